"""`convert` and `unconvert`: a model's depthwise (K, 1) and depthwise 1-D convolutions to ours and back, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from .modules import DepthwiseConv1d, DepthwiseConv2d

# What takes the place of what: exactly these types.
_OURS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: DepthwiseConv1d, nn.Conv2d: DepthwiseConv2d}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` or `unconvert` did, or would do. Names are those of `named_modules`, '' for the model itself."""

    target: str
    dry_run: bool
    swapped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # convolutions that stay as they are, with the reason

    def __str__(self) -> str:
        count = len(self.swapped) + len(self.left)
        lines = [
            f"{'would swap' if self.dry_run else 'swapped'} {len(self.swapped)} of {count} convolutions "
            f"to {self.target}"
        ]
        lines += [f"  {name or '(the model itself)'}" for name in self.swapped]
        if self.left:
            lines.append(f"left {len(self.left)}")
            lines += [f"  {name or '(the model itself)'}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def _is_convolution(module: nn.Module) -> bool:
    # By its attributes, which quantised convolutions have too; a pooling has no groups.
    return hasattr(module, "kernel_size") and hasattr(module, "groups") and hasattr(module, "in_channels")


def _reason_against(module: nn.Module) -> str | None:
    """Why a convolution cannot become one of ours; None where it can."""
    kind = type(module)
    if kind in _THEIRS:
        return f"is a {kind.__name__} already"
    if nn.utils.parametrize.is_parametrized(module):
        return "has a parametrization, which made a class of its own for it: convert before registering that"
    if not isinstance(module, (nn.Conv1d, nn.Conv2d)) or kind not in _OURS:
        return f"is a {kind.__module__}.{kind.__qualname__}, not exactly torch.nn.Conv1d or torch.nn.Conv2d"
    if module.groups != module.in_channels:
        return f"is not depthwise: groups {module.groups}, in_channels {module.in_channels}"
    if module.kernel_size[1:] not in ((), (1,)):
        return f"has kernel size {tuple(module.kernel_size)}, not (K, 1)"
    if "_conv_forward" in vars(module):
        return "has a _conv_forward of its own"
    weight = module.weight
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return f"has a weight of type {type(weight).__name__}, not a plain tensor"
    if weight.dtype not in _DTYPES:
        return f"has dtype {str(weight.dtype).removeprefix('torch.')}, not float32, float64, float16 or bfloat16"
    return None


def _swap(
    model: nn.Module,
    targets: dict[type[nn.Module], type[nn.Module]],
    reason_against: Callable[[nn.Module], str | None],
    dry_run: bool,
) -> ConversionReport:
    report = ConversionReport(" or ".join(target.__name__ for target in targets.values()), dry_run)
    for name, module in model.named_modules():
        if not _is_convolution(module):
            continue
        reason = reason_against(module)
        if reason is not None:
            report.left[name] = reason
            continue
        report.swapped.append(name)
        if not dry_run:
            # The class is exchanged, not the module: ours have the attributes of nn's and no other, so that parameters,
            # hooks, flags, whatever else was attached, and every reference to the module (a second place in the tree, a
            # hook's, the caller's own to the model itself) stay as they are.
            module.__class__ = targets[type(module)]
    return report


def convert(model: nn.Module, dry_run: bool = False) -> ConversionReport:
    """Turn a model's depthwise (K, 1) and depthwise 1-D convolutions, the model itself included, into ours, in place.

    Swapped are modules whose type is exactly nn.Conv2d, with groups == in_channels and kernel width 1, and exactly
    nn.Conv1d, with groups == in_channels. Nothing is copied: parameters, hooks and the state_dict's keys stay the same.
    With dry_run=True the model stays as it is, and the report says what would be done.

    Returns a report: `swapped` names, `left` convolutions with the reason, and both as text by `str`.
    Raises TypeError where model is no module.
    """
    _check_module(model)
    return _swap(model, _OURS, _reason_against, dry_run)


def unconvert(model: nn.Module, dry_run: bool = False) -> ConversionReport:
    """Turn each `DepthwiseConv1d` and `DepthwiseConv2d` of a model back into nn's, in place; the reverse of `convert`.

    A DepthwiseConv1d with padding='causal' is left: nn.Conv1d has no such padding.
    """
    _check_module(model)

    def reason_against(module: nn.Module) -> str | None:
        kind = type(module)
        if kind not in _THEIRS:
            return f"is a {kind.__module__}.{kind.__qualname__}"
        return "has padding='causal', which nn.Conv1d has not" if module.padding == "causal" else None

    return _swap(model, _THEIRS, reason_against, dry_run)


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"depthconv: model must be a torch.nn.Module, but got {type(model).__name__}")
