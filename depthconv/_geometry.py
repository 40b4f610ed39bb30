"""Sizes, checks and layouts for the fake kernels: csrc/geometry.h again, in Python.

C++ cannot see symbolic sizes without fixing them, so that this part exists twice; a test holds the two together,
messages included. Sizes and strides may be ints or SymInts. Comparisons are ordered so that what is known without
looking at a symbolic size is decided without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import SymInt

Int = int | SymInt
_LIMIT = 2**63


class Geometry(NamedTuple):
    """What the operators' results look like; strides in elements."""

    output_size: list[Int]
    output_stride: list[Int]
    channels_last: bool
    grad_input_stride: list[Int]
    grad_weight_stride: list[Int]


def _show(values: Sequence[Int]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _fits(value: Int) -> bool:
    """Whether 64 bits hold it. A SymInt is not asked: the kernels check the number that it stands for."""
    return not isinstance(value, int) or -_LIMIT <= value < _LIMIT


def _as_pair(argument: str, values: Sequence[Int], least: int) -> tuple[Int, Int]:
    if len(values) not in (1, 2):
        raise RuntimeError(
            f"depthconv: {argument} must have one or two values (height, width), but got {_show(values)}"
        )
    if values[0] < least or values[-1] < least:
        raise RuntimeError(
            f"depthconv: {argument} must be at least {least} along both axes, but got {_show(values)}"
        )
    return values[0], values[-1]


def _output_extent(axis: str, size: Int, kernel: Int, stride: Int, padding: Int, dilation: Int) -> Int:
    padded = padding * 2 + size
    if not _fits(padding * 2) or not _fits(padded):
        raise RuntimeError(f"depthconv: padding along the {axis} is out of range: got {padding}")
    reach = dilation * (kernel - 1) + 1
    if not _fits(reach - 1) or not _fits(reach):
        raise RuntimeError(f"depthconv: dilation along the {axis} is out of range: got {dilation} with {kernel} taps")
    if reach > padded:
        raise RuntimeError(
            f"depthconv: the kernel must not be larger than the padded input along the {axis}: "
            f"dilation * (K - 1) + 1 = {reach} against {axis} + 2 * padding = {padded}"
        )
    return (padded - reach) // stride + 1


def output_size(
    input: Sequence[Int],
    weight: Sequence[Int],
    bias: Sequence[Int] | None,
    stride: Sequence[Int],
    padding: Sequence[Int],
    dilation: Sequence[Int],
) -> list[Int]:
    """Size of the output, or RuntimeError with the sentence that the C++ check has."""
    if len(input) not in (3, 4):
        raise RuntimeError(f"depthconv: input must be (N, C, H, W) or (C, H, W), but got size {_show(input)}")
    if len(weight) != 4:
        raise RuntimeError(f"depthconv: weight must be 4-D, (C * multiplier, 1, K, 1), but got size {_show(weight)}")
    filters, group, taps, width = weight
    if group != 1:
        raise RuntimeError(
            f"depthconv: weight must have size 1 in dimension 1 (one input channel a filter), "
            f"but got size {_show(weight)}"
        )
    if width != 1:
        raise RuntimeError(
            f"depthconv: weight must have kernel width 1, (C * multiplier, 1, K, 1), but got size {_show(weight)}"
        )
    if taps < 1:
        raise RuntimeError(
            f"depthconv: weight must have at least one tap along the height, but got size {_show(weight)}"
        )
    channels, rows, columns = input[-3:]
    if channels < 1:
        raise RuntimeError(f"depthconv: input must have at least one channel, but got size {_show(input)}")
    if filters < 1 or filters % channels != 0:  # type: ignore[operator]
        raise RuntimeError(
            f"depthconv: weight must have C * multiplier filters for the C = {channels} channels of input, "
            f"but got size {_show(weight)}"
        )
    if bias is not None and (len(bias) != 1 or bias[0] != filters):
        raise RuntimeError(
            f"depthconv: bias must be 1-D with one value a filter, [{filters}], but got size {_show(bias)}"
        )
    stride = _as_pair("stride", stride, 1)
    padding = _as_pair("padding", padding, 0)
    dilation = _as_pair("dilation", dilation, 1)
    batch = list(input[:-3])
    if (rows < 1 or columns < 1) and (not batch or batch[0] > 0):
        raise RuntimeError(
            f"depthconv: input must not be empty along the height or the width, but got size {_show(input)}"
        )
    rows_out = _output_extent("height", rows, taps, stride[0], padding[0], dilation[0])
    columns_out = _output_extent("width", columns, 1, stride[1], padding[1], 1)
    size = [*batch, filters, rows_out, columns_out]
    count: Int = 1
    for extent in size:
        # An empty batch counts as one: strides have to fit as well.
        count = count if isinstance(extent, int) and extent < 1 else count * extent
        if not _fits(count):
            raise RuntimeError(
                f"depthconv: the output has more elements than 64 bits count: size {_show(size)}"
            )
    return size


def _ordered_by_strides(size: Sequence[Int], stride: Sequence[Int], innermost_first: Sequence[int]) -> bool:
    """Whether strides are positive and never shrink, walking outwards; axes of size 1 or 0 say nothing."""
    least: Int = 1
    for axis in innermost_first:
        if stride[axis] < least:
            if size[axis] > 1:
                return False
        elif axis != innermost_first[-1] and size[axis] > 1:
            least = stride[axis]
    return True


def is_channels_last(size: Sequence[Int], stride: Sequence[Int]) -> bool:
    """The layout of y and of grad_input, from x: 4-D, channels_last-ordered and not NCHW-ordered as well."""
    return (
        len(size) == 4
        and _ordered_by_strides(size, stride, (1, 3, 2, 0))
        and not _ordered_by_strides(size, stride, (3, 2, 1, 0))
    )


def layout_strides(size: Sequence[Int], channels_last: bool) -> list[Int]:
    """Strides of a fresh tensor of this size (rank 3 or 4)."""
    order = (1, 3, 2, 0) if channels_last else range(len(size) - 1, -1, -1)
    stride: list[Int] = [1] * len(size)
    step: Int = 1
    for axis in order:
        stride[axis] = step
        # Not the outermost axis: its size, a symbolic batch mostly, sets no stride. No sym_max, which would stay in the
        # strides of the graph as Max(1, size).
        if axis != 0 and size[axis] >= 1:
            step = step * size[axis]
    return stride


def grad_weight_strides(size: Sequence[Int], stride: Sequence[Int]) -> list[Int]:
    """The weight's own strides where it is dense, contiguous ones otherwise."""
    filters, _, taps, _ = size
    filter_major = (stride[0] == taps or filters <= 1) and (stride[2] == 1 or taps <= 1)
    tap_major = (stride[0] == 1 or filters <= 1) and (stride[2] == filters or taps <= 1)
    return list(stride) if filter_major or tap_major else layout_strides(size, False)


def geometry(
    input_size: Sequence[Int],
    input_stride: Sequence[Int],
    weight_size: Sequence[Int],
    weight_stride: Sequence[Int],
    bias_size: Sequence[Int] | None,
    stride: Sequence[Int],
    padding: Sequence[Int],
    dilation: Sequence[Int],
) -> Geometry:
    """What `_C.geometry` gives: sizes and strides of every result, or RuntimeError."""
    size = output_size(input_size, weight_size, bias_size, stride, padding, dilation)
    channels_last = is_channels_last(input_size, input_stride)
    return Geometry(
        size,
        layout_strides(size, channels_last),
        channels_last,
        layout_strides(input_size, channels_last),
        grad_weight_strides(weight_size, weight_stride),
    )
