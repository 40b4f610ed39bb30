"""Determinism, gradient modes, threads, accuracy of long sums, streams, devices, CUDA graphs and poisoned memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from problems import (
    DTYPES,
    GEOMETRIES,
    PATHS,
    Arguments,
    Problem,
    call_backward,
    call_forward,
    check,
    check_backward,
    check_forward,
    make_arguments,
    poisoned,
)
from torch import Tensor

import depthconv

# Problems whose sums are split in different ways: many rows, many planes, small planes, few filters, one output row.
REDUCTIONS: dict[str, Problem] = {
    "tall planes": Problem((2, 3, 300, 40), 7, padding=(3, 0)),
    "many planes": Problem((40, 4, 20, 24), 3, padding=(1, 0)),
    "small planes": Problem((64, 24, 7, 7), 11, padding=(5, 0)),
    "one channel": Problem((16, 1, 64, 64), 3, padding=(1, 0)),
    "one output row": Problem((16, 8, 22, 100), 22),
    "one column": Problem((8, 16, 400, 1), 9, padding=(4, 0)),
    "K 21": Problem((4, 4, 90, 32), 21, padding=(10, 0)),
    "strided": Problem((4, 4, 61, 33), 5, 2, stride=(2, 2), padding=(2, 1), dilation=(2, 1)),
}


def same_bits(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "layout, dtype", [("contiguous", "float32"), ("channels_last", "float32"), ("row_gap", "float16")]
)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_ten_backwards_have_the_same_bits(name: str, layout: str, dtype: str, device: str, seed: int) -> None:
    problem = replace(REDUCTIONS[name], layout=layout, grad_layout=layout, dtype=dtype, seed=seed)
    a = make_arguments(problem, device)
    first = [*check_backward(problem, device, a), check_forward(problem, device, a)]
    for _ in range(9):
        again = [*call_backward(problem, a), call_forward(problem, a.x, a.weight, a.bias)]
        assert all(same_bits(was, now) for was, now in zip(first, again))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_deterministic_algorithms(name: str, path: str, device: str, seed: int) -> None:
    for layout in ("contiguous", "channels_last"):
        problem = replace(REDUCTIONS[name], layout=layout, path=path, seed=seed)
        a = make_arguments(problem, device)
        torch.use_deterministic_algorithms(True)
        try:
            y, grads = call_forward(problem, a.x, a.weight, a.bias), call_backward(problem, a)
        finally:
            torch.use_deterministic_algorithms(False)
        reference.check_forward(y, a.x, a.weight, a.bias, *problem.geometry)
        reference.check_backward(grads, a.dy, a.x, a.weight, *problem.geometry)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_bits_do_not_depend_on_the_number_of_threads(name: str, layout: str, seed: int) -> None:
    problem = replace(REDUCTIONS[name], layout=layout, grad_layout=layout, seed=seed)
    a = make_arguments(problem, "cpu")
    usual, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([*call_backward(problem, a), call_forward(problem, a.x, a.weight, a.bias)])
    finally:
        torch.set_num_threads(usual)
    for other in results[1:]:
        assert all(same_bits(was, now) for was, now in zip(results[0], other))


@pytest.mark.parametrize(
    "call", [torch.ops.depthconv.forward, depthconv.depthwise_conv2d], ids=["operator", "function"]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(
    mode: Callable[[], torch.no_grad], call: Callable[..., Tensor], device: str, seed: int
) -> None:
    a = make_arguments(Problem((2, 3, 9, 8), seed=seed), device)
    leaves = [t.clone().requires_grad_() for t in (a.x, a.weight, a.bias)]
    with mode():
        for given in (leaves, [a.x, a.weight, a.bias], [t.clone() for t in leaves]):
            y = call(*given)
            assert not y.requires_grad and y.is_inference() == (mode is torch.inference_mode)
            reference.check_forward(y, a.x, a.weight, a.bias, (1, 1), (0, 0), (1, 1))
    y = call(*leaves)
    assert y.requires_grad and not y.is_inference()
    assert not call(a.x, a.weight, a.bias).requires_grad


@pytest.mark.parametrize(
    "call", [torch.ops.depthconv.forward, depthconv.depthwise_conv2d], ids=["operator", "function"]
)
@pytest.mark.parametrize("which", range(3), ids=["x", "w", "b"])
def test_only_one_requires_a_gradient(which: int, call: Callable[..., Tensor], device: str, seed: int) -> None:
    """The others get none; those that lead nowhere are not even kept."""
    for name in ("same", "everything", "unbatched"):
        problem = replace(GEOMETRIES[name], seed=seed)
        a = make_arguments(problem, device)
        leaves = [t.clone().requires_grad_(at == which) for at, t in enumerate((a.x, a.weight, a.bias))]
        y = call(*leaves, *problem.geometry)
        y.backward(a.dy)
        grads = [leaf.grad for leaf in leaves]
        assert [grad is not None for grad in grads] == [at == which for at in range(3)]
        reference.check_backward(grads, a.dy, a.x, a.weight, *problem.geometry)


def test_version_counters(device: str, seed: int) -> None:
    """A weight changed between forward and backward is noticed, not silently used."""
    a = make_arguments(Problem((2, 3, 9, 8), seed=seed), device)
    for call in (torch.ops.depthconv.forward, depthconv.depthwise_conv2d):
        x, weight = a.x.clone().requires_grad_(), a.weight.clone().requires_grad_()
        y = call(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(a.dy)


# Number of terms of a dw element: N * H_out * W_out, up to 2^22.
LONG_SUMS: dict[str, Problem] = {
    "2^12": Problem((4, 3, 32, 32), 3, padding=(1, 0)),
    "2^16": Problem((16, 2, 64, 64), 5, padding=(2, 0)),
    "2^20, planes of 8": Problem((1 << 14, 2, 8, 8), 3, padding=(1, 0)),
    "2^20, one column": Problem((16, 2, 1 << 16, 1), 3, padding=(1, 0)),
    "2^20, one output row": Problem((64, 1, 4, 1 << 14), 4),
    "2^20, filter bank": Problem((64, 1, 4, 1 << 14), 4, 3),
    "2^20, stride and multiplier": Problem((16, 1, 512, 256), 3, 2, stride=(2, 1), padding=(1, 0)),
    "2^22": Problem((4, 1, 1024, 1024), 3, padding=(1, 0)),
    "2^20, K 21": Problem((4, 1, 512, 512), 21, padding=(10, 0)),
}


@pytest.mark.parametrize("signs", ["random", "constant"])
@pytest.mark.parametrize(
    "name, dtype, layout",
    [
        *(
            (name, "float32", layout)
            for name in LONG_SUMS
            if name != "2^16"
            for layout in ("contiguous", "channels_last")
        ),
        *(("2^16", dtype, layout) for dtype in DTYPES for layout in ("contiguous", "channels_last", "row_gap_odd")),
    ],
)
def test_long_sums(name: str, dtype: str, layout: str, signs: str, device: str, seed: int) -> None:
    """dw and db over up to 2^22 terms, within 2e-6 * sqrt(terms) and the rounding of the result itself."""
    problem = replace(LONG_SUMS[name], layout=layout, grad_layout=layout, dtype=dtype, seed=seed)
    a = make_arguments(problem, device)
    if signs == "constant":
        a.x, a.dy = a.x.abs(), a.dy.abs()
    check_backward(replace(problem, mask=(signs == "random", True, True)), device, a)


def test_poison_shows(device: str) -> None:
    """Memory that nobody wrote does not look right by luck."""
    for count in (100, 5000, 300_000, 3_000_000):
        with poisoned(device, [4 * count]):
            untouched = torch.empty(count, device=device)
        assert not (untouched.abs() < 1e30).any()


def test_concurrent_calls(device: str, seed: int) -> None:
    """Several threads at once, each with its own sizes."""
    names = ["same", "K7", "everything", "W 1", "many small planes", "multiplier 2"]
    problems = [replace(GEOMETRIES[name], seed=seed, path=path) for name in names for path in ("operators", "function")]
    arguments = [make_arguments(problem, device) for problem in problems]
    failures: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for turn in range(len(problems)):
                at = (turn + offset) % len(problems)
                p, a = problems[at], arguments[at]
                call = depthconv.depthwise_conv2d if p.path == "function" else torch.ops.depthconv.forward
                reference.check_forward(call(a.x, a.weight, a.bias, *p.geometry), a.x, a.weight, a.bias, *p.geometry)
                grads = torch.ops.depthconv.backward(a.dy, a.x, a.weight, *p.geometry, [True] * 3)
                reference.check_backward(grads, a.dy, a.x, a.weight, *p.geometry)
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(3 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ---- CUDA alone ----------------------------------------------------------------------------------------------------

STREAMED = ["same", "K11", "everything", "W 1", "many small planes", "H_out 1, long"]
DELAY = 100_000_000  # clock cycles, about 50 ms


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", STREAMED)
def test_side_stream(name: str, layout: str, path: str, cuda: str, seed: int) -> None:
    """Work is queued behind a late producer and before a later destroyer, both on the current stream."""
    problem = replace(GEOMETRIES[name], layout=layout, grad_layout=layout, path=path, seed=seed)
    wanted = make_arguments(problem, cuda)
    late = make_arguments(problem, cuda)
    tensors = [(late.x, wanted.x), (late.weight, wanted.weight), (late.bias, wanted.bias), (late.dy, wanted.dy)]
    present = [(mine, right) for mine, right in tensors if mine is not None and right is not None]

    def produce() -> None:
        torch.cuda._sleep(DELAY)
        for mine, right in present:
            mine.copy_(right)

    def destroy() -> None:
        for mine, _ in present:
            mine.fill_(float("nan"))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # once before, so that no first allocation waits for the device below
        call_forward(problem, late.x, late.weight, late.bias)
        call_backward(problem, late)
    destroy()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        produce()
        y = call_forward(problem, late.x, late.weight, late.bias)
        destroy()
        produce()
        grads = call_backward(problem, late)
        destroy()
        copies = [None if t is None else t.clone() for t in (y, *grads)]
    side.synchronize()
    reference.check_forward(copies[0], wanted.x, wanted.weight, wanted.bias, *problem.geometry)
    reference.check_backward(copies[1:], wanted.dy, wanted.x, wanted.weight, *problem.geometry)


def test_workspace_of_one_stream_is_not_taken_by_another(cuda: str, seed: int) -> None:
    """Backwards at once on several streams: partial sums do not meet."""
    problems = [replace(problem, seed=seed + at) for at, problem in enumerate(REDUCTIONS.values())]
    arguments = [make_arguments(problem, cuda) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[Tensor | None]] = []
    for _ in range(3):
        results = []
        for stream, problem, a in zip(streams, problems, arguments):
            with torch.cuda.stream(stream):
                geometry = (*problem.geometry, [True] * 3)
                results.append(list(torch.ops.depthconv.backward(a.dy, a.x, a.weight, *geometry)))
    torch.cuda.synchronize()
    for grads, problem, a in zip(results, problems, arguments):
        reference.check_backward(grads, a.dy, a.x, a.weight, *problem.geometry)


@pytest.mark.parametrize("path", PATHS)
def test_device_guard(path: str, cuda: str, seed: int) -> None:
    """Tensors on the second GPU while the first is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    for name in STREAMED:
        problem = replace(GEOMETRIES[name], path=path, seed=seed)
        with torch.cuda.device(0):
            check(problem, "cuda:1")
            assert torch.cuda.current_device() == 0


def test_current_device_and_stream_are_left_alone(cuda: str, seed: int) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        check(replace(GEOMETRIES["everything"], path="function", seed=seed), cuda)
        assert torch.cuda.current_stream() == side
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", STREAMED)
def test_graph_replayed_on_new_data(name: str, layout: str, path: str, cuda: str, seed: int) -> None:
    """Forward and backward captured once, then replayed on other values in the same places."""
    problem = replace(GEOMETRIES[name], layout=layout, grad_layout=layout, path=path, seed=seed)
    static = make_arguments(problem, cuda)
    call = depthconv.depthwise_conv2d if path == "function" else torch.ops.depthconv.forward
    recording = path != "operators"
    leaves = [t if t is None else t.detach().requires_grad_(recording) for t in (static.x, static.weight, static.bias)]

    def step() -> tuple[Tensor, list[Tensor]]:
        y = call(*leaves, *problem.geometry)
        if recording:
            return y, list(torch.autograd.grad(y, leaves, static.dy))
        x, weight, _ = leaves
        return y, list(torch.ops.depthconv.backward(static.dy, x, weight, *problem.geometry, [True] * 3))

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads = step()
    for turn in range(1, 4):
        new: Arguments = make_arguments(replace(problem, seed=seed + turn), cuda)
        with torch.no_grad():
            for old, value in zip((*leaves, static.dy), (new.x, new.weight, new.bias, new.dy)):
                if old is not None:
                    old.copy_(value)
            for output in (y, *grads):
                output.fill_(float("nan"))
        graph.replay()
        reference.check_forward(y.detach(), new.x, new.weight, new.bias, *problem.geometry)
        reference.check_backward(grads, new.dy, new.x, new.weight, *problem.geometry)


def mapping_flags(tensor: Tensor) -> set[str]:
    """The flags that Linux keeps for the mapping in which a CPU tensor's middle lies."""
    middle, inside = tensor.data_ptr() + tensor.numel() * tensor.element_size() // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping holds address {middle:#x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_large_results_on_the_cpu_ask_for_huge_pages() -> None:
    x = torch.randn(3, 4, 1024, 1024, requires_grad=True)  # 48 MB
    weight = torch.randn(4, 1, 3, 1)
    y = depthconv.depthwise_conv2d(x, weight, padding=(1, 0))
    assert "hg" in mapping_flags(y)  # MADV_HUGEPAGE
    (grad_input,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert "hg" in mapping_flags(grad_input)
    assert "hg" not in mapping_flags(x.detach().clone())
