"""convert on the networks that it is for, written here layer for layer with torch.nn: the same before and after."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import depthconv
from depthconv import DepthwiseConv2d


class StripAttention(nn.Module):
    """SegNeXt's multi-scale attention: a 5x5, then pairs of strips of 7, 11 and 21, a mixing 1x1, and a product."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        for at, taps in enumerate((7, 11, 21)):
            wide = nn.Conv2d(channels, channels, (1, taps), padding=(0, taps // 2), groups=channels)
            tall = nn.Conv2d(channels, channels, (taps, 1), padding=(taps // 2, 0), groups=channels)
            self.add_module(f"conv{at}_1", wide)
            self.add_module(f"conv{at}_2", tall)
        self.conv3 = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        attention = self.conv0(x)
        strips = [
            self.get_submodule(f"conv{at}_2")(self.get_submodule(f"conv{at}_1")(attention)) for at in range(3)
        ]
        return self.conv3(attention + strips[0] + strips[1] + strips[2]) * x


class StripBlock(nn.Module):
    """SegNeXt's block around it: BatchNorm, projections and a convolutional MLP, with layer scale."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.proj_1, self.proj_2 = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.attention = StripAttention(channels)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))
        self.mlp = nn.Sequential(
            nn.Conv2d(channels, 4 * channels, 1),
            nn.Conv2d(4 * channels, 4 * channels, 3, padding=1, groups=4 * channels),
            nn.GELU(),
            nn.Conv2d(4 * channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.scale * (self.proj_2(self.attention(F.gelu(self.proj_1(y)))) + y)
        return x + self.scale * self.mlp(self.norm2(x))


class MaxNormConv2d(nn.Conv2d):
    """EEGNet's spatial filter keeps its norm small; a subclass, which convert leaves."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(torch.renorm(self.weight, 2, 0, 1.0))
        return super().forward(x)


class EEGNet(nn.Module):
    """EEGNet: a filter over time, one over all electrodes (H_out 1, multiplier 2), a separable one over time."""

    def __init__(self, electrodes: int = 22, max_norm: bool = False) -> None:
        super().__init__()
        spatial = MaxNormConv2d if max_norm else nn.Conv2d
        self.temporal = nn.Conv2d(1, 8, (1, 32), padding=(0, 16), bias=False)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(8), nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.spatial = spatial(8, 16, (electrodes, 1), groups=8, bias=False)
        self.depth = nn.Conv2d(16, 16, (1, 16), padding=(0, 8), groups=16, bias=False)
        self.point = nn.Conv2d(16, 16, 1, bias=False)
        self.head = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.temporal(x))
        y = F.avg_pool2d(F.elu(self.norm2(self.spatial(y))), (1, 4))
        y = F.avg_pool2d(F.elu(self.norm3(self.point(self.depth(y)))), (1, 8))
        return self.head(y.flatten(1))


class GhostModule(nn.Module):
    """GhostNetV2's module: cheap features beside the primary ones, gated by a short convolution of two strips."""

    def __init__(self, channels: int = 12, out: int = 24) -> None:
        super().__init__()
        half = out // 2
        self.primary = nn.Sequential(nn.Conv2d(channels, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU())
        self.cheap = nn.Sequential(
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False), nn.BatchNorm2d(half), nn.ReLU()
        )
        self.short_conv = nn.Sequential(
            nn.Conv2d(channels, out, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.Conv2d(out, out, (1, 5), padding=(0, 2), groups=out, bias=False),
            nn.BatchNorm2d(out),
            nn.Conv2d(out, out, (5, 1), padding=(2, 0), groups=out, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.short_conv(F.avg_pool2d(x, 2)))
        y = self.primary(x)
        y = torch.cat([y, self.cheap(y)], 1)
        return y * F.interpolate(gate, size=y.shape[-2:], mode="nearest")


# The model, the size of a sample, and what convert swaps.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "segnext": (StripBlock, (8, 14, 10), [f"attention.conv{at}_2" for at in range(3)]),
    "eegnet": (EEGNet, (1, 22, 128), ["spatial"]),
    "ghostnet": (GhostModule, (12, 20, 14), ["short_conv.4"]),
}


@pytest.fixture(params=MODELS)
def models(request: pytest.FixtureRequest, device: str, seed: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model as it was, a converted copy, and a batch of four."""
    make, size, names = MODELS[request.param]
    theirs, x = make(), torch.randn(4, *size)
    theirs(x)  # lazy layers
    theirs = theirs.to(device)
    ours = copy.deepcopy(theirs)
    assert depthconv.convert(ours).swapped == names
    return theirs, ours, x.to(device)


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and every gradient of a training step, by the parameter's name."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    (y.float() if y.dtype != torch.float64 else y).pow(2).mean().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Error of each relative to its norm."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name].double() - want.double()).norm() / want.double().norm().clamp_min(1e-9))
        for name, want in expected.items()
        if want.double().norm() > 1e-5
    }


def test_dry_run_says_what_would_be_done(models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    theirs, ours, _ = models
    dry = depthconv.convert(theirs, dry_run=True)
    done = depthconv.convert(copy.deepcopy(theirs))
    assert dry.dry_run and (dry.swapped, dry.left) == (done.swapped, done.left)
    assert not any(isinstance(module, DepthwiseConv2d) for module in theirs.modules())
    convolutions = [name for name, module in theirs.named_modules() if isinstance(module, nn.Conv2d)]
    assert sorted([*dry.swapped, *dry.left]) == sorted(convolutions)
    for name in convolutions:
        assert f"  {name}" in str(dry)
    assert str(dry).startswith("would swap") and all(reason in str(dry) for reason in dry.left.values())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_same_outputs_and_gradients(layout: torch.memory_format, models: tuple[nn.Module, nn.Module, Tensor]) -> None:
    """In float32, in either memory format; a state_dict goes both ways; unconvert gives the model back."""
    theirs, ours, x = (each.to(memory_format=layout) for each in models)
    errors = far(step(ours, x), step(theirs, x))
    assert max(errors.values()) < 1e-4, errors
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(1.1)
    theirs.load_state_dict(ours.state_dict())
    assert far({"y": ours.eval()(x).detach()}, {"y": theirs.eval()(x).detach()})["y"] < 1e-4
    ours.load_state_dict(theirs.state_dict())
    assert depthconv.unconvert(ours).swapped and not any(isinstance(m, DepthwiseConv2d) for m in ours.modules())
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # the context of mkldnn.flags asks about Intel GPUs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_half(
    dtype: torch.dtype, layout: torch.memory_format, models: tuple[nn.Module, nn.Module, Tensor], device: str
) -> None:
    """model.half(), model.bfloat16(): no farther from float64 than float16 and bfloat16 are."""
    theirs, ours, x = models
    exact = step(copy.deepcopy(theirs).double(), x.double())
    halves = ours.to(dtype=dtype, memory_format=layout)
    # oneDNN's own depthwise (1, 16) and (1, 21) convolutions of half types take minutes on some processors.
    with torch.backends.mkldnn.flags(enabled=False):
        found = step(halves, x.to(dtype=dtype, memory_format=layout))
    errors = far(found, exact)
    limit = 0.02 if dtype == torch.float16 else 0.15
    assert errors["y"] < limit and all(error < 5 * limit for error in errors.values()), errors


def test_compiled(models: tuple[nn.Module, nn.Module, Tensor], device: str) -> None:
    """One graph for the converted model, forward and training; dynamic in the batch."""
    _, ours, x = models
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"  # Inductor on the CPU: test_compile, once
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=backend)
    for batch in (x, torch.cat([x, x.flip(0)])):
        expected, found = step(ours, batch), step(compiled, batch)
        found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
        errors = far(found, expected)
        assert max(errors.values()) < 1e-3, errors
    torch.compiler.reset()


def test_subclass_is_left(device: str) -> None:
    """A constraint that a subclass keeps would be lost: left, and named with the reason."""
    model = EEGNet(max_norm=True).to(device)
    model(torch.randn(2, 1, 22, 128, device=device))
    report = depthconv.convert(model)
    assert report.swapped == [] and "MaxNormConv2d" in report.left["spatial"]
