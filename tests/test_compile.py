"""torch.compile: no graph break, eager's values, no recompile for another batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import depthconv


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """A channels_last conv1x1 before the convolution, a LayerNorm over the channels after it, and a residual."""

    def __init__(self, channels: int = 8, point: bool = True) -> None:
        super().__init__()
        self.point = nn.Conv2d(channels, channels, 1) if point else nn.Identity()
        self.deep = depthconv.DepthwiseConv2d(channels, channels, (5, 1), padding=(2, 0), groups=channels)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(torch.relu(self.point(x)))
        return x + self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one training step."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.pow(2).mean().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("channels_last", [False, True])
def test_training_step_with_inductor(channels_last: bool, device: str, seed: int) -> None:
    model = Block().to(device)
    x = torch.randn(3, 8, 11, 6, device=device)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    expected = step(model, x)
    compiled = torch.compile(model, fullgraph=True)
    assert_same(step(compiled, x), {f"_orig_mod.{k}" if "." in k else k: v for k, v in expected.items()})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_autocast_step_with_inductor(device: str, seed: int) -> None:
    model, x = Block().to(device), torch.randn(3, 8, 11, 6, device=device)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            deep = model.deep(x)
            with torch.autocast(device, enabled=False):
                return deep, model.deep(x)

    compiled = torch.compile(forward, fullgraph=True)
    for one, other in zip(compiled(x), forward(x)):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    grads = []
    for f in (forward, compiled):
        model.zero_grad()
        sum(y.float().pow(2).sum() for y in f(x)).backward()
        grads.append([model.deep.weight.grad, model.deep.bias.grad])
    assert [grad.dtype for grad in grads[1]] == [torch.float32] * 2
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=2e-2 * float(grads[0][0].abs().max()))


# From here on the tracing alone, without Inductor, which takes seconds for each.


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [False, True])
def test_dynamic_sizes_compile_once(layout: torch.memory_format, training: bool, device: str, seed: int) -> None:
    """Batch, height and width change: one compile, which fixed none of them."""
    counter = CompileCounterWithBackend("aot_eager")
    model = Block(point=False).to(device)  # PyTorch's own convolution compiles again for batches above 15
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    compiles = []
    for size in ((3, 8, 11, 6), (5, 8, 11, 6), (7, 8, 14, 6), (2, 8, 19, 9), (64, 8, 5, 31)):
        x = torch.randn(size, device=device).contiguous(memory_format=layout)
        if training:
            assert_same(step(compiled, x), {f"_orig_mod.{k}" if "." in k else k: v for k, v in step(model, x).items()})
        else:
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        compiles.append(counter.frame_count)
    assert compiles[0] > 0 and set(compiles) == {compiles[0]}


@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
def test_dynamic_geometry(stride: tuple[int, int], device: str) -> None:
    """Every geometry argument set, dynamic sizes."""
    counter = CompileCounterWithBackend("aot_eager")
    weight = torch.randn(8, 1, 5, 1, device=device, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return depthconv.depthwise_conv2d(x, weight, None, stride, (3, 2), (2, 2))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    compiles = []
    for size in ((3, 4, 17, 6), (2, 4, 33, 9), (9, 4, 12, 21)):
        x = torch.randn(size, device=device)
        found, expected = compiled(x), call(x)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        for one, other in zip(torch.autograd.grad(found.sum(), weight), torch.autograd.grad(expected.sum(), weight)):
            torch.testing.assert_close(one, other)
        compiles.append(counter.frame_count)
    assert compiles[0] > 0 and set(compiles) == {compiles[0]}


@pytest.mark.parametrize("options", [{}, {"padding": "same"}, {"padding": "valid", "stride": [2, 1]}, {"padding": 2}])
@pytest.mark.parametrize("taps", [2, 3])
def test_options_of_the_function(options: dict[str, Any], taps: int, device: str) -> None:
    x, weight = torch.randn(2, 4, 9, 6, device=device), torch.randn(8, 1, taps, 1, device=device)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return depthconv.depthwise_conv2d(x, weight, **options)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x, weight), call(x, weight))


def test_torch_func_inside_compile(device: str, seed: int) -> None:
    """Per-sample gradients and a tangent, traced."""
    x = torch.randn(3, 4, 9, 5, device=device, dtype=torch.float64)
    weight = torch.randn(4, 1, 3, 1, device=device, dtype=torch.float64)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return depthconv.depthwise_conv2d(x, weight, padding=(1, 0)).pow(2).sum()

    def call(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        per_sample = torch.vmap(torch.func.grad(loss), (None, 0))(weight, x)
        return per_sample, torch.func.jvp(lambda w: loss(w, x), (weight,), (weight,))[1]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), call(x, weight))


def test_fake_errors_while_tracing(device: str) -> None:
    """What is wrong is said while tracing too, by name."""
    compiled = torch.compile(depthconv.depthwise_conv2d, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="depthconv: weight must have C"):
        compiled(torch.randn(2, 4, 9, 6, device=device), torch.randn(6, 1, 3, 1, device=device))


def test_converted_model_compiles(device: str, seed: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, (3, 1), padding=(1, 0), groups=4), nn.GELU(), nn.Conv2d(4, 4, 1)).to(device)
    converted = copy.deepcopy(model)
    assert depthconv.convert(converted).swapped == ["0"]
    x = torch.randn(2, 4, 9, 6, device=device)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
