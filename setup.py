"""Builds depthconv: the operators (`depthconv/_ops.so`, LibTorch's stable ABI) and the binding (`depthconv._C`).

Environment: DEPTHCONV_CPU_ONLY=1 leaves CUDA out, DEPTHCONV_REQUIRE_CUDA=1 makes a missing nvcc an error,
DEPTHCONV_OPERATORS=FILE takes operators that are built already (they serve every Python; no torch is needed then),
DEPTHCONV_VERBOSE=1 prints registers and spills of each kernel; TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX, MAX_JOBS and
NVCC_THREADS as usual. `build_ext --operators-only` leaves the binding out.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

OPERATORS = os.environ.get("DEPTHCONV_OPERATORS")
TORCH_PROBLEM = ""
if not OPERATORS:
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        TORCH_PROBLEM = str(error)  # an sdist does without

HERE = os.path.dirname(os.path.abspath(__file__))
TORCH_TARGET = "0x020a000000000000"  # the oldest torch that the built files load under: 2.10
WHEEL_ARCHITECTURES = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]  # PTX of the newest comes with them
OLDEST_NVCC = (12, 0)
WAY_OUT = "Install another, name one with CUDA_HOME, or set DEPTHCONV_CPU_ONLY=1 for a CPU build."
REVISION_FILE = "git_revision.txt"  # what an sdist has in place of .git


def stop(reason: str) -> NoReturn:
    sys.exit(f"depthconv: {reason}")


class Toolkit(NamedTuple):
    """A CUDA toolkit with a compiler."""

    root: str
    found: str  # how it was found, in words
    version: str  # "13.0"
    release: str  # "13.0.88"
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


def compile_error(source: str, name: str, *command: str) -> str:
    """Of a small program: '' when it compiles, else the first error."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(source)
        try:
            done = subprocess.run(
                [*command, "-c", name, "-o", "probe.o"], capture_output=True, text=True, cwd=folder, check=False
            )
        except OSError as error:
            return f"{error.filename or command[0]}: {error.strerror}"
    if done.returncode == 0:
        return ""
    lines = (done.stderr + done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if re.search(r"error|fatal|not found", line, re.IGNORECASE)), lines[0]).strip()


# ---- The CUDA toolkit


def toolkit_roots() -> Iterator[tuple[str, str]]:
    """Folders that may hold bin/nvcc, most wanted first, each with how it was found."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield os.environ[name], f"at {name}"
            return  # what is asked for by name and is not there must not be replaced in silence
    nvcc = shutil.which("nvcc")
    if nvcc:
        # What is on PATH may be a wrapper script: the compiler knows its own home.
        top = re.search(r"^#\$ TOP=(.+)$", output(nvcc, "--dryrun", "-c", "x.cu"), re.MULTILINE)
        if top:
            yield os.path.normpath(top[1].strip()), "on PATH"
        yield os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "on PATH"
    yield "/usr/local/cuda", "at /usr/local/cuda"
    packages = importlib.util.find_spec("nvidia")  # cuda-toolkit[nvcc,cccl] and what it brings
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
        version = re.search(r"release (\d+\.\d+), V([\d.]+)", output(nvcc, "--version"))
        named = found.removeprefix("at ") if found.startswith("at CUDA_") else ""
        if not version:
            if named:
                stop(f"{named} is {root}, where bin/nvcc does not run. {WAY_OUT}")
            continue
        include = first_folder_with("cuda_runtime.h", root, ["include", f"targets/{machine}-linux/include"])
        library = first_folder_with(
            "libcudart_static.a", root, ["lib64", "lib", "lib64/stubs", f"targets/{machine}-linux/lib"]
        )
        if not include or not library:
            problem = f"the nvcc found {found} lacks {'libcudart_static.a' if include else 'cuda_runtime.h'} beside it"
            if named:
                stop(f"{problem} [{root}]. {WAY_OUT}")
            continue
        known = re.findall(r"compute_(\d+)(\d)\b", output(nvcc, "--list-gpu-arch"))
        architectures = [".".join(each) for each in known]
        return Toolkit(root, found, version[1], version[2], architectures, include, library), ""
    return None, problem


def architecture_flags(toolkit: Toolkit) -> list[str]:
    """nvcc's -gencode flags: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else all that a wheel carries."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.is_available():
        known = [each for each in WHEEL_ARCHITECTURES if each in toolkit.architectures]
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(known) + "+PTX"
    try:
        return cpp_extension._get_cuda_arch_flags()
    except ValueError as error:
        stop(f"TORCH_CUDA_ARCH_LIST is {os.environ.get('TORCH_CUDA_ARCH_LIST')!r}: {error}.")


def check_toolkit(toolkit: Toolkit, gencode: list[str]) -> None:
    """Stop now, in one sentence, and not after minutes: an nvcc that is too old, that does not know the architectures,
    that rejects the host compiler, or whose parts (from packages of several versions, say) do not fit together."""
    nvcc = f"nvcc {toolkit.release} found {toolkit.found} [{toolkit.root}]"
    if tuple(map(int, toolkit.version.split("."))) < OLDEST_NVCC:
        stop(f"{nvcc} is older than {'.'.join(map(str, OLDEST_NVCC))}. {WAY_OUT}")
    wanted = {re.sub(r"\D", "", each.rsplit("_", 1)[1]) for each in gencode}
    unknown = sorted(wanted - {each.replace(".", "") for each in toolkit.architectures}, key=int)
    if unknown:
        names = " ".join(f"{each[:-1]}.{each[-1]}" for each in unknown)
        stop(f"{nvcc} has no code for {names}, only for {' '.join(toolkit.architectures)}: see TORCH_CUDA_ARCH_LIST.")
    source = "#include <cuda_runtime.h>\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n__global__ void probe() {}\n"
    command = [os.path.join(toolkit.root, "bin", "nvcc"), f"-I{toolkit.include}", "-std=c++17", gencode[0]]
    if os.environ.get("CC"):  # as torch's build does
        command += ["-ccbin", os.environ["CC"]]
    error = compile_error(source, "probe.cu", *command)
    if error:
        stop(f"{nvcc} cannot compile: {error}. {WAY_OUT}")


# ---- What is built


def torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def read_version() -> str:
    with open(os.path.join(HERE, "depthconv", "__init__.py"), encoding="utf-8") as file:
        found = re.search(r'^__version__(?:: str)? = "([^"]+)"', file.read(), re.MULTILINE)
    if not found:
        stop("depthconv/__init__.py must set __version__")
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
    if TORCH_PROBLEM:
        stop(f"building needs torch >= 2.10 in this environment, but importing it failed: {TORCH_PROBLEM}")
    if torch_release() < (2, 10):
        stop(f"building needs torch >= 2.10, but this environment has torch {torch.__version__}.")
    if flag("DEPTHCONV_CPU_ONLY"):
        toolkit, problem = None, "DEPTHCONV_CPU_ONLY is set"
    elif torch.version.hip:
        toolkit, problem = None, f"this torch, {torch.__version__}, is for ROCm"
    else:
        toolkit, problem = find_toolkit()
    if toolkit is None and flag("DEPTHCONV_REQUIRE_CUDA"):
        stop(f"DEPTHCONV_REQUIRE_CUDA is set, but {problem}.")
    # C++17 is enough for the stable headers of torch 2.10 to 2.14, and asks less of the C++ runtime than C++20 does.
    common = ["-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    cxx = ["-O3", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wno-unknown-pragmas", "-g0"]
    if toolkit is None:
        return Build(None, f"CPU build: {problem}", [], {"cxx": cxx + common})
    common += ["-DUSE_CUDA", "-DDEPTHCONV_WITH_CUDA"]
    nvcc = ["-O3", "-Xcompiler", "-fvisibility=hidden", "--threads", os.environ.get("NVCC_THREADS", "1")]
    # Every driver that serves CUDA 13 can unpack the denser form: an eighth of the size.
    nvcc += ["--compress-mode=size"] if int(toolkit.version.split(".")[0]) >= 13 else ["-Xfatbin", "-compress-all"]
    if flag("DEPTHCONV_VERBOSE"):
        nvcc += ["-Xptxas", "-v"]
    gencode = architecture_flags(toolkit)
    check_toolkit(toolkit, gencode)
    reason = f"CUDA build: nvcc {toolkit.version} found {toolkit.found}, code for {' '.join(architectures(gencode))}"
    if torch.version.cuda and torch.version.cuda.split(".")[0] != toolkit.version.split(".")[0]:
        reason += (
            f"; torch's CUDA is {torch.version.cuda}: the CUDA runtime is linked statically, so the two need not "
            f"agree, but the GPU's driver must serve CUDA {toolkit.version.split('.')[0]}"
        )
    return Build(toolkit, reason, gencode, {"cxx": cxx + common, "nvcc": nvcc + common + gencode})


def architectures(gencode: list[str]) -> list[str]:
    """sm_90 for machine code, in order, then compute_120 for PTX."""
    names = [each.rsplit("code=", 1)[1] for each in gencode]
    return sorted(names, key=lambda name: (name.startswith("compute"), int(re.sub(r"\D", "", name)), name))


def operators(build: Build) -> Extension:
    sources = ["csrc/ops.cpp", "csrc/record.cpp", *sorted(glob.glob("csrc/cpu/*.cpp", root_dir=HERE))]
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
        extension = cpp_extension.CppExtension("depthconv._ops", sources)
    else:
        sources += ["csrc/failure.cpp", *sorted(glob.glob("csrc/cuda/*.cu", root_dir=HERE))]
        cpp_extension.CUDA_HOME = build.toolkit.root  # a CPU torch leaves it None
        extension = cpp_extension.CUDAExtension("depthconv._ops", sources, include_dirs=[build.toolkit.include])
        link += [f"-L{build.toolkit.library}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    extension.libraries = []  # torch_python, libcudart.so, c10_cuda: none of them
    # The registrations carry their files' names: no folder of this machine in them.
    extension.extra_compile_args = build.flags | {"cxx": [*build.flags["cxx"], f"-ffile-prefix-map={HERE}=."]}
    extension.extra_link_args = link
    return extension


def pybind11_headers() -> str:
    for package, folder in (("torch", "include"), ("pybind11", "include")):  # found, not imported
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            if os.path.exists(os.path.join(root, folder, "pybind11")):
                return os.path.join(root, folder)
    stop("the binding needs pybind11's headers, which neither torch nor a package pybind11 has here.")


def binding() -> Extension:
    return Extension(
        "depthconv._C",
        ["csrc/binding.cpp"],
        include_dirs=[os.path.join(HERE, "csrc"), pybind11_headers()],
        language="c++",
        extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-g0"],
        extra_link_args=["-Wl,--exclude-libs,ALL", "-s"],  # a C++ runtime linked into it stays its own
    )


# ---- The compiler and the record


def cxx_compiler() -> str:
    return os.environ.get("CXX") or "c++"


def host_compiler() -> str:
    return (output(*shlex.split(cxx_compiler()), "--version").splitlines() or [""])[0]


def check_host_compiler() -> None:
    if not host_compiler():
        stop(f"no C++ compiler: {cxx_compiler()!r} does not run. Install one (package g++), or name it with CXX.")
    source = "#include <Python.h>\n#include <optional>\nstd::optional<int> probe() { return {}; }\n"
    include = sysconfig.get_path("include")
    error = compile_error(source, "probe.cpp", *shlex.split(cxx_compiler()), "-std=c++17", f"-I{include}")
    if "Python.h" in error:
        stop(f"Python's headers are not at {include}: install them (package python3-dev).")
    if error:
        stop(f"the C++ compiler {cxx_compiler()!r} ({host_compiler()}) does not compile C++17: {error}.")


def git_revision() -> str | None:
    if os.path.exists(os.path.join(HERE, ".git")):
        return output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip() or None
    with contextlib.suppress(OSError), open(os.path.join(HERE, REVISION_FILE), encoding="utf-8") as file:
        return file.read().strip()
    return None


def write_record(build: Build) -> None:
    """csrc/build_record.h: the facts of this build as a JSON string, which the operators carry."""
    names = architectures(build.gencode)
    record = {
        "version": VERSION,
        "torch": torch.__version__,
        "torch_target": "2.10",
        "cuda": build.toolkit.version if build.toolkit else None,
        "nvcc": build.toolkit.release if build.toolkit else None,
        "architectures": names,
        "host_compiler": host_compiler(),
        "flags": {name: " ".join(flags) for name, flags in build.flags.items()},
        "reason": build.reason,
        "git_revision": git_revision(),
    }
    macros = {
        "DEPTHCONV_BUILD_RECORD": json.dumps(record),
        "DEPTHCONV_ARCHITECTURES": " ".join(names),
        "DEPTHCONV_CUDA": build.toolkit.version if build.toolkit else "",
    }
    # A JSON string is a C string literal.
    text = "".join(f"#define {name} {json.dumps(value)}\n" for name, value in macros.items())
    write_if_changed(os.path.join(HERE, "csrc", "build_record.h"), text)


def check_operators(path: str) -> None:
    try:
        with open(path, "rb") as file:
            found = re.search(rb'\{"version": "([^"]+)"', file.read())
    except OSError as error:
        stop(f"DEPTHCONV_OPERATORS is {path}: {error.strerror}.")
    if not found or found[1].decode() != VERSION:
        what = f"those of depthconv {found[1].decode()}" if found else "no operators of depthconv"
        stop(f"DEPTHCONV_OPERATORS is {path}, which holds {what}, not those of depthconv {VERSION}.")


# ---- Commands


class BuildExtension(build_ext if OPERATORS or TORCH_PROBLEM else cpp_extension.BuildExtension):
    """torch's, with the operators' file name free of Python's ABI and a folder of objects for each extension.

    What to build is decided when it is built: an sdist needs neither torch nor a compiler.
    """

    user_options = [*build_ext.user_options, ("operators-only", None, "leave the binding out")]
    boolean_options = [*build_ext.boolean_options, "operators-only"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.operators_only = False

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # setuptools would compile all of it anew in a temporary folder
            tag = f"{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_temp = os.path.join("build", f"temp.{tag}")

    def build_extensions(self) -> None:
        check_host_compiler()
        if OPERATORS:
            check_operators(OPERATORS)
            print(f"depthconv {VERSION}: the operators are taken from {OPERATORS}", flush=True)
            build = None
        else:
            build = decide()
            where = f" [{build.toolkit.root}]" if build.toolkit else ""
            print(f"depthconv {VERSION}: {build.reason}{where}", flush=True)
            write_record(build)
        if self.operators_only:
            self.extensions = [each for each in self.extensions if each.name != "depthconv._C"]
        for each in self.extensions:
            found = binding() if each.name == "depthconv._C" else operators(build) if build else each
            vars(each).update({key: value for key, value in vars(found).items() if not key.startswith("_")})
        with torch_cuda_version(build.toolkit.version) if build and build.toolkit else contextlib.nullcontext():
            super().build_extensions()

    def run(self) -> None:
        super().run()
        if not self.inplace and not self.operators_only:
            # In a clone, Python finds the folder depthconv/ before the installed package: let both work.
            self.copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        if OPERATORS and ext.name == "depthconv._ops":
            target = self.get_ext_fullpath(ext.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(OPERATORS, target)
            return
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


class SourceDistribution(sdist):
    """Carries the git revision, for the records of the builds made from it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        revision = git_revision()
        if revision:
            with open(os.path.join(base_dir, REVISION_FILE), "w", encoding="utf-8") as file:
                file.write(revision + "\n")


VERSION = read_version()

# Filled in by build_ext.
setup(
    ext_modules=[Extension("depthconv._ops", []), Extension("depthconv._C", [])],
    cmdclass={"build_ext": BuildExtension, "sdist": SourceDistribution},
)
