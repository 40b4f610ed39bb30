"""The hand-made cases of data/small.json, and the reference itself against them and against ATen in float64."""

from __future__ import annotations

import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import problems
import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor

import depthconv

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "small.json").read_text())


def tensors(case: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x (C, H, W), weight, bias and the exact y of a case; a flat list of rows stands for W = 1."""

    def planes(values: list[Any]) -> Tensor:
        plane = torch.tensor(values, dtype=dtype, device=device)
        return plane if plane.dim() == 3 else plane[..., None]

    weight = torch.tensor(case["w"], dtype=dtype, device=device)[:, None, :, None]
    x, y = planes(case["x"]), planes(case["y"])
    bias = torch.tensor(case["b"], dtype=dtype, device=device) if "b" in case else None
    return x, weight, bias, y


def options(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("stride", "padding", "dilation") if name in case}


@pytest.mark.parametrize("layout", ["unbatched", "contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_exact_values(case: dict[str, Any], dtype: torch.dtype, layout: str, device: str) -> None:
    x, weight, bias, y = tensors(case, dtype, device)
    if layout != "unbatched":
        x, y = x[None], y[None]
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    got = depthconv.depthwise_conv2d(x, weight, bias, **options(case))
    assert got.shape == y.shape and torch.equal(got, y)
    if case.get("padding") != "same":
        assert torch.equal(torch.ops.depthconv.forward(x, weight, bias, **options(case)), y)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_on_exact_values(case: dict[str, Any]) -> None:
    x, weight, bias, y = tensors(case, torch.float64, "cpu")
    given = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)} | options(case)
    if given["padding"] == "same":  # what ATen does: the odd row of padding goes below
        total = weight.shape[2] - 1
        x, given["padding"] = F.pad(x, (0, 0, 0, total % 2)), (total // 2, 0)
    got = reference.forward(x, weight, bias, *(tuple(given[name]) for name in ("stride", "padding", "dilation")))
    assert torch.equal(got, y)


@pytest.mark.parametrize("index", range(40))
def test_reference_against_aten(index: int, seed: int) -> None:
    rng = random.Random(seed)
    problem = problems.random_problem(rng.randint, rng.choice)
    if 0 in problem.size:
        problem = problems.GEOMETRIES["everything"]
    a = problems.make_arguments(problem, "cpu")
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (a.x, a.weight, a.bias)]
    y = F.conv2d(*leaves, *problem.geometry, groups=problem.size[-3])
    given = [leaf for leaf in leaves if leaf is not None]
    want = torch.autograd.grad(y, given, a.dy.double())
    got = [
        reference.grad_input(a.dy, a.x.shape, a.weight, *problem.geometry),
        reference.grad_weight(a.dy, a.x, a.weight.shape, *problem.geometry),
        reference.grad_bias(a.dy),
    ]
    torch.testing.assert_close(reference.forward(a.x, a.weight, a.bias, *problem.geometry), y.detach())
    for mine, aten in zip(got, want):
        torch.testing.assert_close(mine, aten, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", problems.GEOMETRIES)
def test_reference_windows(name: str) -> None:
    """A window of the reference is that part of the whole: test_large looks at nothing else."""
    problem = problems.GEOMETRIES[name]
    a = problems.make_arguments(problem, "cpu")
    y = reference.forward(a.x, a.weight, a.bias, *problem.geometry)
    dx = reference.grad_input(a.dy, a.x.shape, a.weight, *problem.geometry)
    for whole, part in (
        (y, partial(reference.forward, a.x, a.weight, a.bias, *problem.geometry)),
        (dx, partial(reference.grad_input, a.dy, a.x.shape, a.weight, *problem.geometry)),
    ):
        height, width = whole.shape[-2:]
        for top, left in itertools.product({0, height // 2, height - 1}, {0, width // 2, width - 1}):
            rows, columns = (top, min(top + 3, height)), (left, min(left + 3, width))
            torch.testing.assert_close(part(rows, columns), whole[..., slice(*rows), slice(*columns)])


def test_comparison_notices() -> None:
    """The comparison itself: one wrong element, a NaN too many, a NaN too few and a wrong sign of infinity fail."""
    want = torch.tensor([1.0, float("nan"), float("inf"), 0.0], dtype=torch.float64)
    bound = torch.full_like(want, 1e-3)
    reference.assert_close("same", want.float(), want, bound)
    nan, inf = float("nan"), float("inf")
    for wrong in ([1.1, nan, inf, 0], [nan, nan, inf, 0], [1, 1, inf, 0], [1, nan, -inf, 0], [1, nan, 3, 0]):
        with pytest.raises(AssertionError, match="1 of 4 elements"):
            reference.assert_close("wrong", torch.tensor(wrong), want, bound)
