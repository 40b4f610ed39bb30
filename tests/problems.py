"""Problems, tensor layouts, the ways to call depthconv, and the one check that every value test uses."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import reference
import torch
from torch import Tensor

import depthconv

Pair = tuple[int, int]

DTYPES = ("float32", "float64", "float16", "bfloat16")
# Direct operators; autograd over the public operator; autograd over the Python function.
PATHS = ("operators", "operator_autograd", "function")


# ---- layouts -------------------------------------------------------------------------------------------------------
# A layout takes a size and fresh(size), which makes contiguous random values, and gives a tensor of that size.
# What surrounds the values is NaN, so that a read beyond them shows.

Fresh = Callable[[Sequence[int]], Tensor]
Layout = Callable[[Sequence[int], Fresh], Tensor]


def surrounded(values: Tensor, axis: int, before: int, after: int) -> Tensor:
    """values as a slice along one axis of a larger contiguous tensor."""
    size = list(values.shape)
    size[axis] += before + after
    return values.new_full(size, float("nan")).narrow(axis, before, values.shape[axis]).copy_(values)


def stepped(values: Tensor, axis: int) -> Tensor:
    """values at every second position along one axis of a larger contiguous tensor."""
    size = list(values.shape)
    size[axis] *= 2
    where: list[slice] = [slice(None)] * len(size)
    where[axis] = slice(None, None, 2)
    return values.new_full(size, float("nan"))[tuple(where)].copy_(values)


def into_storage(values: Tensor, elements: int) -> Tensor:
    """values contiguous, but starting some elements into their storage."""
    buffer = values.new_full((values.numel() + elements + 1,), float("nan"))
    return buffer[elements : elements + values.numel()].view(values.shape).copy_(values)


def reordered(values: Tensor, order: Sequence[int], place: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    """values with their axes stored in another order, outermost first; place puts the reordered tensor into memory."""
    inverse = [order.index(axis) for axis in range(len(order))]
    return place(values.permute(*order)).permute(inverse)


def channels_innermost(values: Tensor, place: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    return reordered(values, [0, 2, 3, 1] if values.dim() == 4 else [1, 2, 0], place)


def expanded(axes: Sequence[int]) -> Layout:
    def make(size: Sequence[int], fresh: Fresh) -> Tensor:
        small = [1 if axis - len(size) in axes else extent for axis, extent in enumerate(size)]
        return fresh(small).expand(tuple(size))

    return make


def placed(place: Callable[[Tensor], Tensor]) -> Layout:
    return lambda size, fresh: place(fresh(size))


def sliding(size: Sequence[int], fresh: Fresh) -> Tensor:
    """Rows that overlap: windows of a longer signal, one step apart."""
    *outer, height, width = size
    return fresh([*outer, height + width - 1]).unfold(-1, width, 1) if height and width else fresh(size)


# Axes count from the end, so that these hold for (N, C, H, W) and (C, H, W).
LAYOUTS: dict[str, Layout] = {
    "contiguous": placed(lambda v: v),
    "channels_last": placed(channels_innermost),
    "channel_slice": placed(lambda v: surrounded(v, -3, 4, 4)),
    "row_slice": placed(lambda v: surrounded(v, -2, 1, 2)),
    "row_gap": placed(lambda v: surrounded(v, -1, 0, 3)),
    "row_gap_8": placed(lambda v: surrounded(v, -1, 8, 8)),
    "row_gap_odd": placed(lambda v: surrounded(v, -1, 1, 2)),
    "column_step": placed(lambda v: stepped(v, -1)),
    "row_step": placed(lambda v: stepped(v, -2)),
    "channel_step": placed(lambda v: stepped(v, -3)),
    "transposed": placed(lambda v: v.transpose(-1, -2).contiguous().transpose(-1, -2)),
    "one_in": placed(lambda v: into_storage(v, 1)),
    "three_in": placed(lambda v: into_storage(v, 3)),
    "channels_last_channel_slice": placed(lambda v: channels_innermost(v, lambda t: surrounded(t, -1, 4, 3))),
    "channels_last_row_gap": placed(lambda v: channels_innermost(v, lambda t: surrounded(t, -2, 1, 1))),
    "channels_last_row_slice": placed(lambda v: channels_innermost(v, lambda t: surrounded(t, -3, 1, 1))),
    "channels_last_one_in": placed(lambda v: channels_innermost(v, lambda t: into_storage(t, 1))),
    "channels_last_channel_step": placed(lambda v: channels_innermost(v, lambda t: stepped(t, -1))),
    "expanded_channel": expanded([-3]),
    "expanded_row": expanded([-2]),
    "expanded_column": expanded([-1]),
    "expanded_all": expanded([-4, -3, -2, -1]),
    "sliding": sliding,
}
BATCHED_LAYOUTS: dict[str, Layout] = {
    "batch_slice": placed(lambda v: surrounded(v, 0, 1, 1)),
    "batch_step": placed(lambda v: stepped(v, 0)),
    "channels_outermost": placed(lambda v: reordered(v, [1, 0, 2, 3])),
    "batch_innermost": placed(lambda v: reordered(v, [1, 2, 3, 0])),
    "channels_last_batch_slice": placed(lambda v: channels_innermost(v, lambda t: surrounded(t, 0, 1, 1))),
    "channels_last_transposed": placed(lambda v: reordered(v, [0, 3, 2, 1])),
    "expanded_batch": expanded([-4]),
    "channels_last_expanded_batch": lambda size, fresh: channels_innermost(fresh([1, *size[1:]])).expand(tuple(size)),
}
WEIGHT_LAYOUTS: dict[str, Layout] = {
    "contiguous": placed(lambda v: v),
    "channels_last": placed(lambda v: v.contiguous(memory_format=torch.channels_last)),
    "tap_major": placed(lambda v: reordered(v, [2, 1, 3, 0])),
    "one_in": placed(lambda v: into_storage(v, 1)),
    "expanded_filters": expanded([-4]),
    "expanded_taps": expanded([-2]),
    "strided_taps": placed(lambda v: stepped(v, 2)),
    "strided_filters": placed(lambda v: stepped(v, 0)),
    "width_slice": placed(lambda v: surrounded(v, 3, 1, 1)),
    "channel_slice": placed(lambda v: surrounded(v, 1, 1, 2)),
}
DENSE_WEIGHT_LAYOUTS = ("contiguous", "channels_last", "tap_major", "one_in")
BIAS_LAYOUTS: dict[str, Layout] = {
    "contiguous": placed(lambda v: v),
    "one_in": placed(lambda v: into_storage(v, 1)),
    "strided": placed(lambda v: stepped(v, 0)),
    "expanded": expanded([-1]),
}


def layouts_for(size: Sequence[int]) -> list[str]:
    return [*LAYOUTS, *BATCHED_LAYOUTS] if len(size) == 4 else list(LAYOUTS)


def ordered(tensor: Tensor, outermost_first: Sequence[int]) -> bool:
    """Whether strides never grow from the outermost axis in; axes of one element say nothing, expanded ones say no."""
    strides = [tensor.stride(axis) for axis in outermost_first if tensor.shape[axis] > 1]
    return 0 not in strides and all(outer >= inner for outer, inner in itertools.pairwise(strides))


def expected_strides(x: Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """Strides of y (or of dx) of this size for an input x, as the layout rule has them."""
    channels_last = x.dim() == 4 and ordered(x, (0, 2, 3, 1)) and not ordered(x, (0, 1, 2, 3))
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(tuple(size), device="meta", memory_format=memory_format).stride()


# ---- problems ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One convolution and how it is called. size is (N, C, H, W) or (C, H, W); pairs are (height, width)."""

    size: tuple[int, ...]
    taps: int = 3
    multiplier: int = 1
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    bias: bool = True
    dtype: str = "float32"
    layout: str = "contiguous"
    weight_layout: str = "contiguous"
    bias_layout: str = "contiguous"
    grad_layout: str = "contiguous"
    mask: tuple[bool, bool, bool] = (True, True, True)
    path: str = "operators"
    seed: int = 0

    @property
    def geometry(self) -> tuple[Pair, Pair, Pair]:
        return self.stride, self.padding, self.dilation

    @property
    def filters(self) -> int:
        return self.size[-3] * self.multiplier

    @property
    def weight_size(self) -> tuple[int, int, int, int]:
        return self.filters, 1, self.taps, 1

    @property
    def output_size(self) -> list[int]:
        return reference.output_size(self.size, self.filters, self.taps, *self.geometry)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class Arguments:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dy: Tensor


def make_arguments(problem: Problem, device: str) -> Arguments:
    """Random tensors in the problem's layouts; the same values on every device."""
    generator = torch.Generator().manual_seed(problem.seed)

    def fresh(size: Sequence[int]) -> Tensor:
        return torch.randn(tuple(size), generator=generator, dtype=torch.float32).to(problem.torch_dtype).to(device)

    known = LAYOUTS | BATCHED_LAYOUTS
    bias = BIAS_LAYOUTS[problem.bias_layout]([problem.filters], fresh) if problem.bias else None
    return Arguments(
        known[problem.layout](problem.size, fresh),
        WEIGHT_LAYOUTS[problem.weight_layout](problem.weight_size, fresh),
        bias,
        known[problem.grad_layout](problem.output_size, fresh),
    )


# ---- poison --------------------------------------------------------------------------------------------------------


@contextmanager
def poisoned(device: str, byte_counts: Sequence[int]) -> Iterator[None]:
    """Memory allocated inside is not zero by luck: an element that nobody writes shows up as NaN or as huge.

    Freed blocks full of NaN wait in the allocator for each of byte_counts (0xFF bytes are NaN in every dtype); on the
    CPU glibc is asked besides to fill whatever it hands out.
    """
    generic = [512, 1 << 12, 1 << 16, 1 << 19, 1 << 20, 1 << 21, 10 << 20] if device == "cuda" else []
    wanted = [count for count in byte_counts if 0 < count < 1 << 24] + generic
    blocks = [torch.full((count,), 0xFF, dtype=torch.uint8, device=device) for count in wanted]
    del blocks
    fill = getattr(ctypes.CDLL(None), "mallopt", None) if device == "cpu" else None
    m_perturb = -6  # new memory gets the byte's complement: 0xFE, which is NaN in float16 and about -1e38 in float32
    if fill:
        fill(m_perturb, 0x01)
    try:
        yield
    finally:
        if fill:
            fill(m_perturb, 0)


# ---- calls ---------------------------------------------------------------------------------------------------------


def nbytes(*tensors: Tensor | None) -> list[int]:
    return [t.numel() * t.element_size() for t in tensors if t is not None]


def call_forward(problem: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y by the problem's path."""
    call = depthconv.depthwise_conv2d if problem.path == "function" else torch.ops.depthconv.forward
    with poisoned(x.device.type, [*nbytes(x), math.prod(problem.output_size) * x.element_size()]):
        return call(x, weight, bias, *problem.geometry)


def call_backward(problem: Problem, arguments: Arguments) -> list[Tensor | None]:
    """[dx, dw, db] by the problem's path, None where the mask has False."""
    x, weight, bias, dy = arguments.x, arguments.weight, arguments.bias, arguments.dy
    sizes = nbytes(x, weight, bias, dy)
    if problem.path == "operators":
        with poisoned(x.device.type, sizes):
            return list(torch.ops.depthconv.backward(dy, x, weight, *problem.geometry, list(problem.mask)))
    wanted = [problem.mask[0], problem.mask[1], problem.mask[2] and bias is not None]
    leaves = [None if t is None else t.detach().requires_grad_(want) for t, want in zip((x, weight, bias), wanted)]
    y = call_forward(problem, *leaves)
    assert y.requires_grad == any(wanted)
    if not any(wanted):
        return [None, None, None]
    with poisoned(x.device.type, sizes):
        found = iter(torch.autograd.grad(y, [leaf for leaf, want in zip(leaves, wanted) if want], dy))
    return [next(found) if want else None for want in wanted]


# ---- checks --------------------------------------------------------------------------------------------------------


def check_forward(problem: Problem, device: str, arguments: Arguments | None = None) -> Tensor:
    """Runs the forward and checks value, size, dtype, device and strides of y, and that the arguments are untouched."""
    a = arguments or make_arguments(problem, device)
    before = [None if t is None else t.clone() for t in (a.x, a.weight, a.bias)]
    y = call_forward(problem, a.x, a.weight, a.bias)
    assert y.dtype == a.x.dtype and y.device == a.x.device
    assert list(y.shape) == problem.output_size
    if y.numel():
        assert y.stride() == expected_strides(a.x, y.shape), f"strides of y for x of {a.x.shape}, {a.x.stride()}"
    reference.check_forward(y.detach(), a.x, a.weight, a.bias, *problem.geometry)
    assert_untouched(before, (a.x, a.weight, a.bias))
    return y


def check_backward(problem: Problem, device: str, arguments: Arguments | None = None) -> list[Tensor | None]:
    """Runs the backward and checks the gradients as check_forward does y, and that none is there unasked."""
    a = arguments or make_arguments(problem, device)
    inputs = (a.x, a.weight, a.bias, a.dy)
    before = [None if t is None else t.clone() for t in inputs]
    grads = call_backward(problem, a)
    wanted = list(problem.mask)
    if problem.path != "operators":
        wanted[2] = wanted[2] and problem.bias
    assert [grad is not None for grad in grads] == wanted
    dx, dw, _ = grads
    for grad in grads:
        assert grad is None or (grad.dtype == a.x.dtype and grad.device == a.x.device)
    if dx is not None and dx.numel():
        assert dx.stride() == expected_strides(a.x, a.x.shape), f"strides of dx for x of {a.x.shape}, {a.x.stride()}"
    if dw is not None and problem.weight_layout in DENSE_WEIGHT_LAYOUTS:
        assert dw.stride() == a.weight.stride(), f"strides of dw for w of {a.weight.shape}"
    reference.check_backward(grads, a.dy, a.x, a.weight, *problem.geometry)
    assert_untouched(before, inputs)
    return grads


def check(problem: Problem, device: str, arguments: Arguments | None = None) -> None:
    """Forward and backward of one problem against float64, on random arguments or on the given ones."""
    arguments = arguments or make_arguments(problem, device)
    check_forward(problem, device, arguments)
    check_backward(problem, device, arguments)


def assert_untouched(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> None:
    for was, now in zip(before, after):
        if was is not None and not torch.equal(was, now):  # NaN equals nothing
            assert torch.equal(was.nan_to_num(), now.nan_to_num()), "an argument was changed"


# ---- geometries ----------------------------------------------------------------------------------------------------
# Named problems: every kind of size that a kernel may treat on its own.

GEOMETRIES: dict[str, Problem] = {
    "valid": Problem((2, 3, 9, 8)),
    "same": Problem((2, 3, 9, 8), padding=(1, 0)),
    "K1": Problem((2, 3, 9, 8), 1),
    "K2": Problem((2, 3, 9, 8), 2, padding=(1, 0)),
    "K4": Problem((2, 4, 11, 12), 4, padding=(1, 0)),
    "K5": Problem((2, 4, 13, 16), 5, padding=(2, 0)),
    "K7": Problem((2, 4, 19, 24), 7, padding=(3, 0)),
    "K11": Problem((2, 3, 30, 20), 11, padding=(5, 0)),
    "K13": Problem((1, 2, 40, 33), 13, padding=(6, 0)),
    "K21": Problem((2, 3, 45, 17), 21, padding=(10, 0)),
    "K31": Problem((1, 8, 64, 32), 31, padding=(15, 0)),
    "K33": Problem((1, 2, 50, 9), 33, padding=(0, 0)),
    "stride 2": Problem((2, 3, 17, 8), 3, stride=(2, 1), padding=(1, 0)),
    "stride 2, a row left over": Problem((2, 3, 16, 8), 3, stride=(2, 1)),
    "stride 2, one tap": Problem((2, 3, 17, 16), 1, stride=(2, 1)),
    "stride 2, tall": Problem((2, 2, 150, 32), 9, stride=(2, 1), padding=(4, 0)),
    "stride 2, dilation 2": Problem((2, 3, 20, 16), 5, stride=(2, 1), padding=(1, 0), dilation=(2, 1)),
    "stride 3, dilation 2": Problem((2, 3, 29, 20), 7, stride=(3, 1), padding=(2, 0), dilation=(2, 1)),
    "stride 4, dilation 6": Problem((2, 3, 41, 8), 5, stride=(4, 1), padding=(7, 0), dilation=(6, 1)),
    "stride 9": Problem((2, 3, 40, 12), 11, stride=(9, 1), padding=(5, 0)),
    "stride above K": Problem((2, 3, 23, 8), 3, stride=(5, 1), padding=(1, 0)),
    "stride above H": Problem((2, 3, 4, 8), 3, stride=(7, 1), padding=(1, 0)),
    "huge stride": Problem((2, 3, 9, 8), 3, stride=(1 << 40, (1 << 62) + 1), padding=(1, 0)),
    "dilation 2": Problem((2, 3, 17, 8), 3, padding=(2, 0), dilation=(2, 1)),
    "dilation 4": Problem((2, 3, 30, 8), 5, padding=(3, 0), dilation=(4, 1)),
    "dilation above H": Problem((2, 3, 3, 8), 3, padding=(6, 0), dilation=(5, 1)),
    "huge dilation of one tap": Problem((2, 3, 9, 8), 1, dilation=(1 << 62, 1 << 62)),
    "dilation along the width": Problem((2, 3, 9, 8), 3, padding=(1, 0), dilation=(1, 3)),
    "padding beyond the input": Problem((2, 3, 3, 8), 3, padding=(7, 0)),
    "padding far beyond the input": Problem((1, 2, 2, 3), 2, padding=(70, 0)),
    "K above H": Problem((2, 3, 3, 8), 9, padding=(4, 0)),
    "H_out 1": Problem((2, 3, 9, 8), 9),
    "H_out 1, long": Problem((2, 8, 22, 130), 22),
    "H_out 1 from stride": Problem((2, 3, 9, 8), 5, stride=(6, 1)),
    "H 1": Problem((2, 3, 1, 8), 3, padding=(1, 0)),
    "W 1": Problem((2, 3, 40, 1), 5, padding=(2, 0)),
    "H and W 1": Problem((2, 3, 1, 1), 3, padding=(1, 0)),
    "stride of the width": Problem((2, 3, 9, 11), 3, stride=(1, 2), padding=(1, 0)),
    "stride above W": Problem((2, 3, 9, 5), 3, stride=(1, 9), padding=(1, 0)),
    "padding of the width": Problem((2, 3, 9, 8), 3, padding=(1, 3)),
    "padding of the width, W 1": Problem((2, 3, 9, 1), 3, padding=(1, 2)),
    "padding and stride of the width": Problem((2, 3, 9, 13), 3, stride=(1, 3), padding=(0, 4)),
    "C 1": Problem((3, 1, 9, 8), 3, padding=(1, 0)),
    "N and C 1": Problem((1, 1, 9, 8), 3, padding=(1, 0)),
    "multiplier 2": Problem((2, 3, 9, 8), 3, 2, padding=(1, 0)),
    "multiplier 3, C 1": Problem((2, 1, 9, 8), 3, 3, padding=(1, 0)),
    "multiplier 8": Problem((2, 2, 9, 9), 5, 8, padding=(2, 0)),
    "filter bank of 1": Problem((2, 3, 22, 100), 22),
    "filter bank of 2": Problem((2, 3, 22, 226), 22, 2),
    "filter bank of 32": Problem((2, 2, 22, 100), 22, 32),
    "filter bank of 33, odd width": Problem((2, 2, 9, 129), 9, 33),
    "filter bank of 8, 64 taps": Problem((1, 2, 64, 72), 64, 8),
    "filter bank of 5, padded and dilated": Problem((2, 2, 13, 70), 5, 5, padding=(2, 0), dilation=(4, 1)),
    "filter bank of 3, strided": Problem((2, 2, 10, 70), 9, 3, stride=(4, 2)),
    "filter bank of 4, rows of padding alone": Problem((2, 1, 3, 130), 9, 4, padding=(3, 0)),
    "filter bank of 3, few output rows": Problem((2, 3, 12, 66), 9, 3),
    "few output rows": Problem((2, 3, 10, 68), 8, padding=(0, 1)),
    "unbatched": Problem((3, 9, 8), 3, padding=(1, 0)),
    "unbatched, multiplier 2": Problem((3, 9, 8), 4, 2, stride=(2, 1), padding=(1, 0)),
    "everything": Problem((2, 3, 17, 13), 5, 2, stride=(2, 3), padding=(3, 2), dilation=(2, 2)),
    "everything, no bias": Problem((3, 2, 18, 9), 4, 3, stride=(3, 2), padding=(5, 1), dilation=(3, 1), bias=False),
    "tall": Problem((1, 2, 260, 33), 7, padding=(3, 0)),
    "wide": Problem((1, 2, 6, 1030), 3, padding=(1, 0)),
    "products of 16 rows": Problem((2, 3, 70, 64), 13, padding=(6, 0)),
    "products of 16 rows, 41 taps": Problem((1, 2, 90, 32), 41, padding=(20, 0)),
    "products of 16 rows, 33 taps, valid": Problem((1, 2, 81, 72), 33),
    "products of 16 rows, narrow": Problem((5, 2, 40, 8), 9, padding=(4, 0)),
    "products of 16 rows, stride 2": Problem((2, 2, 75, 40), 5, stride=(2, 1), padding=(2, 0)),
    "products of 16 rows, dilation 2, multiplier 2": Problem((2, 2, 70, 20), 11, 2, padding=(10, 0), dilation=(2, 1)),
    "products of 16 rows, few taps": Problem((1, 2, 260, 24), 5, padding=(2, 0)),
    "half types in packs of 4": Problem((3, 4, 40, 28), 7, padding=(3, 0)),
    "half types in packs of 2": Problem((3, 4, 40, 14), 11, padding=(5, 0)),
    "many small planes": Problem((33, 5, 7, 7), 11, padding=(5, 0)),
    "planes of 14": Problem((9, 20, 14, 14), 11, padding=(5, 0)),
    "odd width": Problem((2, 8, 50, 25), 9, padding=(4, 0)),
    "many channels": Problem((1, 260, 6, 3), 3, padding=(1, 0)),
}


def random_problem(integer: Callable[[int, int], int], choose: Callable[[Sequence[Any]], Any]) -> Problem:
    """A random problem from integer(low, high) and choose(options), sizes biased to 1 and to vector-width edges."""
    edges = [1, 1, 2, 3, 4, 5, 7, 8, 9, 14, 15, 16, 17, 25, 31, 32, 33, 63, 64, 65]
    rows = choose([*edges, integer(1, 200)])
    columns = choose([*edges, integer(1, 300)])
    channels = choose([1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
    batch = choose([[], [0], [1], [1], [2], [2], [3]])
    taps = choose([1, 2, 3, 3, 4, 5, 5, 7, 7, 9, 11, 11, integer(1, 33)])
    stride = (choose([1, 1, 1, 2, 2, 3, 4, 5, integer(6, 10)]), choose([1, 1, 1, 2, 3]))
    padding = (choose([0, taps // 2, taps // 2, integer(0, taps + 3)]), choose([0, 0, 0, 1, 2, 5]))
    dilation = (choose([1, 1, 1, 2, 3, 4]), choose([1, 1, 2]))
    reach = dilation[0] * (taps - 1) + 1
    multiplier = choose([1, 1, 1, 1, 2, 3, integer(2, 33)])
    if multiplier > 3:
        channels, rows = min(channels, 3), min(rows, 33)
    few = choose(["", "", "", "", "rows", "bank"])
    if few == "bank":  # a filter bank: one output row, wide, untouched along the width
        columns, stride, padding = integer(64, 300), (stride[0], 1), (choose([0, padding[0]]), 0)
    if few:
        rows = max(1, reach - 2 * padding[0] + choose([0, 0, 0, 1, 2, 5]))
    if rows + 2 * padding[0] < reach:
        padding = (math.ceil((reach - rows) / 2), padding[1])
    size = (*batch, channels, rows, columns)
    names = layouts_for(size)
    common = ["contiguous", "channels_last"]
    return Problem(
        size,
        taps,
        multiplier,
        stride,
        padding,
        dilation,
        choose([True, True, False]),
        choose(DTYPES),
        choose([choose(common), choose(names)]),
        choose(["contiguous", choose(list(WEIGHT_LAYOUTS))]),
        choose(list(BIAS_LAYOUTS)),
        choose([choose(common), choose(names)]),
        choose([(True, True, True), choose(list(itertools.product([False, True], repeat=3)))]),
        choose(PATHS),
        integer(0, 2**31),
    )


def as_dict(problem: Problem) -> dict[str, Any]:
    """What Problem(**...) rebuilds it from."""
    return asdict(problem)
