"""Types of the native module, csrc/binding.cpp."""

from collections.abc import Sequence
from typing import Any

def build_info() -> dict[str, Any]: ...
def geometry(
    input_size: Sequence[int],
    input_stride: Sequence[int],
    weight_size: Sequence[int],
    weight_stride: Sequence[int],
    bias_size: Sequence[int] | None = ...,
    stride: Sequence[int] = ...,
    padding: Sequence[int] = ...,
    dilation: Sequence[int] = ...,
) -> dict[str, Any]: ...
def plan(
    direction: str,
    device: str,
    dtype: str,
    input_size: Sequence[int],
    input_stride: Sequence[int],
    input_offset_bytes: int,
    weight_size: Sequence[int],
    weight_stride: Sequence[int],
    stride: Sequence[int] = ...,
    padding: Sequence[int] = ...,
    dilation: Sequence[int] = ...,
    grad_output_stride: Sequence[int] | None = ...,
    grad_output_offset_bytes: int = ...,
    output_mask: Sequence[bool] = ...,
    multiprocessors: int = ...,
    capability: int = ...,
) -> dict[str, Any]: ...
