"""Devices, seeds and the switches of the suite.

DEPTHCONV_TEST_SEED       seed of all random data; a new one each run without it, printed at the top and on a failure
DEPTHCONV_REQUIRE_GPU=1  a missing GPU is a failure, not a skip
DEPTHCONV_FUZZ_EXAMPLES   examples of the property test
--large                   runs the tests that need many GB on the CPU too (on CUDA they run wherever memory allows)
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Generator

import pytest
import torch

# Left in the environment, so that test modules and child processes see the same one.
SEED = int(os.environ.setdefault("DEPTHCONV_TEST_SEED", str(random.SystemRandom().randrange(2**31))))
REQUIRE_CUDA = os.environ.get("DEPTHCONV_REQUIRE_GPU") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="run the tests marked large on the CPU too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: needs many GB and seconds; on the CPU only with --large")


def pytest_report_header() -> str:
    return (
        f"depthconv: DEPTHCONV_TEST_SEED={SEED}, CUDA {'available' if torch.cuda.is_available() else 'not available'}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("depthconv", f"repeat with DEPTHCONV_TEST_SEED={SEED}"))
    return report


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of its own for each test, the same for a test's CPU and CUDA forms; torch's own is set to it as well."""
    name = request.node.nodeid.replace("cuda", "cpu")
    value = (SEED + zlib.crc32(name.encode())) % 2**31
    torch.manual_seed(value)
    return value


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """'cpu' or 'cuda'."""
    if request.param == "cuda":
        require_cuda()
    elif request.node.get_closest_marker("large") and not request.config.getoption("--large"):
        pytest.skip("needs many GB: --large runs it on the CPU")
    return request.param


@pytest.fixture
def cuda() -> str:
    """'cuda', for tests that have no meaning on the CPU."""
    require_cuda()
    return "cuda"


def require_cuda() -> None:
    if torch.cuda.is_available():
        return
    if REQUIRE_CUDA:
        pytest.fail("DEPTHCONV_REQUIRE_GPU=1, but torch sees no CUDA device")
    pytest.skip("torch sees no CUDA device")
