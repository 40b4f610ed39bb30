"""Sharding rules of the operators for DTensor. Imported with the first DTensor that arrives, never before.

The rules stand on `depthconv::_forward` and `depthconv::_backward`, which take plain ints: DTensor remembers what it
found for a call by its tensors and by the arguments from the first int on, and lists of ints, which `forward` and
`backward` have, would be left out of that, so that a call with another padding would get the former one's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

Placement = Replicate | Shard | Partial | None
Rule = tuple[list[Placement], list[Placement]]

_forward = torch.ops.depthconv._forward.default
_backward = torch.ops.depthconv._backward.default


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """depthconv::forward of DTensors, below autograd."""
    for tensor in (input, weight, bias):
        if tensor is not None and not isinstance(tensor, DTensor):
            raise RuntimeError(
                "depthconv: input, weight and bias must all be DTensors or all plain tensors: "
                "torch.distributed.tensor.distribute_tensor or distribute_module makes them"
            )
    assert isinstance(input, DTensor)
    height = input.dim() - 2
    for axis, placement in enumerate(input.placements):
        shared = isinstance(placement, Shard) and placement.dim % input.dim() == height
        if shared and input.device_mesh.size(axis) > 1:
            raise RuntimeError(
                f"depthconv: input must not be sharded along its height, but has placements {input.placements}: "
                f"rows at a shard's edge would need those of the next one. Redistribute it first, "
                f"to Shard(0) (the batch), Shard({height - 1}) (the channels) or Replicate()."
            )
    pairs = (stride[0], stride[-1], padding[0], padding[-1], dilation[0], dilation[-1])
    y: Tensor = _forward(input, weight, bias, *pairs)
    return y


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """depthconv::backward of DTensors, below autograd."""
    pairs = (stride[0], stride[-1], padding[0], padding[-1], dilation[0], dilation[-1])
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = _backward(
        grad_output, input, weight, *pairs, *output_mask
    )
    return grads


def _splits_evenly(size: int, mesh: Any) -> bool:
    """Whether `size` comes in equal parts, whichever of the mesh's dimensions share it out and leave each at least one.

    Uneven parts of C and of C * m would not match, and an empty part has no convolution.
    """
    counts = [mesh.size(axis) for axis in range(mesh.ndim)]
    shares = (math.prod(chosen) for count in range(1, len(counts) + 1) for chosen in combinations(counts, count))
    return all(size % share == 0 for share in shares if share <= size)


def _axes(input: Any, stride_w: int, padding_w: int) -> tuple[int | None, int | None, int | None]:
    """The axes of batch, channels and width, or None where this one cannot be shared out."""
    batch = 0 if input.ndim == 4 else None
    channels, width = input.ndim - 3, input.ndim - 1
    # Along the width the kernel sees one column at a time.
    wide = (stride_w, padding_w) == (1, 0) and _splits_evenly(input.shape[width], input.mesh)
    return batch, channels if _splits_evenly(input.shape[channels], input.mesh) else None, width if wide else None


def _forward_rules(
    input: Any, weight: Any, bias: Any, stride_h: int, stride_w: int, padding_h: int, padding_w: int, *dilation: int
) -> list[Rule]:
    batch, channels, width = _axes(input, stride_w, padding_w)

    def rule(y: Placement, x: Placement, w: Placement) -> Rule:
        return [y], [x, w, None if bias is None else w, *[None] * 6]

    rules = [rule(Replicate(), Replicate(), Replicate())]
    if channels is not None:
        rules.append(rule(Shard(channels), Shard(channels), Shard(0)))
    rules += [rule(Shard(axis), Shard(axis), Replicate()) for axis in (batch, width) if axis is not None]
    return rules


def _backward_rules(
    grad_output: Any,
    input: Any,
    weight: Any,
    stride_h: int,
    stride_w: int,
    padding_h: int,
    padding_w: int,
    dilation_h: int,
    dilation_w: int,
    *output_mask: bool,
) -> list[Rule]:
    batch, channels, width = _axes(input, stride_w, padding_w)

    def rule(of_x: Placement, of_w: Placement, x: Placement, w: Placement) -> Rule:
        grads = [each if wanted else None for each, wanted in zip((of_x, of_w, of_w), output_mask)]
        return grads, [x, x, w, *[None] * 9]

    rules = [rule(Replicate(), Replicate(), Replicate(), Replicate())]
    if channels is not None:
        rules.append(rule(Shard(channels), Shard(0), Shard(channels), Shard(0)))
    # Each holds the sum over its own part of the batch or of the columns.
    rules += [rule(Shard(axis), Partial(), Shard(axis), Replicate()) for axis in (batch, width) if axis is not None]
    return rules


register_sharding(_forward)(_forward_rules)
register_sharding(_backward)(_backward_rules)
