"""Depthwise (K, 1) convolution for PyTorch, on CPU and CUDA.

Shapes are (N, C, H, W) or (C, H, W); the weight is (C * multiplier, 1, K, 1). See `depthwise_conv2d`.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

__version__ = "0.1.0"

_OLDEST_TORCH = (2, 10)

if tuple(map(int, re.findall(r"\d+", str(torch.__version__))[:2])) < _OLDEST_TORCH:
    raise ImportError(f"depthconv {__version__} needs torch >= 2.10, but here is torch {torch.__version__}.")

try:
    from . import _C  # loads the operators that lie beside it
except (ImportError, OSError) as error:
    from ._load_failure import explain_load_failure

    raise ImportError(
        f"depthconv {__version__} could not load its native module under torch {torch.__version__} "
        f"(CUDA {torch.version.cuda}) and Python {sys.version.split()[0]}: {explain_load_failure(error)}"
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
    """How this build was made (versions, compilers, architectures, flags), and the CPU instruction set picked here."""
    return dict(_C.build_info())
