"""Strides: every layout of x, dy, weight and bias gives right values, and y, dx and dw the right strides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch
from problems import (
    BATCHED_LAYOUTS,
    BIAS_LAYOUTS,
    DENSE_WEIGHT_LAYOUTS,
    LAYOUTS,
    PATHS,
    WEIGHT_LAYOUTS,
    Problem,
    check,
    check_backward,
    expected_strides,
    make_arguments,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import depthconv

ALL_LAYOUTS = [*LAYOUTS, *BATCHED_LAYOUTS]

# Sizes that reach different kernels: vector widths, odd widths, tall, W = 1, small planes, stride, multiplier, H_out 1.
SHAPES: dict[str, Problem] = {
    "vectors": Problem((2, 8, 20, 32), 3, padding=(1, 0)),
    "K7": Problem((2, 4, 23, 16), 7, padding=(3, 0)),
    "K11 small planes": Problem((3, 8, 7, 7), 11, padding=(5, 0)),
    "K21": Problem((2, 4, 40, 8), 21, padding=(10, 0)),
    "odd width": Problem((2, 5, 19, 25), 5, padding=(2, 0)),
    "W 1": Problem((2, 4, 65, 1), 5, padding=(2, 0)),
    "stride": Problem((2, 4, 21, 16), 3, stride=(2, 1), padding=(1, 0)),
    "width stride and padding": Problem((2, 4, 12, 17), 3, stride=(1, 2), padding=(1, 3)),
    "dilation": Problem((2, 4, 21, 16), 3, padding=(3, 0), dilation=(3, 1)),
    "multiplier": Problem((2, 4, 13, 8), 5, 2, padding=(2, 0)),
    "H_out 1": Problem((2, 8, 22, 12), 22),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_input(layout: str, shape: str, dtype: str, device: str, seed: int) -> None:
    for path in ("operators", "function"):
        check(replace(SHAPES[shape], layout=layout, dtype=dtype, path=path, seed=seed), device)


@pytest.mark.parametrize("x_layout", ["contiguous", "channels_last", "row_gap_odd"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_grad_output(layout: str, shape: str, x_layout: str, device: str, seed: int) -> None:
    for dtype, path in (("float16", "operators"), ("float32", "function")):
        check_backward(
            replace(SHAPES[shape], grad_layout=layout, layout=x_layout, dtype=dtype, path=path, seed=seed), device
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
def test_weight(layout: str, shape: str, path: str, device: str, seed: int) -> None:
    for x_layout in ("contiguous", "channels_last"):
        check(replace(SHAPES[shape], weight_layout=layout, layout=x_layout, path=path, seed=seed), device)


@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
@pytest.mark.parametrize("shape", ["vectors", "multiplier"])
def test_bias(layout: str, shape: str, device: str, seed: int) -> None:
    for path in PATHS:
        check(replace(SHAPES[shape], bias_layout=layout, path=path, seed=seed), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unbatched(layout: str, device: str, seed: int) -> None:
    """Three axes are never channels_last: y and dx come contiguous."""
    for path in PATHS:
        problem = Problem((8, 20, 16), 3, padding=(1, 0), layout=layout, grad_layout=layout, path=path, seed=seed)
        check(problem, device)


@pytest.mark.parametrize("offset", range(1, 16))
def test_every_alignment(offset: int, device: str, seed: int) -> None:
    """x and dy start at every address modulo a vector, in rows that themselves start aligned or not."""
    for dtype in ("float32", "float16", "float64"):
        for size in ((2, 4, 20, 16), (2, 4, 20, 15), (2, 16, 9, 6)):
            for channels_last in (False, True):
                problem = Problem(size, 3, padding=(1, 0), dtype=dtype, seed=seed)
                a = make_arguments(problem, device)
                for name in ("x", "dy"):
                    value = getattr(a, name)
                    if channels_last:
                        value = value.contiguous(memory_format=torch.channels_last)
                    buffer = value.new_full((value.numel() + 32,), float("nan"))
                    moved = buffer.as_strided(value.shape, value.stride(), offset).copy_(value)
                    setattr(a, name, moved)
                check(problem, device, a)


def sequence_to_image(batch: int, steps: int, features: int, device: str) -> Tensor:
    """What a sequence model hands on: contiguous in channels_last, yet suggested NCHW, since W is 1."""
    return torch.randn(batch, steps, features, device=device).transpose(1, 2).unsqueeze(-1)


AMBIGUOUS = {
    "sequence": lambda device: sequence_to_image(2, 12, 6, device),
    "sequence of one step": lambda device: sequence_to_image(2, 1, 6, device),
    "sequence of one feature": lambda device: sequence_to_image(2, 12, 1, device),
    "batch of one sequence": lambda device: sequence_to_image(1, 12, 6, device),
    "C 1 channels_last": lambda device: torch.randn(2, 1, 9, 5, device=device).contiguous(
        memory_format=torch.channels_last
    ),
    "H and W 1 channels_last": lambda device: torch.randn(2, 6, 1, 1, device=device).contiguous(
        memory_format=torch.channels_last
    ),
    "H 1": lambda device: torch.randn(2, 1, 5, 6, device=device).permute(0, 3, 1, 2),
    "W 1 of a wider channels_last": lambda device: torch.randn(2, 9, 4, 6, device=device).permute(0, 3, 1, 2)[..., 1:2],
    "C 1 of a wider channels_last": lambda device: torch.randn(2, 9, 4, 6, device=device).permute(0, 3, 1, 2)[:, 2:3],
    "two rows as columns": lambda device: torch.randn(2, 6, 4, 2, device=device).transpose(2, 3),
}


@pytest.mark.parametrize("padding", [0, 1], ids=["W kept", "W grows"])
@pytest.mark.parametrize("weight_layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_layout(name: str, weight_layout: str, padding: int, device: str, seed: int) -> None:
    """Strides that read as both layouts: real and fake y, dx and dw have the same ones, and opcheck agrees."""
    x = AMBIGUOUS[name](device)
    geometry = ((1, 1), (1, padding), (1, 1))
    problem = Problem(tuple(x.shape), 3, padding=geometry[1], weight_layout=weight_layout, seed=seed)
    a = replace(make_arguments(problem, device), x=x)
    check(problem, device, a)
    forward, backward = torch.ops.depthconv.forward.default, torch.ops.depthconv.backward.default
    utilities = ("test_schema", "test_faketensor")  # the rest of opcheck is slow and is run in test_registration
    torch.library.opcheck(forward, (a.x, a.weight, a.bias, *geometry), test_utils=utilities)
    torch.library.opcheck(backward, (a.dy, a.x, a.weight, *geometry, [True] * 3), test_utils=utilities)


@pytest.mark.parametrize("weight_layout", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_fake_strides_are_the_real_ones(layout: str, weight_layout: str, device: str, seed: int) -> None:
    for size in ((2, 4, 9, 6), (2, 4, 9, 1), (1, 4, 1, 6), (2, 1, 9, 6)):
        problem = Problem(size, 3, padding=(1, 1), layout=layout, weight_layout=weight_layout, seed=seed)
        a = make_arguments(problem, device)
        tensors = (a.dy, a.x, a.weight)
        with FakeTensorMode() as mode:
            dy, x, weight = (mode.from_tensor(t) for t in tensors)
            fake = [
                torch.ops.depthconv.forward(x, weight, None, *problem.geometry),
                *torch.ops.depthconv.backward(dy, x, weight, *problem.geometry, [True] * 3),
            ]
        real = [
            torch.ops.depthconv.forward(a.x, a.weight, None, *problem.geometry),
            *torch.ops.depthconv.backward(a.dy, a.x, a.weight, *problem.geometry, [True] * 3),
        ]
        for ours, theirs in zip(real, fake):
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
            assert ours.device == theirs.device


@pytest.mark.parametrize("layout", DENSE_WEIGHT_LAYOUTS)
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("channels", [1, 4])
def test_accumulated_grad_weight_has_the_strides_of_the_weight(
    layout: str, taps: int, channels: int, device: str, seed: int
) -> None:
    """What DDP looks at: w.grad after backward()."""
    a = make_arguments(Problem((2, channels, 9, 6), taps, weight_layout=layout, seed=seed), device)
    weight = a.weight.detach().requires_grad_()
    for call in (depthconv.depthwise_conv2d, torch.ops.depthconv.forward):
        weight.grad = None
        call(a.x, weight).sum().backward()
        assert weight.grad is not None and weight.grad.stride() == weight.stride()


def test_sum_backward(device: str, seed: int) -> None:
    """y.sum().backward(): dy is one element with all strides 0."""
    problem = Problem((2, 4, 13, 8), 5, 2, padding=(2, 0), seed=seed)
    a = make_arguments(problem, device)
    a.dy = torch.ones(1, device=device).expand(a.dy.shape)
    check(problem, device, a)
    x = a.x.clone().requires_grad_()
    depthconv.depthwise_conv2d(x, a.weight, a.bias, *problem.geometry).sum().backward()
    reference.check_backward([x.grad, None, None], a.dy, a.x, a.weight, *problem.geometry)


def test_between_permutations(device: str, seed: int) -> None:
    """Convolution, permute, LayerNorm, as ConvNeXt has it: dy comes channels_last."""
    problem = Problem((2, 8, 12, 6), 7, padding=(3, 0), seed=seed)
    a = make_arguments(problem, device)
    x = a.x.clone().requires_grad_()
    y = depthconv.depthwise_conv2d(x, a.weight, a.bias, *problem.geometry)
    y.retain_grad()
    torch.nn.functional.layer_norm(y.permute(0, 2, 3, 1), (8,)).square().sum().backward()
    assert y.grad is not None
    reference.check_backward([x.grad, None, None], y.grad, a.x, a.weight, *problem.geometry)
    assert x.grad is not None and x.grad.stride() == expected_strides(x, x.shape)
