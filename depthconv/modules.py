"""`DepthwiseConv1d`, `DepthwiseConv2d`: nn.Conv1d and nn.Conv2d in everything but the convolution itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from .ops import causal_conv1d, depthwise_conv1d, depthwise_conv2d, same_padding


if TYPE_CHECKING:

    def _scripted(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> Tensor: ...

else:

    def _scripted(
        input: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
    ) -> Tensor:
        """The operator, for TorchScript, which turns tuples into lists and knows no Sequence."""
        return torch.ops.depthconv.forward(input, weight, bias, stride, padding, dilation)


def _groups(in_channels: int, groups: int | None) -> int:
    if groups is not None and groups != in_channels:
        raise ValueError(
            f"depthconv: groups must equal in_channels, {in_channels} (a depthwise convolution), or be left out, "
            f"but got {groups}"
        )
    return in_channels


class DepthwiseConv2d(nn.Conv2d):
    """Depthwise convolution with a kernel of height K and width 1, in the place of the `nn.Conv2d` with its arguments.

    Args:
        in_channels: C.
        out_channels: C * m.
        kernel_size: (K, 1). A single int is both axes, as in nn.Conv2d, so that only 1 is possible.
        stride, padding, dilation: as in nn.Conv2d, 'same' and 'valid' included; a single int is both axes.
        groups: C; may be left out.
        bias, padding_mode, device, dtype: as in nn.Conv2d, all four padding modes included.

    Shapes: (N, C, H, W) -> (N, C * m, H_out, W_out), or both without N; see `depthwise_conv2d`. weight is
    (C * m, 1, K, 1) and bias (C * m), initialised as nn.Conv2d does; a state_dict goes both ways.

    Raises ValueError where the arguments make no depthwise (K, 1) convolution, and what nn.Conv2d itself raises.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int | None = None,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        groups = _groups(in_channels, groups)
        # Not K for (K, 1): in the nn.Conv2d that this takes the place of, K is (K, K).
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        if height < 1 or width != 1:
            raise ValueError(f"depthconv: kernel_size must be (K, 1) with K at least 1, but got {kernel_size}")
        super().__init__(
            in_channels,
            out_channels,
            (height, width),
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            dilation,  # type: ignore[arg-type]
            groups,
            bias,
            padding_mode,  # type: ignore[arg-type]
            device,
            dtype,
        )

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_scripting():  # what follows is TorchScript, without the function's checks in Python
            if self.padding_mode != "zeros":
                input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                return _scripted(input, weight, bias, self.stride, (0, 0), self.dilation)
            if isinstance(self.padding, str):
                input = F.pad(input, self._reversed_padding_repeated_twice)
                return _scripted(input, weight, bias, self.stride, (0, 0), self.dilation)
            else:
                return _scripted(input, weight, bias, self.stride, self.padding, self.dilation)
        else:
            if self.padding_mode != "zeros":
                input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                return depthwise_conv2d(input, weight, bias, self.stride, 0, self.dilation)
            padding = self.padding
            if padding == "same" and (not isinstance(input, Tensor) or input.dim() in (3, 4)):
                # Not left to the function, which would look at the weight: torch.fx knows no sizes.
                input, padding = same_padding(input, self.dilation[0] * (self.kernel_size[0] - 1))
            return depthwise_conv2d(input, weight, bias, self.stride, padding, self.dilation)


class DepthwiseConv1d(nn.Conv1d):
    """Depthwise convolution along one axis, in the place of the `nn.Conv1d` with its arguments.

    Args:
        in_channels: C.
        out_channels: C * m.
        kernel_size: K.
        stride, padding, dilation: as in nn.Conv1d, 'same' and 'valid' included. padding='causal', which nn.Conv1d does
            not have, puts dilation * (K - 1) zeros on the left alone: y[..., l] reads no input beyond l * stride.
        groups: C; may be left out.
        bias, padding_mode, device, dtype: as in nn.Conv1d, all four padding modes included ('causal' with zeros only).

    Shapes: (N, C, L) -> (N, C * m, L_out), or both without N; see `depthwise_conv1d`. weight is (C * m, 1, K) and bias
    (C * m), initialised as nn.Conv1d does; a state_dict goes both ways.

    Raises ValueError where the arguments make no depthwise convolution, and what nn.Conv1d itself raises.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int | None = None,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        causal = padding == "causal"
        if causal and padding_mode != "zeros":
            raise ValueError(f"depthconv: padding='causal' goes with padding_mode='zeros', but got {padding_mode!r}")
        taps = kernel_size if isinstance(kernel_size, int) else kernel_size[0] if len(kernel_size) == 1 else 0
        if taps < 1:
            raise ValueError(f"depthconv: kernel_size must be an int, at least 1, but got {kernel_size}")
        super().__init__(
            in_channels,
            out_channels,
            taps,
            stride,  # type: ignore[arg-type]
            0 if causal else padding,  # type: ignore[arg-type]
            dilation,  # type: ignore[arg-type]
            _groups(in_channels, groups),
            bias,
            padding_mode,  # type: ignore[arg-type]
            device,
            dtype,
        )
        if causal:
            self.padding = "causal"

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_scripting():
            stride, dilation = (self.stride[0], 1), (self.dilation[0], 1)
            taps = weight.unsqueeze(-1)
            if self.padding_mode != "zeros":
                input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                return _scripted(input.unsqueeze(-1), taps, bias, stride, (0, 0), dilation).squeeze(-1)
            if isinstance(self.padding, str):
                zeros = self._reversed_padding_repeated_twice
                if self.padding == "causal":
                    zeros = [self.dilation[0] * (self.kernel_size[0] - 1), 0]
                input = F.pad(input, zeros)
                return _scripted(input.unsqueeze(-1), taps, bias, stride, (0, 0), dilation).squeeze(-1)
            else:
                sides = (self.padding[0], 0)
                return _scripted(input.unsqueeze(-1), taps, bias, stride, sides, dilation).squeeze(-1)
        else:
            if self.padding_mode != "zeros":
                input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                return depthwise_conv1d(input, weight, bias, self.stride, 0, self.dilation)
            if self.padding == "causal":
                return causal_conv1d(input, weight, bias, self.stride[0], self.dilation[0], self.kernel_size[0])
            if self.padding == "same":  # as in DepthwiseConv2d
                total = self.dilation[0] * (self.kernel_size[0] - 1)
                input = F.pad(input, (0, 1)) if total % 2 else input
                return depthwise_conv1d(input, weight, bias, self.stride, total // 2, self.dilation)
            return depthwise_conv1d(input, weight, bias, self.stride, self.padding, self.dilation)
