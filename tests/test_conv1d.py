"""depthwise_conv1d and DepthwiseConv1d against F.conv1d in float64 and nn.Conv1d."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import depthconv
from depthconv import DepthwiseConv1d, depthwise_conv1d

# Arguments of nn.Conv1d that ours takes unchanged.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((4, 4, 3), {"groups": 4}),
    "multiplier": ((4, 12, 5), {"groups": 4, "padding": 2}),
    "everything": ((4, 8, (4,), (2,), (3,), (2,), 4, False), {}),
    "same": ((4, 4, 5), {"groups": 4, "padding": "same", "dilation": 2}),
    "same, even": ((4, 4, 4), {"groups": 4, "padding": "same"}),
    "valid": ((4, 4, 4), {"groups": 4, "padding": "valid", "stride": 2}),
    **{mode: ((4, 4, 3), {"groups": 4, "padding": 2, "padding_mode": mode}) for mode in ("reflect", "circular")},
}


def pair(name: str) -> tuple[nn.Conv1d, DepthwiseConv1d]:
    arguments, options = ARGUMENTS[name]
    out = []
    for kind in (nn.Conv1d, DepthwiseConv1d):
        torch.manual_seed(3)
        out.append(kind(*arguments, **options))
    return out[0], out[1]


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    x = x.detach().requires_grad_()
    y = module(x)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_is_the_module_that_it_replaces(name: str, device: str, seed: int) -> None:
    theirs, ours = pair(name)
    assert repr(ours) == repr(theirs).replace("Conv1d", "DepthwiseConv1d")
    assert vars(ours).keys() == vars(theirs).keys()
    for attribute in (*nn.Conv1d.__constants__, "_reversed_padding_repeated_twice"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters()))
    for source, target in ((theirs, ours), (ours, theirs)):
        nn.init.normal_(source.weight)
        target.load_state_dict(source.state_dict())
        theirs, ours = theirs.to(device), ours.to(device)
        for size in ((2, 4, 13), (4, 13)):
            x = torch.randn(size, device=device)
            torch.testing.assert_close(gradients(ours, x), gradients(theirs, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels_inner", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_function(dtype: torch.dtype, channels_inner: bool, device: str, seed: int) -> None:
    """Every geometry; (N, L, C) in memory is read in place and gives (N, L_out, C * m) in memory."""
    for taps, stride, padding, dilation in itertools.product((1, 4, 7), (1, 3), (0, 5), (1, 2)):
        x = torch.randn(3, 17, 6, device=device, dtype=dtype).transpose(1, 2)
        x = x if channels_inner else x.contiguous()
        w, b = torch.randn(12, 1, taps, device=device, dtype=dtype), torch.randn(12, device=device, dtype=dtype)
        found = depthwise_conv1d(x, w, b, stride, padding, dilation)
        exact = F.conv1d(x.double(), w.double(), b.double(), stride, padding, dilation, groups=6)
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), exact, rtol=limit, atol=4 * limit)
        assert found.transpose(1, 2).is_contiguous() if channels_inner else found.is_contiguous()


@pytest.mark.parametrize("stride, dilation", [(1, 1), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("channels_inner", [False, True])
def test_causal(channels_inner: bool, stride: int, dilation: int, device: str, seed: int) -> None:
    """The left padding's values, gradients too; what comes later changes nothing before it."""
    module = DepthwiseConv1d(4, 8, 4, stride, "causal", dilation, device=device, dtype=torch.float64)
    theirs = nn.Conv1d(4, 8, 4, stride, 0, dilation, 4, device=device, dtype=torch.float64)
    theirs.load_state_dict(module.state_dict())
    padded = nn.Sequential(nn.ConstantPad1d((3 * dilation, 0), 0.0), theirs)
    for size in ((2, 11, 4), (11, 4)):
        x = torch.randn(size, device=device, dtype=torch.float64).transpose(-1, -2)
        x = x if channels_inner else x.contiguous()
        torch.testing.assert_close(gradients(module, x), gradients(padded, x))
        later = x.clone()
        later[..., 6:] = float("nan")
        before = 5 // stride + 1
        assert torch.equal(module(x)[..., :before], module(later)[..., :before])
        y = depthwise_conv1d(x, module.weight, module.bias, stride, "causal", dilation)
        assert torch.equal(y, module(x))
    # The short way that models have already: both sides padded, the end cut off.
    x = torch.randn(2, 4, 11, device=device, dtype=torch.float64)
    if stride == 1:
        cut = depthwise_conv1d(x, module.weight, module.bias, padding=3 * dilation, dilation=dilation)[..., :11]
        assert torch.equal(cut, module(x))


def test_gradcheck(device: str, seed: int) -> None:
    sizes = ((2, 3, 9), (6, 1, 3), (6,))
    given = [torch.randn(size, device=device, dtype=torch.float64, requires_grad=True) for size in sizes]
    for padding in (2, "causal"):
        assert torch.autograd.gradcheck(lambda *a, p=padding: depthwise_conv1d(*a, 1, p, 2), given)
        assert torch.autograd.gradgradcheck(lambda *a, p=padding: depthwise_conv1d(*a, 1, p, 2), given)


def test_wrong_arguments(device: str) -> None:
    x, w = torch.randn(2, 4, 9, device=device), torch.randn(4, 1, 3, device=device)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, "input must be", (None, w)),
        (TypeError, "weight must be", (x, 3)),
        (RuntimeError, r"input must be \(N, C, L\)", (x[None], w)),
        (RuntimeError, r"input must be \(N, C, L\)", (x[0, 0], w)),
        (RuntimeError, "weight must be 3-D", (x, w[..., None])),
        (RuntimeError, "weight must have size 1 in dim", (x, w.transpose(0, 1))),
        (RuntimeError, "weight must have C", (x, w[:3])),
        (RuntimeError, "bias must be", (x, w, x)),
        (RuntimeError, "stride must be at least 1", (x, w, None, 0)),
        (RuntimeError, "padding must be at least 0", (x, w, None, 1, -1)),
        (RuntimeError, "dilation must be at least 1", (x, w, None, 1, 0, 0)),
        (ValueError, "stride must be an int", (x, w, None, (1, 1))),
        (TypeError, "dilation must be an int", (x, w, None, 1, 0, 1.0)),
        (TypeError, "stride must be an int", (x, w, None, True)),
        (ValueError, "padding must be an int, 'same', 'valid' or 'causal'", (x, w, None, 1, "full")),
        (RuntimeError, "padding='same'", (x, w, None, 2, "same")),
        (RuntimeError, "kernel must not be larger", (x, w, None, 1, 0, 9)),
    ]
    for kind, words, arguments in wrong:
        with pytest.raises(kind, match=words):
            depthwise_conv1d(*arguments)
    constructors: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("groups", (4, 4, 3), {"groups": 2}),
        ("kernel_size", (4, 4, (3, 1)), {}),
        ("kernel_size", (4, 4, 0), {}),
        ("out_channels", (4, 6, 3), {}),
        ("causal", (4, 4, 3), {"padding": "causal", "padding_mode": "circular"}),
    ]
    for words, given, options in constructors:
        with pytest.raises(ValueError, match=words):
            DepthwiseConv1d(*given, **options)


class Mamba(nn.Module):
    """The short convolution of a Mamba block, (N, L, C) in and out, as it is written with nn.Conv1d."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 4, padding=3, groups=6)
        self.mix = nn.Conv1d(6, 6, 1)
        self.pooled = nn.Conv1d(6, 6, 3, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]])
        return self.mix(y).transpose(1, 2)


def test_convert_and_back(device: str, seed: int) -> None:
    theirs = Mamba().to(device)
    ours, x = copy.deepcopy(theirs), torch.randn(2, 15, 6, device=device)
    dry = depthconv.convert(ours, dry_run=True)
    assert dry.swapped == ["conv"] and type(ours.conv) is nn.Conv1d
    report = depthconv.convert(ours)
    assert report.swapped == ["conv"] and set(report.left) == {"mix", "pooled"}
    assert "groups 1" in report.left["mix"] and "groups 2" in report.left["pooled"]
    assert type(ours.conv) is DepthwiseConv1d
    for module in (theirs, ours):
        module.pooled = None  # no gradient
    torch.testing.assert_close(gradients(ours, x), gradients(theirs, x), rtol=1e-4, atol=1e-5)
    theirs.load_state_dict(ours.state_dict())
    again = pickle.loads(pickle.dumps(ours))
    assert type(again.conv) is DepthwiseConv1d and torch.equal(again(x), ours(x))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (15, 22):
        x = torch.randn(2, length, 6, device=device)
        torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert depthconv.unconvert(ours).swapped == ["conv"] and type(ours.conv) is nn.Conv1d


def test_unconvert_leaves_causal() -> None:
    module = DepthwiseConv1d(4, 4, 3, padding="causal")
    assert "causal" in depthconv.unconvert(module).left[""] and type(module) is DepthwiseConv1d
    assert "padding=causal" in repr(module)


def test_autocast(device: str) -> None:
    """The dtype of nn.Conv1d."""
    theirs, ours = (module.to(device) for module in pair("multiplier"))
    x = torch.randn(2, 4, 9, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert ours(x).dtype == theirs(x).dtype == torch.bfloat16


@pytest.mark.parametrize("padding", [2, "same", "valid", "causal"])
@pytest.mark.parametrize("taps", [3, 4])
def test_fx(taps: int, padding: int | str, device: str) -> None:
    """torch.fx traces both modules."""
    line = DepthwiseConv1d(4, 4, taps, padding=padding, device=device)
    modules: list[tuple[nn.Module, Tensor]] = [(line, torch.randn(2, 4, 9, device=device))]
    if padding != "causal":
        plane = depthconv.DepthwiseConv2d(4, 4, (taps, 1), padding=padding, device=device)
        modules.append((plane, torch.randn(2, 4, 9, 5, device=device)))
    for module, x in modules:
        assert torch.equal(torch.fx.symbolic_trace(module)(x), module(x))
