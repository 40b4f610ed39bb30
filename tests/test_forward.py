"""Values of the forward: geometry by dtype by layout by call path, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch
from problems import DTYPES, GEOMETRIES, PATHS, Problem, check_forward, make_arguments

import depthconv

HEIGHTS = (63, 64, 65, 127, 128, 129, 256, 257, 1026, 4099)
# Around 1, 2, 4, 8 and 16 elements and their multiples, which a vector may hold.
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129)
EDGES = [("contiguous", "float32"), ("contiguous", "float16"), ("one_in", "float32"), ("channels_last", "float16")]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_values(name: str, dtype: str, layout: str, device: str, seed: int) -> None:
    for path in PATHS:
        check_forward(replace(GEOMETRIES[name], dtype=dtype, layout=layout, path=path, seed=seed), device)


@pytest.mark.parametrize("layout, dtype", EDGES)
@pytest.mark.parametrize("height", HEIGHTS)
def test_every_width(height: int, dtype: str, layout: str, device: str, seed: int) -> None:
    """Tile and vector edges; what surrounds x in its storage is NaN where the layout leaves room for it."""
    for width in WIDTHS if height < 1000 else WIDTHS[:9]:
        taps = (3, 7, 11, 4)[width % 4]
        problem = Problem((1, 2, height, width), taps, padding=(taps // 2, 0), dtype=dtype, layout=layout, seed=seed)
        check_forward(problem, device)


@pytest.mark.parametrize("layout", ["contiguous", "row_gap", "channels_last"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("taps", [1, 3, 7, 11, 16])
@pytest.mark.parametrize("padding", ["none", "same", "beyond"])
@pytest.mark.parametrize("stride", [1, 2])
def test_one_bad_row_stays_where_it_is_read(
    taps: int, padding: str, stride: int, bad: float, layout: str, device: str, seed: int
) -> None:
    """NaN and infinities reach the outputs whose taps read them and no other; padding never makes a NaN of them."""
    pad = {"none": 0, "same": taps // 2, "beyond": taps + 1}[padding]
    problem = Problem((2, 2, 37, 9), taps, stride=(stride, 1), padding=(pad, 0), layout=layout, seed=seed)
    for row in (0, 1, 18, 36):
        a = make_arguments(problem, device)
        a.x[1, 1, row] = bad
        check_forward(problem, device, a)
        a.x[0, 0, :, 4] = bad
        check_forward(problem, device, a)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "taps, stride, dilation, width", [(11, 1, 1, 64), (21, 1, 1, 8), (41, 1, 1, 24), (9, 1, 2, 12), (5, 2, 1, 16)]
)
def test_a_bad_row_amid_products_of_16_rows(
    taps: int, stride: int, dilation: int, width: int, dtype: str, bad: float, device: str, seed: int
) -> None:
    """A product of matrices multiplies rows that an output does not read by zero: a NaN there must not show."""
    padding = dilation * (taps // 2)
    problem = Problem((2, 2, 90, width), taps, stride=(stride, 1), padding=(padding, 0), dilation=(dilation, 1))
    problem = replace(problem, dtype=dtype, seed=seed)
    for row in (0, 15, 16, 47, 89):
        a = make_arguments(problem, device)
        a.x[1, 1, row, width // 2] = bad
        check_forward(problem, device, a)


@pytest.mark.parametrize("padding", [(0, 2), (1, 2), (4, 7)])
@pytest.mark.parametrize("stride", [(1, 1), (1, 2)])
def test_one_bad_column_stays_where_it_is_read(
    padding: tuple[int, int], stride: tuple[int, int], device: str, seed: int
) -> None:
    problem = Problem((2, 2, 12, 9), 3, stride=stride, padding=padding, seed=seed)
    for column in (0, 4, 8):
        a = make_arguments(problem, device)
        a.x[..., column] = float("inf")
        check_forward(problem, device, a)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "size, padding",
    [
        ((0, 4, 8, 5), (1, 0)),
        ((0, 4, 8, 5), (0, 0)),
        ((0, 4, 0, 5), (3, 1)),
        ((0, 1, 8, 5), (0, 2)),
        ((0, 4, 8, 0), (1, 1)),
    ],
)
@pytest.mark.parametrize("multiplier", [1, 2])
def test_empty_batch(size: tuple[int, ...], padding: tuple[int, int], multiplier: int, path: str, device: str) -> None:
    """y as ATen sizes it."""
    for layout in ("contiguous", "channels_last"):
        check_forward(Problem(size, 3, multiplier, padding=padding, path=path, layout=layout), device)


def test_bias_is_added_once(device: str) -> None:
    """Where every tap reads padding, y is the bias exactly."""
    x, weight = torch.randn(2, 3, 4, 5, device=device), torch.randn(6, 1, 2, 1, device=device)
    bias = torch.randn(6, device=device)
    y = depthconv.depthwise_conv2d(x, weight, bias, padding=(5, 3))
    outside = torch.ones(y.shape[2:], dtype=torch.bool, device=device)
    outside[4:9, 3:8] = False
    assert torch.equal(y[..., outside], bias[:, None].expand(2, 6, int(outside.sum())))


def test_short_argument_lists(device: str, seed: int) -> None:
    """Trailing defaults left out, one int for both axes, plain ints and lists for the Python function."""
    a = make_arguments(Problem((2, 3, 9, 8), seed=seed), device)
    op, function = torch.ops.depthconv.forward, depthconv.depthwise_conv2d
    unit = ((1, 1), (0, 0), (1, 1))
    for call in (op, function):
        reference.check_forward(call(a.x, a.weight), a.x, a.weight, None, *unit)
        reference.check_forward(call(a.x, a.weight, a.bias), a.x, a.weight, a.bias, *unit)
        reference.check_forward(call(a.x, a.weight, a.bias, [2]), a.x, a.weight, a.bias, (2, 2), (0, 0), (1, 1))
        reference.check_forward(
            call(input=a.x, weight=a.weight, dilation=[2, 1], padding=[3]), a.x, a.weight, None, (1, 1), (3, 3), (2, 1)
        )
    for stride, padding, dilation in ((2, 3, 2), ((2, 2), [3, 3], torch.Size([2, 2]))):
        y = function(a.x, a.weight, a.bias, stride, padding, dilation)
        reference.check_forward(y, a.x, a.weight, a.bias, (2, 2), (3, 3), (2, 2))


def test_two_arguments_with_a_gradient(device: str, seed: int) -> None:
    """The dispatcher strips trailing defaults; the gradient must not miss them."""
    a = make_arguments(Problem((2, 3, 9, 8), bias=False, seed=seed), device)
    for call in (torch.ops.depthconv.forward, depthconv.depthwise_conv2d):
        leaves = [a.x.clone().requires_grad_(), a.weight.clone().requires_grad_()]
        grads = torch.autograd.grad(call(*leaves), leaves, a.dy)
        reference.check_backward([*grads, None], a.dy, a.x, a.weight, (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_are_not_rounded_on_the_way(dtype: str, device: str) -> None:
    """33 taps of products whose low bits a TF32, half or bfloat16 sum would lose."""
    problem = Problem((1, 2, 40, 16), 33, dtype=dtype)
    a = make_arguments(problem, device)
    a.weight.copy_(torch.linspace(1, 2, 66).view(2, 1, 33, 1))
    a.x.copy_(torch.linspace(1, 2, a.x.numel()).view(a.x.shape))
    check_forward(problem, device, a)
