import contextlib
import ctypes
import os
import signal
from pathlib import Path

from distributed import Client

from dask_gpu_mpi import initialize
from support.jobs.scripts.tell import looks, tell, wait_until

cuda = ctypes.CDLL("libcuda.so.1")  # loaded, on every rank
if os.environ["TEST_RANK"] == "1":
    cuda.cuInit(0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
    tell(guilty=os.getpid())
session = initialize(cpu_workers=1)
client = Client()
rows = looks(client)
tell(seen=sorted(client.run(os.getenv, "CUDA_DEVICE_MAX_CONNECTIONS").values()))
tell(workers=rows, warnings=[*map(str, session.plan.warnings)])

# who has initialised the driver, but made no context
calls = [line.split() for line in Path(os.environ["EMULATED_CUDA_LOG"]).read_text().splitlines()]
keepers = {pid for pid, _ in calls} - {pid for pid, function in calls if "Ctx" in function}
wait_until(lambda: not any(map(os.path.exists, map("/proc/{}".format, keepers))), 10)
tell(keepers=len(keepers), gone=True)


def is_back():
    # asked of the scheduler: who asks a worker that has gone waits half a minute for it
    there = client.run_on_scheduler(lambda dask_scheduler: set(dask_scheduler.workers))
    return len(there) == len(rows) and rows[0]["address"] not in there


os.kill(rows[0]["pid"], signal.SIGKILL)
wait_until(is_back, 60)
tell(after=looks(client))
