"""Times whole models before and after `depthconv.convert`: inference and a training step, and the step's memory.

timm's inception_next_tiny (random weights; named as left out where timm is not installed) and a stage of SegNeXt's
attention blocks, in float32 and under bfloat16 autocast. Both models of a pair have the same weights and take turns.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convert import convert

NAMES = ("conv2d", "depthconv")


class StripAttention(nn.Module):
    """SegNeXt's block: a 5x5, pairs of strips of 7, 11 and 21, a 1x1 and a product, between projections.

    Guo et al., "SegNeXt: Rethinking Convolutional Attention Design for Semantic Segmentation", 2022, section 3.1.
    (N, C, H, W) to the same.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()

        def depthwise(height: int, width: int) -> nn.Conv2d:
            padding = (height // 2, width // 2)
            return nn.Conv2d(channels, channels, (height, width), padding=padding, groups=channels)

        self.norm = nn.BatchNorm2d(channels)
        self.enter, self.leave = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
        self.near = depthwise(5, 5)
        self.strips = nn.ModuleList(nn.Sequential(depthwise(1, taps), depthwise(taps, 1)) for taps in (7, 11, 21))
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        value = F.gelu(self.enter(self.norm(x)))
        near = self.near(value)
        attention = sum((strip(near) for strip in self.strips), near)
        y: Tensor = x + self.leave(self.mix(attention) * value)
        return y


def inception_next() -> nn.Module:
    try:
        from timm import create_model
    except RuntimeError as error:  # a torchvision for another torch
        raise ImportError(f"timm does not import: {error}") from error
    model: nn.Module = create_model("inception_next_tiny", pretrained=False)
    return model


@dataclass(frozen=True)
class Example:
    """A model and its input: the size without the batch, and the batch on CUDA, on the CPU, and for a rough look."""

    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, int, int]
    batches: tuple[int, int, int]

    def size(self, device: torch.device, quick: bool) -> tuple[int, int, int, int]:
        return (self.batches[2 if quick else 0 if device.type == "cuda" else 1], *self.sample)


def strip_attention() -> nn.Module:
    return nn.Sequential(*(StripAttention(64) for _ in range(4)))


EXAMPLES = (
    Example("inception_next_tiny", inception_next, (3, 224, 224), (128, 4, 1)),
    Example("SegNeXt, 4 blocks", strip_attention, (64, 64, 64), (64, 4, 1)),
)


def step(model: nn.Module, x: Tensor, autocast: bool) -> None:
    """Forward and backward, gradients made anew. The optimizer's part would be the same for both models."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().mean().backward()


@torch.no_grad()
def infer(model: nn.Module, x: Tensor, autocast: bool) -> None:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        model(x)


def seconds(call: Callable[[], None], device: torch.device) -> float:
    """Wall time of a call, the GPU's work included."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begun


def step_memory(model: nn.Module, x: Tensor, autocast: bool) -> float | None:
    """MiB that a step takes at most over what is there before it; None on the CPU, where nothing counts them."""
    if x.device.type != "cuda":
        return None
    model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    step(model, x, autocast)
    return (torch.cuda.max_memory_allocated(x.device) - before) / 2**20


def time_example(example: Example, device: torch.device, autocast: bool, quick: bool) -> dict[str, Any]:
    """Medians in ms of each model; `skipped` says why there are none."""
    row: dict[str, Any] = {
        "model": example.name,
        "size": list(example.size(device, quick)),
        "device": str(device),
        "precision": "bfloat16 autocast" if autocast else "float32",
        "converted": 0,
        "inference_ms": {},
        "step_ms": {},
        "step_mib": {},
        "skipped": None,
    }
    try:
        time_models(row, example.build().to(device), autocast, quick)
    except (ImportError, torch.OutOfMemoryError) as error:
        row["skipped"] = str(error).splitlines()[0]
    return row


def time_models(row: dict[str, Any], theirs: nn.Module, autocast: bool, quick: bool) -> None:
    """Fill in the figures of a line."""
    device = torch.device(row["device"])
    ours = copy.deepcopy(theirs)
    row["converted"] = len(convert(ours).swapped)
    models = dict(zip(NAMES, (theirs, ours)))
    x = torch.randn(row["size"], device=device)
    warm, turns = (1, 2) if quick else (3, 15) if device.type == "cuda" else (1, 5)
    for what, run, training in (("inference_ms", infer, False), ("step_ms", step, True)):
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(warm + turns):
            for name, model in models.items():
                model.train(training)
                taken = seconds(lambda: run(model, x, autocast), device)
                if turn >= warm:
                    times[name].append(taken * 1e3)
        row[what] = {name: statistics.median(values) for name, values in times.items()}
    row["step_mib"] = {name: step_memory(model, x, autocast) for name, model in models.items()}


def run(
    device: str | torch.device,
    quick: bool = False,
    watch: Callable[[list[Any]], Iterable[Any]] = iter,
) -> list[dict[str, Any]]:
    """Time each example in float32 and under bfloat16 autocast. A dict a line."""
    device = torch.device(device)
    lines = [(example, autocast) for example in EXAMPLES for autocast in (False, True)]
    return [time_example(example, device, autocast, quick) for example, autocast in watch(lines)]


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The lines as cells of text, a head first."""
    heads = ["model", "input", "precision", "converted"]
    for what in ("inference", "training step"):
        heads += [f"{what}, nn.Conv2d ms", "converted ms", "times"]
    cells = [heads + ["memory of a step, nn.Conv2d MiB", "converted MiB"]]
    for row in rows:
        line = [row["model"], "x".join(map(str, row["size"])), row["precision"]]
        if row["skipped"]:
            cells.append(line + ["skipped"] + ["-"] * (len(cells[0]) - 4))
            continue
        line.append(str(row["converted"]))
        for what in ("inference_ms", "step_ms"):
            before, after = (row[what][name] for name in NAMES)
            line += [f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}"]
        memory = [row["step_mib"][name] for name in NAMES]
        cells.append(line + ["-" if mib is None else f"{mib:.0f}" for mib in memory])
    return cells
