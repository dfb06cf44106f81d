"""Where the shutdown of Dask itself fails, ours does not; nor does a job hang whose disk is full or gone."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from support.jobs.faults import end, preload, start
from support.jobs.mpi import Mpi

RAISES = "raise RuntimeError('no close')"
HANGS = "import asyncio; await asyncio.sleep(3600)"
#: In a process that no longer answers at all.
BLOCKS = "import time; time.sleep(3600)"


def close_like(what: str, how: str) -> dict[str, str]:
    """The environment of a rank whose schedulers, workers or nannies close like this."""
    return preload(
        f"bad-{(RAISES, HANGS, BLOCKS).index(how)}.py",
        f"import distributed\n\nasync def close(self, *args, **kwargs):\n    {how}\n\ndistributed.{what}.close = close\n",
        what.upper(),
    )


ENDS = "compute()\nmark()\nsys.exit(3)\n"


@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("initialize", RAISES),
        ("initialize", HANGS),
        ("command", BLOCKS),
    ],
)
def test_close_of_the_scheduler(mpirun: Mpi, form: str, how: str) -> None:
    end(start(mpirun, form, ENDS, env=close_like("Scheduler", how)), 3, 10, tracebacks=None)


@pytest.mark.parametrize("what", ["Worker", "Nanny"])
def test_close_of_workers(mpirun: Mpi, what: str) -> None:
    """One rank's raises, another's hangs, and the third's blocks: a nanny that does keeps its agent from answering."""
    options = {"shutdown_timeout": 4} if what == "Nanny" else {}
    each = [close_like(what, how) for how in (RAISES, HANGS, BLOCKS)]
    job = start(mpirun, "initialize", ENDS, 3, per_rank_env=each, options=options)
    end(job, 3, 12 if what == "Nanny" else 10, tracebacks=None)


def test_scheduler_close_by_the_client(mpirun: Mpi) -> None:
    body = "compute()\nmark()\nclient.shutdown()\nsys.exit(3)\n"
    job = start(mpirun, "command", body, env=close_like("Scheduler", RAISES))
    # client.shutdown() itself may raise there, which is the script's own end
    end(job, {1, 3}, 40, tracebacks=None)


NO_THREADS = """
def no_more_threads():
    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start

atexit.register(no_more_threads)
"""


def test_no_threads_at_exit(mpirun: Mpi) -> None:
    """Python 3.12.0 to 3.12.2 start no thread any more once the interpreter ends."""
    job = start(mpirun, "initialize", "compute()\n" + NO_THREADS + "mark()\nsys.exit(3)\n")
    end(job, 3, 5)


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    line = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return subprocess.run(line, capture_output=True).returncode == 0


SPILLING = {
    "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "0.000001",
    "DASK_DISTRIBUTED__WORKER__MEMORY__SPILL": "0.000001",
}
BIG = """
futures = client.map(lambda i: os.urandom(3_000_000), range(6), pure=False)
try:
    print("bytes", sum(map(len, client.gather(futures))))
except Exception as error:
    print("error", type(error).__name__, flush=True)
mark()
"""


@pytest.mark.skipif(not _may_mount(), reason="tmpfs can't be mounted here: needs root and mount namespaces")
def test_disk_full(mpirun: Mpi) -> None:
    # each rank has a mount of its own, which ends with it
    disk = ["sh", "-c", 'mkdir -p small && mount -t tmpfs -o size=1m none small && exec "$@"', "sh"]
    through = ["unshare", "-m", *disk]
    options = {"local_directory": "small"}
    job = start(mpirun, "initialize", BIG, through=through, options=options, env=SPILLING)
    end(job, {0, 1}, 5, tracebacks=None)


def test_disk_gone(mpirun: Mpi) -> None:
    # more than once: a worker that has just started still writes
    body = "import shutil\nfor _ in range(3):\n    shutil.rmtree('local', ignore_errors=True)\n" + BIG
    job = start(mpirun, "command", body, options={"local_directory": "local"}, env=SPILLING)
    end(job, {0, 1}, 5, tracebacks=None)
