import os
import signal
import sys

import numpy as np
from distributed import Client, wait

from dask_gpu_mpi import SpmdError, current_session
from support.jobs.scripts.tell import tell

session, client = current_session(), Client()
# on worker 0 alone: the other member fetches it, over UCX
array = client.submit(np.arange, 5_000_000.0, workers=[0])
wait(array)


def look(group, array):
    return group.allgather(group.rank), float(array.sum()), "ucxx" in sys.modules


def killed(group):
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


tell(first=session.spmd(look, array, timeout=60))
try:
    session.spmd(killed, timeout=60)
except SpmdError as error:
    tell(error=[error.rank, error.worker, list(error.died)])
tell(second=session.spmd(look, array, timeout=60))
sys.exit(3)
