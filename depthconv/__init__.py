"""Depthwise (K, 1) convolution for PyTorch, on CPU and CUDA.

`depthwise_conv2d` and `DepthwiseConv2d`: input (N, C, H, W) or (C, H, W), weight (C * multiplier, 1, K, 1).
`depthwise_conv1d` and `DepthwiseConv1d`: the same of width 1, input (N, C, L) or (C, L), weight (C * multiplier, 1, K).
`convert` puts them into a model that has nn.Conv2d and nn.Conv1d, `unconvert` takes them out. `explain` names the
kernels of a problem; `build_info` says how this build was made.
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
    """How this build was made (versions, compilers, architectures, flags), and the CPU instruction set picked here."""
    return dict(_C.build_info())
