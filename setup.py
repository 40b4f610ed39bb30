"""Builds depthconv: the operators (`depthconv/_ops.so`, LibTorch's stable ABI) and the binding (`depthconv._C`).

Environment: DEPTHCONV_CPU_ONLY=1 leaves CUDA out, DEPTHCONV_REQUIRE_CUDA=1 makes a missing nvcc an error,
DEPTHCONV_VERBOSE=1 prints registers and spills of each kernel; TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS and
NVCC_THREADS as usual.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from setuptools import Extension, setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(f"depthconv: building needs torch >= 2.10 in this environment, but importing it failed: {error}")

HERE = os.path.dirname(os.path.abspath(__file__))
TORCH_TARGET = "0x020a000000000000"  # the oldest torch that the built files load under: 2.10
WHEEL_ARCHITECTURES = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]  # PTX of the newest comes with them


class Toolkit(NamedTuple):
    """A CUDA toolkit with a compiler."""

    root: str
    found: str  # how it was found, in words
    version: str  # "13.0"
    architectures: list[str]  # that the compiler has code for: "9.0"
    include: str
    library: str  # folder of libcudart_static.a


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "no", "off", "false")


def output(*command: str) -> str:
    """What a command prints, or '' when it cannot run."""
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, stdin=subprocess.DEVNULL)
        return done.stdout + done.stderr
    return ""


def toolkit_roots() -> Iterator[tuple[str, str]]:
    """Folders that may hold bin/nvcc, most wanted first, each with how it was found."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield os.environ[name], f"at {name}"
    nvcc = shutil.which("nvcc")
    if nvcc:
        # What is on PATH may be a wrapper script: the compiler knows its own home.
        top = re.search(r"^#\$ TOP=(.+)$", output(nvcc, "--dryrun", "-c", "x.cu"), re.MULTILINE)
        if top:
            yield os.path.normpath(top[1].strip()), "on PATH"
        yield os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "on PATH"
    yield "/usr/local/cuda", "at /usr/local/cuda"
    packages = importlib.util.find_spec("nvidia")  # the packages nvidia-cuda-nvcc and nvidia-cuda-runtime
    for folder in (packages.submodule_search_locations or []) if packages else []:
        for root in sorted(glob.glob(os.path.join(folder, "cu[0-9]*")), reverse=True):
            yield root, "in site-packages"


def first_folder_with(file: str, root: str, folders: list[str]) -> str | None:
    places = [os.path.join(root, folder) for folder in folders]
    return next((place for place in places if os.path.exists(os.path.join(place, file))), None)


def find_toolkit() -> tuple[Toolkit | None, str]:
    """The toolkit to build with, or None and why."""
    problem = "no nvcc found (CUDA_HOME, PATH, /usr/local/cuda, site-packages)"
    machine = platform.machine()
    for root, found in toolkit_roots():
        nvcc = os.path.join(root, "bin", "nvcc")
        version = re.search(r"release (\d+\.\d+)", output(nvcc, "--version"))
        if not version:
            continue
        include = first_folder_with("cuda_runtime.h", root, ["include", f"targets/{machine}-linux/include"])
        library = first_folder_with(
            "libcudart_static.a", root, ["lib64", "lib", "lib64/stubs", f"targets/{machine}-linux/lib"]
        )
        if not include or not library:
            problem = f"the nvcc found {found} lacks {'libcudart_static.a' if include else 'cuda_runtime.h'} beside it"
            continue
        known = re.findall(r"compute_(\d+)(\d)\b", output(nvcc, "--list-gpu-arch"))
        return Toolkit(root, found, version[1], [".".join(each) for each in known], include, library), ""
    return None, problem


def architecture_flags(toolkit: Toolkit) -> list[str]:
    """nvcc's -gencode flags: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else all that a wheel carries."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.is_available():
        known = [each for each in WHEEL_ARCHITECTURES if each in toolkit.architectures]
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(known) + "+PTX"
    return cpp_extension._get_cuda_arch_flags()


def torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def read_version() -> str:
    with open(os.path.join(HERE, "depthconv", "__init__.py"), encoding="utf-8") as file:
        found = re.search(r'^__version__(?:: str)? = "([^"]+)"', file.read(), re.MULTILINE)
    if not found:
        sys.exit("depthconv: depthconv/__init__.py must set __version__")
    return found[1]


def write_if_changed(path: str, text: str) -> None:
    """Leave the file's time alone when nothing changed, so that ninja rebuilds nothing."""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            if file.read() == text:
                return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def torch_cuda_version(version: str) -> Iterator[None]:
    """Let torch's build code see the toolkit's version as torch's own.

    It refuses a toolkit of another CUDA major, which matters to code that shares the CUDA runtime with torch; ours has
    a static one and calls torch through C functions only. And it tracks .cu files' headers only with a CUDA torch.
    """
    own = torch.version.cuda
    torch.version.cuda = version
    try:
        yield
    finally:
        torch.version.cuda = own


class Build(NamedTuple):
    """What is built, and the line that says so."""

    toolkit: Toolkit | None
    reason: str
    gencode: list[str]
    flags: dict[str, list[str]]  # for "cxx" and "nvcc"


def decide() -> Build:
    if torch_release() < (2, 10):
        sys.exit(f"depthconv: building needs torch >= 2.10, but this environment has torch {torch.__version__}")
    toolkit, problem = (None, "DEPTHCONV_CPU_ONLY is set") if flag("DEPTHCONV_CPU_ONLY") else find_toolkit()
    if toolkit is None and flag("DEPTHCONV_REQUIRE_CUDA"):
        sys.exit(f"depthconv: DEPTHCONV_REQUIRE_CUDA is set, but {problem}")
    # C++17 is enough for the stable headers of torch 2.10 to 2.14, and asks less of the C++ runtime than C++20 does.
    common = ["-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    cxx = ["-O3", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wno-unknown-pragmas", "-g0"]
    if toolkit is None:
        return Build(None, f"CPU build: {problem}", [], {"cxx": cxx + common})
    common += ["-DUSE_CUDA", "-DDEPTHCONV_WITH_CUDA"]
    nvcc = ["-O3", "-Xcompiler", "-fvisibility=hidden", "--threads", os.environ.get("NVCC_THREADS", "1")]
    if flag("DEPTHCONV_VERBOSE"):
        nvcc += ["-Xptxas", "-v"]
    gencode = architecture_flags(toolkit)
    reason = f"CUDA build: nvcc {toolkit.version} found {toolkit.found}, code for {' '.join(architectures(gencode))}"
    if torch.version.cuda and torch.version.cuda.split(".")[0] != toolkit.version.split(".")[0]:
        reason += f"; torch's CUDA is {torch.version.cuda}, which does not matter to a static CUDA runtime"
    return Build(toolkit, reason, gencode, {"cxx": cxx + common, "nvcc": nvcc + common + gencode})


def architectures(gencode: list[str]) -> list[str]:
    """sm_90 for machine code, compute_120 for PTX."""
    return [each.rsplit("code=", 1)[1] for each in gencode]


def extensions(build: Build) -> list[Extension]:
    sources = ["csrc/ops.cpp", *sorted(glob.glob("csrc/cpu/*.cpp", root_dir=HERE))]
    # libstdc++ first: libtorch exports some of the C++ runtime's symbols, which must not be bound to it. libtorch.so in
    # NEEDED whatever is used of it: through it the weak CUDA symbols find libtorch_cuda where there is one. They are
    # link arguments, since setuptools cannot put --no-as-needed before its list of libraries.
    link = [
        "-lstdc++",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,--as-needed",
        "-Wl,--exclude-libs,ALL",
        "-s",
    ]
    if build.toolkit is None:
        operators = cpp_extension.CppExtension("depthconv._ops", sources)
    else:
        sources += sorted(glob.glob("csrc/cuda/*.cu", root_dir=HERE))
        cpp_extension.CUDA_HOME = build.toolkit.root  # a CPU torch leaves it None
        operators = cpp_extension.CUDAExtension("depthconv._ops", sources, include_dirs=[build.toolkit.include])
        link += [f"-L{build.toolkit.library}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    operators.libraries = []  # torch_python, libcudart.so, c10_cuda: none of them
    operators.extra_compile_args = build.flags
    operators.extra_link_args = link

    headers = [os.path.join(HERE, "csrc"), os.path.join(os.path.dirname(torch.__file__), "include")]
    if not os.path.exists(os.path.join(headers[1], "pybind11")):
        headers[1] = __import__("pybind11").get_include()
    binding = Extension(
        "depthconv._C",
        ["csrc/binding.cpp"],
        include_dirs=headers,
        language="c++",
        extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-g0"],
        extra_link_args=["-Wl,--exclude-libs,ALL", "-s"],  # a C++ runtime linked into it stays its own
    )
    return [operators, binding]


def host_compiler() -> str:
    return (output(cpp_extension.get_cxx_compiler(), "--version").splitlines() or [""])[0]


def git_revision() -> str | None:
    if not os.path.exists(os.path.join(HERE, ".git")):
        return None
    return output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip() or None


def write_record(build: Build) -> None:
    """csrc/build_record.h: the facts of this build as a JSON string, which the binding carries."""
    record = {
        "version": VERSION,
        "torch": torch.__version__,
        "torch_target": "2.10",
        "cuda": build.toolkit.version if build.toolkit else None,
        "architectures": architectures(build.gencode),
        "host_compiler": host_compiler(),
        "flags": {name: " ".join(flags) for name, flags in build.flags.items()},
        "reason": build.reason,
        "git_revision": git_revision(),
    }
    text = json.dumps(json.dumps(record))  # a JSON string is a C string literal
    write_if_changed(os.path.join(HERE, "csrc", "build_record.h"), f"#define DEPTHCONV_BUILD_RECORD {text}\n")


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, with the operators' file name free of Python's ABI and a folder of objects for each extension."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # setuptools would compile all of it anew in a temporary folder
            tag = f"{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_temp = os.path.join("build", f"temp.{tag}")

    def build_extensions(self) -> None:
        if not host_compiler():
            sys.exit(f"depthconv: no C++ compiler: {cpp_extension.get_cxx_compiler()!r} does not run (set CXX?)")
        where = f" [{BUILD.toolkit.root}]" if BUILD.toolkit else ""
        print(f"depthconv {VERSION}: {BUILD.reason}{where}", flush=True)
        write_record(BUILD)
        with torch_cuda_version(BUILD.toolkit.version) if BUILD.toolkit else contextlib.nullcontext():
            super().build_extensions()

    def run(self) -> None:
        super().run()
        if not self.inplace:
            # In a clone, Python finds the folder depthconv/ before the installed package: let both work.
            self.copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        base = self.build_temp
        self.build_temp = os.path.join(base, ext.name)  # one build.ninja each
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = base

    def get_ext_filename(self, ext_name: str) -> str:
        name = super().get_ext_filename(ext_name)
        if ext_name.split(".")[-1] == "_ops":
            return os.path.join(os.path.dirname(name), "_ops.so")
        return name


VERSION = read_version()
BUILD = decide()

setup(ext_modules=extensions(BUILD), cmdclass={"build_ext": BuildExtension})
