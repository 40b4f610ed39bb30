"""The built files: their symbols, libraries, machine code and record; what a failure says; the sdist and the wheel."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import depthconv
from depthconv import _C

PACKAGE = Path(depthconv.__file__).parent
SOURCE = Path(__file__).resolve().parent.parent
OPERATORS = PACKAGE / "_ops.so"
BINDING = PACKAGE / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
C_AND_CPP_RUNTIME = r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
RECORD = depthconv.build_info()

# Set by .ci/run: the build must hold CUDA code, and there must be a cuobjdump to look at it.
REQUIRE_MACHINE_CODE = os.environ.get("DEPTHCONV_REQUIRE_MACHINE_CODE") == "1"

needs_source = pytest.mark.skipif(not (SOURCE / "setup.py").exists(), reason="the tests run apart from the sources")


def output(*command: str | Path, **options: object) -> str:
    options |= {"check": True, "capture_output": True, "text": True}
    return subprocess.run(list(map(str, command)), **options).stdout  # type: ignore[call-overload]


def tool(name: str) -> str:
    """A binary tool, or a skip."""
    found = shutil.which(name)
    if not found:
        pytest.skip(f"no {name} here (package binutils)")
    return found


def needed(file: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output(tool("readelf"), "-d", file))


def symbols(file: Path, which: str) -> list[tuple[str, str]]:
    """(kind, name with version) of the dynamic symbols, `which` as nm names them."""
    lines = output(tool("nm"), "-D", which, file).splitlines()
    return [(parts[-2], parts[-1]) for parts in map(str.split, lines)]


def test_operators_use_only_stable_symbols():
    """A C++ symbol of torch is what breaks at the next torch; the C functions aoti_torch_* and torch_* stay."""
    stable = re.compile(
        r"(aoti_torch|torch)_[a-z0-9_]+|\w+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+|_ITM_\w+|__gmon_start__|__cxa_finalize"
    )
    outside = [name for _, name in symbols(OPERATORS, "--undefined-only") if not stable.fullmatch(name)]
    assert outside == []


def test_cuda_shims_are_weak():
    """They lie in libtorch_cuda, which a CPU torch lacks: a strong one would be an undefined symbol at import."""
    cuda = [(kind, name) for kind, name in symbols(OPERATORS, "--undefined-only") if "_cuda_" in name]
    assert len(cuda) > 0 or not RECORD["cuda"]
    assert {kind for kind, _ in cuda} <= {"w", "v"}


def test_libraries_of_the_operators():
    """libtorch.so itself too: through it the weak symbols find libtorch_cuda. Nothing of Python, no shared CUDA."""
    libraries = set(needed(OPERATORS))
    torch_libraries = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
    assert torch_libraries <= libraries
    assert [name for name in libraries - torch_libraries if not re.fullmatch(C_AND_CPP_RUNTIME, name)] == []


def test_libraries_of_the_binding():
    assert [name for name in needed(BINDING) if not re.fullmatch(C_AND_CPP_RUNTIME, name)] == []


def test_binding_uses_only_python_and_the_runtime():
    """Nothing of torch by symbol: one file serves every torch."""
    allowed = re.compile(r"_?Py\w+|\w+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+|_ITM_\w+|__gmon_start__|__cxa_finalize")
    assert [name for _, name in symbols(BINDING, "--undefined-only") if not allowed.fullmatch(name)] == []


@needs_source
@pytest.mark.parametrize("file", [OPERATORS, BINDING], ids=["operators", "binding"])
def test_built_files_name_no_folder_of_the_build(file: Path):
    assert str(SOURCE).encode() not in file.read_bytes()
    assert "RUNPATH" not in output(tool("readelf"), "-d", file) and "RPATH" not in output(tool("readelf"), "-d", file)


def test_operators_hide_the_cuda_runtime():
    """The static CUDA runtime's functions must not stand in for those of the libcudart that torch loads."""
    assert [name for _, name in symbols(OPERATORS, "--defined-only") if name.startswith(("cuda", "__cuda"))] == []


def test_record():
    assert RECORD["version"] == depthconv.__version__
    assert RECORD["torch_target"] == "2.10"
    assert RECORD["reason"].startswith("CUDA build: " if RECORD["cuda"] else "CPU build: ")
    assert bool(RECORD["architectures"]) == bool(RECORD["cuda"])
    assert {"torch", "host_compiler", "flags", "git_revision", "cpu_instruction_set"} <= set(RECORD)
    assert RECORD["nvcc"].startswith(RECORD["cuda"]) if RECORD["cuda"] else RECORD["nvcc"] is None
    assert RECORD["binding"].startswith(f"CPython {sys.version_info.major}.{sys.version_info.minor}, pybind11 ")
    assert "fast" not in " ".join(RECORD["flags"].values())  # neither -ffast-math nor --use_fast_math


# ---- Machine code


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    if not RECORD["cuda"]:
        assert not REQUIRE_MACHINE_CODE, RECORD["reason"]
        pytest.skip("a CPU build")
    folders = [Path(root) / "bin" for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    folders += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin"))
    found = shutil.which("cuobjdump") or next(
        (str(folder / "cuobjdump") for folder in folders if (folder / "cuobjdump").exists()), None
    )
    if found is None:
        assert not REQUIRE_MACHINE_CODE, "no cuobjdump"
        pytest.skip("no cuobjdump here (packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm)")
    return found


def test_architectures_are_those_declared(cuobjdump: str):
    machine_code = set(re.findall(r"\.(sm_\w+)\.cubin", output(cuobjdump, "--list-elf", OPERATORS)))
    ptx = {f"compute_{each}" for each in re.findall(r"\.sm_(\w+)\.ptx", output(cuobjdump, "--list-ptx", OPERATORS))}
    assert machine_code | ptx == set(RECORD["architectures"])


def test_no_kernel_spills(cuobjdump: str, tmp_path: Path):
    """No stack and no local memory in any kernel: registers hold all that a thread works with."""
    output(cuobjdump, "-xelf", "all", OPERATORS, cwd=tmp_path)  # it reads no resources from compressed code
    text = "".join(output(cuobjdump, "-res-usage", file) for file in sorted(tmp_path.glob("*.cubin")))
    usage = re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert len(usage) > 20
    assert [name for name, stack, local in usage if int(stack) or int(local)] == []


def instructions(cuobjdump: str) -> Iterator[tuple[str, set[str]]]:
    """Kernel names and the memory instructions in each, for the first architecture of the build."""
    architecture = RECORD["architectures"][0]
    command = [cuobjdump, "-sass", "-arch", architecture, str(OPERATORS)]
    name, found = "", set()
    # Streamed: the text is a hundred megabytes.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Function :" in line:
                if name:
                    yield name, found
                name, found = line.split(":")[1].strip(), set()
            elif match := re.search(r"\b(LDG|LDGSTS|STG|LDL|STL)[.\w]*", line):
                found.add(match[0])
    assert process.returncode == 0
    yield name, found


def test_vector_kernels_load_sixteen_bytes(cuobjdump: str):
    """Each kernel whose vector is 16 bytes wide, to a register or to shared memory; and nothing goes to the stack."""
    sizes = {"f": 4, "d": 8, "6__half": 2, "13__nv_bfloat16": 2}
    kernel = re.compile(r"_ZN9depthconv4cuda\d+([a-z_]+)I(f|d|6__half|13__nv_bfloat16)Li(\d+)E")
    vectors, narrow, spilling = set(), [], []
    for name, found in instructions(cuobjdump):
        if any(each.startswith(("LDL", "STL")) for each in found):
            spilling.append(name)
        match = kernel.match(name)
        if match and sizes[match[2]] * int(match[3]) == 16:
            vectors.add((match[1], match[2]))
            if not any(re.match(r"LDG\.E\.128|LDGSTS[.\w]*\.128", each) for each in found):
                narrow.append(name)
    assert {("forward_kernel", dtype) for dtype in sizes} <= vectors
    assert {("one_pass_kernel", dtype) for dtype in sizes} <= vectors
    assert (narrow, spilling) == ([], [])


# ---- What a failure says


NO_IMAGE = "no kernel image is available for execution on the device"
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"


@pytest.mark.parametrize(
    "driver, capability, says",
    [
        (0, (0, 0), "No NVIDIA driver was found. "),
        (12080, (0, 0), "The driver is too old for this build: install one for CUDA 13.0 or later, or rebuild "),
        (13000, (7, 0), "No code of this build runs on this device: rebuild depthconv with TORCH_CUDA_ARCH_LIST=7.0"),
        (13000, (11, 0), "No code of this build runs on this device: rebuild depthconv with TORCH_CUDA_ARCH_LIST=11.0"),
        (13000, (13, 0), "Of this build only the PTX suits this device, and the driver is too old to compile it: "),
        (13010, (13, 0), ""),
        (13000, (8, 9), ""),
        (13000, (12, 1), ""),
    ],
)
def test_failed_launch_says_what_was_built_and_what_is_there(driver: int, capability: tuple[int, int], says: str):
    text = _C.explain_failure(NO_IMAGE, ARCHITECTURES, "13.1", driver, capability, "A GPU")
    head = f"depthconv: a CUDA kernel could not run: {NO_IMAGE}. {says}"
    assert text.startswith(head)
    if not says:
        assert text.startswith(f"{head}Built for: ")
    assert f"Built for: {ARCHITECTURES}, CUDA 13.1. Found: " in text
    if capability != (0, 0):
        assert f"Found: A GPU of compute capability {capability[0]}.{capability[1]}, a driver for CUDA 13." in text


@pytest.mark.parametrize(
    "code, capability, runs",
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (11, 0), False),
        ("sm_86", (8, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("compute_100f", (12, 0), False),
    ],
)
def test_which_code_serves_which_device(code: str, capability: tuple[int, int], runs: bool):
    text = _C.explain_failure("error", code, "13.0", 13000, capability, "A GPU")
    assert ("No code of this build" not in text) == runs


def test_kernel_that_does_not_start_names_the_build_and_the_device(cuda: str):
    """Asked of the device at hand: the library fills in what the machine is."""
    if not RECORD["cuda"]:
        pytest.skip("a CPU build")
    major, minor = torch.cuda.get_device_capability()
    text = torch.ops.depthconv._explain_failure("error", torch.cuda.current_device())
    assert f"Built for: {' '.join(RECORD['architectures'])}, CUDA {RECORD['cuda']}. " in text
    assert f"Found: {torch.cuda.get_device_name()} of compute capability {major}.{minor}, a driver for CUDA " in text


def package_in(folder: Path) -> Path:
    """A copy of the package, as installed."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(PACKAGE, folder / "site" / "depthconv", ignore=ignored))


def failing_import(package: Path, *paths: Path) -> str:
    """The last line of what `import depthconv` prints."""
    # Without site, since the finder of an editable install would find the files that the package here lacks.
    paths = (*paths, package.parent, Path(torch.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-S", "-c", "import depthconv"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=package.parent)
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_torch_too_old(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.9.1+cu128'\n")
    version = depthconv.__version__
    assert (
        failing_import(package_in(tmp_path), tmp_path)
        == f"ImportError: depthconv {version} needs torch >= 2.10, but here is torch 2.9.1+cu128."
    )


def test_built_for_another_python(tmp_path: Path):
    package = package_in(tmp_path)
    (package / BINDING.name).rename(package / "_C.cpython-399-x86_64-linux-gnu.so")
    here = sys.implementation.cache_tag
    assert f"built for cpython-399-x86_64-linux-gnu, and this is {here}" in failing_import(package)


def test_not_built_at_all(tmp_path: Path):
    package = package_in(tmp_path)
    (package / "_ops.so").unlink()
    assert "_ops.so is missing" in failing_import(package)
    (package / BINDING.name).unlink()
    assert f"there are no built files in {package}." in failing_import(package)


def test_symbol_that_torch_lacks(tmp_path: Path):
    """What a binary interface that is not stable would do: the loader's words, and what the file was built for."""
    package = package_in(tmp_path)
    file = package / "_ops.so"
    file.write_bytes(file.read_bytes().replace(b"aoti_torch_get_strides\0", b"aoti_torch_got_strides\0"))
    text = failing_import(package)
    assert f"under torch {torch.__version__} (CUDA {torch.version.cuda})" in text
    assert "undefined symbol: aoti_torch_got_strides; _ops.so was built as version " in text
    assert f"torch {RECORD['torch']}, torch_target 2.10, cuda {RECORD['cuda']}" in text


def test_import_brings_nothing_that_torch_has_not_brought():
    """An import costs time for what it imports: nothing but the package's own modules."""
    program = (
        "import sys, time, torch\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        "import depthconv\n"
        "print(f'{1e3 * (time.perf_counter() - start):.1f} ms over torch')\n"
        "print(*sorted(name for name in set(sys.modules) - before if name.split('.')[0] != 'depthconv'))\n"
        "print(*sorted(name for name in set(sys.modules) if name.split('.')[0] == 'depthconv'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    time, others, own = output(sys.executable, "-c", program, env=environment).splitlines()
    print(time)
    assert others == ""
    assert not {"depthconv.bench", "depthconv.__main__", "depthconv._reference"} & set(own.split())


# ---- What setup.py says before it builds


NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.88";;
  *--list-gpu-arch*) echo compute_80; echo compute_90;;
  *) echo "In file included from x:"; echo "x.h:1:2: error: unsupported GNU version!"; exit 1;;
esac
"""


def toolkit(folder: Path, version: str) -> str:
    """A CUDA_HOME whose compiler compiles nothing."""
    for name, text in (
        ("bin/nvcc", NVCC.format(version=version)),
        ("include/cuda_runtime.h", ""),
        ("lib64/libcudart_static.a", ""),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin" / "nvcc").chmod(0o755)
    return str(folder)


@needs_source
@pytest.mark.parametrize(
    "environment, says",
    [
        ({"CXX": "/nowhere/c++"}, "no C++ compiler: '/nowhere/c++' does not run"),
        ({"CXX": "false"}, "the C++ compiler 'false' ("),
        ({"CUDA_HOME": "/nowhere"}, "CUDA_HOME is /nowhere, where bin/nvcc does not run"),
        ({"CUDA_HOME": "12.4", "without": "cuda_runtime.h"}, "the nvcc found at CUDA_HOME lacks cuda_runtime.h"),
        ({"CUDA_HOME": "11.8"}, "nvcc 11.8.88 found at CUDA_HOME"),
        ({"CUDA_HOME": "13.0", "TORCH_CUDA_ARCH_LIST": "7.0"}, "has no code for 7.0, only for 8.0 9.0"),
        ({"CUDA_HOME": "13.0", "TORCH_CUDA_ARCH_LIST": "9.0 nine"}, "TORCH_CUDA_ARCH_LIST is '9.0 nine': Unknown"),
        ({"CUDA_HOME": "13.0"}, "cannot compile: x.h:1:2: error: unsupported GNU version!"),
        ({"DEPTHCONV_OPERATORS": __file__}, "which holds no operators of depthconv"),
        ({"DEPTHCONV_OPERATORS": "/nowhere"}, "DEPTHCONV_OPERATORS is /nowhere: No such file or directory."),
    ],
)
def test_build_stops_early_in_one_sentence(environment: dict[str, str], says: str, tmp_path: Path):
    environment = dict(environment)
    missing, home = environment.pop("without", None), environment.get("CUDA_HOME", "")
    if re.match(r"\d", home):
        environment["CUDA_HOME"] = toolkit(tmp_path / "cuda", home)
    if missing:
        (tmp_path / "cuda" / "include" / missing).unlink()
    unset = ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "DEPTHCONV_CPU_ONLY", "CC", "CXX")
    rest = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)],
        capture_output=True, text=True, cwd=copy_of_sources(tmp_path), env=rest | environment,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("depthconv: ") and says in last, done.stderr


# ---- Distributions


def copy_of_sources(folder: Path) -> Path:
    """A clone's files, without what builds leave."""
    ignored = shutil.ignore_patterns(
        "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*", "build_record.h", "shared"
    )
    return Path(shutil.copytree(SOURCE, folder / "source", ignore=ignored))


@needs_source
def test_sdist_has_what_a_build_needs(tmp_path: Path):
    source = copy_of_sources(tmp_path)
    (source / "git_revision.txt").write_text("0123456789ab\n")  # as an sdist has it: it goes on to the next
    build = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(tmp_path)!r}))"
    output(sys.executable, "-c", build, cwd=source)
    with tarfile.open(tmp_path / f"depthconv-{depthconv.__version__}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = {
        str(path.relative_to(source))
        for folder in ("csrc", "depthconv", "docs", "examples", "tests", "tools")
        for path in (source / folder).rglob("*")
        if path.is_file() and not path.name.endswith((".pyc", "build_record.h", ".so"))
    } | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", "PKG-INFO"}
    expected |= {"git_revision.txt"}
    assert expected - names == set()
    assert [name for name in names if name.endswith((".so", ".pyc", "build_record.h"))] == []


def check_record(wheel: Path) -> None:
    """Each file with its hash and size, and no other."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(archive.read(name).decode().splitlines())}
        assert rows.pop(name) == ["", ""]
        found = {}
        for each in archive.namelist():
            if each != name and not each.endswith("/"):
                data = archive.read(each)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                found[each] = [f"sha256={digest}", str(len(data))]
    assert rows == found


@needs_source
def test_wheel_imports_from_another_folder(tmp_path: Path):
    """A wheel of the operators that are built already and a binding of its own, as tools/build_wheels.py makes them:
    unpacked elsewhere, imported and run from a third folder."""
    source = copy_of_sources(tmp_path)
    environment = os.environ | {"DEPTHCONV_OPERATORS": str(OPERATORS)}
    output(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", tmp_path / "wheels", cwd=source, env=environment)
    (wheel,) = (tmp_path / "wheels").iterdir()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"depthconv-{depthconv.__version__}-{tag}-{tag}-{platform}.whl"
    check_record(wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    package = {name for name in names if name.startswith("depthconv/")}
    assert package == {
        f"depthconv/{path.name}"
        for path in (source / "depthconv").iterdir()
        if path.suffix in (".py", ".pyi", ".typed", ".json")
    } | {"depthconv/_ops.so", f"depthconv/{BINDING.name}"}
    info = {name.split("/", 1)[1] for name in names - package}
    assert {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE"} <= info
    folder = tmp_path / "site" / f"depthconv-{depthconv.__version__}.dist-info"
    metadata = (folder / "METADATA").read_text()
    assert (folder / "licenses" / "LICENSE").read_text() == (SOURCE / "LICENSE").read_text()
    assert (tmp_path / "site" / "depthconv" / "_ops.so").read_bytes() == OPERATORS.read_bytes()
    assert "Requires-Dist: torch>=2.10" in metadata and "License-Expression: BSD-3-Clause" in metadata

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    program = (
        "import torch, depthconv\n"
        "y = depthconv.depthwise_conv2d(torch.ones(1, 2, 5, 4), torch.ones(2, 1, 3, 1))\n"
        "print(depthconv.__file__, y.sum().item())"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    where, total = output(sys.executable, "-c", program, cwd=elsewhere, env=environment).split()
    assert Path(where).parent == tmp_path / "site" / "depthconv"
    assert float(total) == 2 * 3 * 4 * 3
