"""Bad arguments: an exception that names the argument, never a crash, never garbage, and nothing broken afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from problems import Problem, check
from torch import Tensor

import depthconv

LOWEST, HIGHEST = -(2**63), 2**63 - 1
Arguments = dict[str, Any]


def good_arguments(device: str) -> Arguments:
    return {
        "grad_output": torch.randn(2, 8, 9, 6, device=device),
        "input": torch.randn(2, 4, 9, 6, device=device),
        "weight": torch.randn(8, 1, 3, 1, device=device),
        "bias": torch.randn(8, device=device),
        "stride": [1, 1],
        "padding": [1, 0],
        "dilation": [1, 1],
        "output_mask": [True, True, True],
    }


COMMON = ("input", "weight", "stride", "padding", "dilation")
CALLS: dict[str, tuple[Callable[..., Any], tuple[str, ...], bool]] = {
    # the call, its arguments, and whether the tensors require gradients
    "forward operator": (lambda **a: torch.ops.depthconv.forward(**a), (*COMMON, "bias"), False),
    "forward operator, recording": (lambda **a: torch.ops.depthconv.forward(**a), (*COMMON, "bias"), True),
    "backward operator": (
        lambda **a: torch.ops.depthconv.backward(**a),
        (*COMMON, "grad_output", "output_mask"),
        False,
    ),
    "backward operator, recording": (
        lambda **a: torch.ops.depthconv.backward(**a),
        (*COMMON, "grad_output", "output_mask"),
        True,
    ),
    "function": (lambda **a: depthconv.depthwise_conv2d(**a), (*COMMON, "bias"), False),
    "function, recording": (lambda **a: depthconv.depthwise_conv2d(**a), (*COMMON, "bias"), True),
}


def call(name: str, changes: Arguments, device: str) -> Any:
    function, names, recording = CALLS[name]
    given = {key: value for key, value in (good_arguments(device) | changes).items() if key in names}
    if recording:
        for key, value in given.items():
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                given[key] = value.detach().requires_grad_()
    return function(**given)


def other(device: str) -> str:
    """A device that the good arguments are not on."""
    return "cpu" if device == "cuda" else "meta"


def all_tensors(device: str, change: Callable[[Tensor], Tensor]) -> Arguments:
    return {key: change(value) for key, value in good_arguments(device).items() if isinstance(value, Tensor)}


def bad_integers() -> dict[str, tuple[str, Callable[[str], Arguments]]]:
    """Integers that no axis may have; the pattern is what the message must name."""
    table: dict[str, tuple[str, Callable[[str], Arguments]]] = {}
    bad = {
        "stride": ([0, 1], [1, 0], [0], [-1, 1], [1, -3], [LOWEST, 1], [1, LOWEST], [LOWEST]),
        "padding": ([-1, 0], [0, -1], [-1], [LOWEST, 0], [0, LOWEST], [HIGHEST, 0], [0, HIGHEST], [2**62, 0]),
        "dilation": ([0, 1], [1, 0], [0], [-2, 1], [1, -1], [LOWEST, 1], [1, LOWEST], [HIGHEST, 1], [2**62, 1]),
    }
    for name, values in bad.items():
        for value in [*values, [], [1, 1, 1], [1, 1, 1, 1]]:
            table[f"{name} {value}"] = (rf"\b{name}\b", lambda device, n=name, v=value: {n: v})
    table["an output of 2^60 rows"] = (r"\b(padding|output)\b", lambda device: {"padding": [2**59, 0]})
    table["an output of 2^60 columns"] = (r"\b(padding|output)\b", lambda device: {"padding": [0, 2**59]})
    return table


BAD: dict[str, tuple[str, Callable[[str], Arguments]]] = bad_integers() | {
    # sizes
    "kernel above the padded input": (r"\b(kernel|weight)\b", lambda d: {"weight": torch.randn(8, 1, 12, 1, device=d)}),
    "dilated kernel above the padded input": (r"\b(kernel|weight|dilation)\b", lambda d: {"dilation": [6, 1]}),
    "K 0": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 1, 0, 1, device=d)}),
    "kernel width 3": (r"\bweight\b.*\bwidth\b", lambda d: {"weight": torch.randn(8, 1, 3, 3, device=d)}),
    "kernel width 0": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 1, 3, 0, device=d)}),
    "weight of rank 0": (r"\bweight\b", lambda d: {"weight": torch.randn((), device=d)}),
    "weight of rank 1": (r"\bweight\b", lambda d: {"weight": torch.randn(3, device=d)}),
    "weight of rank 2": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 3, device=d)}),
    "weight of rank 3": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 1, 3, device=d)}),
    "weight of rank 5": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 1, 3, 1, 1, device=d)}),
    "weight over several channels": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 4, 3, 1, device=d)}),
    "weight of no multiple of C": (r"\bweight\b", lambda d: {"weight": torch.randn(6, 1, 3, 1, device=d)}),
    "weight of fewer filters than C": (r"\bweight\b", lambda d: {"weight": torch.randn(2, 1, 3, 1, device=d)}),
    "weight of no filters": (r"\bweight\b", lambda d: {"weight": torch.randn(0, 1, 3, 1, device=d)}),
    "input of rank 0": (r"\binput\b", lambda d: {"input": torch.randn((), device=d)}),
    "input of rank 2": (r"\binput\b", lambda d: {"input": torch.randn(9, 6, device=d)}),
    "input of rank 5": (r"\binput\b", lambda d: {"input": torch.randn(1, 2, 4, 9, 6, device=d)}),
    "H 0": (r"\binput\b", lambda d: {"input": torch.randn(2, 4, 0, 6, device=d)}),
    "H 0, padded": (r"\binput\b", lambda d: {"input": torch.randn(2, 4, 0, 6, device=d), "padding": [3, 1]}),
    "W 0": (r"\binput\b", lambda d: {"input": torch.randn(2, 4, 9, 0, device=d)}),
    "W 0, padded": (r"\binput\b", lambda d: {"input": torch.randn(2, 4, 9, 0, device=d), "padding": [3, 1]}),
    "H 0, unbatched": (r"\binput\b", lambda d: {"input": torch.randn(4, 0, 6, device=d), "padding": [3, 1]}),
    "C 0": (r"\b(input|weight)\b", lambda d: {"input": torch.randn(2, 0, 9, 6, device=d)}),
    "C 0 of both": (
        r"\b(input|weight)\b",
        lambda d: {"input": torch.randn(2, 0, 9, 6, device=d), "weight": torch.randn(0, 1, 3, 1, device=d)},
    ),
    "C 0, empty batch": (r"\b(input|weight)\b", lambda d: {"input": torch.randn(0, 0, 9, 6, device=d)}),
    "bias too long": (r"\bbias\b", lambda d: {"bias": torch.randn(9, device=d)}),
    "bias of one": (r"\bbias\b", lambda d: {"bias": torch.randn(1, device=d)}),
    "bias of none": (r"\bbias\b", lambda d: {"bias": torch.randn(0, device=d)}),
    "bias of C": (r"\bbias\b", lambda d: {"bias": torch.randn(4, device=d)}),
    "bias of rank 0": (r"\bbias\b", lambda d: {"bias": torch.randn((), device=d)}),
    "bias of rank 2": (r"\bbias\b", lambda d: {"bias": torch.randn(8, 1, device=d)}),
    "grad_output too high": (r"\bgrad_output\b", lambda d: {"grad_output": torch.randn(2, 8, 10, 6, device=d)}),
    "grad_output too low": (r"\bgrad_output\b", lambda d: {"grad_output": torch.randn(2, 8, 8, 6, device=d)}),
    "grad_output of C channels": (r"\bgrad_output\b", lambda d: {"grad_output": torch.randn(2, 4, 9, 6, device=d)}),
    "grad_output of another batch": (r"\bgrad_output\b", lambda d: {"grad_output": torch.randn(1, 8, 9, 6, device=d)}),
    "grad_output unbatched": (r"\bgrad_output\b", lambda d: {"grad_output": torch.randn(8, 9, 6, device=d)}),
    "grad_output of one element": (r"\bgrad_output\b", lambda d: {"grad_output": torch.randn(1, 1, 1, 1, device=d)}),
    "output_mask of two": (r"\boutput_mask\b", lambda d: {"output_mask": [True, True]}),
    "output_mask of four": (r"\boutput_mask\b", lambda d: {"output_mask": [True] * 4}),
    "output_mask of none": (r"\boutput_mask\b", lambda d: {"output_mask": []}),
    # mixed dtypes and devices
    "weight of another dtype": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 1, 3, 1, device=d).double()}),
    "weight of a half dtype": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 1, 3, 1, device=d).half()}),
    "weight of integers": (r"\bweight\b", lambda d: {"weight": torch.ones(8, 1, 3, 1, device=d, dtype=torch.int64)}),
    "input of another dtype": (
        r"\b(input|weight)\b",
        lambda d: {"input": torch.randn(2, 4, 9, 6, device=d).bfloat16()},
    ),
    "input of integers": (r"\binput\b", lambda d: {"input": torch.ones(2, 4, 9, 6, device=d, dtype=torch.int64)}),
    "bias of another dtype": (r"\bbias\b", lambda d: {"bias": torch.randn(8, device=d).double()}),
    "grad_output of another dtype": (
        r"\bgrad_output\b",
        lambda d: {"grad_output": torch.randn(2, 8, 9, 6, device=d).half()},
    ),
    "weight on another device": (
        r"\b(weight|input)\b.*\b(device|cpu|meta|cuda)\b",
        lambda d: {"weight": torch.randn(8, 1, 3, 1, device=other(d))},
    ),
    "input on another device": (
        r"\b(weight|input|grad_output)\b.*\b(device|cpu|meta|cuda)\b",
        lambda d: {"input": torch.randn(2, 4, 9, 6, device=other(d))},
    ),
    "bias on another device": (
        r"\bbias\b.*\b(device|cpu|meta|cuda)\b",
        lambda d: {"bias": torch.randn(8, device=other(d))},
    ),
    "grad_output on another device": (
        r"\bgrad_output\b.*\b(device|cpu|meta|cuda)\b",
        lambda d: {"grad_output": torch.randn(2, 8, 9, 6, device=other(d))},
    ),
    # layouts that are no strided tensors
    "sparse input": (r"\binput\b", lambda d: {"input": torch.randn(2, 4, 9, 6, device=d).to_sparse()}),
    "sparse weight": (r"\bweight\b", lambda d: {"weight": torch.randn(8, 1, 3, 1, device=d).to_sparse()}),
    "sparse bias": (r"\bbias\b", lambda d: {"bias": torch.randn(8, device=d).to_sparse()}),
    "sparse grad_output": (
        r"\bgrad_output\b",
        lambda d: {"grad_output": torch.randn(2, 8, 9, 6, device=d).to_sparse()},
    ),
    "sparse everything": (r"\b(input|weight)\b", lambda d: all_tensors(d, Tensor.to_sparse)),
    "CSR input": (r"\binput\b", lambda d: {"input": torch.randn(9, 6, device=d).to_sparse_csr()}),
    "quantized input": (r"\binput\b", lambda d: {"input": quantized(torch.randn(2, 4, 9, 6, device=d))}),
    "quantized weight": (r"\bweight\b", lambda d: {"weight": quantized(torch.randn(8, 1, 3, 1, device=d))}),
    "quantized everything": (r"\b(input|weight)\b", lambda d: all_tensors(d, quantized)),
    # no tensors, no integers
    "input None": (r"\binput\b", lambda d: {"input": None}),
    "input a list": (r"\binput\b", lambda d: {"input": [1.0, 2.0]}),
    "weight None": (r"\bweight\b", lambda d: {"weight": None}),
    "weight a number": (r"\bweight\b", lambda d: {"weight": 1.5}),
    "bias a string": (r"\bbias\b", lambda d: {"bias": "yes"}),
    "grad_output None": (r"\bgrad_output\b", lambda d: {"grad_output": None}),
    "stride of floats": (r"\bstride\b", lambda d: {"stride": [1.5, 1.0]}),
    "padding of None": (r"\bpadding\b", lambda d: {"padding": [None, 1]}),
    "dilation of strings": (r"\bdilation\b", lambda d: {"dilation": ["1", "1"]}),
    "stride None": (r"\bstride\b", lambda d: {"stride": None}),
}
for wrong_dtype in ("int8", "int32", "int64", "uint8", "bool", "complex64", "complex128", "float8_e4m3fn"):
    BAD[f"everything {wrong_dtype}"] = (
        r"\b(input|weight)\b",
        lambda d, dtype=wrong_dtype: all_tensors(d, lambda t: t.to(getattr(torch, dtype))),
    )


def quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def check_still_works(device: str) -> None:
    for path in ("operators", "function"):
        check(Problem((2, 4, 9, 6), 3, 2, padding=(1, 0), path=path), device)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*", "ignore:.*[Qq]uantiz.*", "ignore:Casting complex")
@pytest.mark.parametrize("bad", BAD)
def test_bad_argument(bad: str, device: str) -> None:
    """Each call that has such an argument."""
    words, change = BAD[bad]
    changes = change(device)
    callers = [name for name, (_, arguments, _) in CALLS.items() if set(changes) & set(arguments)]
    assert callers
    for name in callers:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=f"(?s){words}"):
            print(name, "returned", call(name, changes, device))
    check_still_works(device)


@pytest.mark.parametrize("name", CALLS)
def test_good_arguments(name: str, device: str) -> None:
    """The arguments that the bad ones are made from are good, so that each test shows what it changes."""
    call(name, {}, device)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize(
    "argument, value",
    [
        *(
            (name, value)
            for name in ("stride", "padding", "dilation")
            for value in ((), (1, 1, 1), "2", None, 1.5, (1, None))
        ),
        ("stride", 0),
        ("stride", -1),
        ("stride", (1, 0)),
        ("stride", LOWEST),
        ("padding", -1),
        ("padding", (0, -1)),
        ("padding", LOWEST),
        ("padding", HIGHEST),
        ("padding", "full"),
        ("padding", "SAME"),
        ("padding", ""),
        ("dilation", 0),
        ("dilation", -1),
        ("dilation", LOWEST),
        ("dilation", HIGHEST),
    ],
    ids=str,
)
def test_bad_option_of_the_function(argument: str, value: Any, recording: bool, device: str) -> None:
    """Plain ints, pairs of the wrong length and what is no int at all."""
    with pytest.raises((RuntimeError, TypeError, ValueError), match=rf"(?s)\b{argument}\b"):
        call("function, recording" if recording else "function", {argument: value}, device)
    check_still_works(device)


@pytest.mark.skipif(not hasattr(torch.Tensor, "to_mkldnn"), reason="this torch has no mkldnn tensors")
def test_opaque_tensor() -> None:
    a = good_arguments("cpu")
    for name in ("forward operator", "backward operator", "function"):
        with pytest.raises(RuntimeError, match=r"\binput\b"):
            call(name, {"input": a["input"].to_mkldnn()}, "cpu")


def test_missing_arguments() -> None:
    x, weight = torch.randn(2, 4, 9, 6), torch.randn(4, 1, 3, 1)
    for function in (torch.ops.depthconv.forward, depthconv.depthwise_conv2d):
        with pytest.raises((RuntimeError, TypeError), match=r"\bweight\b"):
            function(x)
        with pytest.raises((RuntimeError, TypeError), match=r"\bgroups\b"):
            function(x, weight, groups=4)
    with pytest.raises((RuntimeError, TypeError), match=r"\b(stride|padding|output_mask)\b"):
        torch.ops.depthconv.backward(x, x, weight)


def test_gradient_of_integers_is_refused(device: str) -> None:
    """A weight that requires a gradient does not make integers convolvable."""
    weight = torch.randn(8, 1, 3, 1, device=device, requires_grad=True)
    for name in ("forward operator", "function"):
        for dtype in (torch.int64, torch.bool, torch.complex64):
            x = torch.ones(2, 4, 9, 6, device=device).to(dtype)
            with pytest.raises((RuntimeError, TypeError), match=r"\b(input|weight)\b"):
                call(name, {"input": x, "weight": weight}, device)


def test_only_grad_output_requires_a_gradient(device: str) -> None:
    """Nothing that the convolution reads requires one: dx and dw are still linear in grad_output, and recorded."""
    a = good_arguments(device)
    dy = a["grad_output"].requires_grad_()
    geometry = ((1, 1), (1, 0), (1, 1))
    dx, dw, db = torch.ops.depthconv.backward(dy, a["input"], a["weight"], *geometry, [True] * 3)
    incoming = torch.randn_like(dx)
    (got,) = torch.autograd.grad(dx, dy, incoming)
    reference.check_forward(got, incoming, a["weight"], None, *geometry)
    assert dw.requires_grad and db.requires_grad


@pytest.mark.parametrize("stride", [2, (2, 1), (1, 2), [3, 3]], ids=str)
@pytest.mark.parametrize("recording", [False, True])
def test_same_padding_with_stride(stride: Any, recording: bool, device: str) -> None:
    """ATen's own error."""
    x = torch.randn(2, 4, 9, 6, device=device, requires_grad=recording)
    weight = torch.randn(4, 1, 3, 1, device=device)
    with pytest.raises(RuntimeError) as theirs:
        F.conv2d(x, weight, stride=stride, padding="same", groups=4)
    with pytest.raises(RuntimeError) as ours:
        depthconv.depthwise_conv2d(x, weight, stride=stride, padding="same")
    assert str(theirs.value) in str(ours.value)
    check_still_works(device)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("dilation", [1, 2, (3, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 6])
def test_same_padding(taps: int, dilation: Any, unbatched: bool, device: str) -> None:
    """The size is kept; of an odd number of padding rows the extra one goes below. Gradients as well."""
    x = torch.randn(4, 9, 6, device=device) if unbatched else torch.randn(2, 4, 9, 6, device=device)
    weight, bias = torch.randn(8, 1, taps, 1, device=device), torch.randn(8, device=device)
    down = dilation if isinstance(dilation, int) else dilation[0]
    total = down * (taps - 1)
    geometry = ((1, 1), (0, 0), (down, 1))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = depthconv.depthwise_conv2d(*leaves, padding="same", dilation=dilation)
    padded = F.pad(x, (0, 0, total // 2, total - total // 2))
    assert y.shape[-2:] == x.shape[-2:]
    reference.check_forward(y.detach(), padded, weight, bias, *geometry)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, leaves, dy)
    reference.check_backward([None, dw, db], dy, padded, weight, *geometry)
    whole = reference.grad_input(dy, padded.shape, weight, *geometry)
    torch.testing.assert_close(dx.double(), whole[..., total // 2 : total // 2 + 9, :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2, (2, 3)], ids=str)
def test_valid_padding(stride: Any, device: str) -> None:
    x, weight = torch.randn(2, 4, 9, 6, device=device), torch.randn(8, 1, 3, 1, device=device)
    y = depthconv.depthwise_conv2d(x, weight, stride=stride, padding="valid")
    pair = (stride, stride) if isinstance(stride, int) else stride
    reference.check_forward(y, x, weight, None, pair, (0, 0), (1, 1))
