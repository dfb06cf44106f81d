import os
import resource
import time

from distributed import Client

from dask_gpu_mpi import initialize
from support.jobs.scripts.tell import tell


def places(dask_worker):
    return [dask_worker.address, dask_worker.nanny]


def limits():
    return resource.getrlimit(resource.RLIMIT_NOFILE)


until = os.path.join(os.environ["TMPDIR"], "go-on")
session = initialize(worker_class="distributed.Nanny", dashboard=False)
with session.client() as client:
    tell(limits=[*client.run(limits).values(), client.run_on_scheduler(limits)])
    tell(places=[session.address, *[each for both in client.run(places).values() for each in both]])
    sums = []
    while not os.path.exists(until):
        sums.append(client.submit(sum, client.map(abs, range(-20, 0), pure=False)).result())
        with Client(session.address, security=session.security, set_as_default=False) as another:
            sums.append(another.submit(sum, range(21), pure=False).result())
        tell(so_far=len(sums))
    tell(sums=sorted(set(sums)))
