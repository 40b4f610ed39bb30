"""`explain`: which kernels would run a problem, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _C
from .ops import as_pair, check_types, padding_from_string


@dataclass(frozen=True)
class Explanation:
    """The plan of one problem. `forward` has a kernel's facts; `backward` has `kernels`, a list of such, on CUDA."""

    problem: dict[str, Any]
    forward: dict[str, Any]
    backward: dict[str, Any]

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"depthwise (K, 1) convolution on {p['device']}, {p['dtype']}: input {p['input_size']} with strides "
            f"{p['input_stride']}, weight {p['weight_size']}, stride {p['stride']}, padding {p['padding']}, "
            f"dilation {p['dilation']}"
        ]
        lines += ["forward", *_kernel_lines(self.forward)]
        gradients = [name for name, wanted in zip(("input", "weight", "bias"), p["output_mask"]) if wanted]
        lines.append(f"backward to {', '.join(gradients)}")
        for kernel in self.backward.get("kernels", [self.backward]):
            lines += _kernel_lines(kernel)
        if self.backward.get("workspace_bytes"):
            lines.append(f"  workspace: {self.backward['workspace_bytes']} bytes")
        return "\n".join(lines)


def _kernel_lines(kernel: dict[str, Any]) -> list[str]:
    facts = [f"{name} {value}" for name, value in kernel.items() if name not in ("kernel", "reason")]
    return [f"  {kernel['kernel']}: {kernel['reason']}"] + ([f"    {', '.join(facts)}"] if facts else [])


def explain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
) -> Explanation:
    """Which kernels `depthwise_conv2d` with these arguments would run forward and backward, and why; it runs none.

    The backward is that of an output gradient in the output's own layout, to input, weight and bias if there is one.
    CUDA plans depend on alignment and on the GPU: give the tensors themselves. Tensors on the meta device are
    planned for a GPU with 132 multiprocessors of capability 9.0.

    Raises what `depthwise_conv2d` raises for these arguments, as far as sizes, dtypes and devices go.
    """
    check_types(input, weight, bias)
    strides, dilations = as_pair("stride", stride), as_pair("dilation", dilation)
    if isinstance(padding, str):
        input, paddings = padding_from_string(input, weight, strides, padding, dilations)
    else:
        paddings = as_pair("padding", padding)
    dtype = str(input.dtype).removeprefix("torch.")
    bias_size = None if bias is None else list(bias.shape)
    sizes_and_strides = (list(input.shape), list(input.stride()), list(weight.shape), list(weight.stride()))
    geometry = _C.geometry(*sizes_and_strides, bias_size, list(strides), list(paddings), list(dilations))

    device = "cuda" if input.device.type in ("cuda", "meta") else input.device.type
    multiprocessors, capability = 132, 90
    if input.device.type == "cuda":
        properties = torch.cuda.get_device_properties(input.device)
        multiprocessors, capability = properties.multi_processor_count, 10 * properties.major + properties.minor
    mask = [True, True, bias is not None]
    plans = {
        direction: _C.plan(
            direction,
            device,
            dtype,
            sizes_and_strides[0],
            sizes_and_strides[1],
            0 if input.is_meta else input.data_ptr() % 16,
            sizes_and_strides[2],
            sizes_and_strides[3],
            list(strides),
            list(paddings),
            list(dilations),
            list(geometry["output_stride"]),
            0,
            mask,
            multiprocessors,
            capability,
        )
        for direction in ("forward", "backward")
    }
    problem = {
        "device": str(input.device),
        "dtype": dtype,
        "input_size": tuple(input.shape),
        "input_stride": tuple(input.stride()),
        "weight_size": tuple(weight.shape),
        "bias": bias is not None,
        "stride": strides,
        "padding": paddings,
        "dilation": dilations,
        "output_mask": tuple(mask),
        "output_size": tuple(geometry["output_size"]),
        "output_stride": tuple(geometry["output_stride"]),
    }
    return Explanation(problem, plans["forward"], plans["backward"])
