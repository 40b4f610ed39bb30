"""The built files: their symbols, libraries, machine code and record; the sdist and the wheel."""

from __future__ import annotations

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

import depthconv

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
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, **options).stdout  # type: ignore[call-overload]


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


def test_operators_hide_the_cuda_runtime():
    """The static CUDA runtime's functions must not stand in for those of the libcudart that torch loads."""
    assert [name for _, name in symbols(OPERATORS, "--defined-only") if name.startswith(("cuda", "__cuda"))] == []


def test_record():
    assert RECORD["version"] == depthconv.__version__
    assert RECORD["torch_target"] == "2.10"
    assert RECORD["reason"].startswith("CUDA build: " if RECORD["cuda"] else "CPU build: ")
    assert bool(RECORD["architectures"]) == bool(RECORD["cuda"])
    assert {"torch", "host_compiler", "flags", "git_revision", "cpu_instruction_set"} <= set(RECORD)
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


def test_no_kernel_spills(cuobjdump: str):
    """No stack and no local memory in any kernel: registers hold all that a thread works with."""
    usage = re.findall(
        r"Function (\w+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", output(cuobjdump, "-res-usage", OPERATORS)
    )
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
    build = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(tmp_path)!r}))"
    output(sys.executable, "-c", build, cwd=source)
    with tarfile.open(tmp_path / f"depthconv-{depthconv.__version__}.tar.gz") as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = {
        str(path.relative_to(source))
        for folder in ("csrc", "depthconv", "docs", "examples", "tests")
        for path in (source / folder).rglob("*")
        if path.is_file() and not path.name.endswith((".pyc", "build_record.h", ".so"))
    } | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", "PKG-INFO"}
    assert expected - names == set()
    assert [name for name in names if name.endswith((".so", ".pyc", "build_record.h"))] == []


@needs_source
def test_wheel_imports_from_another_folder(tmp_path: Path):
    """A wheel made of the files that are built already, unpacked elsewhere, imported and run from a third folder."""
    source = copy_of_sources(tmp_path)
    (source / "setup.cfg").write_text(f"[build]\nbuild_lib = {tmp_path / 'lib'}\n")
    output(sys.executable, "setup.py", "-q", "build_py", cwd=source)
    for built in (OPERATORS, BINDING):
        shutil.copy(built, tmp_path / "lib" / "depthconv")
    output(sys.executable, "setup.py", "-q", "bdist_wheel", "--skip-build", "-d", tmp_path / "wheels", cwd=source)
    (wheel,) = (tmp_path / "wheels").iterdir()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"depthconv-{depthconv.__version__}-{tag}-{tag}-{platform}.whl"
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
    metadata = (tmp_path / "site" / f"depthconv-{depthconv.__version__}.dist-info" / "METADATA").read_text()
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
