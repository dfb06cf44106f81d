import time

import dask
import dask.array as da
import numpy as np
from distributed import Client, wait

from support.jobs.scripts.tell import look, tell

client = session = None  # the text that follows makes them


def cuda(dask_worker):
    """What CUDA says inside a worker, and what a kernel of it computes."""
    import numba.cuda

    @numba.cuda.jit
    def triple(values):
        i = numba.cuda.grid(1)
        if i < values.size:
            values[i] = 3 * i

    values = numba.cuda.to_device(np.zeros(200_000, dtype=np.int64))  # fewer blocks, and numba warns
    triple[800, 256](values)
    device = numba.cuda.get_current_device()
    import ctypes

    free, total = ctypes.c_size_t(), ctypes.c_size_t()  # numba's own call fails if RMM allocates for it
    assert ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return {
        **look(dask_worker),
        "count": len(numba.cuda.gpus),
        "uuid": device.uuid if isinstance(device.uuid, str) else device.uuid.decode(),
        "total": total.value,
        "kernel": bool((values.copy_to_host() == 3 * np.arange(200_000)).all()),
    }


def contexts():
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return [len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles]


def seen():
    rows = sorted(client.run(cuda).values(), key=lambda row: str(row["name"]))
    tell(workers=rows, plan=session.plan.as_json(), contexts=contexts(), ready=session.ready_seconds)
