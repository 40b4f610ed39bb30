"""The operators in PyTorch: fake kernels, autograd, autocast and vmap of `torch.ops.depthconv`, and the function.

`depthconv::forward` and `depthconv::backward` are fully registered and are what torch.compile, torch.export,
torch.func, tensor subclasses and dispatch modes see. `depthwise_conv2d` on plain tensors in eager mode goes past all
that to `depthconv::_forward` and `depthconv::_backward`, the same kernels without any registration, at a fraction of
the host time.

Private names of torch used here, all of them also used by torch.library or torch.autograd.function themselves:
- torch._C._are_functorch_transforms_active, _len_torch_dispatch_stack, _is_torch_function_mode_enabled,
  _get_tracing_state, _is_any_autocast_enabled, torch.autograd.forward_ad._current_level: whether the short way is open;
- OpOverload._op: the operator's C function, without OpOverload's Python call around it;
- torch._C._AutoDispatchBelowAutograd, _ExcludeDispatchKeyGuard: a kernel's call of its own operator further down;
- __script_unsupported, an attribute of a function: the sentence that torch.jit.script then raises;
- torch.autograd.function._SingleLevelFunction, torch._functorch.utils.enable_single_level_autograd_function,
  torch._C._functorch.unwrap_if_dead, torch.autograd.forward_ad._set_fwd_grad_enabled: autograd for one level of
  torch.func, as ATen's own operators have it.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch._C._functorch import unwrap_if_dead
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from . import _geometry

Pair = tuple[int, int]
Mask = Sequence[bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

# The package has imported _C before, which loads the operators.
_forward: Callable[..., Tensor] = torch.ops.depthconv._forward.default._op
_backward: Callable[..., Gradients] = torch.ops.depthconv._backward.default._op
_public_forward: Callable[..., Tensor] = torch.ops.depthconv.forward.default
_public_backward: Callable[..., Gradients] = torch.ops.depthconv.backward.default

_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_tracing_state = torch._C._get_tracing_state
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled

# The dispatcher leaves out trailing arguments that equal their defaults: kernels have to accept a missing tail.
_ONE, _ZERO = (1, 1), (0, 0)

# Exactly these types: a subclass (FakeTensor, DTensor, ...) has to see the public operator.
_PLAIN = frozenset({Tensor, Parameter})


# ---- the short way -------------------------------------------------------------------------------------------------


def check_types(input: Any, weight: Any, bias: Any) -> None:
    """TypeError for what is no tensor."""
    for argument, value in (("input", input), ("weight", weight), ("bias", bias)):
        # Tensor-likes (a torch.fx.Proxy) come through: the operator hands them to their own __torch_function__.
        if isinstance(value, Tensor) or hasattr(value, "__torch_function__") or (argument == "bias" and value is None):
            continue
        expected = "a torch.Tensor or None" if argument == "bias" else "a torch.Tensor"
        raise TypeError(f"depthconv: {argument} must be {expected}, but got {type(value).__name__}")


def _watched() -> bool:
    """Whether something wants to see the public operator: torch.func, a mode, a tracer."""
    return bool(
        _are_functorch_transforms_active() or _dispatch_modes() or _function_modes() or _tracing_state() is not None
    )


def _run_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The convolution by the cheapest way that is right here. Autocast is the caller's."""
    if (
        type(input) not in _PLAIN
        or type(weight) not in _PLAIN
        or (bias is not None and type(bias) not in _PLAIN)
        or _are_functorch_transforms_active()
        or _dispatch_modes()
        or _function_modes()
        or _tracing_state() is not None
    ):
        check_types(input, weight, bias)
        if torch.is_inference_mode_enabled() and _sharded(input, weight, bias):
            # Inference tensors go past the autograd kernel, which is where DTensors are told apart.
            return _lower_forward(input, weight, bias, stride, padding, dilation)
        return _public_forward(input, weight, bias, stride, padding, dilation)
    try:
        if (
            _is_grad_enabled()
            and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        ) or forward_ad._current_level >= 0:
            bias = None if bias is None else unwrap_if_dead(bias)
            return _EagerForward.apply(
                unwrap_if_dead(input), unwrap_if_dead(weight), bias, stride, padding, dilation
            )
        # Indices, not stars: a call with stars builds a list and a tuple first.
        return _forward(
            input, weight, bias, stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1]
        )
    except NotImplementedError:  # no kernel for this device: meta has one on the public operator, others a clear error
        return _public_forward(input, weight, bias, stride, padding, dilation)


def _run_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, mask: Mask
) -> Gradients:
    """The gradients by the cheapest way that is right here."""
    if type(grad_output) not in _PLAIN or type(input) not in _PLAIN or type(weight) not in _PLAIN or _watched():
        return _public_backward(grad_output, input, weight, stride, padding, dilation, mask)
    try:
        if (
            _is_grad_enabled() and (grad_output.requires_grad or input.requires_grad or weight.requires_grad)
        ) or forward_ad._current_level >= 0:
            tensors = (unwrap_if_dead(grad_output), unwrap_if_dead(input), unwrap_if_dead(weight))
            return _EagerBackward.apply(*tensors, stride, padding, dilation, mask)
        return _backward(grad_output, input, weight, *stride, *padding, *dilation, *mask)
    except NotImplementedError:
        return _public_backward(grad_output, input, weight, stride, padding, dilation, mask)


# ---- derivatives ---------------------------------------------------------------------------------------------------
# The convolution is linear in (weight, bias) and in input, the gradients in grad_output and in one of the two each. So
# every derivative, of any order and in both modes, is made of the two operators.


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _over_output(bias: Tensor, like: Tensor) -> Tensor:
    """(C_out) spread over the size of an output."""
    return bias[:, None, None].expand(like.shape)


class _ForwardRules:
    """Derivatives of forward(input, weight, bias, stride, padding, dilation)."""

    if TYPE_CHECKING:
        apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        mask = ctx.needs_input_grad[:3]
        if grad_output is None:
            return (None,) * 6
        input, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        return (*_run_backward(grad_output, input, weight, stride, padding, dilation, mask), None, None, None)

    @staticmethod
    def jvp(
        ctx: Any, input_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, *_: None
    ) -> Tensor | None:
        input, weight = ctx.saved_tensors
        from_input = from_weight = None
        if input_t is not None:
            from_input = _run_forward(input_t, weight, None, *ctx.geometry)
        if weight_t is not None:
            from_weight = _run_forward(input, weight_t, bias_t, *ctx.geometry)
        elif bias_t is not None:
            # A weight of zeros, for the output's size and layout.
            from_weight = _run_forward(input, torch.zeros_like(weight), bias_t, *ctx.geometry)
        return _add(from_input, from_weight)


class _BackwardRules:
    """Derivatives of backward(grad_output, input, weight, stride, padding, dilation, output_mask)."""

    if TYPE_CHECKING:
        apply: ClassVar[Callable[..., Gradients]]

    @staticmethod
    def backward(
        ctx: Any, of_input: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_output, input, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        to_grad_output, to_input, to_weight = ctx.needs_input_grad[:3]
        out: list[Tensor | None] = [None] * 7
        if to_grad_output:
            if of_input is not None:
                out[0] = _run_forward(of_input, weight, None, *ctx.geometry)
            if of_weight is not None:
                out[0] = _add(out[0], _run_forward(input, of_weight, of_bias, *ctx.geometry))
            elif of_bias is not None:
                out[0] = _add(out[0], _over_output(of_bias, grad_output))
        if to_input and of_weight is not None:
            out[1] = _run_backward(grad_output, input, of_weight, stride, padding, dilation, (True, False, False))[0]
        if to_weight and of_input is not None:
            out[2] = _run_backward(grad_output, of_input, weight, stride, padding, dilation, (False, True, False))[1]
        return tuple(out)

    @staticmethod
    def jvp(
        ctx: Any, grad_output_t: Tensor | None, input_t: Tensor | None, weight_t: Tensor | None, *_: None
    ) -> Gradients:
        grad_output, input, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        mask = ctx.output_mask
        out: list[Tensor | None] = [None, None, None]
        if grad_output_t is not None:
            out = list(_run_backward(grad_output_t, input, weight, stride, padding, dilation, mask))
        if weight_t is not None and mask[0]:
            by_weight = _run_backward(grad_output, input, weight_t, stride, padding, dilation, (True, False, False))
            out[0] = _add(out[0], by_weight[0])
        if input_t is not None and mask[1]:
            by_input = _run_backward(grad_output, input_t, weight, stride, padding, dilation, (False, True, False))
            out[1] = _add(out[1], by_input[1])
        # PyTorch wants a tangent for every output that is a tensor.
        like = (input, weight, weight[:, 0, 0, 0])
        full = [torch.zeros_like(t) if wanted and o is None else o for o, wanted, t in zip(out, mask, like)]
        return full[0], full[1], full[2]


def _save(ctx: Any, tensors: tuple[Tensor, ...], geometry: tuple[Pair, Pair, Pair]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.geometry = geometry


class _EagerForward(_ForwardRules, _SingleLevelFunction):
    """Plain tensors outside torch.func.

    Its apply is the one in C++: torch.autograd.Function's looks for torch.func and for its dead wrappers first, in
    Python, and costs as much again. What it looks for has been looked for here.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.geometry = (stride, padding, dilation)
        if forward_ad._current_level >= 0:
            ctx.set_materialize_grads(False)
            ctx.save_for_forward(input, weight)
        return _forward(input, weight, bias, *stride, *padding, *dilation)


class _EagerBackward(_BackwardRules, _SingleLevelFunction):
    """The same for the gradients, when their own derivative is to be recorded."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        output_mask: Mask,
    ) -> Gradients:
        _save(ctx, (grad_output, input, weight), (stride, padding, dilation))
        ctx.output_mask = output_mask
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(grad_output, input, weight)
        return _backward(grad_output, input, weight, *stride, *padding, *dilation, *output_mask)


def _sharded(*tensors: Tensor | None) -> bool:
    """Whether one is a DTensor. No cost for who has none: theirs is a module that nobody has imported then."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def _lower_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = _ONE,
    padding: Sequence[int] = _ZERO,
    dilation: Sequence[int] = _ONE,
) -> Tensor:
    """depthconv::forward from below autograd."""
    if _sharded(input, weight, bias):
        from . import _sharding

        return _sharding.forward(input, weight, bias, stride, padding, dilation)
    return _public_forward(input, weight, bias, stride, padding, dilation)


def _lower_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_mask: Mask,
) -> Gradients:
    """depthconv::backward from below autograd."""
    if _sharded(grad_output, input, weight):
        from . import _sharding

        return _sharding.backward(grad_output, input, weight, stride, padding, dilation, output_mask)
    return _public_backward(grad_output, input, weight, stride, padding, dilation, output_mask)


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """For an autograd kernel's call of its own operator. The outer levels of torch.func go on recording there."""
    with torch._C._AutoDispatchBelowAutograd():
        if _are_functorch_transforms_active():
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                yield
        else:
            yield


class _RegisteredForward(_ForwardRules, _SingleLevelFunction):
    """The autograd of depthconv::forward, at one level of torch.func or outside it."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with _below_autograd():
            return _lower_forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, *geometry = inputs
        _save(ctx, (input, weight), tuple(geometry))
        ctx.save_for_forward(input, weight)


class _RegisteredBackward(_BackwardRules, _SingleLevelFunction):
    """The autograd of depthconv::backward, at one level of torch.func or outside it."""

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        with _below_autograd():
            return _lower_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        grad_output, input, weight, *geometry, output_mask = inputs
        _save(ctx, (grad_output, input, weight), tuple(geometry))
        ctx.output_mask = output_mask
        ctx.save_for_forward(grad_output, input, weight)


def _records(*tensors: Tensor | None) -> bool:
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return _is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _autograd_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = _ONE,
    padding: Sequence[int] = _ZERO,
    dilation: Sequence[int] = _ONE,
) -> Tensor:
    arguments = (input, weight, bias, stride, padding, dilation)
    if not _records(input, weight, bias):
        with torch._C._AutoDispatchBelowAutograd():
            return _lower_forward(*arguments)
    with enable_single_level_autograd_function():
        return _RegisteredForward.apply(*arguments)


def _autograd_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_mask: Mask,
) -> Gradients:
    arguments = (grad_output, input, weight, stride, padding, dilation, output_mask)
    if not _records(grad_output, input, weight):
        with torch._C._AutoDispatchBelowAutograd():
            return _lower_backward(*arguments)
    with enable_single_level_autograd_function():
        return _RegisteredBackward.apply(*arguments)


# ---- fake kernels --------------------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _check_tensors(input: Tensor, **others: Tensor | None) -> None:
    """Device and dtype, which the operators check before any size."""

    def name(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    if input.dtype not in _DTYPES:
        raise RuntimeError(
            f"depthconv: input must be float32, float64, float16 or bfloat16, but got {name(input.dtype)}"
        )
    for argument, tensor in others.items():
        if tensor is None:
            continue
        if tensor.device != input.device:
            raise RuntimeError(
                f"depthconv: {argument} must be on the same device as input, {input.device}, but got {tensor.device}"
            )
        if tensor.dtype != input.dtype:
            raise RuntimeError(
                f"depthconv: {argument} must have the same dtype as input, {name(input.dtype)}, "
                f"but got {name(tensor.dtype)}"
            )


def _geometry_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[_geometry.Int]
) -> _geometry.Geometry:
    bias_size = None if bias is None else bias.shape
    return _geometry.geometry(input.shape, input.stride(), weight.shape, weight.stride(), bias_size, *geometry)


def _fake_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = _ONE,
    padding: Sequence[int] = _ZERO,
    dilation: Sequence[int] = _ONE,
) -> Tensor:
    _check_tensors(input, weight=weight, bias=bias)
    g = _geometry_of(input, weight, bias, stride, padding, dilation)
    return input.new_empty_strided(g.output_size, g.output_stride)


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_mask: Mask,
) -> Gradients:
    _check_tensors(input, weight=weight, grad_output=grad_output)
    g = _geometry_of(input, weight, None, stride, padding, dilation)
    if len(grad_output.shape) != len(g.output_size) or any(a != b for a, b in zip(grad_output.shape, g.output_size)):
        raise RuntimeError(
            f"depthconv: grad_output must have the output's size, {list(g.output_size)}, "
            f"but got {list(grad_output.shape)}"
        )
    return (
        input.new_empty_strided(input.shape, g.grad_input_stride) if output_mask[0] else None,
        input.new_empty_strided(weight.shape, g.grad_weight_stride) if output_mask[1] else None,
        input.new_empty_strided((weight.shape[0],), (1,)) if output_mask[2] else None,
    )


def _fake_plain_forward(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: int) -> Tensor:
    return _fake_forward(input, weight, bias, geometry[0:2], geometry[2:4], geometry[4:6])


def _fake_plain_backward(grad_output: Tensor, input: Tensor, weight: Tensor, *rest: int) -> Gradients:
    mask = (bool(rest[6]), bool(rest[7]), bool(rest[8]))
    return _fake_backward(grad_output, input, weight, rest[0:2], rest[2:4], rest[4:6], mask)


# ---- autocast ------------------------------------------------------------------------------------------------------


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _cast(
    device: str, input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tensors as autocast has them for a convolution: floating ones, except float64, in the context's dtype."""
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:
        if t.device.type == device and t.is_floating_point() and t.dtype != torch.float64:
            return t.to(dtype)
        return t

    return cast(input), cast(weight), None if bias is None else cast(bias)


def _autocast_kernel(device: str, key: torch._C.DispatchKey) -> Callable[..., Tensor]:
    # Not torch.library.register_autocast, which knows one fixed dtype a device.
    def kernel(input: Tensor, weight: Tensor, bias: Tensor | None = None, *geometry: Sequence[int]) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return _public_forward(*_cast(device, input, weight, bias), *geometry)

    return kernel


# ---- vmap ----------------------------------------------------------------------------------------------------------
# A vmapped axis is folded into the batch where the weight is shared, else into the channels: there a filter of its own
# for each is what a depthwise convolution has anyway.


def _to_front(tensor: Tensor, axis: int | None, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def _fold(tensor: Tensor, into: int) -> Tensor:
    """(B, ...) with axis 0 merged into the axis that was `into` without it."""
    return tensor.movedim(0, into).flatten(into, into + 1)


def _unfold(tensor: Tensor, count: int, outof: int) -> Tensor:
    unfolded: Tensor = tensor.unflatten(outof, (count, -1))
    return unfolded.movedim(outof, 0)


def _vmap_forward(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *geometry: Sequence[int],
) -> tuple[Tensor, int]:
    count = info.batch_size
    bias_dim = in_dims[2] if bias is not None else None
    input = _to_front(input, in_dims[0], count)
    unbatched = input.dim() == 4
    if in_dims[1] is None and bias_dim is None:
        if unbatched:
            return _public_forward(input, weight, bias, *geometry), 0
        return _unfold(_public_forward(_fold(input, 0), weight, bias, *geometry), count, 0), 0
    channels = 0 if unbatched else 1
    weight = _fold(_to_front(weight, in_dims[1], count), 0)
    if bias is not None:
        bias = _fold(_to_front(bias, bias_dim, count), 0)
    return _unfold(_public_forward(_fold(input, channels), weight, bias, *geometry), count, channels), 0


def _vmap_backward(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_mask: Mask,
) -> tuple[Gradients, tuple[int | None, int | None, int | None]]:
    count = info.batch_size
    rest = (stride, padding, dilation, output_mask)
    grad_output = _to_front(grad_output, in_dims[0], count)
    input = _to_front(input, in_dims[1], count)
    unbatched = input.dim() == 4
    if in_dims[2] is None and not output_mask[1] and not output_mask[2]:
        if not unbatched:
            grad_output, input = _fold(grad_output, 0), _fold(input, 0)
        grad_input = _public_backward(grad_output, input, weight, *rest)[0]
        if grad_input is not None and not unbatched:
            grad_input = _unfold(grad_input, count, 0)
        return (grad_input, None, None), (0, None, None)
    channels = 0 if unbatched else 1
    weight = _fold(_to_front(weight, in_dims[2], count), 0)
    found = _public_backward(_fold(grad_output, channels), _fold(input, channels), weight, *rest)
    axes = (channels, 0, 0)
    grads = [None if grad is None else _unfold(grad, count, axis) for grad, axis in zip(found, axes)]
    return (grads[0], grads[1], grads[2]), (0, 0, 0)


# ---- registration --------------------------------------------------------------------------------------------------

_library = torch.library.Library("depthconv", "FRAGMENT")
torch.library.register_fake("depthconv::forward", _fake_forward, lib=_library)
torch.library.register_fake("depthconv::backward", _fake_backward, lib=_library)
# For DTensor, which asks for the size of what it shares out.
torch.library.register_fake("depthconv::_forward", _fake_plain_forward, lib=_library)
torch.library.register_fake("depthconv::_backward", _fake_plain_backward, lib=_library)
torch.library.register_vmap("depthconv::forward", _vmap_forward, lib=_library)
torch.library.register_vmap("depthconv::backward", _vmap_backward, lib=_library)
# Not torch.library.register_autograd: it drops the tangents of forward-mode AD without a word and refuses torch.func.
_library.impl("forward", _autograd_forward, "Autograd")
_library.impl("backward", _autograd_backward, "Autograd")
# backward has none, as ATen's convolution_backward has none: it takes what the forward saved.
_library.impl("forward", _autocast_kernel("cpu", torch._C.DispatchKey.AutocastCPU), "AutocastCPU")
_library.impl("forward", _autocast_kernel("cuda", torch._C.DispatchKey.AutocastCUDA), "AutocastCUDA")


# ---- the function --------------------------------------------------------------------------------------------------


def as_pair(argument: str, value: Any) -> Pair:
    """An int or a pair of ints (height, width) as a pair; TypeError or ValueError naming the argument otherwise."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    ints = []
    for each in values:
        if not isinstance(each, SymInt):  # a SymInt stays one
            if isinstance(each, (bool, Tensor)) or not hasattr(each, "__index__"):
                raise TypeError(
                    f"depthconv: {argument} must be an int or a pair of ints (height, width), but got {value!r}"
                )
            each = operator.index(each)
        ints.append(each)
    if len(ints) not in (1, 2):
        raise ValueError(
            f"depthconv: {argument} must be an int or a pair of ints (height, width), but got {value!r}"
        )
    return ints[0], ints[-1]


def padding_from_string(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: str, dilation: Sequence[int]
) -> tuple[Tensor, Pair]:
    """'valid' or 'same': the input, for 'same' with a row more at the bottom where the sum is odd, and the padding."""
    if padding not in ("same", "valid"):
        raise ValueError(f"depthconv: padding must be an int, a pair of ints, 'same' or 'valid', but got {padding!r}")
    # With a rank that is wrong anyway, nothing is padded: the operator says what is wrong.
    if padding == "valid" or weight.dim() != 4 or input.dim() not in (3, 4):
        return input, (0, 0)
    if stride[0] != 1 or stride[1] != 1:
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    return same_padding(input, dilation[0] * (_constant(weight.shape[2]) - 1))


def same_padding(input: Tensor, total: int) -> tuple[Tensor, Pair]:
    """`total` rows of zeros, half of them above and half below: the input, with the odd one below, and the padding."""
    if total % 2:
        input = F.pad(input, (0, 0, 0, 1))
    return input, (total // 2, 0)


def _constant(size: int) -> int:
    """A kernel's size, which torch.jit.trace would have as a tensor."""
    if not isinstance(size, Tensor):
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return int(size)


def depthwise_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Depthwise convolution with a kernel of height K and width 1, as `F.conv2d` with groups = C computes it.

    y[n, co, h, w] = bias[co] + sum over k of
    weight[co, 0, k, 0] * input[n, co // m, h * stride_h + k * dilation_h - padding_h, w * stride_w - padding_w],
    with zeros outside the input.

    Args:
        input: (N, C, H, W) or (C, H, W); float32, float64, float16 or bfloat16, on the CPU or a CUDA device; strides
            as they come.
        weight: (C * m, 1, K, 1) with m >= 1 filters a channel; dtype and device of input.
        bias: (C * m) or None.
        stride, dilation: an int or a pair (height, width), at least 1. The dilation of the width has no effect.
        padding: an int or a pair (height, width) of zeros on both sides, at least 0; 'valid' for none; 'same' for an
            output of the input's size (stride 1 only). 'same' pads dilation_h * (K - 1) rows and no columns; where that
            is odd, the extra row is at the bottom, as in `F.conv2d`, and costs a padded copy of the input.

    Returns:
        (N, C * m, H_out, W_out), or without N: H_out = (H + 2 * padding_h - dilation_h * (K - 1) - 1) // stride_h + 1,
        W_out = (W + 2 * padding_w - 1) // stride_w + 1. channels_last where input is 4-D and channels_last (and not
        contiguous as well), else contiguous. Under autocast it has the context's dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong type or with the wrong number of values.
        RuntimeError: sizes, dtypes or devices that do not fit each other; the message names the argument.
    """
    # What is usual is tested first, and here: the whole call, its kernel launched, has ten microseconds of host time.
    if type(stride) is int:
        stride = (stride, stride)
    elif not (type(stride) is tuple and len(stride) == 2 and type(stride[0]) is int and type(stride[1]) is int):
        stride = as_pair("stride", stride)
    if type(dilation) is int:
        dilation = (dilation, dilation)
    elif not (type(dilation) is tuple and len(dilation) == 2 and type(dilation[0]) is int and type(dilation[1]) is int):
        dilation = as_pair("dilation", dilation)
    if type(padding) is int:
        padding = (padding, padding)
    elif type(padding) is str:
        check_types(input, weight, bias)
        input, padding = padding_from_string(input, weight, stride, padding, dilation)
    elif not (type(padding) is tuple and len(padding) == 2 and type(padding[0]) is int and type(padding[1]) is int):
        padding = as_pair("padding", padding)

    # Enough for torch.export too: without dynamo, its tensors are of a class of their own.
    if is_dynamo_compiling():
        return _public_forward(input, weight, bias, stride, padding, dilation)
    if _is_any_autocast_enabled():
        check_types(input, weight, bias)
        device = input.device.type
        if device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
            input, weight, bias = _cast(device, input, weight, bias)
    return _run_forward(input, weight, bias, stride, padding, dilation)


# torch.jit.script would stop at an annotation or a statement of the function that it cannot read.
_IN_SCRIPT = (
    "{} is not for torch.jit.script: script a DepthwiseConv1d or DepthwiseConv2d, "
    "or call torch.ops.depthconv.forward(input, weight, bias, stride, padding, dilation)"
)
setattr(depthwise_conv2d, "__script_unsupported", _IN_SCRIPT.format("depthconv.depthwise_conv2d"))


# ---- one axis ------------------------------------------------------------------------------------------------------


def as_single(argument: str, value: Any, least: int) -> int:
    """An int, or a sequence of one, that is at least `least`; TypeError or ValueError naming the argument otherwise."""
    each = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
    if isinstance(each, (tuple, list)):
        raise ValueError(f"depthconv: {argument} must be an int, but got {value!r}")
    if not isinstance(each, SymInt):
        if isinstance(each, (bool, Tensor)) or not hasattr(each, "__index__"):
            raise TypeError(f"depthconv: {argument} must be an int, but got {value!r}")
        each = operator.index(each)
    single: int = each
    if single < least:
        raise RuntimeError(f"depthconv: {argument} must be at least {least}, but got {single}")
    return single


def _check_line(input: Any, weight: Any, bias: Any) -> None:
    """What depthwise_conv2d would say of (C, 1, K, 1) where (C, 1, K) was given."""
    check_types(input, weight, bias)
    if isinstance(input, Tensor) and input.dim() not in (2, 3):
        raise RuntimeError(f"depthconv: input must be (N, C, L) or (C, L), but got size {list(input.shape)}")
    if isinstance(weight, Tensor) and weight.dim() != 3:
        raise RuntimeError(f"depthconv: weight must be 3-D, (C * multiplier, 1, K), but got size {list(weight.shape)}")


def depthwise_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Depthwise convolution along one axis, as `F.conv1d` with groups = C computes it: `depthwise_conv2d` of width 1.

    y[n, co, l] = bias[co] + sum over k of weight[co, 0, k] * input[n, co // m, l * stride + k * dilation - padding],
    with zeros outside the input.

    Args:
        input: (N, C, L) or (C, L); float32, float64, float16 or bfloat16, on the CPU or a CUDA device. Strides as they
            come: (N, L, C).transpose(1, 2) is read in place.
        weight: (C * m, 1, K) with m >= 1 filters a channel; dtype and device of input.
        bias: (C * m) or None.
        stride, dilation: an int (or a sequence of one), at least 1.
        padding: zeros on both sides, an int (or a sequence of one), at least 0; 'valid' for none; 'same' for an output
            of the input's length (stride 1 only); 'causal' for dilation * (K - 1) zeros on the left alone, so that
            y[..., l] reads no input beyond l * stride.

    'causal' computes with these zeros on both sides and returns the first (L - 1) // stride + 1 positions, a view: the
    input is not copied, and dilation * (K - 1) / stride positions more than needed are computed for each (n, c).

    Returns:
        (N, C * m, L_out), or without N: L_out = (L + 2 * padding - dilation * (K - 1) - 1) // stride + 1. In memory
        (N, L_out, C * m) where input lies so, (N, L, C), else contiguous (with 'causal', a view of such).

    Raises:
        TypeError, ValueError: an argument of the wrong type or with the wrong number of values.
        RuntimeError: sizes, dtypes or devices that do not fit each other; the message names the argument.
    """
    _check_line(input, weight, bias)
    step, spread = as_single("stride", stride, 1), as_single("dilation", dilation, 1)
    if padding == "causal":
        return causal_conv1d(input, weight, bias, step, spread, _constant(weight.shape[-1]))
    zeros: Pair | str
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"depthconv: padding must be an int, 'same', 'valid' or 'causal', but got {padding!r}")
        zeros = padding
    else:
        zeros = (as_single("padding", padding, 0), 0)
    y = depthwise_conv2d(input.unsqueeze(-1), weight.unsqueeze(-1), bias, (step, 1), zeros, (spread, 1))
    return y.squeeze(-1)


def causal_conv1d(input: Tensor, weight: Tensor, bias: Tensor | None, step: int, spread: int, taps: int) -> Tensor:
    """depthwise_conv1d with padding='causal', the arguments checked."""
    zeros = (spread * (taps - 1), 0)
    y = depthwise_conv2d(input.unsqueeze(-1), weight.unsqueeze(-1), bias, (step, 1), zeros, (spread, 1))
    return y.squeeze(-1)[..., : (input.shape[-1] - 1) // step + 1]


setattr(depthwise_conv1d, "__script_unsupported", _IN_SCRIPT.format("depthconv.depthwise_conv1d"))
