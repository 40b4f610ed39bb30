"""Type hints: the package itself, and what a user's own type checker sees of it, under mypy --strict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import depthconv

SOURCE = Path(__file__).resolve().parent.parent
USER = """
import torch
from torch import nn

import depthconv

x = torch.randn(2, 4, 9, 6)
module = depthconv.DepthwiseConv2d(4, 4, (3, 1), stride=[1, 1], padding="same")
y: torch.Tensor = depthconv.depthwise_conv2d(x, module.weight, module.bias, module.stride, (1, 0), dilation=[1, 1])
line = depthconv.DepthwiseConv1d(4, 4, 3, padding="causal")
y = depthconv.depthwise_conv1d(x[..., 0], line.weight, None, 1, "causal", (2,))
report: depthconv.ConversionReport = depthconv.convert(nn.Sequential(module), dry_run=True)
names: list[str] = depthconv.unconvert(module).swapped
reasons: dict[str, str] = report.left
plan: depthconv.Explanation = depthconv.explain(x, module.weight)
version: str = depthconv.__version__
wrong: int = depthconv.depthwise_conv2d(x, module.weight)  # line 17
depthconv.depthwise_conv2d(x, module.weight, stride=1.5)  # line 18
"""


def test_py_typed() -> None:
    assert (Path(depthconv.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(not (SOURCE / "pyproject.toml").exists(), reason="the tests run apart from the sources")
def test_mypy_strict(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Nothing in the package, and in a user's file exactly the two mistakes that it holds."""
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text(USER)
    cache = request.config.cache.mkdir("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, "depthconv", user]
    found = subprocess.run(list(map(str, command)), cwd=SOURCE, capture_output=True, text=True)
    errors = [line for line in found.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 2, found.stdout + found.stderr
    for error, line, code in zip(errors, (17, 18), ("[assignment]", "[arg-type]")):
        assert f"user.py:{line}: " in error and error.endswith(code)
