"""torch.export, saved and loaded again, and the AOTInductor package of it, run without the Python package."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import depthconv

OPERATORS = Path(depthconv.__file__).parent / "_ops.so"
SERVER = Path(__file__).resolve().parent.parent / "examples" / "serve.cpp"
DIMS = {0: torch.export.Dim("batch", min=2), 2: torch.export.Dim("height", min=5), 3: torch.export.Dim("width", min=2)}


class Net(nn.Module):
    """Both modules, every kind of padding; (N, 8, H, W) -> (N, 16, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = depthconv.DepthwiseConv2d(8, 16, (5, 1), padding=(2, 0))
        self.same = depthconv.DepthwiseConv2d(16, 16, (4, 1), padding="same", bias=False)
        self.mirror = depthconv.DepthwiseConv2d(16, 16, (3, 1), padding=(1, 0), padding_mode="reflect")
        self.line = depthconv.DepthwiseConv1d(16, 16, 4, padding="causal")

    def forward(self, x: Tensor) -> Tensor:
        y = self.mirror(torch.relu(self.same(self.deep(x))))
        return y * torch.sigmoid(self.line(y.mean(3)))[..., None]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_and_load(strict: bool, layout: torch.memory_format, device: str, seed: int) -> None:
    """Dynamic batch, height and width; the graph holds the public operator, before and after saving."""
    model = Net().to(device).eval()
    x = torch.randn(3, 8, 11, 6, device=device).contiguous(memory_format=layout)
    program = torch.export.export(model, (x,), dynamic_shapes=(DIMS,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for each in (program, torch.export.load(file)):
        targets = [str(node.target) for node in each.graph.nodes]
        assert targets.count("depthconv.forward.default") == 4
        assert not any("depthconv._" in target for target in targets)
        for size in ((3, 8, 11, 6), (5, 8, 23, 9), (2, 8, 5, 31)):
            y = torch.randn(size, device=device).contiguous(memory_format=layout)
            torch.testing.assert_close(each.module()(y), model(y))


def test_export_for_training(device: str, seed: int) -> None:
    """An exported module's gradients are the model's."""
    model, x = Net().to(device), torch.randn(3, 8, 11, 6, device=device)
    exported = torch.export.export(model, (x,), dynamic_shapes=(DIMS,)).module()
    for each in (model, exported):
        each.zero_grad()
        each(x).square().mean().backward()
    found = dict(exported.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad)


LOADER = """
import sys, torch
torch.ops.load_library(sys.argv[1])
model = torch._inductor.aoti_load_package(sys.argv[2])
x, y = torch.load(sys.argv[3])
torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)
assert not any(name.split(".")[0] == "depthconv" for name in sys.modules)
print("right")
"""


def test_package_without_python_package(device: str, tmp_path: Path, seed: int) -> None:
    """AOTInductor's package needs the operators' library alone: in a bare Python process, and in a C++ program."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here, which AOTInductor calls")
    model = nn.Sequential(depthconv.DepthwiseConv2d(8, 8, (5, 1), padding=(2, 0)), nn.ReLU()).to(device).eval()
    x = torch.randn(3, 8, 11, 6, device=device)
    dims = {0: DIMS[0], 2: DIMS[2]}
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=(dims,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        other = torch.randn(5, 8, 23, 6, device=device)
        torch.save((other, model(other)), tmp_path / "values.pt")
        ramp = torch.linspace(-1, 1, 2 * 8 * 23 * 6).reshape(2, 8, 23, 6).to(device)
        expected = float(model(ramp).square().sum())
    command = [sys.executable, "-c", LOADER, OPERATORS, package, tmp_path / "values.pt"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "right\n", done.stderr

    if device == "cuda" or not SERVER.exists():
        return
    torch_path = Path(torch.__file__).parent
    if not (torch_path / "include" / "ATen" / "ATen.h").exists():
        pytest.skip("this torch has no C++ headers")
    server = tmp_path / "serve"
    command = ["g++", "-std=c++20", "-O0", SERVER, "-o", server]
    command += [f"-I{torch_path}/include", f"-L{torch_path}/lib", f"-Wl,-rpath,{torch_path}/lib", "-Wl,--no-as-needed"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    done = subprocess.run([server, OPERATORS, package, "23"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(expected, rel=1e-4)
    # Without the operators the package must not load: what is shown above is theirs.
    alone = subprocess.run([server, "libm.so.6", package], capture_output=True, text=True, cwd=tmp_path)
    assert alone.returncode != 0 and "depthconv" in alone.stderr
