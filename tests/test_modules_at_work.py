"""The modules among PyTorch's own tools: torch.func, checkpoint, processes, TorchScript, autocast and GradScaler,
CUDA graphs and streams. What holds of the function and of the operator stands in test_host_path and test_runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import depthconv
from depthconv import DepthwiseConv1d, DepthwiseConv2d

# Ours, what it stands for, and the size of an input without the batch.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "2d": (
        lambda: DepthwiseConv2d(4, 8, (3, 1), padding=(1, 0)),
        lambda: nn.Conv2d(4, 8, (3, 1), padding=(1, 0), groups=4),
        (4, 9, 6),
    ),
    "2d, same, even": (
        lambda: DepthwiseConv2d(4, 4, (4, 1), padding="same", bias=False),
        lambda: nn.Conv2d(4, 4, (4, 1), padding="same", groups=4, bias=False),
        (4, 9, 6),
    ),
    "1d": (
        lambda: DepthwiseConv1d(4, 8, 3, 2, 2, 2),
        lambda: nn.Conv1d(4, 8, 3, 2, 2, 2, groups=4),
        (4, 17),
    ),
    "1d, causal": (
        lambda: DepthwiseConv1d(4, 4, 4, padding="causal"),
        lambda: nn.Sequential(nn.ConstantPad1d((3, 0), 0.0), nn.Conv1d(4, 4, 4, groups=4)),
        (4, 17),
    ),
}


@pytest.fixture(params=MODULES)
def case(request: pytest.FixtureRequest, device: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Ours, PyTorch's with the same parameters, and a batch of five, all in float64."""
    make_ours, make_theirs, size = MODULES[request.param]
    torch.manual_seed(11)
    ours, theirs = (make().to(device, torch.float64) for make in (make_ours, make_theirs))
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        other.data.copy_(mine.data)
    return ours, theirs, torch.randn(5, *size, device=device, dtype=torch.float64)


def values(tree: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


# ---- torch.func, checkpoint ----------------------------------------------------------------------------------------


def per_sample(module: nn.Module, x: Tensor) -> Any:
    """Gradients of each sample's loss to every parameter and to the sample."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(module, parameters, (sample[None],)).pow(2).sum()

    return vmap(grad(loss, (0, 1)), (None, 0))(parameters, x)


def ensemble(module: nn.Module, x: Tensor) -> Any:
    """Three models at once: a vmap over the weights, over weights and input, and over unbatched inputs."""
    models = [copy.deepcopy(module) for _ in range(3)]
    for at, model in enumerate(models):
        for p in model.parameters():
            p.data.mul_(at + 1)
    parameters, buffers = stack_module_state(models)

    def call(parameters: Any, x: Tensor) -> Tensor:
        return functional_call(module, (parameters, buffers), (x,))

    xs = torch.stack([x, 2 * x, x.flip(0)])
    unbatched = vmap(vmap(call, (None, 0)))
    return [vmap(call, (0, None))(parameters, x), vmap(call)(parameters, xs), unbatched(parameters, xs)]


def tangents(module: nn.Module, x: Tensor) -> Any:
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    steps = {name: torch.ones_like(p) for name, p in parameters.items()}

    def call(parameters: Any, x: Tensor) -> Tensor:
        return functional_call(module, parameters, (x,)).pow(2)

    return [
        jvp(call, (parameters, x), (steps, x.cos())),
        jvp(lambda x: call(parameters, x), (x,), (x.cos(),)),
        vmap(lambda x, dx: jvp(lambda x: call(parameters, x), (x,), (dx,)))(x, x.cos()),
    ]


def second_order(module: nn.Module, x: Tensor) -> Any:
    def loss(x: Tensor) -> Tensor:
        return module(x).pow(3).sum()

    return grad(lambda x: grad(loss)(x).pow(2).sum())(x)


def checkpointed(module: nn.Module, x: Tensor) -> Any:
    results = []
    for reentrant in (False, True):
        leaf = x.clone().requires_grad_()
        y = checkpoint(module, leaf, use_reentrant=reentrant)
        results.append(torch.autograd.grad(y.pow(2).sum(), [leaf, *module.parameters()]) if not reentrant else None)
        if reentrant:
            module.zero_grad()
            y.pow(2).sum().backward()
            results[-1] = (leaf.grad, *(p.grad.clone() for p in module.parameters()))
    return results


WORK = [per_sample, ensemble, tangents, second_order, checkpointed]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_gives_what_theirs_gives(work: Callable[..., Any], case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    ours, theirs, x = case
    found, expected = values(work(ours, x)), values(work(theirs, x))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


# ---- other processes, TorchScript ----------------------------------------------------------------------------------


def _train_in_child(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1)


def test_share_memory() -> None:
    """A child process computes with the shared parameters, and what it writes is seen here."""
    torch.manual_seed(1)
    model = nn.Sequential(DepthwiseConv2d(4, 4, (3, 1)), nn.Flatten(2), DepthwiseConv1d(4, 4, 3)).share_memory()
    before = [p.detach().clone() for p in model.parameters()]
    child = torch.multiprocessing.get_context("spawn").Process(
        target=_train_in_child, args=(model, torch.randn(2, 4, 5, 6))
    )
    child.start()
    child.join(120)
    assert child.exitcode == 0
    for p, was in zip(model.parameters(), before):
        assert p.is_shared() and torch.equal(p.detach(), was + 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error::torch.jit.TracerWarning")
def test_script_and_trace(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    """Both take a module; what they make is saved, loaded and differentiated."""
    ours, _, x = case
    expected = torch.autograd.grad(ours(x.requires_grad_()).pow(2).sum(), x)[0]
    for made in (torch.jit.script(ours), torch.jit.trace(ours, x)):
        assert "depthconv::forward" in str(made.inlined_graph)
        loaded = torch.jit.load(_saved(made))
        for each in (made, loaded):
            torch.testing.assert_close(torch.autograd.grad(each(x).pow(2).sum(), x)[0], expected)


def _saved(module: torch.jit.ScriptModule) -> Any:
    import io

    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return file


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_script_with_padding_mode(mode: str, device: str) -> None:
    for module in (
        DepthwiseConv2d(4, 4, (3, 1), padding=(2, 0), padding_mode=mode),
        DepthwiseConv1d(4, 4, 3, padding=2, padding_mode=mode),
    ):
        module, x = module.to(device), torch.randn(2, 4, 9, 6, device=device)
        x = x if isinstance(module, nn.Conv2d) else x[..., 0]
        assert torch.equal(torch.jit.script(module)(x), module(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", [depthconv.depthwise_conv1d, depthconv.depthwise_conv2d])
def test_script_of_the_functions(function: Callable[..., Tensor]) -> None:
    """One sentence, and the operator as the way out, which scripts."""
    with pytest.raises(RuntimeError, match=f"{function.__name__} is not for torch.jit.script.*torch.ops.depthconv"):
        torch.jit.script(function)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.depthconv.forward(x, w, None, [1, 1], [1, 0], [1, 1])

    x, w = torch.randn(2, 4, 9, 6), torch.randn(4, 1, 3, 1)
    assert torch.equal(torch.jit.script(call)(x, w), call(x, w))


# ---- mixed precision -----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """The same block with ours or theirs; a conv1x1, the depthwise convolution, a LayerNorm, a linear head."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 8, 1)
        self.deep = nn.Conv2d(8, 16, (5, 1), padding=(2, 0), groups=8)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)
        if ours:
            assert depthconv.convert(self).swapped == ["deep"]

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.deep(self.mix(x)))
        return self.head(self.norm(y.mean((2, 3))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast_dtypes(dtype: torch.dtype, weights: torch.dtype, device: str) -> None:
    """Dtype for dtype what nn.Conv2d gives: outputs in nested and disabled contexts, gradients outside of them."""
    dtypes: list[list[torch.dtype]] = []
    for make in (MODULES["2d"][0], MODULES["2d"][1]):
        module = make().to(device, weights)
        x = torch.randn(2, 4, 9, 6, device=device, dtype=weights, requires_grad=True)
        found = []
        # Without its cache, which hands out the outer context's casts in an inner one of another dtype.
        with torch.autocast(device, dtype, cache_enabled=False):
            outputs = [module(x)]
            with torch.autocast(device, enabled=False):
                outputs.append(module(x))
                with torch.autocast(device, torch.bfloat16):
                    outputs.append(module(x))
            with torch.no_grad():
                found.append(module(x).dtype)
        for y in outputs:
            found.append(y.dtype)
            found += [g.dtype for g in torch.autograd.grad(y.float().sum(), [x, *module.parameters()])]
        dtypes.append(found)
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grad_scaler_loop(dtype: torch.dtype, device: str, seed: int) -> None:
    """Ten steps under autocast with a scaler: losses as with nn.Conv2d, and an overflow skips the step as there."""
    runs: list[list[float]] = []
    torch.manual_seed(4)
    start = Pair(False).state_dict()
    x, target = torch.randn(16, 3, 11, 6, device=device), torch.arange(16, device=device) % 5
    for ours in (False, True):
        model = Pair(ours).to(device)
        model.load_state_dict(start)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device, init_scale=2.0**10)
        losses = []
        for turn in range(10):
            optimizer.zero_grad()
            with torch.autocast(device, dtype):
                loss = F.cross_entropy(model(x).float(), target)
            scaler.scale(loss * (float("inf") if turn == 4 else 1)).backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            before, scale = model.deep.weight.detach().clone(), scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = torch.equal(before, model.deep.weight)
            assert skipped == (turn == 4) == (scaler.get_scale() < scale)
            losses.append(loss.item())
        runs.append(losses)
    assert runs[1][-1] < runs[1][0]
    assert runs[1] == pytest.approx(runs[0], rel=0.05)


# ---- CUDA graphs and streams ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def steps_of(model: nn.Module, forward: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[list[Tensor]]:
    """Output and gradients of each batch, copied."""
    out = []
    for x in batches:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        y = forward(x)
        y.pow(2).sum().backward()
        out.append([y.detach().clone(), *(p.grad.clone() for p in model.parameters())])
    return out


def test_reduce_overhead(cuda: str, fresh_dynamo: None, seed: int) -> None:
    """torch.compile with CUDA graphs: forward and training on fresh data."""
    model = Pair(True).to(cuda)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    batches = [torch.randn(4, 3, 11, 6, device=cuda) for _ in range(5)]
    torch.testing.assert_close(
        steps_of(model, compiled, batches), steps_of(model, model, batches), rtol=1e-3, atol=1e-4
    )
    with torch.no_grad():
        for x in batches:
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)


def test_make_graphed_callables(cuda: str, seed: int) -> None:
    """Forward and backward as graphs, on fresh data; under autocast too."""
    for dtype in (None, torch.bfloat16):
        model = Pair(True).to(cuda)
        batches = [torch.randn(4, 3, 11, 6, device=cuda) for _ in range(4)]
        with torch.autocast("cuda", dtype or torch.float32, enabled=dtype is not None, cache_enabled=False):
            plain = steps_of(model, model, batches)
            sample = torch.randn(4, 3, 11, 6, device=cuda)
            graphed = torch.cuda.make_graphed_callables(copy.deepcopy(model), (sample,))
            found = steps_of(graphed, graphed, batches)
        limit = 1e-4 if dtype is None else 5e-2
        torch.testing.assert_close(found, plain, rtol=limit, atol=limit * 10)


def test_whole_step_in_one_graph(cuda: str, seed: int) -> None:
    """Forward, backward and the optimizer captured once and replayed on new data, against the same steps without."""
    torch.manual_seed(9)
    eager = Pair(True).to(cuda)
    captured = copy.deepcopy(eager)
    batches = [torch.randn(4, 3, 11, 6, device=cuda) for _ in range(6)]
    static = batches[0].clone()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).pow(2).mean().backward()
        optimizer.step()

    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (eager, captured)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(captured, optimizers[1], static)
    torch.cuda.current_stream().wait_stream(side)
    captured.load_state_dict(eager.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, optimizers[1], static)
    captured.load_state_dict(eager.state_dict())
    for x in batches:
        static.copy_(x)
        graph.replay()
        step(eager, optimizers[0], x)
    for one, other in zip(captured.parameters(), eager.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_modules_on_side_streams(cuda: str, seed: int) -> None:
    """Backward runs on the stream of its forward, and a consumer on another stream waits for it as for torch's own."""
    models = [Pair(True).to(cuda) for _ in range(3)]
    batches = [torch.randn(32, 3, 64, 32, device=cuda) for _ in models]
    expected = [steps_of(model, model, [x])[0] for model, x in zip(models, batches)]
    streams = [torch.cuda.Stream() for _ in models]
    torch.cuda.synchronize()
    losses = []
    for model, x, stream in zip(models, batches, streams):
        model.zero_grad()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            losses.append(model(x).pow(2).sum())
    for loss, stream in zip(losses, streams):
        with torch.cuda.stream(stream):
            loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
    for model, (_, *grads) in zip(models, expected):
        torch.testing.assert_close([p.grad for p in model.parameters()], grads, rtol=1e-3, atol=1e-3)
