import ctypes
import os
import time
from pathlib import Path

from distributed import Client

from dask_gpu_mpi import initialize
from support.jobs.scripts.tell import looks, tell

cuda = ctypes.CDLL("libcuda.so.1")  # loaded, on every rank
if os.environ["TEST_RANK"] == "1":
    cuda.cuInit(0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
    tell(guilty=os.getpid())
session = initialize(cpu_workers=1)
rows = looks(Client())
tell(workers=rows, warnings=[*map(str, session.plan.warnings)])

# who has initialised the driver, but made no context
calls = [line.split() for line in Path(os.environ["EMULATED_CUDA_LOG"]).read_text().splitlines()]
keepers = {pid for pid, _ in calls} - {pid for pid, function in calls if "Ctx" in function}
limit = time.monotonic() + 10
while any(map(os.path.exists, map("/proc/{}".format, keepers))) and time.monotonic() < limit:
    time.sleep(0.01)
tell(keepers=len(keepers), gone=time.monotonic() < limit)
