"""Gangs on real GPUs: NCCL between the members, and one that hangs inside NCCL, after which its GPU is free again."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, TELL, facts
from support.jobs.mpi import Mpi

SCRIPT = (
    TELL
    + """
import time
from dask_gpu_mpi import SpmdError, current_session

session = current_session()

def with_cupy(group):
    import cupy
    from cupy.cuda import nccl
    cupy.cuda.Device(group.device).use()
    uid = group.broadcast(nccl.get_unique_id() if group.rank == 0 else None)
    comm = nccl.NcclCommunicator(group.size, uid, group.rank)
    values = cupy.full(1000, group.rank + 1, dtype=cupy.float32)
    comm.allReduce(values.data.ptr, values.data.ptr, values.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)
    cupy.cuda.Device().synchronize()
    total = float(values[0])
    comm.destroy()
    return total

def hangs_in_cupy(group):
    import cupy
    from cupy.cuda import nccl
    cupy.cuda.Device(group.device).use()
    uid = group.broadcast(nccl.get_unique_id() if group.rank == 0 else None)
    comm = nccl.NcclCommunicator(group.size, uid, group.rank)
    values = cupy.ones(1000, dtype=cupy.float32)
    group.barrier()
    if group.rank == 1:
        raise ValueError("rank 1 does not take part")
    comm.allReduce(values.data.ptr, values.data.ptr, values.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)
    cupy.cuda.Device().synchronize()  # for ever: rank 1 does not come

def with_torch(group):
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(group.device)
    dist.init_process_group("nccl")
    values = torch.full((1000,), group.rank + 1.0, device="cuda")
    dist.all_reduce(values)
    total = float(values[0])
    dist.destroy_process_group()
    return total

def hangs_in_torch(group):
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(group.device)
    dist.init_process_group("nccl")
    values = torch.ones(1000, device="cuda")
    dist.all_reduce(values)
    group.barrier()
    if group.rank == 1:
        raise ValueError("rank 1 does not take part")
    dist.all_reduce(values)
    torch.cuda.synchronize()  # for ever: rank 1 does not come

def processes(group):
    return os.getpid()

works, hangs = {"cupy": (with_cupy, hangs_in_cupy), "torch": (with_torch, hangs_in_torch)}[sys.argv[1]]
before = session.spmd(processes)
first = session.spmd(works, timeout=120)
begun = time.monotonic()
try:
    session.spmd(hangs, timeout=120, grace=2)
except SpmdError as error:
    failed = [error.rank, repr(error.__cause__)]
seconds = time.monotonic() - begun
after = session.spmd(processes)
tell(first=first, failed=failed, seconds=seconds, before=before, after=after, second=session.spmd(works, timeout=120))
"""
)


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
    told = facts(mpirun.run(line, 1, env=environ, timeout=110).check(0))
    size = len(gpus.uuids)
    total = size * (size + 1) / 2
    assert told["first"] == told["second"] == [total] * size
    assert told["failed"] == [1, "ValueError('rank 1 does not take part')"]
    # whoever hung has another process now; and rank 1, which returned, its own, unless PyTorch's process group is in it
    assert told["before"][0] != told["after"][0]
    assert (told["before"][1] == told["after"][1]) == (library == "cupy")
    assert gpus.idle()
