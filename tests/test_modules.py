"""DepthwiseConv2d in the place of nn.Conv2d; convert and unconvert; explain."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import depthconv
from depthconv import DepthwiseConv2d

# Arguments that nn.Conv2d takes; ours takes them unchanged.
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((4, 4, (3, 1)), {"groups": 4}),
    "multiplier": ((4, 12, (5, 1)), {"groups": 4, "padding": (2, 0)}),
    "everything": ((4, 8, (3, 1), (2, 3), (3, 1), (2, 1), 4, False), {}),
    "positional": ((4, 8, (3, 1), 1, (1, 0), 1, 4, True, "circular", "cpu", torch.float64), {}),
    "ints": ((4, 4, [3, 1]), {"groups": 4, "stride": 2, "padding": 1, "dilation": 2}),
    "same": ((4, 4, (5, 1)), {"groups": 4, "padding": "same", "dilation": (2, 1)}),
    "same, even": ((4, 4, (4, 1)), {"groups": 4, "padding": "same"}),
    "valid": ((4, 4, (4, 1)), {"groups": 4, "padding": "valid", "stride": (2, 1)}),
    "one channel": ((1, 6, (3, 1)), {}),
    "one tap": ((4, 4, 1), {"groups": 4}),
    **{
        f"{mode} {padding}": ((4, 4, (3, 1)), {"groups": 4, "padding": padding, "padding_mode": mode})
        for mode in ("reflect", "replicate", "circular")
        for padding in ((1, 0), (2, 1), "same")
    },
}


def pair(name: str, **more: Any) -> tuple[nn.Conv2d, DepthwiseConv2d]:
    """Both modules from the same arguments and the same seed."""
    arguments, options = ARGUMENTS[name]
    out = []
    for kind in (nn.Conv2d, DepthwiseConv2d):
        torch.manual_seed(3)
        out.append(kind(*arguments, **(options | more)))
    return out[0], out[1]


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients, deterministic in the output's gradient."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).reshape(y.shape))
    assert x.grad is not None
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


def assert_same(module: nn.Module, other: nn.Module, x: Tensor) -> None:
    found, expected = gradients(module, x), gradients(other, x)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


# ---- the module ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARGUMENTS)
def test_is_the_module_that_it_replaces(name: str, device: str) -> None:
    """Initial values, attributes, repr, state_dict, outputs and gradients."""
    theirs, ours = pair(name)
    assert repr(ours) == repr(theirs).replace("Conv2d", "DepthwiseConv2d")
    assert vars(ours).keys() == vars(theirs).keys()
    for attribute in (*nn.Conv2d.__constants__, "transposed", "_reversed_padding_repeated_twice", "training"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(mine, other) and mine.dtype == other.dtype and mine.stride() == other.stride()
    theirs, ours = theirs.to(device), ours.to(device)
    for size in ((2, theirs.in_channels, 9, 7), (theirs.in_channels, 9, 7)):
        assert_same(ours, theirs, torch.randn(size, device=device, dtype=theirs.weight.dtype))


def test_state_dict_both_ways(device: str) -> None:
    theirs, ours = (module.to(device) for module in pair("multiplier"))
    x = torch.randn(2, 4, 9, 7, device=device)
    for source, target in ((theirs, ours), (ours, theirs)):
        nn.init.normal_(source.weight)
        target.load_state_dict(source.state_dict())
        assert_same(ours, theirs, x)


def test_groups_may_be_left_out() -> None:
    assert DepthwiseConv2d(4, 8, (3, 1)).groups == 4
    assert DepthwiseConv2d(4, 8, (3, 1), groups=4).weight.shape == (8, 1, 3, 1)


@pytest.mark.parametrize(
    "arguments, options, word",
    [
        ((4, 4, (3, 1)), {"groups": 2}, "groups"),
        ((4, 4, (3, 1)), {"groups": 1}, "groups"),
        ((4, 6, (3, 1)), {}, "out_channels"),
        ((4, 4, (3, 3)), {}, "kernel_size"),
        ((4, 4, (1, 3)), {}, "kernel_size"),
        ((4, 4, 3), {}, "kernel_size"),
        ((4, 4, (0, 1)), {}, "kernel_size"),
        ((0, 0, (3, 1)), {}, "groups"),
        ((4, 4, (3, 1)), {"padding": "full"}, "padding"),
        ((4, 4, (3, 1)), {"padding": "same", "stride": 2}, "padding='same'"),
        ((4, 4, (3, 1)), {"padding_mode": "mirror"}, "padding_mode"),
    ],
)
def test_bad_arguments_of_the_constructor(arguments: tuple[Any, ...], options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        DepthwiseConv2d(*arguments, **options)


@pytest.mark.parametrize("options", [{"stride": True}, {"stride": 1.0}, {"dilation": 1.5}, {"padding": (1.0, 0)}])
def test_bad_numbers_are_refused_as_by_conv2d(options: dict[str, Any], device: str) -> None:
    x = torch.randn(2, 4, 9, 7, device=device)
    for module in pair("plain", **options):
        with pytest.raises(TypeError):
            module.to(device)(x)


def test_deepcopy_and_pickle(device: str) -> None:
    _, ours = pair("multiplier")
    ours = ours.to(device).eval()
    x = torch.randn(2, 4, 9, 7, device=device)
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(saved, weights_only=False)]
    for each in copies:
        assert type(each) is DepthwiseConv2d and not each.training
        assert each.weight.data_ptr() != ours.weight.data_ptr()
        assert torch.equal(each(x), ours(x))


def test_meta_device_and_to_empty(device: str) -> None:
    module = DepthwiseConv2d(4, 8, (3, 1), device="meta")
    assert module(torch.empty(2, 4, 9, 7, device="meta")).shape == (2, 8, 7, 7)
    module = module.to_empty(device=device)
    module.reset_parameters()
    assert module(torch.randn(2, 4, 9, 7, device=device)).device.type == device


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, device: str) -> None:
    module = pair("multiplier")[1].to(device, dtype)
    y = module(torch.randn(2, 4, 9, 7, device=device, dtype=dtype))
    assert y.dtype == dtype


def weight_norm_by_hook(module: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(module)


REPARAMETRISATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "weight_norm by hook": weight_norm_by_hook,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
}


@pytest.mark.parametrize("name", REPARAMETRISATIONS)
def test_reparametrisations(name: str, device: str) -> None:
    outputs = []
    for module in pair("multiplier"):
        torch.manual_seed(5)
        module = REPARAMETRISATIONS[name](module.to(device))
        torch.manual_seed(6)
        outputs.append(gradients(module, torch.randn(2, 4, 9, 7, device=device)))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)


def test_hooks(device: str) -> None:
    """Forward, backward and tensor hooks see what they see of nn.Conv2d."""
    seen: list[list[Any]] = []
    for module in pair("multiplier"):
        module = module.to(device)
        notes: list[Any] = []
        module.register_forward_pre_hook(lambda m, a, notes=notes: notes.append(("pre", a[0].shape)))
        module.register_forward_hook(lambda m, a, y, notes=notes: notes.append(("forward", y.shape)))
        module.register_full_backward_hook(
            lambda m, dx, dy, notes=notes: notes.append(("back", dx[0].shape, dy[0].shape))
        )
        module.weight.register_hook(lambda grad, notes=notes: notes.append(("weight", grad.shape)))
        gradients(module, torch.randn(2, 4, 9, 7, device=device))
        seen.append(notes)
    assert seen[0] == seen[1] and len(seen[0]) == 4


# ---- convert -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Eligible convolutions at several depths, one of them in two places, and some of every kind that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, (5, 1), padding=(2, 0), groups=8)
        self.blocks = nn.Sequential(
            nn.Conv2d(16, 16, (3, 1), padding="same", groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.Sequential(nn.Conv2d(16, 16, (1, 3), padding=(0, 1), groups=16), nn.MaxPool2d(2)),
        )
        self.again = self.blocks[0]
        self.wide = nn.Conv2d(16, 16, 3, groups=16, padding=1)
        self.line = nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.deep(self.stem(x)))
        return self.wide(F.relu(self.again(x)))


def test_convert_and_back(device: str, seed: int) -> None:
    model = Model().to(device)
    original = copy.deepcopy(model)
    x = torch.randn(2, 3, 12, 10, device=device)
    before = {id(p) for p in model.parameters()}
    modules, keys = list(model.modules()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.deep.note = "kept"
    model.deep.eval()
    calls: list[str] = []
    model.deep.register_forward_hook(lambda m, a, y: calls.append(type(m).__name__))

    dry = depthconv.convert(model, dry_run=True)
    assert dry.dry_run and dry.swapped == ["deep", "blocks.0"] and type(model.deep) is nn.Conv2d
    assert "would swap 2 of 6" in str(dry)

    report = depthconv.convert(model)
    assert report.swapped == ["deep", "blocks.0"]
    assert set(report.left) == {"stem", "blocks.2.0", "wide", "line"}
    assert "not depthwise" in report.left["stem"]
    assert "(1, 3)" in report.left["blocks.2.0"] and "(3, 3)" in report.left["wide"]
    assert "groups 1" in report.left["line"]
    for name in (*report.swapped, *report.left):
        assert name in str(report)
    assert type(model.deep) is DepthwiseConv2d and type(model.stem) is nn.Conv2d
    assert model.again is model.blocks[0]
    assert model.deep.note == "kept" and not model.deep.training
    assert {id(p) for p in model.parameters()} == before
    assert all(a is b for a, b in zip(model.modules(), modules)) and list(model.state_dict()) == keys
    assert_same(model, original, x)
    assert calls == ["DepthwiseConv2d"]
    weight = model.deep.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, model.deep.weight)

    again = depthconv.convert(model)
    assert again.swapped == [] and "already" in again.left["deep"]
    back = depthconv.unconvert(model)
    assert back.swapped == ["deep", "blocks.0"] and type(model.deep) is nn.Conv2d
    original.load_state_dict(model.state_dict())
    assert_same(model, original, x)
    assert depthconv.unconvert(model).swapped == []


def test_convert_of_an_eligible_root(device: str) -> None:
    module = nn.Conv2d(4, 4, (3, 1), groups=4, device=device)
    alias = module
    report = depthconv.convert(module)
    assert report.swapped == [""] and "the model itself" in str(report)
    assert type(alias) is DepthwiseConv2d
    assert depthconv.unconvert(module).swapped == [""] and type(alias) is nn.Conv2d


def test_convert_leaves_what_is_not_exactly_conv2d() -> None:
    class Mine(nn.Conv2d):
        pass

    class MyTensor(Tensor):
        pass

    def eligible() -> nn.Conv2d:
        return nn.Conv2d(4, 4, (3, 1), groups=4)

    own, odd = eligible(), eligible()
    own._conv_forward = lambda *arguments: arguments[0]
    odd.weight = nn.Parameter(torch.randn(4, 1, 3, 1).as_subclass(MyTensor))
    model = nn.ModuleDict(
        {
            "subclass": Mine(4, 4, (3, 1), groups=4),
            "lazy": nn.LazyConv2d(4, (3, 1), groups=4),
            "transposed": nn.ConvTranspose2d(4, 4, (3, 1), groups=4),
            "quantised": torch.ao.nn.quantized.Conv2d(4, 4, (3, 1), groups=4),
            "complex": nn.Conv2d(4, 4, (3, 1), groups=4, dtype=torch.complex64),
            "parametrised": torch.nn.utils.parametrizations.weight_norm(eligible()),
            "own": own,
            "odd": odd,
            "grouped": nn.Conv2d(4, 4, (3, 1), groups=2),
            "pool": nn.MaxPool2d(2),
        }
    )
    report = depthconv.convert(model)
    assert report.swapped == []
    assert set(report.left) == set(model) - {"pool"}
    reasons = {
        "subclass": "Mine", "lazy": "Lazy", "transposed": "Transpose", "quantised": "quantized", "complex": "complex64",
        "parametrised": "parametrization", "own": "_conv_forward", "odd": "MyTensor", "grouped": "groups 2",
    }  # fmt: skip
    for name, word in reasons.items():
        assert word in report.left[name], name


def test_convert_before_and_after_weight_norm(device: str) -> None:
    """The hook form converts; a parametrization of a converted module works and stays."""
    model = nn.Sequential(weight_norm_by_hook(nn.Conv2d(4, 4, (3, 1), groups=4))).to(device)
    x = torch.randn(2, 4, 9, 7, device=device)
    expected = gradients(model, x)
    assert depthconv.convert(model).swapped == ["0"]
    torch.testing.assert_close(gradients(model, x), expected, rtol=1e-4, atol=1e-4)
    torch.nn.utils.remove_weight_norm(model[0])
    torch.nn.utils.parametrizations.weight_norm(model[0])
    assert isinstance(model[0], DepthwiseConv2d)
    assert depthconv.unconvert(model).swapped == []  # its class is the parametrization's
    torch.testing.assert_close(model(x), expected["y"], rtol=1e-4, atol=1e-4)


def test_convert_of_no_module() -> None:
    for function in (depthconv.convert, depthconv.unconvert):
        with pytest.raises(TypeError, match="model"):
            function([nn.Conv2d(4, 4, (3, 1), groups=4)])  # type: ignore[arg-type]


def test_converted_model_pickles_and_changes_format(device: str) -> None:
    model = Model().to(device).eval()
    original = copy.deepcopy(model)
    depthconv.convert(model)
    x = torch.randn(2, 3, 12, 10, device=device)
    again = pickle.loads(pickle.dumps(model))
    assert type(again.deep) is DepthwiseConv2d and again.again is again.blocks[0]
    torch.testing.assert_close(again(x), original(x), rtol=1e-4, atol=1e-4)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        model(x.contiguous(memory_format=torch.channels_last)), original(x), rtol=1e-4, atol=1e-4
    )


# ---- explain -------------------------------------------------------------------------------------------------------


def test_explain(device: str) -> None:
    x, w = torch.randn(2, 4, 9, 8, device=device), torch.randn(8, 1, 3, 1, device=device)
    found = depthconv.explain(x, w, torch.randn(8, device=device), padding=(1, 0))
    assert found.problem["output_size"] == (2, 8, 9, 8)
    assert isinstance(found.forward["kernel"], str) and isinstance(found.forward["reason"], str)
    for part in (found.forward["kernel"], found.forward["reason"], "backward to input, weight, bias", str(x.device)):
        assert part in str(found)
    if device == "cuda":
        names = [kernel["kernel"] for kernel in found.backward["kernels"]]
        assert names and all(name in str(found) for name in names)
    assert "backward to input, weight\n" in str(depthconv.explain(x, w))
    assert depthconv.explain(x, w, padding="same", dilation=2).problem["output_size"] == (2, 8, 9, 8)
    assert depthconv.explain(x[0], w[:, :, :2], padding="same").problem["output_size"] == (8, 9, 8)


def test_explain_of_meta_tensors_is_a_gpu_plan() -> None:
    x, w = torch.empty(64, 8, 512, 512, device="meta"), torch.empty(8, 1, 3, 1, device="meta")
    found = depthconv.explain(x, w)
    assert found.forward["vector_width"] == 4 and found.backward["kernels"]
    narrow = depthconv.explain(x[..., :511], w)
    assert narrow.forward["vector_width"] == 1


def test_explain_raises_what_the_function_raises(device: str) -> None:
    x, w = torch.randn(2, 4, 9, 8, device=device), torch.randn(8, 1, 3, 1, device=device)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, w[:6]), {}),
        ((x, w, w), {}),
        ((x, w), {"stride": 0}),
        ((x, w), {"stride": True}),
        ((x, w), {"padding": "full"}),
        ((x, w), {"padding": "same", "stride": 2}),
        ((x, None), {}),
        ((x, w), {"dilation": (1, 2, 3)}),
    ]
    for arguments, options in wrong:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
            depthconv.depthwise_conv2d(*arguments, **options)
        with pytest.raises(type(theirs.value)) as ours:
            depthconv.explain(*arguments, **options)
        assert str(ours.value) == str(theirs.value)


def test_build_info() -> None:
    info = depthconv.build_info()
    assert info["version"] == depthconv.__version__
    assert {"torch", "torch_target", "cuda", "architectures", "flags", "reason", "cpu_instruction_set"} <= info.keys()
    assert set(depthconv.__all__) <= set(dir(depthconv))
