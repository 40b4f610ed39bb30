"""The plan: which kernel a problem gets. A pure function, so it is pinned here without a GPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import depthconv
from depthconv import _C

DTYPES = ("float32", "float16", "bfloat16")
SHAPES = json.loads((Path(depthconv.__file__).parent / "shapes.json").read_text())

# Per line of the default grid, on 132 multiprocessors of sm_90: forward kernel and elements a load, backward kernels.
FLOAT32 = [
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("flat", 4, ["one_pass_flat", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 1, ["one_pass_march", "reduce"]),
    ("rows", 1, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("flat", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("flat", 4, ["one_pass_march", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("rows", 1, ["one_pass_march", "one_pass_march", "reduce"]),
    ("flat", 4, ["one_pass_march", "reduce"]),
    ("bank", 2, ["one_pass_bank", "reduce"]),
    ("bank", 4, ["one_pass_bank", "reduce"]),
    ("rows", 4, ["one_pass_march", "reduce"]),
    ("flat", 4, ["one_pass_march", "reduce"]),
    ("rows", 1, ["one_pass_march", "one_pass_march", "reduce"]),
    ("flat", 4, ["one_pass_march", "reduce"]),
    ("flat", 4, ["one_pass_flat", "reduce"]),
    ("flat", 4, ["one_pass_flat", "reduce"]),
]
BFLOAT16 = [
    ("band", 8, ["one_pass_march", "reduce"]),
    ("band", 8, ["one_pass_march", "reduce"]),
    ("band", 8, ["one_pass_march", "reduce"]),
    ("flat", 8, ["one_pass_flat", "reduce"]),
    ("band", 8, ["one_pass_march", "reduce"]),
    ("flat", 8, ["one_pass_march", "reduce"]),
    ("flat", 8, ["one_pass_march", "reduce"]),
    ("rows", 1, ["one_pass", "reduce"]),
    ("march", 8, ["one_pass_march", "reduce"]),
    ("band", 8, ["one_pass_march", "reduce"]),
    ("band", 8, ["one_pass_march", "reduce"]),
    ("band", 8, ["one_pass_march", "reduce"]),
    ("march", 8, ["one_pass_march", "reduce"]),
    ("flat", 8, ["one_pass_march", "reduce"]),
    ("band", 8, ["one_pass_march", "reduce"]),
    ("flat", 8, ["one_pass", "reduce"]),
    ("march", 8, ["one_pass_march", "reduce"]),
    ("rows", 1, ["one_pass", "one_pass", "reduce"]),
    ("flat", 8, ["one_pass", "reduce"]),
    ("bank", 2, ["one_pass_bank", "reduce"]),
    ("bank", 4, ["one_pass_bank", "reduce"]),
    ("march", 8, ["one_pass_march", "reduce"]),
    ("flat", 8, ["one_pass", "reduce"]),
    ("rows", 1, ["one_pass", "one_pass", "reduce"]),
    ("flat", 8, ["one_pass", "reduce"]),
    ("flat", 8, ["one_pass_flat", "reduce"]),
    ("flat", 8, ["one_pass", "reduce"]),
]
PINNED = [
    (line, dtype, pin)
    for dtype, pins in (("float32", FLOAT32), ("bfloat16", BFLOAT16))
    for line, pin in zip(SHAPES, pins, strict=True)
]


def contiguous(size: list[int]) -> list[int]:
    stride = [1]
    for extent in reversed(size[1:]):
        stride.insert(0, stride[0] * extent)
    return stride


def plan(direction: str, x: list[int], k: int, **options: Any) -> dict[str, Any]:
    multiplier = options.pop("multiplier", 1)
    weight = [x[-3] * multiplier, 1, k, 1]
    options.setdefault("dtype", "float32")
    options.setdefault("input_stride", contiguous(x))
    options.setdefault("input_offset_bytes", 0)
    return _C.plan(
        direction=direction,
        device="cuda",
        input_size=x,
        weight_size=weight,
        weight_stride=contiguous(weight),
        **options,
    )


def backward_kernels(x: list[int], k: int, **options: Any) -> list[str]:
    return [kernel["kernel"] for kernel in plan("backward", x, k, **options)["kernels"]]


@pytest.mark.parametrize("line, dtype, pinned", PINNED, ids=[f"{line['from']}-{dtype}" for line, dtype, _ in PINNED])
def test_grid(line: dict[str, Any], dtype: str, pinned: tuple[str, int, list[str]]) -> None:
    n, c, h, w = line["x"]
    stride = [line.get("slice_of", c) * h * w, h * w, w, 1]
    options = {key: line[key] for key in ("stride", "padding", "dilation", "multiplier") if key in line}
    options["dtype"] = dtype
    forward = plan("forward", line["x"], line["k"], input_stride=stride, **options)
    backward = plan("backward", line["x"], line["k"], input_stride=stride, output_mask=[True, True, False], **options)
    assert (forward["kernel"], forward["vector_width"], [k["kernel"] for k in backward["kernels"]]) == pinned
    assert forward["reason"] and all(kernel["reason"] for kernel in backward["kernels"])


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("float64", 2), ("float16", 8), ("bfloat16", 8)])
def test_vectors_need_alignment(dtype: str, width: int) -> None:
    x, size = [2, 4, 8, 64], {"float32": 4, "float64": 8}.get(dtype, 2)
    aligned = dict(padding=[1, 0], dtype=dtype)
    assert plan("forward", x, 3, **aligned)["vector_width"] == width
    shifted = plan("forward", x, 3, **aligned, input_offset_bytes=size, input_stride=[4096, 1024, 128, 1])
    assert shifted["vector_width"] == 1
    gap = [4 * 8 * 65, 8 * 65, 65, 1]
    assert plan("forward", x, 3, **aligned, input_stride=gap)["vector_width"] == 1
    assert plan("forward", x, 3, padding=[1, 1], dtype=dtype)["vector_width"] == 1
    assert plan("forward", x, 3, stride=[1, 2], dtype=dtype)["vector_width"] == 1


def test_channels_last() -> None:
    x = [2, 64, 16, 16]
    stride = [64 * 256, 1, 64 * 16, 64]
    assert plan("forward", x, 7, padding=[3, 0], input_stride=stride)["kernel"] == "march_channels_last"
    assert plan("forward", x, 8, padding=[3, 0], input_stride=stride)["kernel"] == "channels_last"
    kernels = plan("backward", x, 7, padding=[3, 0], input_stride=stride)["kernels"]
    assert [k["kernel"] for k in kernels] == ["one_pass_march_channels_last", "reduce"]


def test_bank() -> None:
    """Few output rows or more filters than taps; the widest pack that every row allows."""
    for dtype, width, expected in [
        ("float32", 1000, 4),
        ("float32", 1126, 2),
        ("float32", 1125, 1),
        ("float16", 1000, 8),
        ("bfloat16", 1004, 4),
        ("bfloat16", 1126, 2),
    ]:
        for multiplier in (1, 2, 32):
            found = plan("forward", [64, 8, 22, width], 22, multiplier=multiplier, dtype=dtype)
            width_of_bank = min(expected, 4) if multiplier > 2 else expected
            assert (found["kernel"], found["vector_width"]) == ("bank", width_of_bank)
    assert plan("forward", [64, 8, 22, 1000], 22, dtype="float64")["kernel"] == "rows"
    assert plan("forward", [64, 8, 22, 15], 22)["kernel"] != "bank"
    assert plan("forward", [64, 8, 26, 1000], 22)["kernel"] != "bank"
    assert plan("forward", [64, 8, 512, 1000], 3, multiplier=3)["kernel"] == "bank"
    assert plan("forward", [64, 8, 512, 1000], 3, multiplier=2)["kernel"] != "bank"
    small, large = (plan("forward", [n, 1, 64, 128], 64) for n in (1, 4096))
    assert small["tap_splits"] > 1 and large["tap_splits"] == 1
    channels_last = [8 * 22 * 1000, 1, 8 * 1000, 8]
    assert plan("forward", [64, 8, 22, 1000], 22, multiplier=2, input_stride=channels_last)["kernel"] == "channels_last"


@pytest.mark.parametrize(
    "x, k, options, mask, expected",
    [
        ([64, 8, 22, 1126], 22, {"multiplier": 2}, (True, True, True), ["one_pass_bank", "reduce"]),
        ([64, 8, 22, 1126], 22, {"multiplier": 2}, (True, False, False), ["bank"]),
        ([64, 8, 22, 1126], 22, {"multiplier": 2}, (False, True, True), ["weight_gradient_bank", "reduce"]),
        ([64, 8, 22, 1126], 22, {"multiplier": 2}, (False, False, True), ["weight_gradient", "reduce"]),
        ([64, 8, 22, 1126], 22, {}, (True, True, True), ["one_pass_bank", "reduce"]),
        ([64, 8, 64, 999], 64, {"multiplier": 32}, (True, True, True), ["one_pass_bank", "reduce"]),
        ([64, 8, 22, 1126], 22, {"multiplier": 33}, (True, True, False), ["bank", "weight_gradient_bank", "reduce"]),
        ([64, 8, 22, 63], 22, {"multiplier": 2}, (True, True, False), ["bank", "weight_gradient", "reduce"]),
        (
            [64, 8, 9, 999],
            5,
            {"multiplier": 2, "dilation": [2, 1]},
            (True, True, False),
            ["rows", "weight_gradient_bank", "reduce"],
        ),
    ],
)
def test_bank_backward(
    x: list[int], k: int, options: dict[str, Any], mask: tuple[bool, bool, bool], expected: list[str]
) -> None:
    kernels = plan("backward", x, k, output_mask=list(mask), **options)["kernels"]
    assert [kernel["kernel"] for kernel in kernels] == expected


def test_bank_fits_every_architecture() -> None:
    """At most 64 KB of shared memory a block, and no more blocks' partial sums than a few waves leave."""
    for multiplier, taps, dtype in itertools.product((1, 2, 3, 16, 17, 32, 33), (1, 5, 22, 24, 36, 64), DTYPES):
        x = [64, 8, taps, 1000]
        (gradients, _) = plan(
            "backward", x, taps, multiplier=multiplier, dtype=dtype, output_mask=[False, True, True]
        )["kernels"]
        assert gradients["kernel"] == "weight_gradient_bank"
        assert gradients["shared_bytes"] <= 64 * 1024
        assert gradients["blocks"] <= 8 * 132 * 8


def test_masks() -> None:
    x, padding = [8, 8, 64, 64], [1, 0]
    names = {
        (True, False, False): ["rows"],
        (True, False, True): ["rows", "weight_gradient", "reduce"],
        (False, True, False): ["one_pass_march", "reduce"],
        (False, True, True): ["one_pass_march", "reduce"],
        (False, False, True): ["weight_gradient", "reduce"],
        (True, True, True): ["one_pass_march", "reduce"],
    }
    for mask, expected in names.items():
        assert backward_kernels(x, 3, padding=padding, output_mask=list(mask)) == expected
    with_multiplier = backward_kernels(x, 3, padding=padding, output_mask=[False, True, True], multiplier=2)
    assert with_multiplier == ["weight_gradient", "reduce"]


def test_weight_gradient_alone_of_flat_planes() -> None:
    """No grad_input, so that its gaps cannot matter: rows without a gap in x and grad_output are enough."""
    assert backward_kernels([2, 4, 64, 63], 3, output_mask=[False, True, True]) == ["one_pass_flat", "reduce"]


# stride, dilation, K, options: the backward's kernels without the last, "reduce".
STRIDED: list[tuple[list[int], int, int, dict[str, Any], list[str]]] = [
    ([2, 1], 1, 3, {}, ["one_pass_march"] * 2),
    ([2, 1], 1, 3, {"output_mask": [False, True, True]}, ["one_pass_march"] * 2),
    ([2, 1], 1, 9, {"dtype": "bfloat16"}, ["one_pass_march"] * 2),
    ([2, 1], 1, 3, {"dtype": "float64"}, ["one_pass"] * 2),
    ([2, 1], 2, 3, {"padding": [2, 0]}, ["one_pass_march", "rows"]),  # the odd rows are zeros
    ([2, 1], 2, 3, {"padding": [2, 0], "output_mask": [False, True, False]}, ["one_pass_march"]),
    ([3, 1], 1, 2, {}, ["one_pass_march"] * 2 + ["rows"]),
    ([4, 1], 6, 5, {}, ["one_pass_march", "rows"] * 2),
    ([2, 1], 1, 3, {"multiplier": 2}, ["rows", "weight_gradient"] * 2),
    ([1, 2], 1, 3, {}, ["rows", "one_pass_march"]),
    ([2, 2], 1, 3, {}, ["rows", "one_pass_march"] * 2),
    ([2, 2], 1, 3, {"padding": [0, 1]}, ["rows", "one_pass_march"] * 2),
    ([9, 1], 1, 3, {"output_mask": [True, True, False]}, ["strided_input_gradient", "weight_gradient"]),
    ([9, 9], 1, 3, {"output_mask": [False, True, False]}, ["weight_gradient"]),
]


@pytest.mark.parametrize("stride, dilation, k, options, kernels", STRIDED)
def test_strides(stride: list[int], dilation: int, k: int, options: dict[str, Any], kernels: list[str]) -> None:
    """A height stride runs phase by phase; grad_bias comes from one of them where that meets all of grad_output."""
    options = {"stride": stride, "dilation": [dilation, 1], **options}
    found = backward_kernels([4, 8, 96, 64], k, **options)
    if options.get("padding", [0, 0])[1] > 0:  # columns of grad_output that no column of x meets
        kernels = [*kernels, "weight_gradient"]
    assert found == [*kernels, "reduce"]


def test_phases_keep_vectors() -> None:
    for mask in ([True, True, True], [False, True, False], [True, False, False]):
        made = plan("backward", [4, 8, 95, 64], 4, stride=[3, 1], padding=[2, 0], output_mask=mask)
        assert [kernel["vector_width"] for kernel in made["kernels"] if kernel["kernel"] != "reduce"] == [4] * 3
    odd = plan("backward", [4, 8, 95, 62], 4, stride=[3, 1], padding=[2, 0])
    assert {kernel["vector_width"] for kernel in odd["kernels"] if kernel["kernel"] != "reduce"} == {1}


@pytest.mark.parametrize("dilation", range(1, 5))
@pytest.mark.parametrize("stride", range(1, 9))
def test_phases_meet_every_pair_once(stride: int, dilation: int) -> None:
    """Row, tap and output row of every product, from the phases and from the definition."""
    for k, height, padding in itertools.product((1, 2, 3, 5, 8), (1, 4, 17, 24), (0, 1, 5)):
        if height + 2 * padding < dilation * (k - 1) + 1:
            continue
        outputs = (height + 2 * padding - dilation * (k - 1) - 1) // stride + 1
        wanted = [
            (row, tap, out)
            for out, tap in itertools.product(range(outputs), range(k))
            if 0 <= (row := out * stride + tap * dilation - padding) < height
        ]
        made = plan("backward", [1, 2, height, 4], k, stride=[stride, 1], padding=[padding, 0], dilation=[dilation, 1])
        whole = {"row": 0, "height": height, "first_tap": 0, "tap_step": 1, "taps": k, "padding": padding}
        phases = made.get("phases", [whole | {"dilation": dilation}])
        found = [
            (phase["row"] + stride * i, phase["first_tap"] + phase["tap_step"] * tap, out)
            for phase in phases
            for i, tap in itertools.product(range(phase["height"]), range(phase["taps"]))
            if 0 <= (out := i + phase["padding"] - tap * phase["dilation"]) < outputs
        ]
        assert sorted(found) == sorted(wanted)
        assert sorted(phase["row"] for phase in phases) == list(range(stride))
        rows = [phase["row"] + stride * i for phase in phases for i in range(phase["height"])]
        assert sorted(rows) == list(range(height))


def test_beyond_32_bits() -> None:
    assert plan("forward", [1, 1, 2**31, 1], 3)["kernel"] == "plain"
    assert [k["kernel"] for k in plan("backward", [1, 1, 2**31, 1], 3)["kernels"]] == ["plain"]


def test_workspace_does_not_grow_with_the_batch() -> None:
    small, large = (plan("backward", [n, 8, 512, 512], 3, padding=[1, 0])["workspace_bytes"] for n in (64, 4096))
    assert 0 < large <= 2 * small


def test_band_needs_tensor_cores() -> None:
    """Half types with many taps: tensor cores from sm_80 on; before that, and for float32, other kernels."""
    options = dict(padding=[10, 0], dtype="bfloat16")
    assert plan("forward", [2, 4, 64, 64], 21, **options)["kernel"] == "band"
    assert plan("forward", [2, 4, 64, 64], 21, **options, capability=75)["kernel"] == "march"
    assert plan("forward", [2, 4, 64, 64], 21, **{**options, "dtype": "float32"})["kernel"] == "rows"
    assert plan("forward", [2, 4, 64, 64], 41, padding=[20, 0], dtype="float16")["kernel"] == "band"
    assert plan("forward", [2, 4, 512, 64], 3, stride=[2, 1], dtype="float16")["kernel"] == "band"
    assert plan("forward", [2, 4, 64, 66], 21, **options)["kernel"] != "band"  # rows off 8 bytes
    assert plan("forward", [2, 4, 12, 64], 21, **options)["kernel"] != "band"  # fewer rows than a product has
    assert backward_kernels([2, 4, 64, 64], 21, **options, output_mask=[True, False, False]) == ["band"]


@pytest.mark.parametrize("width, packs", [(64, 8), (28, 4), (14, 2), (7, 1)])
def test_half_types_march_in_the_packs_that_rows_allow(width: int, packs: int) -> None:
    found = plan("backward", [8, 4, 64, width], 7, padding=[3, 0], dtype="float16")["kernels"][0]
    assert (found["kernel"], found["vector_width"]) == ("one_pass_march" if packs > 1 else "one_pass", packs)
