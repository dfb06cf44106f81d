import os
import sys
import time

from dask_gpu_mpi import SpmdError, current_session
from support.jobs.scripts.tell import tell

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
tell(
    first=first,
    failed=failed,
    seconds=seconds,
    before=before,
    after=after,
    second=session.spmd(works, timeout=120),
)
