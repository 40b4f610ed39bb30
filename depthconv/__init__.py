"""Depthwise (K, 1) convolution for PyTorch, on CPU and CUDA.

Shapes are (N, C, H, W) or (C, H, W); the weight is (C * multiplier, 1, K, 1). See `depthwise_conv2d`.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

try:
    from . import _C  # loads the operators that lie beside it
except ImportError as error:
    import torch

    raise ImportError(
        f"depthconv {__version__}: its native module depthconv._C did not load under torch {torch.__version__}"
        f"{'' if torch.version.cuda is None else f' (CUDA {torch.version.cuda})'}; it needs torch >= 2.10 and a build "
        f"for this Python ({error}). Reinstall it with `pip install .` from its sources, or import it from a folder "
        f"that is not a clone of them."
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
