"""What test_distributed runs in several processes: python distributed_jobs.py RANK WORLD DEVICE FOLDER.

Each job is a function of a Place. Every rank runs all of them in order and writes {job: None or the error} to
FOLDER/RANK.json.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import depthconv

assert "torch.distributed.tensor" not in sys.modules, "depthconv imports DTensor before anyone needs it"

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


@dataclass
class Place:
    """Where this process is."""

    rank: int
    world: int
    device: torch.device


JOBS: dict[str, Callable[[Place], None]] = {}


def job(function: Callable[[Place], None]) -> Callable[[Place], None]:
    JOBS[function.__name__] = function
    return function


class Net(nn.Module):
    """(N, 3, H, W) -> (N, 5); a depthwise convolution of each kind, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
        self.deep = depthconv.DepthwiseConv2d(8, 16, (5, 1), padding=(2, 0))
        self.line = depthconv.DepthwiseConv1d(16, 16, 4, padding="causal")
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.stem(x))
        return self.head(self.line(y.mean(3)).mean(2))


def seeded(place: Place, *sizes: tuple[int, ...]) -> list[Tensor]:
    """The same random tensors on every rank."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, generator=generator).to(place.device) for size in sizes]


def part(place: Place, x: Tensor) -> Tensor:
    """This rank's share of a batch."""
    return x.chunk(place.world)[place.rank]


def reference(net: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Gradients of the mean loss over the whole batch, on one process."""
    net = copy.deepcopy(net)
    F.cross_entropy(net(x), target).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def replicated(place: Place, channels_last: bool) -> None:
    torch.manual_seed(3)
    net = Net().to(place.device)
    x, target = seeded(place, (4 * place.world, 3, 11, 6))[0], torch.arange(4 * place.world, device=place.device) % 5
    if channels_last:
        net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        assert net.deep.weight.stride() == (5, 1, 1, 1)
    expected = reference(net, x, target)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    with warnings.catch_warnings():
        # Such as "Grad strides do not match bucket view strides", which costs a copy each step.
        warnings.simplefilter("error")
        for _ in range(3):
            model.zero_grad()
            F.cross_entropy(model(part(place, x)), part(place, target)).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.stride() == p.stride(), name
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)


@job
def ddp(place: Place) -> None:
    replicated(place, False)


@job
def ddp_channels_last(place: Place) -> None:
    replicated(place, True)


class WrongStrides(torch.autograd.Function):
    """A gradient whose strides differ from its parameter's where the size is 1, as those of 1x1 kernels may."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        return p.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous().as_strided(grad.shape, (1, 1))


@job
def ddp_warning_is_an_error_here(place: Place) -> None:
    """The jobs above would see the warning: a layer that does earn it fails."""
    layer = nn.Linear(4, 1, bias=False).to(place.device)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Through())
    model = DistributedDataParallel(layer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(3, 4, device=place.device)).sum().backward()
    assert any("strides" in str(each.message) for each in seen), [str(each.message) for each in seen]


class Through(nn.Module):
    def forward(self, p: Tensor) -> Tensor:
        return WrongStrides.apply(p)


def sharded(place: Place, policy: MixedPrecisionPolicy | None) -> None:
    torch.manual_seed(3)
    net = Net().to(place.device)
    x, target = seeded(place, (4 * place.world, 3, 11, 6))[0], torch.arange(4 * place.world, device=place.device) % 5
    expected = reference(net, x, target)
    options = {} if policy is None else {"mp_policy": policy}
    mesh = init_device_mesh(place.device.type, (place.world,))
    for layer in (net.deep, net.line):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    assert isinstance(net.deep.weight, DTensor) and isinstance(net.line.weight, DTensor)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = net.deep.weight.full_tensor().clone()
    loss = F.cross_entropy(net(part(place, x)).float(), part(place, target))
    loss.backward()
    limit = 1e-4 if policy is None else 5e-2
    for name, p in net.named_parameters():
        assert isinstance(p.grad, DTensor) and p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), expected[name], rtol=limit, atol=limit / 5)
    optimizer.step()
    torch.testing.assert_close(net.deep.weight.full_tensor(), before - 0.1 * net.deep.weight.grad.full_tensor())


@job
def fsdp(place: Place) -> None:
    sharded(place, None)


@job
def fsdp_mixed_precision(place: Place) -> None:
    sharded(place, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


CALLS: dict[str, Callable[..., Tensor]] = {
    "function": depthconv.depthwise_conv2d,
    "operator": torch.ops.depthconv.forward,
}


def compare(
    call: Callable[..., Tensor],
    given: list[DTensor],
    geometry: tuple[Any, ...],
    placements: dict[str, Any],
) -> None:
    """Values, sizes, strides and gradients of DTensors against the plain ones; the placements that are named."""
    plain = [t.full_tensor().detach().requires_grad_() for t in given]
    leaves = [t.detach().requires_grad_() for t in given]
    y, expected = call(*leaves, *geometry), F.conv2d(*plain, *geometry, groups=plain[0].shape[-3])
    assert isinstance(y, DTensor) and y.shape == expected.shape
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    if "y" in placements:
        assert list(y.placements) == placements["y"], (y.placements, placements)
    found = torch.autograd.grad(y.pow(2).sum(), leaves)
    wanted = torch.autograd.grad(expected.pow(2).sum(), plain)
    for name, one, other in zip(("dx", "dw", "db"), found, wanted):
        assert one.shape == other.shape
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-3, atol=1e-4)
        if name in placements:
            assert list(one.placements) == placements[name], (name, one.placements, placements)


# Shapes alike and geometry not: what was found for one call must not serve another.
GEOMETRIES: list[tuple[Any, ...]] = [
    ([1, 1], [0, 0], [1, 1]), ([1, 1], [1, 0], [1, 1]), ([1, 1], [2, 0], [2, 1]), ([2, 1], [1, 0], [1, 1])
]  # fmt: skip


@job
def dtensor_rules(place: Place) -> None:
    """Batch, channels, width and nothing shared out, over one axis of the mesh; with a multiplier."""
    mesh = init_device_mesh(place.device.type, (place.world,))
    n, c = 2 * place.world, 4 * place.world
    x, w, b = seeded(place, (n, c, 9, 2 * place.world), (2 * c, 1, 3, 1), (2 * c,))
    for x_placement, w_placement in ((0, None), (1, 0), (3, None), (None, None)):
        placed = Replicate() if x_placement is None else Shard(x_placement)
        shared = Replicate() if w_placement is None else Shard(w_placement)
        given = [distribute_tensor(t, mesh, [p]) for t, p in ((x, placed), (w, shared), (b, shared))]
        for call in CALLS.values():
            for geometry in GEOMETRIES:
                names: dict[str, Any] = {"y": [placed], "dx": [placed]}
                if w_placement is not None:
                    names |= {"dw": [shared], "db": [shared]}
                compare(call, given, geometry, names)
    # The width with padding or a stride needs neighbours: gathered by DTensor, and right.
    given = [distribute_tensor(t, mesh, [p]) for t, p in ((x, Shard(3)), (w, Replicate()), (b, Replicate()))]
    compare(CALLS["function"], given, ([1, 2], [1, 1], [1, 1]), {})


@job
def dtensor_uneven(place: Place) -> None:
    """Sizes that do not divide: still right, whatever has to be gathered for it."""
    mesh = init_device_mesh(place.device.type, (place.world,))
    for n, c, m in ((place.world + 1, place.world + 1, 1), (1, place.world + 1, 2), (3, 1, 2)):
        x, w, b = seeded(place, (n, c, 9, 5), (c * m, 1, 3, 1), (c * m,))
        for x_placement, w_placement in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(3), Replicate())):
            shared = ((x, x_placement), (w, w_placement), (b, w_placement))
            compare(CALLS["function"], [distribute_tensor(t, mesh, [p]) for t, p in shared], GEOMETRIES[1], {})


@job
def dtensor_two_axes(place: Place) -> None:
    """Batch over one axis of the mesh, channels over the other; unbatched input too."""
    if place.world < 4:
        return
    mesh = init_device_mesh(place.device.type, (2, place.world // 2), mesh_dim_names=("data", "model"))
    x, w, b = seeded(place, (4, 8, 9, 6), (8, 1, 3, 1), (8,))
    shared = ((x, [Shard(0), Shard(1)]), (w, [Replicate(), Shard(0)]), (b, [Replicate(), Shard(0)]))
    given = [distribute_tensor(t, mesh, p) for t, p in shared]
    compare(CALLS["function"], given, GEOMETRIES[2], {"y": [Shard(0), Shard(1)], "dx": [Shard(0), Shard(1)]})
    shared = ((x[0], [Replicate(), Shard(0)]), (w, [Replicate(), Shard(0)]), (b, [Replicate(), Shard(0)]))
    given = [distribute_tensor(t, mesh, p) for t, p in shared]
    compare(CALLS["operator"], given, GEOMETRIES[1], {"y": [Replicate(), Shard(0)], "dw": [Replicate(), Shard(0)]})


@job
def dtensor_height(place: Place) -> None:
    """An input that is shared out along its height: one clear sentence. A gradient that is: gathered, and right."""
    mesh = init_device_mesh(place.device.type, (place.world,))
    if place.world < 2:
        return
    x, w = seeded(place, (2, 4, 8 * place.world, 6), (4, 1, 3, 1))
    weight = distribute_tensor(w, mesh, [Replicate()])
    for size, axis in ((x, 2), (x, -2), (x[0], 1)):
        given = distribute_tensor(size, mesh, [Shard(axis)])
        for call in CALLS.values():
            try:
                call(given, weight, None, [1, 1], [1, 0])
            except RuntimeError as error:
                assert "depthconv: input must not be sharded along its height" in str(error)
                assert "Redistribute" in str(error)
            else:
                raise AssertionError("no error")
    leaf = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    y = CALLS["function"](leaf, weight, None, 1, (1, 0))
    y.redistribute(mesh, [Shard(2)]).pow(2).sum().backward()
    plain = x.clone().requires_grad_()
    F.conv2d(plain, w, None, 1, (1, 0), groups=4).pow(2).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad, rtol=1e-3, atol=1e-4)


@job
def dtensor_mixed_with_plain(place: Place) -> None:
    mesh = init_device_mesh(place.device.type, (place.world,))
    x, w = seeded(place, (2, 4, 9, 6), (4, 1, 3, 1))
    for arguments in ((distribute_tensor(x, mesh, [Replicate()]), w), (x, distribute_tensor(w, mesh, [Replicate()]))):
        for call in CALLS.values():
            try:
                call(*arguments)
            except RuntimeError as error:
                assert "must all be DTensors" in str(error), error
            else:
                raise AssertionError("no error")


@job
def tensor_parallel_module(place: Place) -> None:
    """distribute_module with the filters shared out, under no_grad, autocast and torch.compile."""
    mesh = init_device_mesh(place.device.type, (place.world,))
    c = 2 * place.world
    torch.manual_seed(3)
    plain = depthconv.DepthwiseConv2d(c, c, (3, 1), padding=(1, 0)).to(place.device)
    module = copy.deepcopy(plain)

    def share(name: str, layer: nn.Module, mesh: Any) -> None:
        for key, p in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(key, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))

    distribute_module(module, mesh, share)
    (x,) = seeded(place, (2, c, 9, 6))
    given = distribute_tensor(x, mesh, [Shard(1)])
    expected = plain(x)
    with torch.no_grad():
        torch.testing.assert_close(module(given).full_tensor(), expected)
    with torch.inference_mode():
        inner = distribute_tensor(x.clone(), mesh, [Shard(1)])
        torch.testing.assert_close(module(inner).full_tensor(), expected)
    with torch.autocast(place.device.type, torch.bfloat16):
        assert module(given).dtype == torch.bfloat16
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(given)
    assert list(y.placements) == [Shard(1)]
    torch.testing.assert_close(y.full_tensor(), expected)
    y.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(module.weight.grad.full_tensor(), plain.weight.grad, rtol=1e-3, atol=1e-4)


def main(rank: int, world: int, kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    results: dict[str, str | None] = {}
    for name, function in JOBS.items():
        try:
            function(Place(rank, world, device))
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
        # No next job while a rank is still in this one, after an error most of all.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
