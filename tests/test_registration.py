"""torch.library's view of both operators: schema, fake kernel, autograd; the Python geometry against the C++ one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from conftest import SEED
from problems import BATCHED_LAYOUTS, LAYOUTS, WEIGHT_LAYOUTS, Problem, expected_strides, make_arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from depthconv import _C, _geometry

FORWARD = torch.ops.depthconv.forward.default
BACKWARD = torch.ops.depthconv.backward.default
# opcheck without its slow fourth part, for a second look at what has passed all four with gradients recorded.
WITHOUT_TRACING = ("test_schema", "test_autograd_registration", "test_faketensor")
MASKS = list(itertools.product([False, True], repeat=3))

PROBLEMS = {
    **{f"layout {name}": Problem((2, 4, 9, 6), 3, 2, layout=name) for name in LAYOUTS | BATCHED_LAYOUTS},
    **{f"weight {name}": Problem((2, 4, 9, 6), 3, 2, weight_layout=name) for name in WEIGHT_LAYOUTS},
    "geometry": Problem((2, 3, 17, 13), 5, 2, stride=(2, 3), padding=(3, 2), dilation=(2, 2)),
    "geometry, channels_last": Problem((2, 3, 17, 13), 5, stride=(2, 3), padding=(3, 2), layout="channels_last"),
    "unbatched": Problem((3, 9, 8), 3, padding=(1, 0)),
    "empty batch": Problem((0, 4, 8, 5), 3, padding=(1, 0)),
    "empty batch, channels_last": Problem((0, 4, 8, 5), 3, padding=(1, 0), layout="channels_last"),
    "H_out 1": Problem((2, 3, 9, 8), 9),
    "C 1": Problem((2, 1, 9, 8), 3, layout="channels_last"),
    "bfloat16": Problem((2, 4, 9, 6), 3, dtype="bfloat16"),
    "no bias": Problem((2, 4, 9, 6), 3, bias=False),
}


def arguments_of(problem: Problem, device: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of forward and of backward (without the mask)."""
    a = make_arguments(problem, device)
    geometry = [list(pair) for pair in problem.geometry]
    return (a.x, a.weight, a.bias, *geometry), (a.dy, a.x, a.weight, *geometry)


def recording(arguments: tuple[Any, ...], wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    """The first tensors as leaves that require a gradient where wanted; strides stay."""
    leaves = [
        t.detach().requires_grad_(want) if isinstance(t, Tensor) else t for t, want in zip(arguments[:3], wanted)
    ]
    return (*leaves, *arguments[3:])


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_forward(name: str, device: str) -> None:
    forward, _ = arguments_of(PROBLEMS[name], device)
    torch.library.opcheck(FORWARD, forward, test_utils=WITHOUT_TRACING)
    torch.library.opcheck(FORWARD, recording(forward, (True, True, True)))


@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_backward(name: str, device: str) -> None:
    _, backward = arguments_of(PROBLEMS[name], device)
    torch.library.opcheck(BACKWARD, (*backward, [True, True, True]), test_utils=WITHOUT_TRACING)
    torch.library.opcheck(BACKWARD, (*recording(backward, (True, True, True)), [True, True, True]))


@pytest.mark.parametrize("wanted", MASKS, ids=str)
def test_opcheck_requires_grad(wanted: tuple[bool, ...], device: str) -> None:
    """Each subset of the tensors requires a gradient."""
    forward, backward = arguments_of(PROBLEMS["geometry"], device)
    torch.library.opcheck(FORWARD, recording(forward, wanted))
    torch.library.opcheck(BACKWARD, (*recording(backward, wanted), [True, True, True]))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_opcheck_masks(mask: tuple[bool, ...], device: str) -> None:
    """Gradients that are not asked for are None in the real kernel, the fake one and the traced one."""
    _, backward = arguments_of(PROBLEMS["geometry, channels_last"], device)
    arguments = (*backward, list(mask))
    torch.library.opcheck(BACKWARD, arguments)
    torch.library.opcheck(BACKWARD, (*recording(backward, (True, True, True)), list(mask)))
    assert [grad is not None for grad in BACKWARD(*arguments)] == list(mask)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        assert [grad is not None for grad in BACKWARD(*fake)] == list(mask)


@pytest.mark.parametrize("name", PROBLEMS)
def test_fake_strides_are_the_real_ones(name: str, device: str) -> None:
    """Fake and meta kernels against the real kernels: size, strides, dtype and device of y, dx, dw and db."""
    problem = PROBLEMS[name]
    forward, backward = arguments_of(problem, device)
    backward = (*backward, [True, True, True])
    real = [FORWARD(*forward), *BACKWARD(*backward)]
    if problem.size[0]:
        assert real[0].stride() == expected_strides(forward[0], real[0].shape)
    with FakeTensorMode() as mode:

        def fake(arguments: tuple[Any, ...]) -> list[Any]:
            return [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]

        found = [FORWARD(*fake(forward)), *BACKWARD(*fake(backward))]
    for a, b in zip(real, found):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)

    def meta(arguments: tuple[Any, ...]) -> list[Any]:
        return [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a
            for a in arguments
        ]

    for a, b in zip(real, [FORWARD(*meta(forward)), *BACKWARD(*meta(backward))]):
        assert (a.shape, a.stride(), a.dtype, "meta") == (b.shape, b.stride(), b.dtype, b.device.type)


# ---- the geometry --------------------------------------------------------------------------------------------------


def both(*arguments: Any) -> tuple[Any, Any]:
    """What C++ and Python say: a dict each, or the message of the error."""
    out = []
    for function in (_C.geometry, _geometry.geometry):
        try:
            result = function(*arguments)
        except RuntimeError as error:
            out.append(str(error))
        else:
            found = dict(result) if isinstance(result, dict) else result._asdict()
            out.append({key: list(value) if key != "channels_last" else value for key, value in found.items()})
    return out[0], out[1]


def random_strides(draw: random.Random, size: list[int]) -> list[int]:
    """Strides of a dense tensor in a random order of axes, or with steps and gaps, or expanded, or plainly random."""
    order = draw.sample(range(len(size)), len(size))
    if draw.random() < 0.5:
        order = draw.choice([[0, 1, 2, 3], [0, 2, 3, 1]]) if len(size) == 4 else [0, 1, 2]
    stride, step = [0] * len(size), draw.choice([1, 1, 1, 2])
    for axis in reversed(order):
        stride[axis] = step
        step *= max(size[axis], 1) + (draw.randint(0, 3) if draw.random() < 0.2 else 0)
    for axis in range(len(size)):
        if draw.random() < 0.08:
            stride[axis] = draw.choice([0, 1, draw.randint(0, 400)])
    return stride


def test_python_geometry_is_the_cpp_one() -> None:
    """Thousands of random problems, a third of them wrong somewhere: same sizes, same strides, same sentences."""
    draw = random.Random(SEED)
    errors, valid = set(), 0
    for _ in range(6000):
        rank = draw.choice([3, 4, 4, 4, 4])
        size = [draw.choice([0, 1, 1, 2, 3, 4, 5, 8]) for _ in range(rank)]
        if draw.random() < 0.7:
            size = [max(extent, 1) for extent in size]
        channels = size[rank - 3]
        weight = [channels * draw.choice([1, 1, 2, 3]), 1, draw.choice([1, 1, 2, 3, 5]), 1]
        if draw.random() < 0.7:
            size[rank - 2] = max(size[rank - 2], weight[2])
        bias: list[int] | None = draw.choice([None, [weight[0]]])
        pairs = [[draw.choice([1, 1, 2, 3]) for _ in range(2)] for _ in range(3)]
        pairs[1] = [draw.choice([0, 0, 1, 2, 5]) for _ in range(2)]
        strides = [random_strides(draw, size), random_strides(draw, weight)]
        if draw.random() < 0.3:
            spoiled = draw.choice([size, weight, bias or weight, *pairs])
            is_size = not any(spoiled is pair for pair in pairs)
            values = [0, 1, 2, 7, 2**31] if is_size else [-(2**63), -1, 0, 2**40, 2**62, 2**63 - 1]
            spoiled[draw.randrange(len(spoiled))] = draw.choice(values)
            if draw.random() < 0.2:
                spoiled.pop()
        arguments = (size, strides[0][: len(size)], weight, strides[1][: len(weight)], bias, *pairs)
        cpp, python = both(*arguments)
        assert cpp == python, f"{arguments}"
        if isinstance(cpp, str):
            errors.add(cpp.split(":")[1].split(",")[0].split(" must")[0])
        else:
            valid += 1
    assert valid > 2000
    assert {"input", "weight", "bias", "stride", "padding", "dilation"} <= {error.split()[0] for error in errors}


def test_fake_errors_are_the_real_ones(device: str) -> None:
    """Wrong sizes, dtypes and devices: the fake kernels raise the sentence that the kernels raise."""
    sizes = ((2, 4, 9, 6), (8, 1, 3, 1), (8,), (2, 8, 9, 6))
    x, w, b, dy = (torch.randn(size, device=device) for size in sizes)
    wrong: list[tuple[Any, ...]] = [
        (x[0, 0], w, b),
        (x, w[:, 0], b),
        (x, w[:6], b[:6]),
        (x, w, b[:3]),
        (x, w.double(), b),
        (x, w, b.half()),
        (x.int(), w.int(), b.int()),
        (x, w, b, [0, 1]),
        (x, w, b, [1, 1], [-1]),
        (x, w, b, [1, 1], [0, 0], [9, 1]),
        (x, w, b, [1, 1, 1]),
    ]
    calls = [(FORWARD, arguments) for arguments in wrong]
    ones = ([1, 1], [1, 0], [1, 1], [True, True, True])
    calls += [(BACKWARD, (wrong_dy, x, w, *ones)) for wrong_dy in (dy[:1], dy.double(), dy[0])]
    for operator, arguments in calls:
        with pytest.raises(RuntimeError) as real:
            operator(*arguments)
        with FakeTensorMode() as mode, pytest.raises(RuntimeError) as fake:
            operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
        assert str(real.value).startswith("depthconv: ")
        assert str(real.value) == str(fake.value)


# ---- the dispatcher's trap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_calls_with_a_missing_tail(count: int, device: str) -> None:
    """Arguments left out, or equal to their defaults: gradients come, with and without autocast, and compile."""
    x = torch.randn(2, 4, 9, 6, device=device, requires_grad=True)
    w = torch.randn(4, 1, 3, 1, device=device, requires_grad=True)
    arguments = (x, w, None, [1, 1], [0, 0], [1, 1])[:count]
    expected = torch.nn.functional.conv2d(x, w, groups=4)
    wanted = torch.autograd.grad(expected.sum(), (x, w))
    y = torch.ops.depthconv.forward(*arguments)
    torch.testing.assert_close(y, expected)
    for got, want in zip(torch.autograd.grad(y.sum(), (x, w)), wanted):
        torch.testing.assert_close(got, want)
    with torch.autocast(device, torch.bfloat16):
        y = torch.ops.depthconv.forward(*arguments)
    assert y.dtype == torch.bfloat16
    assert [grad.dtype for grad in torch.autograd.grad(y.sum(), (x, w))] == [torch.float32] * 2
    torch.library.opcheck(FORWARD, arguments)
