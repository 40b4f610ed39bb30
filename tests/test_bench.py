"""`python -m depthconv` and its benchmark: problems, bytes, tables, JSON, exit statuses. Times are never judged."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import depthconv
from depthconv import __main__ as command
from depthconv import _reference, bench, models

TINY = [
    {"from": "rows", "x": [2, 4, 20, 16], "k": 3, "padding": [1, 0]},
    {"from": "a slice, strided", "x": [2, 4, 20, 15], "slice_of": 6, "k": 5, "stride": [2, 2], "dilation": [2, 1]},
    {"from": "multiplier", "x": [1, 3, 12, 9], "k": 12, "multiplier": 2},
    {"from": "channels_last", "x": [2, 8, 10, 7], "k": 7, "padding": [3, 0], "channels_last": True},
    {"from": "a line", "x": [2, 4, 20, 1], "k": 4, "padding": [3, 0]},
]
ROW = {"ms": {"depthconv": 2.0, "conv2d": 8.0, "reference": 1.0}, "bytes": 2_000_000_000, "invalid": None}


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(TINY))
    return path


def row(**changes: object) -> dict[str, object]:
    return {**ROW, "ms": dict(ROW["ms"]), **changes}  # type: ignore[arg-type]


# ---- Problems and the bytes that they must move


def test_default_grid_parses():
    problems = bench.load_shapes()
    assert len(problems) == 27
    assert problems[0] == bench.Problem("the reference problem", (64, 8, 512, 512), 3)
    assert problems[19].output_size == (64, 16, 1, 1126)


@pytest.mark.parametrize(
    "line",
    [
        {"x": [1, 2, 3, 4]},
        {"x": [1, 2, 3], "k": 3},
        {"x": [1, 2, 3, 4], "k": 4},
        {"x": [1, 2, 3, 4], "k": 0},
        {"x": [1, 2, 8, 4], "k": 3, "stride": [0, 1]},
        {"x": [1, 4, 8, 4], "k": 3, "slice_of": 2},
        {"x": [1, 4, 8, 4], "k": 3, "pading": [1, 0]},
    ],
)
def test_wrong_lines_are_rejected(line: dict[str, object]):
    with pytest.raises(ValueError, match="a shape"):
        bench.Problem.parse(line)


@pytest.mark.parametrize("line", TINY)
def test_output_size_is_conv2ds(line: dict[str, object]):
    problem = bench.Problem.parse(line)
    x, w, dy = bench.tensors(problem, torch.device("cpu"), torch.float32)
    y = torch.nn.functional.conv2d(x, w, None, problem.stride, problem.padding, problem.dilation, problem.size[1])
    assert y.shape == problem.output_size == dy.shape


def test_tensors_have_the_layout_of_the_line():
    sliced, channels_last = (
        bench.tensors(bench.Problem.parse(line), torch.device("cpu"), torch.float32)[0] for line in (TINY[1], TINY[3])
    )
    assert sliced.shape == (2, 4, 20, 15) and sliced.stride() == (6 * 20 * 15, 20 * 15, 15, 1)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("problem", "forward", "backward"),
    [
        # x and y once; dy, x and dx once.
        (bench.Problem("", (2, 3, 10, 8), 3), 2 * 3 * (10 + 8) * 8, 2 * 3 * (8 + 10 + 10) * 8),
        # K 1 at stride 2 reads every other row of x, but all of dx is written.
        (bench.Problem("", (1, 1, 10, 8), 1, stride=(2, 1)), (5 + 5) * 8, (5 + 5 + 10) * 8),
        # Every other column, but each 32-byte sector of 8 floats holds one.
        (bench.Problem("", (1, 1, 4, 16), 1, stride=(1, 2)), 4 * 16 + 4 * 8, 4 * 8 + 4 * 16 + 4 * 16),
        # One column in 16: half of the sectors.
        (bench.Problem("", (1, 1, 4, 64), 1, stride=(1, 16)), 4 * 32 + 4 * 4, 4 * 4 + 4 * 32 + 4 * 64),
        # Rows of padding are not read.
        (bench.Problem("", (1, 1, 3, 4), 3, padding=(4, 0)), 3 * 4 + 9 * 4, 9 * 4 + 3 * 4 + 3 * 4),
        (bench.Problem("", (1, 2, 5, 4), 5, multiplier=3), 2 * 5 * 4 + 6 * 4, 6 * 4 + 2 * 5 * 4 + 2 * 5 * 4),
    ],
)  # fmt: skip
def test_least_bytes(problem: bench.Problem, forward: int, backward: int):
    assert problem.least_bytes("forward", 4) == 4 * forward
    assert problem.least_bytes("backward", 4) == 4 * backward


def test_cut_fits_and_keeps_what_fits():
    problem = bench.Problem("", (64, 8, 512, 512), 3, padding=(1, 0))
    assert problem.cut(bench.CPU_BYTES, 4).size == (8, 8, 512, 512)
    assert problem.cut(bench.CPU_BYTES, 2).size == (16, 8, 512, 512)
    assert problem.cut(1 << 40, 4) == problem
    one = bench.Problem("", (1, 12288, 16384, 1), 4).cut(bench.CPU_BYTES, 4)
    assert one.size[0] == 1 and 900 < one.size[1] <= 1024 and one.size[2:] == (16384, 1)


@pytest.mark.parametrize("line", TINY)
def test_peers_compute_the_same(line: dict[str, object]):
    """What is timed against each other is the same function: the shifted sum too."""
    problem = bench.Problem.parse(line)
    device = torch.device("cpu")
    x, w, _ = bench.tensors(problem, device, torch.float64)
    for function in bench.convolutions(problem, device, "conv2d").values():
        torch.testing.assert_close(function(x, w), bench.shifted_sum(x, w, problem), rtol=1e-12, atol=1e-12)


# ---- Timed lines


def test_run_times_every_line_both_ways(device: str):
    problems = [bench.Problem.parse(line) for line in TINY]
    rows = bench.run(device, torch.float32, problems, quick=True)
    assert [(row["name"], row["direction"]) for row in rows] == [
        (problem.name, direction) for direction in ("forward", "backward") for problem in problems
    ]
    for row in rows:
        expected = {"depthconv", "conv2d", "reference"} | ({"channels_last"} if device == "cpu" else set())
        line = row["size"][3] == 1
        assert ("conv1d" in row["ms"]) == line and (line or "causal_conv1d" not in row["ms"])
        row_names = set(row["ms"]) - {"conv1d", "causal_conv1d"}
        assert row_names == expected | ({"operator"} if row["direction"] == "backward" else set())
        assert all(value > 0 for value in row["ms"].values()), row
        assert row["ratio"] == pytest.approx(row["ms"]["depthconv"] / row["ms"]["reference"])
        assert row["kernel"] and row["skipped"] is None
    table = bench.report(rows)
    assert all("x".join(map(str, problem.size)) in table for problem in problems)
    assert "forward, float32" in table and "geometric means" in table
    json.dumps(rows)


def test_line_larger_than_the_free_memory_is_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench.CpuClock, "free_bytes", lambda self: 1000)
    (row,) = bench.run("cpu", torch.float32, [bench.Problem.parse(TINY[0])], directions=["forward"])
    assert "needs about" in row["skipped"] and row["ms"] == {}
    assert "skipped" in bench.report([row]) and bench.means([row]) == []


def test_peer_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch):
    right = bench.convolutions

    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not for this problem\nand more")

    monkeypatch.setattr(bench, "convolutions", lambda *arguments: {**right(*arguments), "cudnn": broken})
    (line,) = bench.run("cpu", torch.float32, [bench.Problem.parse(TINY[0])], quick=True, directions=["forward"])
    assert line["failed"] == {"cudnn": "RuntimeError: not for this problem"}
    assert "cudnn" not in line["ms"] and line["ratio"] > 0
    assert "cudnn failed, RuntimeError: not for this problem" in bench.report([line])


def test_causal_conv1d_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    """Called as that package is: (N, C, L) and (C, K), on CUDA, for short lines of stride 1 alone."""
    seen: list[tuple[torch.Size, torch.Size]] = []

    def fake(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape, w.shape))
        return torch.nn.functional.conv1d(x, w[:, None], None, 1, w.shape[1] - 1, 1, x.shape[1])[..., : x.shape[2]]

    monkeypatch.setitem(sys.modules, "causal_conv1d", types.SimpleNamespace(causal_conv1d_fn=fake))
    cuda, short = torch.device("cuda"), bench.Problem("", (2, 4, 9, 1), 4, padding=(3, 0))
    functions = bench.convolutions(short, cuda, "conv2d")
    x, w, _ = bench.tensors(short, torch.device("cpu"), torch.float64)
    y = functions["causal_conv1d"](x, w)
    torch.testing.assert_close(y, functions["depthconv"](x, w)[:, :, :9])
    assert seen == [((2, 4, 9), (4, 4))]
    for other in (
        replace(short, kernel_size=5), replace(short, stride=(2, 1)), replace(short, dilation=(2, 1)),
        replace(short, multiplier=2), replace(short, size=(2, 4, 9, 2)),
    ):  # fmt: skip
        assert "causal_conv1d" not in bench.convolutions(other, cuda, "conv2d")
    assert "causal_conv1d" not in bench.convolutions(short, torch.device("cpu"), "conv2d")


def test_measure_interleaves_and_repeats():
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = bench.measure(calls, bench.CpuClock(), budget=0, least=3, most=5)
    assert "".join(order) == "aabb" + "ab" * 3
    assert set(times) == {"a", "b"} and min(times.values()) > 0


def test_judge_gives_ratios():
    judged = bench.judge(row(), math.inf)
    assert (judged["ratio"], judged["conv2d_ratio"], judged["speedup"], judged["tb_per_s"]) == (2, 8, 4, 1)
    assert judged["invalid"] is None


def test_figure_above_the_memory_is_invalid():
    """The reference moves 2 TB/s, the card 1.5: not measured right, whoever it was."""
    judged = bench.judge(row(), 1.5e12)
    assert judged["invalid"] == "reference above the memory's 1.50 TB/s"


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -1.0])
def test_time_that_is_none_is_invalid(value: float):
    judged = bench.judge(row(ms={"depthconv": value, "conv2d": 8.0, "reference": 1.0}, ratio=None), math.inf)
    assert judged["invalid"] == "no time for depthconv" and judged["ratio"] is None


def test_invalid_lines_are_shown_and_not_averaged():
    (timed,) = bench.run("cpu", torch.float32, [bench.Problem.parse(TINY[0])], quick=True, directions=["forward"])
    invalid = bench.judge({**timed, "bytes": 10**15}, 1e12)
    assert invalid["invalid"]
    assert "INVALID" in bench.report([timed, invalid])
    assert bench.means([timed, invalid]) == bench.means([timed])
    assert bench.means([timed])[0]["over_reference"]["depthconv"] == pytest.approx(timed["ratio"])


def test_geometric_mean():
    assert bench.geometric_mean([1, 4, 16]) == pytest.approx(4)
    assert bench.geometric_mean([]) is None


def test_host_costs():
    rows = bench.host_costs("cpu", quick=True)
    assert {(row["interface"], row["call"]) for row in rows} == {
        (interface, call)
        for interface in ("function", "module")
        for call in ("no gradient", "recording one", "forward + backward")
    }
    assert all(row["ratio"] == pytest.approx(row["depthconv_us"] / row["conv2d_us"]) for row in rows)


# ---- Whole models


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small model that there is, and one that cannot be built."""

    def missing() -> torch.nn.Module:
        raise ImportError("No module named 'timm'")

    block = models.Example("blocks", lambda: models.StripAttention(4), (4, 12, 10), (2, 2, 2))
    monkeypatch.setattr(models, "EXAMPLES", (block, models.Example("missing", missing, (3, 8, 8), (1, 1, 1))))


def test_models_are_timed_before_and_after(examples: None, device: str):
    rows = models.run(device, quick=True)
    assert [(row["model"], row["precision"]) for row in rows] == [
        (name, precision) for name in ("blocks", "missing") for precision in ("float32", "bfloat16 autocast")
    ]
    for row in rows[:2]:
        assert row["converted"] == 3 and row["skipped"] is None and row["size"] == [2, 4, 12, 10]
        for what in ("inference_ms", "step_ms"):
            assert set(row[what]) == {"conv2d", "depthconv"} and min(row[what].values()) > 0
        peaks = row["step_mib"].values()
        assert all(peak > 0 for peak in peaks) if device == "cuda" else set(peaks) == {None}
    assert [row["skipped"] for row in rows[2:]] == ["No module named 'timm'"] * 2
    cells = models.table(rows)
    assert len({len(line) for line in cells}) == 1 and len(cells) == 5
    assert cells[1][:4] == ["blocks", "2x4x12x10", "float32", "3"] and cells[4][3] == "skipped"


def test_strip_attention_is_the_same_after_conversion():
    block = models.StripAttention(4).eval()
    x = torch.randn(2, 4, 12, 10)
    expected = block(x)
    assert len(depthconv.convert(block).swapped) == 3
    torch.testing.assert_close(block(x), expected)


def test_command_times_models(examples: None, capsys: pytest.CaptureFixture[str]):
    assert command.main(["--device", "cpu", "--quick", "--part", "models"]) == 0
    text = capsys.readouterr().out
    assert "missing: skipped, No module named 'timm'" in text and "bfloat16 autocast" in text


# ---- The check


def test_check_passes(device: str):
    rows = _reference.check(device, [torch.float32, torch.bfloat16], count=3, seed=1)
    assert [(row["dtype"], row["result"]) for row in rows] == [
        (dtype, result) for dtype in ("float32", "bfloat16") for result in ("y", "dx", "dw", "db")
    ]
    assert all(row["passed"] and 0 < row["ratio"] <= 1 and row["problems"] == 17 for row in rows), rows


@pytest.mark.parametrize("wrong", [lambda y: y * (1 + 1e-4), lambda y: y * math.nan])
def test_check_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]):
    right = depthconv.depthwise_conv2d

    def patched(*arguments: Any) -> Tensor:
        return wrong(right(*arguments))

    monkeypatch.setattr(depthconv, "depthwise_conv2d", patched)
    rows = _reference.check("cpu", [torch.float32], count=0, seed=1)
    assert not any(row["passed"] for row in rows if row["result"] == "y")


# ---- The command


def test_command_prints_everything(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--quick", "--shapes", str(shapes), "--json", str(target), "--dtype", "float64"]
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    for part in (
        depthconv.build_info()["reason"],
        "check against float64",
        "forward, float64, cpu",
        "host time a call",
    ):
        assert part in text
    figures = json.loads(target.read_text())
    assert set(figures) == {"build", "machine", "check", "speed", "means", "host"}
    assert len(figures["speed"]) == 2 * len(TINY)
    assert {row["dtype"] for row in figures["check"] + figures["speed"]} == {"float64"}


def test_command_writes_json_alone_to_the_standard_output(shapes: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--device", "cpu", "--quick", "--shapes", str(shapes), "--json", "-", "--part", "speed"]
    assert command.main([*arguments, "--dtype", "float32", "--dtype", "float16"]) == 0
    captured = capsys.readouterr()
    assert {row["dtype"] for row in json.loads(captured.out)["speed"]} == {"float32", "float16"}
    assert "geometric means" in captured.err


def test_command_fails_with_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    right = depthconv.depthwise_conv2d
    monkeypatch.setattr(depthconv, "depthwise_conv2d", lambda *arguments: right(*arguments) + 1)
    assert command.main(["--device", "cpu", "--quick", "--part", "check", "--dtype", "float32"]) == 1
    assert "FAILED: float32 y: Case(" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "meta"], "must be cpu, cuda or cuda:N"),
        (["--device", "tensor"], "--device"),
        (["--dtype", "int8"], "invalid choice"),
        (["--device", "cpu", "--shapes", "no such file"], "no such file"),
        (["--device", "cpu", "--part", "check", "--plot", "figure.png"], "--plot"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_exits_with_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--device", "cuda"])
    assert exit_.value.code == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_plot(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="no matplotlib")
    problem = bench.Problem.parse(TINY[0])
    bench.plot(bench.run("cpu", torch.float32, [problem], quick=True), str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
