"""A real model before and after convert: timm's inception_next_tiny with random weights. Skipped without timm."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import depthconv


def load_timm() -> ModuleType:
    """timm, or a skip with the reason.

    timm imports torchvision, whose own operators are built for one torch: beside another they do not load, and the
    import fails at the first fake kernel, for the want of its operator. No model here calls any, so that a bare
    definition helps.
    """
    for _ in range(20):
        try:
            return importlib.import_module("timm")
        except ImportError as error:
            pytest.skip(f"timm does not import: {error}")
        except RuntimeError as error:
            missing = re.search(r"operator (torchvision::\w+) does not exist", str(error))
            if missing is None:
                raise
            for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
                del sys.modules[name]
            torch.library.define(missing[1], "(Tensor input) -> Tensor")
    pytest.skip("torchvision lacks more than 20 operators")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    timm = load_timm()
    torch.manual_seed(7)
    return timm.create_model("inception_next_tiny", pretrained=False, num_classes=10).eval()


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradients of a loss over them, in float64 for the comparison."""
    model.zero_grad()
    # oneDNN's own depthwise (1, K) convolutions of half types take minutes on some processors.
    with torch.backends.mkldnn.flags(enabled=x.dtype == torch.float32):
        logits = model(x)
        target = torch.arange(x.shape[0], device=x.device) % 10
        nn.functional.cross_entropy(logits.float(), target).backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().double(), grads


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # the context of mkldnn.flags asks about Intel GPUs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_inception_next(dtype: torch.dtype, layout: torch.memory_format, model: nn.Module, device: str) -> None:
    """Logits and gradients; in bfloat16 both models are held against float64, ours at most a little farther off."""
    theirs = copy.deepcopy(model).to(device, dtype).to(memory_format=layout)
    ours = copy.deepcopy(theirs)
    report = depthconv.convert(ours)
    swapped = [m for m in ours.modules() if type(m) is depthconv.DepthwiseConv2d]
    assert len(report.swapped) == len(swapped) == 18 and all(m.kernel_size == (11, 1) for m in swapped)
    assert not set(report.swapped) & set(report.left) and all(report.left.values())

    size = (4, 3, 224, 224) if device == "cuda" else (2, 3, 64, 64)
    x = torch.randn(size, generator=torch.Generator().manual_seed(8)).to(device, dtype).contiguous(memory_format=layout)
    logits, grads = run(ours, x)
    their_logits, their_grads = run(theirs, x)
    if dtype == torch.float32:
        exact_logits, exact_grads, slack = their_logits, their_grads, 0.0
    else:
        exact_logits, exact_grads = run(copy.deepcopy(theirs).double(), x.double())
        slack = 1.5
    limit = 1e-3 if dtype == torch.float32 else 1e-2
    assert error(logits, exact_logits) <= slack * error(their_logits, exact_logits) + limit
    assert grads.keys() == their_grads.keys()
    for name, exact in exact_grads.items():
        if exact.norm() > 1e-6 * exact.numel() ** 0.5:
            far = error(grads[name], exact)
            assert far <= slack * error(their_grads[name], exact) + limit, f"{name}: {far}"

    back = depthconv.unconvert(ours)
    assert back.swapped == report.swapped
    ours.load_state_dict(model.state_dict())
