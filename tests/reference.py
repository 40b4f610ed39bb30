"""A float64 reference of the convolution and its gradients, and how far a result may lie from it.

Written from the formula alone, with slices and one loop over the taps, on whatever device the tensors are:

    y[n, co, h, w] = b[co] + sum_k weight[co, 0, k, 0] * x[n, co // m, h*s_h + k*d_h - p_h, w*s_w - p_w]

A tap that falls outside the input is left out, never multiplied by zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Pair = tuple[int, int]

# Unit roundoff of the stored dtype, and of the arithmetic that it stands for (half types are summed in float32).
OUTPUT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
SUM_ROUNDOFF = {
    torch.float64: 2.0**-53 * 2,  # this reference errs as much
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-24,
}
CHUNK = 1 << 25  # elements summed at once by grad_weight, so that huge tensors are never copied to float64 whole


def output_size(size: Sequence[int], filters: int, taps: int, stride: Pair, padding: Pair, dilation: Pair) -> list[int]:
    """Size of y for an input size of rank 3 or 4."""
    *batch, _, height, width = size
    rows = (height + 2 * padding[0] - dilation[0] * (taps - 1) - 1) // stride[0] + 1
    columns = (width + 2 * padding[1] - 1) // stride[1] + 1
    return [*batch, filters, rows, columns]


def span(count: int, size: int, offset: int, stride: int) -> Pair:
    """First and last-plus-one of the `count` positions o whose o * stride + offset lies in [0, size)."""
    first = max(0, -(offset // stride))
    last = min(count, (size - 1 - offset) // stride + 1)
    return first, max(first, last)


def clip(positions: Pair, first: int, last: int) -> Pair:
    return max(positions[0], first), min(positions[1], last)


def batched(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor[None]


def window(x: Tensor, rows: Pair, columns: Pair, offset: Pair, stride: Pair) -> Tensor:
    """View of x at the positions o * stride + offset for o in rows and columns."""
    starts = (rows[0] * stride[0] + offset[0], columns[0] * stride[1] + offset[1])
    ends = ((rows[1] - 1) * stride[0] + offset[0] + 1, (columns[1] - 1) * stride[1] + offset[1] + 1)
    steps = tuple(min(step, max(1, size)) for step, size in zip(stride, x.shape[2:]))  # slices overflow at huge ones
    return x[:, :, starts[0] : ends[0] : steps[0], starts[1] : ends[1] : steps[1]]


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    rows: Pair | None = None,
    columns: Pair | None = None,
) -> Tensor:
    """y in float64, or only its rows [rows[0], rows[1]) and columns likewise."""
    size = output_size(batched(x).shape, weight.shape[0], weight.shape[2], stride, padding, dilation)
    x4 = batched(x)
    batch, channels, height, width = x4.shape
    filters, taps = weight.shape[0], weight.shape[2]
    top, bottom = rows or (0, size[2])
    left, right = columns or (0, size[3])
    y = torch.zeros(
        batch, channels, filters // channels, bottom - top, right - left, dtype=torch.float64, device=x.device
    )
    across = clip(span(size[3], width, -padding[1], stride[1]), left, right)
    for k in range(taps):
        offset = (k * dilation[0] - padding[0], -padding[1])
        down = clip(span(size[2], height, offset[0], stride[0]), top, bottom)
        if down[0] >= down[1] or across[0] >= across[1]:
            continue
        tap = weight[:, 0, k, 0].double().view(1, channels, -1, 1, 1)
        read = window(x4, down, across, offset, stride)[:, :, None].double()
        y[..., down[0] - top : down[1] - top, across[0] - left : across[1] - left] += tap * read
    y = y.flatten(1, 2)
    if bias is not None:
        y = y + bias.double().view(1, -1, 1, 1)
    return y if x.dim() == 4 else y[0]


def grad_input(
    dy: Tensor,
    x_size: Sequence[int],
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    rows: Pair | None = None,
    columns: Pair | None = None,
) -> Tensor:
    """dx in float64, or only its rows [rows[0], rows[1]) and columns likewise."""
    dy4 = batched(dy)
    channels, height, width = x_size[-3:]
    top, bottom = rows or (0, height)
    left, right = columns or (0, width)
    dx = torch.zeros(dy4.shape[0], channels, bottom - top, right - left, dtype=torch.float64, device=dy.device)
    # Positions of dy whose tap lands in the window, whose own origin is its top left corner.
    across = span(dy4.shape[3], right - left, -padding[1] - left, stride[1])
    for k in range(weight.shape[2]):
        offset = (k * dilation[0] - padding[0] - top, -padding[1] - left)
        down = span(dy4.shape[2], bottom - top, offset[0], stride[0])
        if down[0] >= down[1] or across[0] >= across[1]:
            continue
        tap = weight[:, 0, k, 0].double().view(1, -1, 1, 1)
        terms = tap * dy4[:, :, down[0] : down[1], across[0] : across[1]].double()
        window(dx, down, across, offset, stride).add_(terms.unflatten(1, (channels, -1)).sum(2))
    return dx if len(x_size) == 4 else dx[0]


def grad_weight(
    dy: Tensor, x: Tensor, weight_size: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """dw in float64."""
    x4, dy4 = batched(x), batched(dy)
    batch, channels, height, width = x4.shape
    dw = torch.zeros(tuple(weight_size), dtype=torch.float64, device=dy.device)
    across = span(dy4.shape[3], width, -padding[1], stride[1])
    # Steps along the batch, the height and the width that keep a part at CHUNK elements.
    column_step = max(1, CHUNK // dy4.shape[1])
    row_step = max(1, column_step // max(1, across[1] - across[0]))
    batch_step = max(1, row_step // max(1, dy4.shape[2]))
    for k in range(weight_size[2]):
        offset = (k * dilation[0] - padding[0], -padding[1])
        down = span(dy4.shape[2], height, offset[0], stride[0])
        for n, row, column in itertools.product(
            range(0, batch, batch_step), range(*down, row_step), range(*across, column_step)
        ):
            rows, columns = (row, min(row + row_step, down[1])), (column, min(column + column_step, across[1]))
            read = window(x4[n : n + batch_step], rows, columns, offset, stride).double()
            above = dy4[n : n + batch_step, :, rows[0] : rows[1], columns[0] : columns[1]].double()
            terms = above.unflatten(1, (channels, -1)) * read[:, :, None]
            dw[:, 0, k, 0] += terms.sum((0, 3, 4)).flatten()
    return dw


def grad_bias(dy: Tensor) -> Tensor:
    """db in float64: the gradient of a single tap that reads ones."""
    dy4 = batched(dy)
    ones = dy.new_ones(()).expand(dy4.shape)
    return grad_weight(dy4, ones, (dy4.shape[1], 1, 1, 1), (1, 1), (0, 0), (1, 1)).flatten()


def finite(tensor: Tensor) -> Tensor:
    """The finite elements in float64, flat."""
    values = tensor.double().flatten()
    return values if values.isfinite().all() else values[values.isfinite()]


def rms(tensor: Tensor) -> float:
    """Root mean square of the finite elements, 0 for none."""
    values = finite(tensor)
    return values.norm().item() / math.sqrt(max(1, values.numel()))


def largest(tensor: Tensor) -> float:
    """Largest absolute value of the finite elements, 0 for none."""
    values = finite(tensor)
    return values.abs().max().item() if values.numel() else 0.0


def rounding(want: Tensor, dtype: torch.dtype) -> Tensor:
    """What storing a right value in this dtype may cost: half a unit in the last place."""
    info = torch.finfo(dtype)
    return want.abs() * OUTPUT_ROUNDOFF[dtype] + info.tiny * info.eps


def short_sum_bound(want: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Bound for y and dx, whose sums are short: (terms + 1) * u * magnitude + output rounding.

    Holds for any order of summation, fused or not. u is the unit roundoff of the arithmetic; magnitude is at least the
    sum of the terms' absolute values: that of the weights times the largest value they meet.
    """
    return rounding(want, dtype) + magnitude * ((terms + 1) * SUM_ROUNDOFF[dtype])


def long_sum_bound(want: Tensor, terms: int, size_of_term: float, dtype: torch.dtype, alike: bool = False) -> Tensor:
    """Bound for dw and db, whose sums are long: 33.6 * u * sqrt(terms) * size_of_term + output rounding.

    33.6 u is 2e-6 in float32: 2e-6 * sqrt(N * H_out * W_out) * rms(x) * rms(dy) for dw, rms(dy) alone for db. A plain
    float32 running sum misses it from some 10^4 terms on. The square root takes roundings for random; terms that are
    alike (an expanded dy) are rounded alike, and get what partial sums of 64 equal terms may err: 32 u times the sum of
    the terms' absolute values, which is at most terms * size_of_term. So does float64, which has no wider type to sum
    in, and in which this reference sums as well.
    """
    unit = 2e-6 * SUM_ROUNDOFF[dtype] / SUM_ROUNDOFF[torch.float32]
    systematic = 32 * SUM_ROUNDOFF[dtype] if alike or dtype == torch.float64 else 0.0
    return rounding(want, dtype) + (systematic * terms + unit * math.sqrt(terms)) * size_of_term


def expanded(tensor: Tensor) -> bool:
    """Whether some values stand for several."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape))


def assert_close(name: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    """got against float64 want: same size, NaN and infinities in the same places, finite errors within bound."""
    assert got.shape == want.shape, f"{name}: size {tuple(got.shape)}, expected {tuple(want.shape)}"
    values = got.double()
    if ((values - want).abs() <= bound).all():
        return
    both_finite = values.isfinite() & want.isfinite()
    same_special = (values.isnan() & want.isnan()) | (values == want)
    wrong = torch.where(both_finite, (values - want).abs() > bound, ~same_special)
    if not wrong.any():
        return
    where = wrong.nonzero()
    excess = torch.where(both_finite, (values - want).abs() / bound, torch.inf)
    worst = torch.where(wrong, excess, -1.0).argmax()
    at = tuple(int(i) for i in torch.unravel_index(worst, want.shape))
    raise AssertionError(
        f"{name}: {len(where)} of {want.numel()} elements are wrong, the first at {tuple(where[0].tolist())}; the "
        f"worst at {at}: got {values[at].item()!r}, expected {want[at].item()!r} within {bound[at].item():.3g}"
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """The reference's many small operations, which waiting for other threads would make slow on a busy machine."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


@one_thread()
def check_forward(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
) -> None:
    """y against float64, for any layout and dtype of the arguments."""
    want = forward(x, weight, bias, stride, padding, dilation)
    magnitude = weight.double().abs().sum(2).view(-1, 1, 1) * largest(x)
    if bias is not None:
        magnitude = magnitude + bias.double().abs().view(-1, 1, 1)
    assert_close("y", y, want, short_sum_bound(want, magnitude, weight.shape[2] + 1, x.dtype))


@one_thread()
def check_backward(
    grads: Sequence[Tensor | None],
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> None:
    """(dx, dw, db) against float64; None is a gradient that was not asked for."""
    dx, dw, db = grads
    terms = math.prod(dy.shape) // dy.shape[-3]
    if dx is not None:
        want = grad_input(dy, x.shape, weight, stride, padding, dilation)
        multiplier = weight.shape[0] // x.shape[-3]
        magnitude = weight.double().abs().sum(2).view(-1, multiplier).sum(1).view(-1, 1, 1) * largest(dy)
        assert_close("dx", dx, want, short_sum_bound(want, magnitude, weight.shape[2] * multiplier, x.dtype))
    if dw is not None:
        want = grad_weight(dy, x, weight.shape, stride, padding, dilation)
        assert_close(
            "dw", dw, want, long_sum_bound(want, terms, rms(x) * rms(dy), x.dtype, expanded(x) and expanded(dy))
        )
    if db is not None:
        want = grad_bias(dy)
        assert_close("db", db, want, long_sum_bound(want, terms, rms(dy), x.dtype, expanded(dy)))
