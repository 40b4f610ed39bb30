"""DDP, FSDP2 and DTensor: on CPU in four processes with gloo, on CUDA in one for each of up to four GPUs with NCCL."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from conftest import require_cuda

import depthconv

WORKER = Path(__file__).with_name("distributed_jobs.py")
# By its text: importing it would import DTensor into this process.
NAMES = re.findall(r"^@job\ndef (\w+)", WORKER.read_text(), re.MULTILINE)

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What each rank found, all jobs run at once."""
    if request.param == "cuda":
        require_cuda()
    world = 4 if request.param == "cpu" else min(torch.cuda.device_count(), 4)
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, str(WORKER)]
    paths = [str(Path(depthconv.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ranks = []
    for rank in range(world):
        with (folder / f"{rank}.txt").open("w") as log:
            arguments = [*command, str(rank), str(world), request.param, str(folder)]
            ranks.append(subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        for rank in ranks:
            rank.wait(240)
    except subprocess.TimeoutExpired:
        pass  # the jobs that were not reached fail
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = []
    for rank in range(world):
        file = folder / f"{rank}.json"
        log_text = (folder / f"{rank}.txt").read_text()[-3000:]
        found.append({"log": log_text, **(json.loads(file.read_text()) if file.exists() else {})})
    return found


@pytest.mark.parametrize("name", NAMES)
def test_job(name: str, results: list[dict[str, str | None]]) -> None:
    for rank, found in enumerate(results):
        assert name in found, f"rank {rank} did not get there: {found['log']}"
        assert found[name] is None, f"rank {rank}: {found[name]}"
