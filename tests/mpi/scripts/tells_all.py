import os
import sys
from pathlib import Path

import beside
from distributed import Client

from dask_gpu_mpi import current_session
from support.jobs.scripts.tell import looks, tell


class Pair:
    def __init__(self, left):
        self.left, self.right = left, os.getpid()


def double(x):
    return 2 * x


def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size, MPI.COMM_WORLD.allreduce(5)


def rank():
    environ = Path("/proc/self/environ").read_text()  # a rank's variables are gone from `os.environ`
    begun_with = dict(item.partition("=")[::2] for item in environ.split("\0"))
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "DGM_RANK")
    return next((int(begun_with[name]) for name in names if name in begun_with), 0)


print("the script runs", flush=True)
client = Client()
pair = client.submit(Pair, 3).result()
from mpi4py import MPI  # noqa: E402 - as users do, where they need it

tell(
    rank=rank(),
    world=[MPI.COMM_WORLD.size, MPI.COMM_WORLD.allreduce(5)],
    argv=sys.argv,
    name=__name__,
    file=__file__,
    address=client.scheduler.address,
    doubled=client.gather(client.map(double, range(10))),
    beside=client.submit(beside.triple, 5).result(),
    pair={"type": type(pair).__name__, "left": pair.left, "made here": pair.right == os.getpid()},
    worlds=[list(answer) for answer in client.run(world).values()],
    workers=looks(client),
    plan=current_session().plan.as_json(),
    ready=current_session().ready_seconds,
)
