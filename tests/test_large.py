"""Sizes beyond what a grid dimension, a 32-bit index or a 32-bit product holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import reference
import torch
from problems import Arguments, Problem, call_backward, call_forward, check, expected_strides
from torch import Tensor

LIMIT = 2**31
LARGEST = 6.0  # no normal random value of these tests is beyond it

# Above 65535 in N, in C, in their product, with the multiplier, in H, in W.
GRID: dict[str, Problem] = {
    "N": Problem((65537, 1, 2, 2), 2),
    "N, multiplier": Problem((65537, 1, 3, 1), 2, 2),
    "C": Problem((1, 65537, 3, 1), 2),
    "N * C": Problem((300, 300, 3, 2), 2),
    "C * multiplier": Problem((1, 33000, 3, 2), 2, 2),
    "H": Problem((1, 2, 70001, 3), 3, padding=(1, 0)),
    "H, W 1": Problem((1, 2, 262147, 1), 7, padding=(3, 0)),
    "H, stride": Problem((1, 2, 140003, 2), 3, stride=(2, 1), padding=(1, 0)),
    "H, from padding": Problem((1, 2, 3, 2), 3, padding=(40000, 0)),
    "H, one output row": Problem((1, 2, 66000, 2), 3, dilation=(32999, 1)),
    "W": Problem((1, 2, 4, 70001), 3, padding=(1, 0)),
    "W of whole vectors": Problem((1, 1, 4, 131072), 3, padding=(1, 0)),
    "W, stride": Problem((1, 2, 4, 140003), 3, stride=(1, 2)),
    "W, from padding": Problem((1, 2, 4, 2), 3, padding=(1, 40000)),
    "K": Problem((1, 1, 3, 2), 66001, padding=(33000, 0)),
}


@pytest.mark.parametrize(
    "layout, dtype", [("contiguous", "float32"), ("contiguous", "float16"), ("channels_last", "float32")]
)
@pytest.mark.parametrize("name", [name for name in GRID if name != "K"])
def test_above_65535(name: str, dtype: str, layout: str, device: str, seed: int) -> None:
    check(replace(GRID[name], dtype=dtype, layout=layout, grad_layout=layout, seed=seed), device)


def test_taps_above_65535(device: str, seed: int) -> None:
    """Almost all taps read padding: only the few that read a row are compared, the rest of dw is exactly zero."""
    problem = replace(GRID["K"], seed=seed)
    x = torch.randn(problem.size, device=device)
    weight = torch.randn(problem.weight_size, device=device)
    dy = torch.randn(problem.output_size, device=device)
    y = call_forward(problem, x, weight, None)
    near = slice(33000 - 4, 33000 + 5)
    small = ((1, 1), (4, 0), (1, 1))
    reference.check_forward(y, x, weight[:, :, near], None, *small)
    dx, dw, db = call_backward(problem, Arguments(x, weight, None, dy))
    assert dw is not None and torch.count_nonzero(dw) <= 5
    reference.check_backward([dx, dw[:, :, near], db], dy, x, weight[:, :, near], *small)


@dataclass(frozen=True)
class Large:
    """A float16 problem with more than 2^31 elements, or just fewer, in x, in y or in both."""

    size: tuple[int, int, int, int]
    taps: int = 3
    multiplier: int = 1
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    channels_last: bool = False


LARGE: dict[str, Large] = {
    "many planes": Large((40, 8, 2600, 2600), padding=(1, 0)),
    "many small planes": Large((3, 700000, 32, 32), padding=(1, 0)),
    "one plane": Large((1, 1, 46400, 46400), padding=(1, 0)),
    "one plane, K 21": Large((1, 1, 46400, 46400), 21, padding=(10, 0)),
    "one plane, odd width": Large((1, 1, 46401, 46391), 7, padding=(3, 0)),
    "one plane, stride and dilation": Large((1, 1, 46400, 46400), stride=(2, 1), dilation=(20000, 1)),
    "one plane, width stride": Large((1, 1, 46400, 46400), stride=(3, 7), padding=(1, 2)),
    "one column": Large((1, 1, LIMIT + 1000, 1), padding=(1, 0)),
    "one row": Large((1, 1, 1, LIMIT + 1000), padding=(1, 0)),
    "one output row": Large((1, 1, 40, 53700000), 40),
    "channels_last": Large((40, 64, 920, 920), padding=(1, 0), channels_last=True),
    "channels_last, one image": Large((1, 512, 2050, 2050), 7, padding=(3, 0), channels_last=True),
    "channels_last, two channels": Large((1, 2, 32771, 32771), padding=(1, 0), channels_last=True),
    "just under": Large((1, 1, 65535, 32768), padding=(1, 0)),
    "just under, many planes": Large((32767, 2, 32, 1024), padding=(1, 0)),
    "just under, one column": Large((1, 1, LIMIT - 1, 1), padding=(1, 0)),
    "just under, channels_last": Large((1, 4, 16383, 32768), padding=(1, 0), channels_last=True),
    "y alone, padded": Large((1, 1, 16, 32768), padding=(40000, 0)),
    "y alone, padded columns": Large((1, 1, 20, 64), padding=(0, 60000000)),
    "y alone, multiplier": Large((1, 4, 512, 4096), multiplier=260, padding=(1, 0)),
    "y alone, channels_last": Large((1, 64, 16, 512), padding=(33000, 0), channels_last=True),
}


def free_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def filled(size: list[int], channels_last: bool, period: int, scale: float, device: str) -> Tensor:
    """float16 noise that repeats after a prime number of elements, so that no power of two leads to the same value."""
    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    flat = torch.empty(torch.Size(size).numel(), dtype=torch.float16, device=device)
    noise = torch.randn(period).mul(scale).half().to(device)
    whole = flat.numel() // period * period
    flat[:whole].view(-1, period).copy_(noise)
    flat[whole:] = noise[: flat.numel() - whole]
    stored = flat.view([size[axis] for axis in order])
    return stored.permute(0, 3, 1, 2) if channels_last else stored


def spots(tensor: Tensor) -> list[tuple[int, int, slice, slice]]:
    """(n, c, rows, columns) of small windows: both ends in memory, and about 2^30, 2^31 and random places."""
    count = tensor.numel()
    wanted = [0, count - 1, 2**30, LIMIT - 1, LIMIT, *torch.randint(count, (12,)).tolist()]
    axes = sorted(range(4), key=lambda axis: (-tensor.stride(axis), axis))
    found = []
    for position in wanted:
        if position >= count:
            continue
        index = [0] * 4
        for axis in reversed(axes):
            position, index[axis] = divmod(position, tensor.shape[axis])
        n, c, h, w = index
        rows, columns = slice(max(0, h - 2), h + 3), slice(max(0, w - 40), w + 41)
        found.append((n, c, slice(*rows.indices(tensor.shape[2])[:2]), slice(*columns.indices(tensor.shape[3])[:2])))
    return found


@pytest.mark.large
@pytest.mark.parametrize("name", LARGE)
def test_above_two_to_the_31(name: str, device: str, seed: int) -> None:
    """y and dx in sampled windows, dw and db whole, against float64."""
    large = LARGE[name]
    problem = Problem(
        large.size, large.taps, large.multiplier, large.stride, large.padding, large.dilation, dtype="float16"
    )
    x_bytes, y_bytes = (2 * torch.Size(size).numel() for size in (problem.size, problem.output_size))
    needed = 2 * (x_bytes + y_bytes) + (8 << 30)
    if device == "cpu":
        needed = x_bytes + y_bytes + max(x_bytes, y_bytes) + (3 << 30)
    if free_bytes(device) < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB free on {device}")
    x = filled(list(problem.size), large.channels_last, 999983, 1.0, device)
    weight = torch.randn(problem.weight_size).half().to(device)
    bias = torch.randn(problem.filters).half().to(device)

    y = torch.ops.depthconv.forward(x, weight, bias, *problem.geometry)
    assert list(y.shape) == problem.output_size and y.stride() == expected_strides(x, y.shape)
    for n, c, rows, columns in spots(y):
        own = c // problem.multiplier
        part = (x[n : n + 1, own : own + 1], weight[c : c + 1], bias[c : c + 1])
        where = ((rows.start, rows.stop), (columns.start, columns.stop))
        want = reference.forward(*part, *problem.geometry, *where)
        magnitude = part[1].double().abs().sum() * LARGEST + part[2].double().abs()
        bound = reference.short_sum_bound(want, magnitude, problem.taps + 1, torch.float16)
        reference.assert_close(f"y at {(n, c, *where)}", y[n : n + 1, c : c + 1, rows, columns], want, bound)
    del y

    small = 2.0**-10  # keeps dw and db inside float16
    dy = filled(problem.output_size, large.channels_last, 999979, small, device)
    dx, dw, db = torch.ops.depthconv.backward(dy, x, weight, *problem.geometry, [True] * 3)
    for n, c, rows, columns in spots(dx):
        own = slice(c * problem.multiplier, (c + 1) * problem.multiplier)
        where = ((rows.start, rows.stop), (columns.start, columns.stop))
        size_of_x = (1, 1, *problem.size[2:])
        above, below = dy[n : n + 1, own], weight[own]
        want = reference.grad_input(above, size_of_x, below, *problem.geometry, *where)
        terms = problem.taps * problem.multiplier
        magnitude = below.double().abs().sum() * (LARGEST * small)
        bound = reference.short_sum_bound(want, magnitude, terms, torch.float16)
        reference.assert_close(f"dx at {(n, c, *where)}", dx[n : n + 1, c : c + 1, rows, columns], want, bound)
    del dx
    terms = dy.numel() // problem.filters
    for name_of_sum, got, want, term in (
        ("dw", dw, reference.grad_weight(dy, x, weight.shape, *problem.geometry), small),
        ("db", db, reference.grad_bias(dy), small),
    ):
        reference.assert_close(name_of_sum, got, want, reference.long_sum_bound(want, terms, term, torch.float16))
