"""`DepthwiseConv2d`: nn.Conv2d in everything but the convolution itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .ops import depthwise_conv2d


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
        if groups is None:
            groups = in_channels
        if groups != in_channels:
            raise ValueError(
                f"depthconv: groups must equal in_channels, {in_channels} (a depthwise convolution), or be left out, "
                f"but got {groups}"
            )
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
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            return depthwise_conv2d(input, weight, bias, self.stride, 0, self.dilation)
        return depthwise_conv2d(input, weight, bias, self.stride, self.padding, self.dilation)
