import ctypes
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

from distributed import default_client

from dask_gpu_mpi import GangCancelledError, SpmdError, SpmdTimeoutError, current_session, spmd
from support.jobs.scripts.faults import HERE, mark, marked, wait_until

client, session = default_client(), current_session()
pool = ThreadPoolExecutor(4)


def stages():
    def find(dask_scheduler):
        plugin = dask_scheduler.plugins.get("dask_gpu_mpi-gangs")
        return (
            [] if plugin is None else [stage.name for gang in plugin._gangs.values() for stage in gang.stages]
        )

    return client.run_on_scheduler(find)


def pids():
    return dict(client.run(lambda dask_worker: (str(dask_worker.name), os.getpid())).values())


def names():
    return [str(worker["name"]) for worker in client.scheduler_info(n_workers=-1)["workers"].values()]


def usable(size):
    assert sorted(names()) == [str(rank) for rank in range(size)], names()
    futures = [client.submit(pow, 2, 3, workers=[address], pure=False) for address in client.nthreads()]
    assert client.gather(futures) == [8] * size
    assert session.spmd(lambda group: group.allgather(group.rank), timeout=60) == [list(range(size))] * size
    assert stages() == []


def everybody_waits(group):
    mark(f"runs-{group.rank}")
    group.barrier()


def is_here(stage):
    return all(marked(f"{stage}-{rank}") for rank in range(3))


def clear():
    for name in os.listdir(HERE):
        if name.startswith("mark-") and name[5:] not in ("up", "end"):
            os.remove(os.path.join(HERE, name))


def failure(fn, when, victim, number=signal.SIGKILL, **limits):
    """The error of a gang in which the victim is sent a signal at this moment."""
    clear()
    target = pids()[victim]
    gang = pool.submit(session.spmd, fn, **limits)
    wait_until(when)
    os.kill(target, number)
    error = gang.exception(60)
    assert isinstance(error, SpmdError), error
    return error


def dies(fn, when, text):
    """Rank 1 is killed at this moment: the error names it."""
    error = failure(fn, when, "1")
    assert (error.rank, error.worker) == (1, "1"), vars(error)
    assert text in str(error) and "rank 1 (worker 1 on " in str(error), str(error)
