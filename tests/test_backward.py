"""Values of dx, dw and db: geometry by dtype by layout by call path, every output mask, against float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import reference
import torch
from problems import DTYPES, GEOMETRIES, PATHS, Problem, check_backward, make_arguments
from test_forward import EDGES, HEIGHTS, WIDTHS

import depthconv

MASKS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_values(name: str, dtype: str, layout: str, device: str, seed: int) -> None:
    for path in PATHS:
        problem = replace(GEOMETRIES[name], dtype=dtype, layout=layout, grad_layout=layout, path=path, seed=seed)
        check_backward(problem, device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "".join("xwb"[i] for i in range(3) if mask[i]) or "none")
@pytest.mark.parametrize("name", ["same", "K11", "everything", "H_out 1", "stride above K", "W 1", "unbatched"])
def test_masks(name: str, mask: tuple[bool, bool, bool], path: str, device: str, seed: int) -> None:
    """Only what is asked for is there, and it is right whatever else is asked for."""
    for layout in ("contiguous", "channels_last"):
        check_backward(replace(GEOMETRIES[name], mask=mask, path=path, layout=layout, seed=seed), device)


@pytest.mark.parametrize(
    "layout, dtype", [("contiguous", "float32"), ("contiguous", "bfloat16"), ("channels_last", "float32")]
)
@pytest.mark.parametrize("dilation", range(1, 5))
@pytest.mark.parametrize("stride", range(2, 6))
def test_strides(stride: int, dilation: int, dtype: str, layout: str, device: str, seed: int) -> None:
    """Taps fewer and more than the stride, heights that it divides and not, rows of vectors and not, each mask."""
    sizes = itertools.cycle(itertools.product((stride * 12, stride * 12 + 1, stride * 3 - 1), (8, 33, 32)))
    for taps, mask in itertools.product((1, 2, 3, 4, 7), MASKS[:-1]):
        height, width = next(sizes)
        padding = max(taps // 2, math.ceil((dilation * (taps - 1) + 1 - height) / 2))
        problem = Problem((2, 4, height, width), taps, 1, (stride, 1), (padding, 0), (dilation, 1), dtype=dtype)
        check_backward(replace(problem, mask=mask, layout=layout, grad_layout=layout, seed=seed), device)


@pytest.mark.parametrize("layout, dtype", EDGES)
@pytest.mark.parametrize("height", HEIGHTS)
def test_every_width(height: int, dtype: str, layout: str, device: str, seed: int) -> None:
    """Tile and vector edges; what surrounds x and dy in their storage is NaN where the layout leaves room for it."""
    for width in WIDTHS if height < 1000 else WIDTHS[:9]:
        taps = (3, 7, 11, 4)[width % 4]
        problem = Problem((1, 2, height, width), taps, padding=(taps // 2, 0), dtype=dtype, seed=seed)
        check_backward(replace(problem, layout=layout, grad_layout=layout), device)


@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("taps", [1, 3, 7, 11, 16])
@pytest.mark.parametrize("padding", ["none", "same", "beyond"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_one_bad_row_stays_where_it_is_read(
    taps: int, padding: str, stride: int, bad: float, where: str, layout: str, device: str, seed: int
) -> None:
    """A NaN row of dy reaches the rows of dx that it made, a NaN row of x the taps that read it, and no other."""
    pad = {"none": 0, "same": taps // 2, "beyond": taps + 1}[padding]
    problem = Problem((2, 2, 37, 9), taps, stride=(stride, 1), padding=(pad, 0), seed=seed)
    problem = replace(problem, layout=layout, grad_layout=layout)
    height = problem.size[2] if where == "x" else problem.output_size[2]
    for row in (0, 1, height // 2, height - 1):
        a = make_arguments(problem, device)
        (a.x if where == "x" else a.dy)[1, 1, row] = bad
        check_backward(problem, device, a)


@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False)])
@pytest.mark.parametrize("taps, stride, width", [(11, 1, 64), (21, 1, 28), (5, 2, 14)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_bad_row_in_half_types(
    taps: int, stride: int, width: int, layout: str, mask: tuple[bool, bool, bool], dtype: str, where: str, device: str,
    seed: int,
) -> None:
    problem = Problem((2, 2, 60, width), taps, stride=(stride, 1), padding=(taps // 2, 0), mask=mask, dtype=dtype)
    problem = replace(problem, layout=layout, grad_layout=layout, seed=seed)
    height = problem.size[2] if where == "x" else problem.output_size[2]
    for row in (0, 17, height - 1):
        a = make_arguments(problem, device)
        (a.x if where == "x" else a.dy)[1, 1, row, width // 2] = float("inf")
        check_backward(problem, device, a)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("size, padding", [((0, 4, 8, 5), (1, 0)), ((0, 4, 0, 5), (3, 1)), ((0, 1, 8, 5), (0, 2))])
def test_empty_batch(size: tuple[int, ...], padding: tuple[int, int], multiplier: int, path: str, device: str) -> None:
    """dx is empty, dw and db are zeros."""
    for layout in ("contiguous", "channels_last"):
        problem = Problem(size, 3, multiplier, padding=padding, path=path, layout=layout)
        dx, dw, db = check_backward(problem, device)
        assert dx is not None and dx.shape == size
        assert dw is not None and not dw.any() and db is not None and not db.any()


def test_gradients_add_up_over_uses(device: str, seed: int) -> None:
    """A weight used twice gets both gradients, and w.grad has the strides of w."""
    problem = Problem((2, 4, 9, 8), 3, padding=(1, 0), weight_layout="channels_last", seed=seed)
    a = make_arguments(problem, device)
    weight = a.weight.clone().requires_grad_()
    for _ in range(2):
        depthconv.depthwise_conv2d(a.x, weight, None, *problem.geometry).backward(a.dy)
    assert weight.grad is not None and weight.grad.stride() == weight.stride()
    reference.check_backward([None, weight.grad / 2, None], a.dy, a.x, a.weight, *problem.geometry)


def test_chain_of_two(device: str, seed: int) -> None:
    """Two convolutions in a row, in float64, against the reference's own chain."""
    first = Problem((2, 3, 12, 7), 3, padding=(1, 0), dtype="float64", seed=seed)
    second = replace(first, taps=5, padding=(2, 0), seed=seed + 1)
    a, b = make_arguments(first, device), make_arguments(second, device)
    x, v, w = (t.clone().requires_grad_() for t in (a.x, a.weight, b.weight))
    middle = depthconv.depthwise_conv2d(x, v, None, *first.geometry)
    depthconv.depthwise_conv2d(middle, w, None, *second.geometry).backward(b.dy)
    d_middle = reference.grad_input(b.dy, middle.shape, b.weight, *second.geometry)
    torch.testing.assert_close(x.grad, reference.grad_input(d_middle, x.shape, a.weight, *first.geometry))
    torch.testing.assert_close(v.grad, reference.grad_weight(d_middle, a.x, v.shape, *first.geometry))
