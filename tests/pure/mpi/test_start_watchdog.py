"""Ranks that stay in ``MPI_Init``: ended by their agent, and nobody else is."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dask_gpu_mpi.mpi import start_watchdog as startwatch
from dask_gpu_mpi.mpi.local_ranks import launched_as
from dask_gpu_mpi.mpi.start_watchdog import StartWatch


def _watch(code: str) -> subprocess.Popen[str]:
    """A process that watches its parent, which is a rank here, and ends with it, as an agent does."""
    head = (
        "import asyncio, os, time\n"
        "from dask_gpu_mpi.base.pdeathsig import die_with_parent\n"
        "from dask_gpu_mpi.mpi.start_watchdog import StartWatch\ndie_with_parent(os.getppid())\n"
    )
    rank = (
        "import subprocess, sys\nwatch = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\nwatch.wait()\n"
        "print('lived on', watch.returncode)\n"
    )
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", rank, head + code], stdout=pipe, stderr=pipe, text=True)


WATCH = """
over = []
async def main():
    watch = StartWatch(os.getppid(), time.monotonic() + AFTER, speaks=True, over=lambda: bool(over))
    watch.begin()
    MORE
    await asyncio.sleep(FOR)
asyncio.run(main())
"""


def test_a_rank_that_stays_in_mpi_is_ended() -> None:
    with _watch(WATCH.replace("AFTER", "0").replace("MORE", "").replace("FOR", "60")) as rank:
        assert rank.wait(60) == -signal.SIGKILL
        assert rank.stderr is not None
        assert "MPI did not come together" in rank.stderr.readline()


def test_a_rank_that_has_joined_meanwhile_is_not_ended() -> None:
    """Not even where its end was settled already."""
    more = "over.append(1); watch._end_rank(); watch._lose_patience(); watch._name_the_stopped()"
    with _watch(WATCH.replace("AFTER", "0").replace("MORE", more).replace("FOR", "0.1")) as rank:
        out, err = rank.communicate(timeout=60)
        assert (out, err) == ("lived on 0\n", "")


def test_a_number_that_is_not_the_parents_any_more_is_not_killed() -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        watch = StartWatch(other.pid, 0.0, speaks=False, over=lambda: False)
        watch._end_rank()
        other.terminate()
        assert other.wait(30) == -signal.SIGTERM  # SIGKILL would have come first


def test_the_end_of_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    monkeypatch.setattr(startwatch.os, "getppid", lambda: gone.pid)
    StartWatch(gone.pid, 0.0, speaks=False, over=lambda: False)._end_rank()
    assert launched_as(gone.pid) is None
