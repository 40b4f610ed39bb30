"""Times depthconv against F.conv2d and against a copy of the least bytes, on CUDA or on the CPU.

CUDA: events around one call, medians of interleaved repeats. Before each, a buffer of several times the L2 cache is
written: it empties the cache, and it keeps the GPU busy while the host gets the call ready, so that no launch is timed.
The reference is y.copy_(x) forward and torch.add(a, b, out=c) backward.
CPU: wall time, minima of interleaved repeats; an operator returns fresh memory, so the reference is x.clone() forward
and a fresh torch.add(a, b) backward.
Either moves as many bytes as the problem must: forward the x that any tap reads and y; backward dy, that x, and dx.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import DepthwiseConv2d, build_info, depthwise_conv2d, explain, models

Pair = tuple[int, int]
Call = Callable[[], Any]
DIRECTIONS = ("forward", "backward")
PEERS = {
    "conv2d": "F.conv2d",
    "channels_last": "F.conv2d, channels_last",
    "cudnn": "cuDNN, benchmark on",
    "compiled": "shifted sum, torch.compile",
    "conv1d": "F.conv1d",  # lines of width 1
    "causal_conv1d": "causal-conv1d",  # of these, short ones of stride 1, where that package is installed
}
CPU_BYTES = 2 * 8 * 8 * 512 * 512 * 4  # x and y together: 8x8x512x512 in float32


@dataclass(frozen=True)
class Problem:
    """A line of the table. Sizes in elements, pairs are (height, width); x is a slice of `slice_of` channels."""

    name: str
    size: tuple[int, int, int, int]
    kernel_size: int
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    multiplier: int = 1
    slice_of: int = 0
    channels_last: bool = False

    @classmethod
    def parse(cls, line: dict[str, Any]) -> Problem:
        """From a line of shapes.json; raises ValueError for one that is wrong."""
        unknown = set(line) - {"from", "x", "k", *cls.__dataclass_fields__} | {"name", "size"} & set(line)
        if unknown or not {"x", "k"} <= set(line) or len(line["x"]) != 4:
            raise ValueError(
                f"a shape needs x (four sizes) and k, and may have stride, padding, dilation, multiplier, "
                f"slice_of, channels_last, from; but got {json.dumps(line)}"
            )
        pairs = {
            key: (int(line[key][0]), int(line[key][1])) for key in ("stride", "padding", "dilation") if key in line
        }
        n, c, height, width = (int(size) for size in line["x"])
        problem = cls(
            line.get("from", ""),
            (n, c, height, width),
            int(line["k"]),
            **pairs,
            multiplier=int(line.get("multiplier", 1)),
            slice_of=int(line.get("slice_of", 0)),
            channels_last=bool(line.get("channels_last", False)),
        )
        positive = (*problem.size, problem.kernel_size, *problem.stride, *problem.dilation, problem.multiplier)
        if min(positive) < 1 or min(problem.output_size) < 1 or 0 < problem.slice_of < c:
            raise ValueError(f"a shape with a size below 1, without output, or wider than slice_of: {json.dumps(line)}")
        return problem

    @property
    def output_size(self) -> tuple[int, int, int, int]:
        n, c, height, width = self.size
        reach = self.dilation[0] * (self.kernel_size - 1) + 1
        rows = (height + 2 * self.padding[0] - reach) // self.stride[0] + 1
        cols = (width + 2 * self.padding[1] - 1) // self.stride[1] + 1
        return n, c * self.multiplier, rows, cols

    @property
    def is_line(self) -> bool:
        """Whether this is a convolution along one axis: width 1 in and out."""
        return self.size[3] == self.output_size[3] == 1

    @property
    def is_short(self) -> bool:
        """Whether the package causal-conv1d knows the kernel: 2 to 4 taps, stride, dilation and multiplier 1."""
        return self.kernel_size in (2, 3, 4) and (self.stride[0], self.dilation[0], self.multiplier) == (1, 1, 1)

    def elements_read(self, itemsize: int) -> int:
        """Elements of x that must be read: rows that some tap reads, and of those each 32-byte sector with a column."""
        n, c, height, width = self.size
        _, _, out_height, out_width = self.output_size
        rows = {
            h * self.stride[0] + k * self.dilation[0] - self.padding[0]
            for h in range(out_height)
            for k in range(self.kernel_size)
        }
        cols = {w * self.stride[1] - self.padding[1] for w in range(out_width)}
        sector = max(1, 32 // itemsize)
        sectors = {col // sector for col in cols if 0 <= col < width}
        return n * c * sum(0 <= row < height for row in rows) * min(width, len(sectors) * sector)

    def least_bytes(self, direction: str, itemsize: int) -> int:
        """Bytes that cannot be avoided: x and y once; or dy and x read once and dx written once."""
        x, y, read = math.prod(self.size), math.prod(self.output_size), self.elements_read(itemsize)
        return (read + y if direction == "forward" else y + read + x) * itemsize

    def cut(self, most_bytes: int, itemsize: int) -> Problem:
        """The same problem with a batch, and if that is not enough with channels, whose x and y fit `most_bytes`."""
        sample = (math.prod(self.size) + math.prod(self.output_size)) // self.size[0] * itemsize
        n = max(1, min(self.size[0], most_bytes // sample))
        c = self.size[1] if sample <= most_bytes else max(1, self.size[1] * most_bytes // sample)
        return replace(self, size=(n, c, *self.size[2:]))

    def geometry(self) -> str:
        """What differs from the defaults, in short: 'p3,0 s2,1 d3,1 m2'."""
        values = {"p": (self.padding, (0, 0)), "s": (self.stride, (1, 1)), "d": (self.dilation, (1, 1))}
        parts = [f"{key}{value[0]},{value[1]}" for key, (value, default) in values.items() if value != default]
        parts += [f"m{self.multiplier}"] * (self.multiplier > 1) + [f"of {self.slice_of}"] * bool(self.slice_of)
        return " ".join(parts + ["channels_last"] * self.channels_last)


def load_shapes(path: str | Path | None = None) -> list[Problem]:
    """The problems of a file like the package's own shapes.json; raises ValueError or OSError."""
    lines = json.loads(Path(path or Path(__file__).with_name("shapes.json")).read_text(encoding="utf-8"))
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise ValueError("the shapes must be a list of objects")
    return [Problem.parse(line) for line in lines]


def fact_of(path: str, key: str, read: Callable[[str], Any]) -> Any:
    """What `read` makes of the first 'key: value' line of a file of the system, or None."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((read(line.split(":", 1)[1].strip()) for line in lines if line.startswith(key)), None)


class CudaClock:
    """GPU time of one call in seconds, with a cold L2 cache."""

    @staticmethod
    def summary(values: list[float]) -> float:
        return statistics.median(values)

    def __init__(self, device: torch.device) -> None:
        self.properties = torch.cuda.get_device_properties(device)
        size = max(4 * getattr(self.properties, "L2_cache_size", 0), 256 << 20)
        self.flushed = torch.empty(size, dtype=torch.uint8, device=device)

    def start(self, call: Call) -> Callable[[], float]:
        """Queue the call; what is returned waits for it and gives its time."""
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(10):  # some 0.6 ms in all on the fastest card: longer than an autograd call takes the host
            self.flushed.zero_()
        before.record()
        call()
        after.record()

        def finish() -> float:
            after.synchronize()
            return float(before.elapsed_time(after)) / 1e3

        return finish

    @cached_property
    def most_bytes_per_second(self) -> float:
        """What the memory can move; a figure above it was not measured right."""
        rate = getattr(self.properties, "memory_clock_rate", 0)  # kHz
        width = getattr(self.properties, "memory_bus_width", 0)  # bits
        if rate and width:
            return 2 * rate * 1e3 * width / 8
        source = torch.empty(1 << 30, dtype=torch.uint8, device=self.flushed.device)
        target = torch.empty_like(source)
        seconds = measure({"copy": lambda: target.copy_(source)}, self, 0.1, 5, 20)["copy"]
        return 1.15 * 2 * source.numel() / seconds

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.flushed.device)[0]


class CpuClock:
    """Wall time of one call in seconds."""

    @staticmethod
    def summary(values: list[float]) -> float:
        return min(values)

    def start(self, call: Call) -> Callable[[], float]:
        begun = time.perf_counter()
        kept = call()  # freed after the clock has stopped
        seconds = time.perf_counter() - begun
        del kept
        return lambda: seconds

    most_bytes_per_second = math.inf  # small problems live in the caches

    def free_bytes(self) -> int:
        return fact_of("/proc/meminfo", "MemAvailable", lambda text: int(text.split()[0]) << 10) or sys.maxsize


Clock = CudaClock | CpuClock


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def measure(calls: dict[str, Call], clock: Clock, budget: float, least: int, most: int) -> dict[str, float]:
    """Seconds a call: rounds over all calls, each repeated `least` to `most` times within `budget` seconds."""
    repeats = {}
    for name, call in calls.items():
        clock.start(call)()  # warm up: compilation, plans, the allocator
        begun = time.perf_counter()
        clock.start(call)()
        repeats[name] = max(least, min(most, int(budget / (time.perf_counter() - begun))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(max(repeats.values())):
        started = [(name, clock.start(call)) for name, call in calls.items() if turn < repeats[name]]
        for name, finish in started:
            times[name].append(finish())
    return {name: clock.summary(values) for name, values in times.items()}


def shifted_sum(x: Tensor, w: Tensor, problem: Problem) -> Tensor:
    """The convolution as a sum of K shifted products: what torch.compile turns into one kernel."""
    (s, sw), (p, pw), d = problem.stride, problem.padding, problem.dilation[0]
    rows = problem.output_size[2]
    if p or pw:
        x = F.pad(x, (pw, pw, p, p))
    if problem.multiplier > 1:
        x = x.repeat_interleave(problem.multiplier, 1)
    terms = [
        x[:, :, k * d : k * d + (rows - 1) * s + 1 : s, ::sw] * w[:, 0, k, 0].view(1, -1, 1, 1)
        for k in range(problem.kernel_size)
    ]
    return sum(terms[1:], terms[0])


def causal_conv1d() -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function of the package causal-conv1d, where it is installed and loads."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except (ImportError, OSError):
        return None
    function: Callable[[Tensor, Tensor], Tensor] = causal_conv1d_fn
    return function


def convolutions(problem: Problem, device: torch.device, peers: str) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The functions of (x, w) that are compared: ours first, then F.conv2d and the other peers."""
    geometry = (problem.stride, problem.padding, problem.dilation)

    def conv2d(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, None, *geometry, groups=problem.size[1])

    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "depthconv": lambda x, w: depthwise_conv2d(x, w, None, *geometry),
        "conv2d": conv2d,
    }
    if peers == "all" or device.type == "cpu":
        functions["channels_last"] = conv2d
    if problem.is_line:
        stride, padding, dilation = (values[0] for values in geometry)

        def conv1d(x: Tensor, w: Tensor) -> Tensor:
            y = F.conv1d(x.squeeze(-1), w.squeeze(-1), None, stride, padding, dilation, problem.size[1])
            return y.unsqueeze(-1)

        functions["conv1d"] = conv1d
        causal = causal_conv1d()
        if causal is not None and device.type == "cuda" and problem.is_short:
            # As many outputs as inputs, whatever the padding: up to K - 1 more or fewer than the others make.
            functions["causal_conv1d"] = lambda x, w: causal(x.squeeze(-1), w[:, 0, :, 0]).unsqueeze(-1)
    if peers == "all":
        if device.type == "cuda" and torch.backends.cudnn.is_available():
            functions["cudnn"] = lambda x, w: torch.ops.aten.cudnn_convolution(
                x, w, problem.padding, problem.stride, problem.dilation, problem.size[1], True, False, False
            )
        torch.compiler.reset()
        compiled = torch.compile(shifted_sum, dynamic=False)
        functions["compiled"] = lambda x, w: compiled(x, w, problem)
    return functions


def tensors(problem: Problem, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy of a problem: random, x and dy in the layout that the problem names."""
    n, c, height, width = problem.size
    x = torch.randn(n, max(c, problem.slice_of), height, width, device=device, dtype=dtype)[:, :c]
    w = torch.randn(c * problem.multiplier, 1, problem.kernel_size, 1, device=device, dtype=dtype)
    dy = torch.randn(problem.output_size, device=device, dtype=dtype)
    if problem.channels_last:
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    return x, w, dy


def reference_call(direction: str, count: int, device: torch.device, dtype: torch.dtype) -> Call:
    """A call that moves `count` elements in all: one read and one write, or two reads and one write."""
    if direction == "forward":
        source = torch.ones(max(1, count // 2), device=device, dtype=dtype)
        if device.type == "cpu":
            return source.clone
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    one, two = (torch.ones(max(1, count // 3), device=device, dtype=dtype) for _ in range(2))
    if device.type == "cpu":
        return lambda: torch.add(one, two)
    out = torch.empty_like(one)
    return lambda: torch.add(one, two, out=out)


def calls_for(
    problem: Problem, direction: str, device: torch.device, dtype: torch.dtype, peers: str
) -> tuple[dict[str, Call], dict[str, str]]:
    """What is timed, and what cannot be and why: ours and the peers. Backward makes dx and dw, ours also as the bare
    operator."""
    x, w, dy = tensors(problem, device, dtype)

    def call_of(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Call:
        own_x, own_dy = (
            t.contiguous(memory_format=torch.channels_last) if name == "channels_last" else t for t in (x, dy)
        )
        if direction == "forward":
            return lambda: function(own_x, w)
        leaves = (own_x.detach().requires_grad_(), w.detach().requires_grad_())
        y = function(*leaves)
        if y.shape != own_dy.shape:
            own_dy = torch.randn_like(y)
        return lambda: torch.autograd.grad(y, leaves, own_dy, retain_graph=True)

    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for name, function in convolutions(problem, device, peers).items():
        if direction == "backward" and name == "cudnn":
            continue  # its derivative is F.conv2d's
        try:
            calls[name] = call_of(name, function)
            calls[name]()
        except Exception as error:
            if name in ("depthconv", "conv2d"):
                raise
            # cuDNN and the compiler do not take every problem.
            calls.pop(name, None)
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    if direction == "backward":
        geometry = (problem.stride, problem.padding, problem.dilation)
        calls["operator"] = lambda: torch.ops.depthconv.backward(dy, x, w, *geometry, [True, True, False])
    return calls, failed


def kernels(problem: Problem, direction: str, device: torch.device, dtype: torch.dtype) -> str:
    """The names of the kernels that the plan chooses, joined by '+'."""
    small = problem if device.type == "cuda" else replace(problem, size=(1, *problem.size[1:]))
    x, w, _ = tensors(small, device, dtype)
    plan = getattr(explain(x, w, None, problem.stride, problem.padding, problem.dilation), direction)
    return "+".join(part["kernel"] for part in plan.get("kernels", [plan]))


def time_line(
    problem: Problem, direction: str, device: torch.device, dtype: torch.dtype, peers: str, quick: bool, clock: Clock
) -> dict[str, Any]:
    """One line of the table: times in ms, ratios to the reference, TB/s; `invalid` or `skipped` says why it is none."""
    itemsize = dtype.itemsize
    asked = problem
    if device.type == "cpu":
        problem = problem.cut(CPU_BYTES // (16 if quick else 1), itemsize)
    moved = problem.least_bytes(direction, itemsize)
    row: dict[str, Any] = {
        "name": problem.name,
        "direction": direction,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "size": list(problem.size),
        "kernel_size": problem.kernel_size,
        "stride": list(problem.stride),
        "padding": list(problem.padding),
        "dilation": list(problem.dilation),
        "multiplier": problem.multiplier,
        "slice_of": problem.slice_of,
        "channels_last": problem.channels_last,
        "geometry": problem.geometry(),
        "cut_from": list(asked.size) if asked.size != problem.size else None,
        "bytes": moved,
        "kernel": None,
        "ms": {},
        "ratio": None,
        "conv2d_ratio": None,
        "speedup": None,
        "tb_per_s": None,
        "invalid": None,
        "skipped": None,
        "failed": {},
    }
    x_bytes, y_bytes = (math.prod(size) * itemsize for size in (problem.size, problem.output_size))
    # Roughly what is alive at once: the tensors, padded or channels_last copies of a peer, gradients, the reference.
    needed = max(1, problem.slice_of / problem.size[1]) * x_bytes + 4 * (x_bytes + y_bytes) + moved
    free = clock.free_bytes()
    if needed > free:
        row["skipped"] = f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        return row
    row["kernel"] = kernels(problem, direction, device, dtype)
    guard: AbstractContextManager[Any] = torch.no_grad() if direction == "forward" else nullcontext()
    with guard:
        calls, row["failed"] = calls_for(problem, direction, device, dtype, peers)
        calls["reference"] = reference_call(direction, moved // itemsize, device, dtype)
        least, most, budget = (3, 10, 0.02) if quick else (9, 101, 0.15) if device.type == "cuda" else (5, 101, 0.3)
        seconds = measure(calls, clock, budget, least, most)
    row["ms"] = {name: value * 1e3 for name, value in seconds.items()}
    return judge(row, clock.most_bytes_per_second)


def judge(row: dict[str, Any], most_bytes_per_second: float) -> dict[str, Any]:
    """Ratios and TB/s of a timed line; marked invalid when a time is none or faster than the memory."""
    ms = row["ms"]
    wrong = [name for name, value in ms.items() if not (math.isfinite(value) and value > 0)]
    too_fast = [
        name for name, value in ms.items() if name not in wrong and row["bytes"] / value * 1e3 > most_bytes_per_second
    ]
    if wrong:
        row["invalid"] = f"no time for {', '.join(wrong)}"
        return row
    if too_fast:
        row["invalid"] = f"{', '.join(too_fast)} above the memory's {most_bytes_per_second / 1e12:.2f} TB/s"
    row["ratio"] = ms["depthconv"] / ms["reference"]
    row["conv2d_ratio"] = ms["conv2d"] / ms["reference"]
    row["speedup"] = ms["conv2d"] / ms["depthconv"]
    row["tb_per_s"] = row["bytes"] / ms["depthconv"] / 1e9
    return row


def run(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    shapes: Iterable[Problem] | None = None,
    peers: str = "conv2d",
    quick: bool = False,
    directions: Iterable[str] = DIRECTIONS,
    watch: Callable[[list[Any]], Iterable[Any]] = iter,
) -> list[dict[str, Any]]:
    """Time each problem in each direction; `watch` wraps the list of lines (a progress bar). A dict a line."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    clock = clock_for(device)
    problems = load_shapes() if shapes is None else list(shapes)
    lines = [(problem, direction) for direction in directions for problem in problems]
    return [time_line(problem, direction, device, dtype, peers, quick, clock) for problem, direction in watch(lines)]


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else None


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each dtype and direction the geometric means over the valid lines of each time over the reference's."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["ms"] and not row["invalid"]:
            groups.setdefault((row["dtype"], row["direction"]), []).append(row["ms"])
    return [
        {
            "dtype": dtype,
            "direction": direction,
            "lines": len(group),
            "over_reference": {
                name: geometric_mean(ms[name] / ms["reference"] for ms in group)
                for name in group[0]
                if name != "reference" and all(name in ms for ms in group)
            },
        }
        for (dtype, direction), group in groups.items()
    ]


def host_costs(device: str | torch.device, quick: bool = False) -> list[dict[str, Any]]:
    """Microseconds of host time an eager call on a tiny tensor: functions and modules, ours and PyTorch's."""
    device = torch.device(device)
    x = torch.randn(1, 4, 8, 8, device=device)
    w, bias = torch.randn(4, 1, 3, 1, device=device), torch.randn(4, device=device)
    recording = [t.clone().requires_grad_() for t in (x, w, bias)]
    dy = torch.randn(1, 4, 8, 8, device=device)
    ours = DepthwiseConv2d(4, 4, (3, 1), padding=(1, 0), groups=4).to(device)
    theirs = torch.nn.Conv2d(4, 4, (3, 1), padding=(1, 0), groups=4).to(device)

    def functions(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Call, Call]:
        return (lambda: depthwise_conv2d(x, w, bias, 1, (1, 0))), lambda: F.conv2d(x, w, bias, 1, (1, 0), groups=4)

    def modules(x: Tensor) -> tuple[Call, Call]:
        return (lambda: ours(x)), lambda: theirs(x)

    def both_ways(pair: tuple[Call, Call], leaves: list[Tensor]) -> tuple[Call, Call]:
        mine, other = pair
        return (lambda: torch.autograd.grad(mine(), leaves, dy)), lambda: torch.autograd.grad(other(), leaves, dy)

    parameters = [recording[0]]
    cases = {
        ("function", "no gradient"): (functions(x, w, bias), True),
        ("function", "recording one"): (functions(*recording), False),
        ("function", "forward + backward"): (both_ways(functions(*recording), recording), False),
        ("module", "no gradient"): (modules(x), True),
        ("module", "recording one"): (modules(recording[0]), False),
        ("module", "forward + backward"): (
            (
                lambda: torch.autograd.grad(ours(recording[0]), parameters + list(ours.parameters()), dy),
                lambda: torch.autograd.grad(theirs(recording[0]), parameters + list(theirs.parameters()), dy),
            ),
            False,
        ),
    }
    calls, blocks = (50, 3) if quick else (300, 15)
    synchronize: Call = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(call: Call) -> float:
        synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begun) / calls

    rows = []
    for (interface, what), (pair, without_gradient) in cases.items():
        with torch.no_grad() if without_gradient else nullcontext():
            times = [[seconds(call) for call in pair] for _ in range(blocks + 1)][1:]
        mine, other = (statistics.median(column) * 1e6 for column in zip(*times))
        rows.append(
            {"interface": interface, "call": what, "depthconv_us": mine, "conv2d_us": other, "ratio": mine / other}
        )
    return rows


def machine(device: str | torch.device) -> dict[str, Any]:
    """What is known of this machine and of the device."""
    device = torch.device(device)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "system": platform.platform(),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def processor() -> str:
    return fact_of("/proc/cpuinfo", "model name", str) or platform.processor() or platform.machine()


def progress(items: list[Any], label: str) -> Iterator[Any]:
    """The items, with a bar on the standard error: tqdm's where it is installed, else a counter."""
    try:
        from tqdm import tqdm
    except ImportError:
        for at, item in enumerate(items, 1):
            print(f"\r{label} {at}/{len(items)}", end="", file=sys.stderr, flush=True)
            yield item
        print(file=sys.stderr)
    else:
        yield from tqdm(items, desc=label, file=sys.stderr, leave=False)


def cells(table: list[list[str]]) -> str:
    """Rows of text as aligned columns: the first three to the left, figures to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < 3 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in table
    )


def reference_name(row: dict[str, Any]) -> str:
    names = {"cpu": ("clone", "a fresh add"), "cuda": ("copy_", "add")}[torch.device(row["device"]).type]
    return names[DIRECTIONS.index(row["direction"])]


def speed_table(rows: list[dict[str, Any]]) -> str:
    """The lines of one dtype and direction as text: times in ms, and times over the reference's."""
    ratios = [name for name in ("depthconv", "operator", *PEERS) if any(name in row["ms"] for row in rows)]
    on_gpu = torch.device(rows[0]["device"]).type == "cuda"
    heads = ["shape", "K", "geometry; kernel", "ms", "reference ms", *ratios, "conv2d/depthconv"]
    heads.append("TB/s" if on_gpu else "GB/s")
    table, notes = [heads], []
    for row in rows:
        shape, ms = "x".join(map(str, row["size"])), row["ms"]
        cut = f"cut from {row['cut_from'][0]}x{row['cut_from'][1]}" if row["cut_from"] else ""
        line = [shape, str(row["kernel_size"]), "; ".join(filter(None, [row["geometry"], cut, row["kernel"]]))]
        problem = row["skipped"] or row["invalid"]
        if problem:
            notes.append(f"{shape} K {row['kernel_size']}: {'skipped' if row['skipped'] else 'INVALID'}, {problem}")
        notes += [f"{shape} K {row['kernel_size']}: {name} failed, {why}" for name, why in row["failed"].items()]
        if row["ratio"] is None:
            table.append(line + ["skipped" if row["skipped"] else "invalid"] + ["-"] * (len(heads) - 4))
            continue
        line += [f"{ms['depthconv']:.4f}", f"{ms['reference']:.4f}"]
        mark = "!" * bool(row["invalid"])
        line += [f"{ms[name] / ms['reference']:.2f}{mark}" if name in ms else "-" for name in ratios]
        table.append(line + [f"{row['speedup']:.1f}", f"{row['tb_per_s'] * (1 if on_gpu else 1e3):.2f}"])
    if any(row["cut_from"] for row in rows):
        notes.append(
            f"cut: to a batch, or channels, whose x and y take at most {CPU_BYTES >> 20} MiB, less with --quick"
        )
    return "\n".join([cells(table), *notes])


def report(rows: list[dict[str, Any]]) -> str:
    """All tables of a run and their geometric means."""
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for direction in DIRECTIONS:
            group = [row for row in rows if (row["dtype"], row["direction"]) == (dtype, direction)]
            if group:
                title = f"{direction}, {dtype}, {group[0]['device']}"
                parts.append(f"{title}: times over the reference's, {reference_name(group[0])}\n{speed_table(group)}")
    for mean in means(rows):
        names = {"depthconv": "depthconv", "operator": "the operator alone", **PEERS}
        figures = ", ".join(f"{names[name]} {value:.2f}" for name, value in mean["over_reference"].items())
        where = f"{mean['direction']}, {mean['dtype']}, {mean['lines']} lines"
        parts.append(f"geometric means over the reference, {where}: {figures}")
    return "\n\n".join(parts)


def facts_text(build: dict[str, Any], facts: dict[str, Any]) -> str:
    lines = [f"build    {build['reason']}"]
    lines += [f"  {key}: {value}" for key, value in build.items() if key not in ("reason", "flags")]
    lines += [f"  flags, {name}: {flags}" for name, flags in build["flags"].items()]
    return "\n".join(lines + ["machine"] + [f"  {key}: {value}" for key, value in facts.items()])


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Bars of every valid line's ratios to the reference, as a picture (needs matplotlib)."""
    from matplotlib.figure import Figure

    groups = [(m["dtype"], m["direction"]) for m in means(rows)]
    valid = {g: [r for r in rows if (r["dtype"], r["direction"]) == g and r["ms"] and not r["invalid"]] for g in groups}
    figure = Figure(figsize=(11, 1 + sum(0.32 * len(group) + 1.2 for group in valid.values())), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[len(group) + 3 for group in valid.values()])
    for axis, ((dtype, direction), group) in zip(axes[:, 0], valid.items()):
        names = ["depthconv", *(name for name in PEERS if all(name in row["ms"] for row in group))]
        thickness = 0.8 / len(names)
        for at, name in enumerate(names):
            ratios = [row["ms"][name] / row["ms"]["reference"] for row in group]
            places = [line + at * thickness for line in range(len(group))]
            axis.barh(places, ratios, thickness, label=PEERS.get(name, name))
        axis.set_yticks([line + 0.4 - thickness / 2 for line in range(len(group))])
        axis.set_yticklabels(
            ["x".join(map(str, row["size"])) + f" K {row['kernel_size']}" for row in group], fontsize=8
        )
        axis.set(xscale="log", xlabel="time over the reference's", title=f"{direction}, {dtype}, {group[0]['device']}")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def everything(
    device: str,
    dtypes: list[torch.dtype],
    shapes: list[Problem],
    peers: str,
    quick: bool,
    parts: list[str],
    checked: list[torch.dtype],
) -> dict[str, Any]:
    """All that `python -m depthconv` reports, as one dict; parts that were not asked for are left out."""
    from ._reference import check

    if torch.device(device).type == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(device)
    result: dict[str, Any] = {"build": build_info(), "machine": machine(device)}
    if "check" in parts:
        result["check"] = check(device, checked, 10 if quick else 60, watch=lambda items: progress(items, "check"))
    if "speed" in parts:
        result["speed"] = [
            row
            for dtype in dtypes
            for row in run(device, dtype, shapes, peers, quick, watch=lambda items: progress(items, "speed"))
        ]
        result["means"] = means(result["speed"])
    if "host" in parts:
        result["host"] = host_costs(device, quick)
    if "models" in parts:
        result["models"] = models.run(device, quick, lambda items: progress(items, "models"))
    return result


def text(result: dict[str, Any]) -> str:
    """The report of `everything` for people."""
    parts = [facts_text(result["build"], result["machine"])]
    if "check" in result:
        rows = result["check"]
        table = [["dtype", "result", "", "problems", "largest error", "of its tolerance"]]
        table += [
            [
                row["dtype"],
                row["result"],
                "" if row["passed"] else "FAILED",
                str(row["problems"]),
                f"{row['error']:.2e}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ]
        parts.append(f"check against float64, seed {rows[0]['seed']}\n{cells(table)}")
        parts += [f"FAILED: {row['dtype']} {row['result']}: {row['worst']}" for row in rows if not row["passed"]]
    if "speed" in result:
        parts.append(report(result["speed"]))
    if "host" in result:
        table = [["host time a call", "", "", "ours µs", "PyTorch µs", "ratio"]]
        table += [
            [
                row["interface"],
                row["call"],
                "",
                f"{row['depthconv_us']:.1f}",
                f"{row['conv2d_us']:.1f}",
                f"{row['ratio']:.2f}",
            ]
            for row in result["host"]
        ]
        parts.append(cells(table))
    if "models" in result:
        parts.append(cells(models.table(result["models"])))
        parts += [f"{row['model']}: skipped, {row['skipped']}" for row in result["models"] if row["skipped"]]
    return "\n\n".join(parts)
