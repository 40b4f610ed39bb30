"""Depthwise (K, 1) convolution for PyTorch, on CPU and CUDA.

`depthwise_conv2d` and `DepthwiseConv2d`: input (N, C, H, W) or (C, H, W), weight (C * multiplier, 1, K, 1).
`depthwise_conv1d` and `DepthwiseConv1d`: the same of width 1, input (N, C, L) or (C, L), weight (C * multiplier, 1, K).
`convert` puts them into a model that has nn.Conv2d and nn.Conv1d, `unconvert` takes them out. `explain` names the
kernels of a problem; `build_info` says how this build was made.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

__version__ = "0.1.0"


def _what_is_wrong(error: Exception) -> str:
    """The error, and what the built file says of itself, read from its bytes since it does not load."""
    folder = Path(__file__).parent
    built = sorted(folder.glob("_C*.so"))
    if not built:
        return f"there is no built _C in {folder}"
    text = f"{error.__cause__ or error}; {built[0].name} "
    found = re.search(rb'\{"version": [^\0]*\}', built[0].read_bytes())
    if found is None:
        return text + "has no readable build record"
    record = json.loads(found[0])
    names = ("version", "torch", "torch_target", "cuda", "architectures")
    return text + "was built as " + ", ".join(f"{name} {record.get(name)}" for name in names)


try:
    from . import _C  # loads the operators that lie beside it
except (ImportError, OSError) as error:
    raise ImportError(
        f"depthconv {__version__} could not load its native module under torch {torch.__version__} "
        f"(CUDA {torch.version.cuda}) and Python {sys.version.split()[0]}: {_what_is_wrong(error)}; "
        f"it needs torch >= 2.10 and a build for this Python."
    ) from error

from .convert import ConversionReport, convert, unconvert
from .explain import Explanation, explain
from .modules import DepthwiseConv1d, DepthwiseConv2d
from .ops import depthwise_conv1d, depthwise_conv2d

__all__ = [
    "ConversionReport",
    "DepthwiseConv1d",
    "DepthwiseConv2d",
    "Explanation",
    "__version__",
    "build_info",
    "convert",
    "depthwise_conv1d",
    "depthwise_conv2d",
    "explain",
    "unconvert",
]


def build_info() -> dict[str, Any]:
    """How this build was made (versions, architectures, flags), and the CPU instruction set picked on this machine."""
    return dict(_C.build_info())
