"""The float64 check of `python -m depthconv`: fresh random problems, every gradient, against F.conv2d on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]
NAMES = ("y", "dx", "dw", "db")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "channel slice": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "rows with a gap": lambda x: torch.cat([x, x[..., :1]], 3)[..., :-1],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@dataclass(frozen=True)
class Case:
    """One problem of the check; sizes in elements, pairs are (height, width)."""

    size: tuple[int, int, int, int]
    kernel_size: int
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    multiplier: int = 1
    layout: str = "contiguous"

    def fits(self) -> bool:
        """Whether the output has at least one row and one column."""
        _, _, height, width = self.size
        return (
            height + 2 * self.padding[0] > self.dilation[0] * (self.kernel_size - 1) and width + 2 * self.padding[1] > 0
        )


FIXED = [
    Case((2, 3, 9, 5), 3),
    Case((2, 4, 40, 64), 3, padding=(1, 0)),
    Case((2, 4, 40, 64), 5, padding=(2, 0), layout="misaligned"),
    Case((2, 4, 70, 128), 7, padding=(3, 0), layout="channel slice"),
    Case((2, 4, 56, 56), 11, padding=(5, 0), layout="channel slice"),
    Case((2, 24, 56, 14), 11, padding=(5, 0), layout="channels_last"),
    Case((3, 5, 7, 7), 19, padding=(9, 0)),
    Case((2, 4, 65, 33), 21, padding=(10, 0)),
    Case((2, 4, 65, 32), 3, stride=(2, 1), padding=(1, 0)),
    Case((2, 4, 65, 32), 3, stride=(2, 2), padding=(1, 1)),
    Case((2, 8, 40, 16), 7, padding=(9, 0), dilation=(3, 1), layout="channels_last"),
    Case((2, 16, 50, 1), 31, padding=(15, 0)),
    Case((2, 4, 22, 60), 22, multiplier=2),
    Case((2, 3, 22, 60), 22, multiplier=5, layout="rows with a gap"),
]


def random_cases(count: int, draw: random.Random) -> Iterator[Case]:
    """`count` problems of random geometry, multiplier and layout, a few thousand elements each."""
    while count:
        taps = draw.choice([1, 2, 3, 3, 4, 5, 5, 7, 7, 9, 11, 13, 21, 31])
        size = (draw.randint(1, 3), draw.randint(1, 17), draw.randint(1, 70), draw.choice([1, 2, 5, 8, 16, 25, 31, 64]))
        case = Case(
            size,
            taps,
            stride=(draw.choice([1, 1, 1, 2, 3]), draw.choice([1, 1, 1, 2])),
            padding=(draw.choice([0, taps // 2, taps + 1]), draw.choice([0, 0, 0, 1])),
            dilation=(draw.choice([1, 1, 1, 2, 3]), 1),
            multiplier=draw.choice([1, 1, 1, 2, 3]),
            layout=draw.choice(list(LAYOUTS)),
        )
        if case.fits():
            count -= 1
            yield case


def gradients(
    convolution: Callable[..., Tensor], case: Case, x: Tensor, w: Tensor, b: Tensor, dy: Tensor
) -> list[Tensor]:
    """y, dx, dw, db of a function with F.conv2d's first six arguments."""
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = convolution(x, w, b, case.stride, case.padding, case.dilation)
    return [y.detach(), *torch.autograd.grad(y, (x, w, b), dy)]


def grouped(x: Tensor, w: Tensor, b: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    return F.conv2d(x, w, b, stride, padding, dilation, groups=x.shape[1])


def errors(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, dict[str, float]]:
    """For y, dx, dw, db: the largest error, and the largest ratio of an element's error to its own tolerance.

    An element may be off by one rounding to `dtype`, and by 16 roundings of the type that sums (float32; float64 for
    float64) of the sum of its terms' magnitudes.
    """
    from . import depthwise_conv2d

    n, c, height, width = case.size
    filters = c * case.multiplier
    out_height = (height + 2 * case.padding[0] - case.dilation[0] * (case.kernel_size - 1) - 1) // case.stride[0] + 1
    out_width = (width + 2 * case.padding[1] - 1) // case.stride[1] + 1
    shapes = [case.size, (filters, 1, case.kernel_size, 1), (filters,), (n, filters, out_height, out_width)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    x, w, b, dy = (t.to(device) for t in tensors)
    got = gradients(depthwise_conv2d, case, LAYOUTS[case.layout](x), w, b, dy)
    exact = gradients(grouped, case, *(t.double() for t in tensors))
    magnitude = gradients(grouped, case, *(t.double().abs() for t in tensors))
    summing = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    rounding = torch.finfo(dtype).eps / 2
    result = {}
    for name, mine, right, size in zip(NAMES, got, exact, magnitude):
        error = (mine.double().cpu() - right).abs()
        # The smallest normal number stands for results that underflow in `dtype`.
        tolerance = rounding * right.abs() + 16 * summing * size + torch.finfo(dtype).tiny
        ratio = float((error / tolerance).max())
        result[name] = {"error": float(error.max()), "ratio": ratio if ratio == ratio else float("inf")}
    return result


def check(
    device: str | torch.device,
    dtypes: list[torch.dtype],
    count: int = 40,
    seed: int | None = None,
    watch: Callable[[list[Any]], Any] = iter,
) -> list[dict[str, Any]]:
    """Check each dtype over the fixed problems and `count` random ones; `watch` wraps the list (a progress bar).

    Returns a dict a dtype and result (y, dx, dw, db): the problem that is worst, its error, its ratio to the
    tolerance, and `passed`.
    """
    device = torch.device(device)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cases = FIXED + list(random_cases(count, draw))
    rows: dict[tuple[torch.dtype, str], dict[str, Any]] = {
        (dtype, name): {
            "dtype": str(dtype).removeprefix("torch."),
            "result": name,
            "problems": len(cases),
            "seed": seed,
            "error": 0.0,
            "ratio": 0.0,
            "worst": "",
            "passed": True,
        }
        for dtype in dtypes
        for name in NAMES
    }
    for dtype, case in watch([(dtype, case) for dtype in dtypes for case in cases]):
        for name, found in errors(case, device, dtype, generator).items():
            row = rows[dtype, name]
            if found["ratio"] >= row["ratio"]:
                row.update(error=found["error"], ratio=found["ratio"], worst=str(case), passed=found["ratio"] <= 1)
    return list(rows.values())
