"""Where the shutdown of Dask itself fails, ours does not; nor does a job hang whose disk is full or gone."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from support.jobs.faults import FORMS, end, start, write
from support.jobs.mpi import Mpi

RAISES = "raise RuntimeError('no close')"
HANGS = "import asyncio; await asyncio.sleep(3600)"
#: In a process that no longer answers at all.
BLOCKS = "import time; time.sleep(3600)"


@pytest.mark.parametrize(
    ("form", "how"),
    [
        pytest.param("initialize", RAISES, id="initialize-raises"),
        pytest.param("initialize", HANGS, id="initialize-hangs", marks=pytest.mark.quick("openmpi")),
        pytest.param("command", HANGS, id="command-hangs"),
        pytest.param("command", BLOCKS, id="command-blocks"),
    ],
)
def test_scheduler_close(mpirun: Mpi, how: str, form: str) -> None:
    preload = write(
        "bad_scheduler.py",
        f"import distributed\n\nasync def close(self, *args, **kwargs):\n    {how}\n\ndistributed.Scheduler.close = close\n",
    )
    env = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": f"['{preload}']"}
    job = start(mpirun, form, "compute()\nmark()\nsys.exit(3)\n", env=env)
    end(mpirun, job, 3, 10, tracebacks=None)


def test_scheduler_close_by_the_client(mpirun: Mpi) -> None:
    preload = write(
        "bad_scheduler.py",
        f"import distributed\n\nasync def close(self, *args, **kwargs):\n    {RAISES}\n\ndistributed.Scheduler.close = close\n",
    )
    env = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": f"['{preload}']"}
    job = start(mpirun, "command", "compute()\nmark()\nclient.shutdown()\nsys.exit(3)\n", env=env)
    # client.shutdown() itself may raise there, which is the script's own end
    end(mpirun, job, {1, 3}, 40, tracebacks=None)


@pytest.mark.parametrize("how", [RAISES, HANGS, BLOCKS], ids=["raises", "hangs", "blocks"])
def test_worker_close(mpirun: Mpi, how: str) -> None:
    preload = write(
        "bad_worker.py",
        f"import distributed\n\nasync def close(self, *args, **kwargs):\n    {how}\n\ndistributed.Worker.close = close\n",
    )
    env = {"DASK_DISTRIBUTED__WORKER__PRELOAD": f"['{preload}']"}
    job = start(mpirun, "initialize", "compute()\nmark()\nsys.exit(3)\n", env=env)
    end(mpirun, job, 3, 10, tracebacks=None)


@pytest.mark.parametrize("how", [RAISES, HANGS, BLOCKS], ids=["raises", "hangs", "blocks"])
def test_nanny_close(mpirun: Mpi, how: str) -> None:
    """A nanny lives in the agent: one that blocks keeps the agent from answering."""
    preload = write(
        "bad_nanny.py",
        f"import distributed\n\nasync def close(self, *args, **kwargs):\n    {how}\n\ndistributed.Nanny.close = close\n",
    )
    env = {"DASK_DISTRIBUTED__NANNY__PRELOAD": f"['{preload}']"}
    options = {"shutdown_timeout": 4}
    job = start(mpirun, "initialize", "compute()\nmark()\nsys.exit(3)\n", env=env, options=options)
    end(mpirun, job, 3, 12, tracebacks=None)


NO_THREADS = """
def no_more_threads():
    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start

atexit.register(no_more_threads)
"""


@pytest.mark.both_mpis
@pytest.mark.parametrize("form", FORMS)
def test_no_threads_at_exit(mpirun: Mpi, form: str) -> None:
    """Python 3.12.0 to 3.12.2 start no thread any more once the interpreter ends."""
    job = start(mpirun, form, "compute()\n" + NO_THREADS + "mark()\nsys.exit(3)\n")
    end(mpirun, job, 3, 5)


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
    end(mpirun, job, {0, 1}, 5, tracebacks=None)


def test_disk_gone(mpirun: Mpi) -> None:
    # more than once: a worker that has just started still writes
    body = "import shutil\nfor _ in range(3):\n    shutil.rmtree('local', ignore_errors=True)\n" + BIG
    job = start(mpirun, "command", body, options={"local_directory": "local"}, env=SPILLING)
    end(mpirun, job, {0, 1}, 5, tracebacks=None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_disk_read_only(mpirun: Mpi) -> None:
    job = start(mpirun, "command", "mark()\n", options={"local_directory": "/proc/none"})
    assert job.wait().rc == 2
