#!/usr/bin/env python3
"""Installs depthconv from these sources in fresh virtual environments, as on machines of several kinds.

`python tools/try_installs.py` runs all trials, `--only NAME` some, `--list` names them. A line each says what came of
it. What a machine lacks is hidden: compilers by a PATH of links to everything else, /usr/local/cuda by an empty folder
mounted over it (in a mount namespace of its own; `unshare`). CUDA code is compiled for one architecture.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
COMPILERS = r"([\w.]+-)*(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp|c89|c99|c89-gcc|c99-gcc)(-[\d.]+)?"
OURS = r"(CUDA|TORCH|DEPTHCONV|PYTHON|NVCC|PIP)_\w*|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|VIRTUAL_ENV|PYTHONPATH"
WORKS = """
import torch, depthconv
x = torch.randn(2, 3, 9, 8, requires_grad=True)
w = torch.randn(3, 1, 5, 1, requires_grad=True)
y = depthconv.depthwise_conv2d(x, w, padding=(2, 0))
torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w, padding=(2, 0), groups=3))
y.sum().backward()
print(depthconv.build_info()["reason"])
"""


@dataclass
class Machine:
    """A fresh copy of the sources and a fresh virtual environment, on a machine that lacks some programs."""

    folder: Path
    hidden: str  # pattern of the programs that it lacks
    torch: str
    log: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=SOURCE, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (SOURCE / name).is_file():
                (self.sources / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(SOURCE / name, self.sources / name)
        for name in ("elsewhere", "programs", "empty"):
            (self.folder / name).mkdir()
        for place in os.environ["PATH"].split(os.pathsep):
            for program in Path(place).iterdir() if place and Path(place).is_dir() else ():
                link = self.folder / "programs" / program.name
                if not link.exists() and not re.fullmatch(self.hidden, program.name) and "python" not in program.name:
                    link.symlink_to(program)
        # One torch in every environment, those that pip builds in as well.
        (self.folder / "constraints").write_text(f"torch=={self.torch}\n")
        rest = {name: value for name, value in os.environ.items() if not re.fullmatch(OURS, name)}
        self.environment = rest | {
            "PATH": f"{self.folder / 'venv' / 'bin'}{os.pathsep}{self.folder / 'programs'}",
            "PIP_CONSTRAINT": str(self.folder / "constraints"),
            "PIP_BUILD_CONSTRAINT": str(self.folder / "constraints"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "MAX_JOBS": os.environ.get("MAX_JOBS", "2"),
            "TORCH_CUDA_ARCH_LIST": "9.0",
        }
        subprocess.run([sys.executable, "-m", "venv", self.folder / "venv"], check=True)

    @property
    def sources(self) -> Path:
        return self.folder / "sources"

    def run(self, command: str, environment: dict[str, str], folder: Path | None = None) -> tuple[int, str]:
        """The status and what was printed."""
        line = ["bash", "-c", command]
        if re.fullmatch(self.hidden, "nvcc") and os.path.isdir("/usr/local/cuda"):
            hide = f'mount --bind {self.folder / "empty"} /usr/local/cuda && exec "$@"'
            root = [] if os.geteuid() == 0 else ["--map-root-user"]
            line = ["unshare", "--mount", *root, "sh", "-c", hide, "sh", *line]
        done = subprocess.run(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder or self.sources,
            env=self.environment | environment, check=False,
        )  # fmt: skip
        self.log.append(f"$ {command}\n{done.stdout}")
        return done.returncode, done.stdout

    def must(self, command: str, **environment: str) -> str:
        status, text = self.run(command, environment)
        if status:
            raise AssertionError(f"{command!r} ended with {status}: {last_line(text)}")
        return text

    def must_stop(self, command: str, says: str, **environment: str) -> str:
        """The sentence of a build that must not succeed."""
        status, text = self.run(command, environment)
        sentences = [line.strip() for line in text.splitlines() if line.strip().startswith("depthconv: ")]
        if status == 0 or not sentences or says not in sentences[-1]:
            raise AssertionError(f"{command!r} ended with {status} and not with {says!r}: {last_line(text)}")
        return f"stopped: {sentences[-1]}"

    def works(self, says: str) -> str:
        """The reason in the build's record, once the installed package has run from another folder."""
        (self.folder / "works.py").write_text(WORKS)
        status, text = self.run(f"python {self.folder / 'works.py'}", {}, self.folder / "elsewhere")
        if status or says not in last_line(text):
            raise AssertionError(f"the installed package ended with {status}, {says!r} expected: {last_line(text)}")
        return last_line(text)

    def prepare(self, *packages: str) -> None:
        self.must("pip install -q 'torch>=2.10' 'setuptools>=77' ninja " + " ".join(f"'{each}'" for each in packages))


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


# ---- The trials


@dataclass(frozen=True)
class Trial:
    name: str
    hidden: str
    run: Callable[[Machine], str]


TRIALS: list[Trial] = []
NO_NVCC = r"nvcc|ptxas|cuobjdump"


def trial(hidden: str) -> Callable[[Callable[[Machine], str]], Callable[[Machine], str]]:
    def add(function: Callable[[Machine], str]) -> Callable[[Machine], str]:
        TRIALS.append(Trial(function.__name__, hidden, function))
        return function

    return add


@trial(NO_NVCC)
def gcc_pip_install(machine: Machine) -> str:
    machine.must("pip install .")
    return machine.works("CPU build: no nvcc found")


@trial(NO_NVCC)
def gcc_no_build_isolation(machine: Machine) -> str:
    machine.prepare()
    machine.must("pip install --no-build-isolation .")
    return machine.works("CPU build: no nvcc found")


@trial(NO_NVCC)
def gcc_editable(machine: Machine) -> str:
    machine.must("pip install -e .")
    return machine.works("CPU build: no nvcc found")


@trial(NO_NVCC)
def gcc_build_sdist_and_wheel(machine: Machine) -> str:
    machine.must("pip install -q build && python -m build")
    machine.must("pip install dist/*.whl")
    return f"{', '.join(sorted(os.listdir(machine.sources / 'dist')))}; {machine.works('CPU build: no nvcc found')}"


@trial("nothing")
def nvcc_without_gpu(machine: Machine) -> str:
    machine.prepare()
    text = machine.must("pip install -v --no-build-isolation .", DEPTHCONV_REQUIRE_CUDA="1")
    assert "CUDA build: nvcc " in text, "the build does not say which one it is"
    return machine.works("CUDA build: nvcc ")


def pretend_another_major(machine: Machine) -> None:
    """torch's CUDA is told by torch/version.py."""
    machine.prepare()
    folder = last_line(machine.must("python -W ignore -c 'import torch; print(torch.__path__[0])'"))
    with (Path(folder) / "version.py").open("a") as file:
        file.write("\ncuda = '99.1'\n")


@trial("nothing")
def another_cuda_major(machine: Machine) -> str:
    pretend_another_major(machine)
    machine.must("pip install --no-build-isolation .")
    return machine.works("torch's CUDA is 99.1: the CUDA runtime is linked statically")


@trial("nothing")
def another_cuda_major_cpu_on_request(machine: Machine) -> str:
    pretend_another_major(machine)
    machine.must("pip install --no-build-isolation .", DEPTHCONV_CPU_ONLY="1")
    return machine.works("CPU build: DEPTHCONV_CPU_ONLY is set")


@trial(NO_NVCC)
def nvcc_from_packages(machine: Machine) -> str:
    machine.prepare("cuda-toolkit[nvcc,cccl]==13.0.*")
    machine.must("pip install --no-build-isolation .", DEPTHCONV_REQUIRE_CUDA="1")
    return machine.works("found in site-packages")


@trial(NO_NVCC)
def nvcc_from_packages_incomplete(machine: Machine) -> str:
    machine.prepare(*(f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime")))
    return machine.must_stop("pip install --no-build-isolation .", "nv/target: No such file")


@trial(f"{NO_NVCC}|{COMPILERS}")
def no_compiler(machine: Machine) -> str:
    machine.prepare()
    return machine.must_stop("pip install --no-build-isolation .", "no C++ compiler: 'c++' does not run. Install one")


@trial("nothing")
def torch_missing(machine: Machine) -> str:
    machine.must("pip install -q 'setuptools>=77' ninja")
    return machine.must_stop("pip install --no-build-isolation --no-deps .", "building needs torch >= 2.10")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[each.name for each in TRIALS], metavar="NAME")
    parser.add_argument("--torch", default="2.13.0", help="the release to build and run with; default: 2.13.0")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write what each trial printed there")
    parser.add_argument("--list", action="store_true", help="the trials' names")
    options = parser.parse_args()
    chosen = [each for each in TRIALS if not options.only or each.name in options.only]
    if options.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    failed = 0
    for each in chosen:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            machine = Machine(Path(folder), each.hidden, options.torch)
            try:
                line = f"PASS {each.name}: {each.run(machine)}"
            except AssertionError as error:
                failed += 1
                line = f"FAIL {each.name}: {error}"
            print(f"{line} ({time.monotonic() - start:.0f} s)", flush=True)
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{each.name}.log").write_text("\n".join(machine.log))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
