"""Depthwise (K, 1) convolution for PyTorch, on CPU and CUDA.

Shapes are (N, C, H, W) or (C, H, W); the weight is (C * multiplier, 1, K, 1). See `depthwise_conv2d`.
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
from .modules import DepthwiseConv2d
from .ops import depthwise_conv2d

__all__ = [
    "ConversionReport",
    "DepthwiseConv2d",
    "Explanation",
    "__version__",
    "build_info",
    "convert",
    "depthwise_conv2d",
    "explain",
    "unconvert",
]


def build_info() -> dict[str, Any]:
    """How this build was made (versions, architectures, flags), and the CPU instruction set picked on this machine."""
    return dict(_C.build_info())
