"""gradcheck and gradgradcheck in float64, with respect to each argument, on the operators and the Python function."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from problems import Problem, make_arguments
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import depthconv

CASES: dict[str, Problem] = {
    "plain": Problem((2, 2, 5, 3)),
    "stride": Problem((2, 2, 6, 3), stride=(2, 1)),
    "dilation": Problem((1, 2, 7, 3), dilation=(2, 1)),
    "padding": Problem((2, 2, 4, 3), padding=(2, 0)),
    "multiplier": Problem((2, 2, 4, 3), multiplier=2, padding=(1, 0)),
    "width": Problem((1, 2, 4, 5), stride=(1, 2), padding=(0, 2)),
    "everything": Problem((1, 2, 6, 5), 2, 2, stride=(2, 2), padding=(2, 1), dilation=(3, 1)),
    "H_out 1": Problem((2, 2, 4, 3), 4),
    "K1": Problem((2, 2, 3, 3), 1),
    "unbatched": Problem((2, 6, 3), 3, 2, stride=(2, 1), padding=(1, 1), dilation=(2, 1)),
}
CALLS: dict[str, Callable[..., Tensor]] = {
    "operator": lambda *arguments: torch.ops.depthconv.forward(*arguments),
    "function": lambda *arguments: depthconv.depthwise_conv2d(*arguments),
}
WRT = {"x": (True, False, False), "w": (False, True, False), "b": (False, False, True), "all": (True, True, True)}


def leaves(problem: Problem, wanted: tuple[bool, bool, bool], device: str) -> list[Tensor]:
    a = make_arguments(problem, device)
    assert a.bias is not None
    return [t.detach().requires_grad_(want) for t, want in zip((a.x, a.weight, a.bias), wanted)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrt, layout", [*((wrt, "contiguous") for wrt in WRT), ("all", "channels_last")])
@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str, wrt: str, call: str, layout: str, device: str, seed: int) -> None:
    problem = replace(CASES[name], dtype="float64", layout=layout, seed=seed)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return CALLS[call](x, weight, bias, *problem.geometry)

    inputs = leaves(problem, WRT[wrt], device)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("mask", [m for m in itertools.product([True, False], repeat=3) if any(m)], ids=str)
@pytest.mark.parametrize("name", ["everything", "unbatched"])
def test_backward_operator(name: str, mask: tuple[bool, bool, bool], device: str, seed: int) -> None:
    """The backward operator is differentiable itself, in each of its arguments, whichever outputs are asked for."""
    problem = replace(CASES[name], dtype="float64", seed=seed)
    a = make_arguments(problem, device)
    inputs = [t.detach().requires_grad_() for t in (a.dy, a.x, a.weight)]

    def function(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        grads = torch.ops.depthconv.backward(dy, x, weight, *problem.geometry, list(mask))
        return tuple(grad for grad in grads if grad is not None)

    assert gradcheck(function, inputs)


@pytest.mark.parametrize("used", range(3), ids=["dx", "dw", "db"])
def test_missing_incoming_gradients(used: int, device: str, seed: int) -> None:
    """All three gradients are made, one is used: its derivative is as if the others had not been made."""
    problem = replace(CASES["everything"], dtype="float64", seed=seed)
    a = make_arguments(problem, device)
    inputs = [t.detach().requires_grad_() for t in (a.dy, a.x, a.weight)]

    def function(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.depthconv.backward(dy, x, weight, *problem.geometry, [True] * 3)[used]

    assert gradcheck(function, inputs)


@pytest.mark.parametrize("call", CALLS)
def test_gradient_penalty(call: str, device: str, seed: int) -> None:
    """A loss that holds a gradient, as a WGAN has it: its derivative with respect to w, by central differences."""
    problem = replace(CASES["everything"], dtype="float64", seed=seed)
    x, weight, bias = leaves(problem, (True, True, False), device)

    def penalty(w: Tensor) -> Tensor:
        y = CALLS[call](x, w, bias, *problem.geometry)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return dx.square().sum()

    (got,) = torch.autograd.grad(penalty(weight), weight)
    step = 1e-5
    for index in range(weight.numel()):
        delta = torch.zeros_like(weight).flatten()
        delta[index] = step
        delta = delta.view_as(weight)
        slope = (penalty(weight.detach() + delta) - penalty(weight.detach() - delta)).item() / (2 * step)
        assert abs(slope - got.flatten()[index].item()) <= 1e-5 * max(1.0, abs(slope))
