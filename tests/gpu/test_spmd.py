"""Gangs on real GPUs: NCCL between the members, and one that hangs inside NCCL, after which its GPU is free again."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

SCRIPT = script("gpu/scripts/gangs.py")


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_nccl_between_members(mpirun: Mpi, gpus: Any, tmp_path: Path, library: str) -> None:
    if len(gpus.uuids) < 2:
        pytest.skip("needs two GPUs")
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "cupy":
        pytest.importorskip("cupy.cuda.nccl", reason="cupy has no NCCL here", exc_type=ImportError)
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {"PYTHONPATH": os.environ.get("PYTHONPATH")}
    line = [*COMMAND, str(tmp_path / "script.py"), library]
    told = facts(mpirun.run(line, 1, env=environ).check(0))
    size = len(gpus.uuids)
    total = size * (size + 1) / 2
    assert told["first"] == told["second"] == [total] * size
    assert told["failed"] == [1, "ValueError('rank 1 does not take part')"]
    # whoever hung has another process now; and rank 1, which returned, its own, unless PyTorch's process group is in it
    assert told["before"][0] != told["after"][0]
    assert (told["before"][1] == told["after"][1]) == (library == "cupy")
    gpus.check_idle()
