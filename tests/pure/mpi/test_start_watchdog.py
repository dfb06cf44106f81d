"""Ranks that stay in ``MPI_Init``: ended by their agent, and nobody else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from dask_gpu_mpi.mpi import watchdogs as startwatch
from dask_gpu_mpi.mpi.launcher_check import launched_as
from dask_gpu_mpi.mpi.watchdogs import StartWatch


def _watch(code: str) -> subprocess.Popen[str]:
    """A process that watches its parent, which is a rank here, and ends with it, as an agent does."""
    head = (
        "import asyncio, os, time\n"
        "from dask_gpu_mpi.base.signals import die_with_parent\n"
        "from dask_gpu_mpi.mpi.watchdogs import StartWatch\ndie_with_parent(os.getppid())\n"
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
    watch = StartWatch(os.getppid(), time.monotonic() + AFTER, speaks=True, over=lambda: bool(over), started=lambda: bool(over))
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
        watch = StartWatch(other.pid, 0.0, speaks=False, over=lambda: False, started=lambda: False)
        watch._end_rank()
        other.terminate()
        assert other.wait(30) == -signal.SIGTERM  # SIGKILL would have come first


def test_the_end_of_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    monkeypatch.setattr(startwatch.os, "getppid", lambda: gone.pid)
    StartWatch(gone.pid, 0.0, speaks=False, over=lambda: False, started=lambda: False)._end_rank()
    assert launched_as(gone.pid) is None


def test_a_rank_that_hangs_ends_with_its_launcher() -> None:
    """It has joined, and is in a driver's call, say, in which it handles no signal."""
    code = WATCH.replace("over=lambda: bool(over)", "over=lambda: True").replace("AFTER", "1e9")
    code = code.replace("MORE", "print(os.getppid(), flush=True)").replace("FOR", "60")
    launcher = (
        "import os, subprocess, sys\n"
        "ranked = {**os.environ, 'PMI_RANK': '0', 'PMI_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0', 'OMPI_COMM_WORLD_SIZE': '1'}\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]], env=ranked)\n"
    )
    rank = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    head = "import asyncio, os, time\nfrom dask_gpu_mpi.mpi.watchdogs import StartWatch\n"
    line = [sys.executable, "-c", launcher, rank, head + code]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        hanging = psutil.Process(int(started.stdout.readline()))
        started.kill()
        hanging.wait(20)


class Neighbours:
    """Ranks of one host beside one that is watched; time passes as fast as the loop's timers say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rank: int, beside: list[dict[int, str]]) -> None:
        self.now, self.beside, self.said, self.ended = 0.0, beside, list[str](), list[float]()
        self.timers: list[tuple[float, Callable[[], object]]] = []
        monkeypatch.setattr(startwatch.asyncio, "get_running_loop", lambda: self)
        monkeypatch.setattr(
            startwatch, "launched_as", lambda pid: SimpleNamespace(rank=rank, local_rank=rank)
        )
        monkeypatch.setattr(startwatch, "started_here", lambda pid: 3)
        monkeypatch.setattr(
            startwatch, "neighbours", lambda pid: self.beside.pop(0) if self.beside[1:] else self.beside[0]
        )
        monkeypatch.setattr(startwatch, "_say", self.said.append)
        monkeypatch.setattr(StartWatch, "_end_rank", lambda watch: self.ended.append(self.now))

    def call_later(self, delay: float, call: Callable[..., object], *arguments: object) -> None:
        self.timers.append((self.now + delay, lambda: call(*arguments)))

    def call_at(self, when: float, call: Callable[..., object], *arguments: object) -> None:
        pass

    def run(self, until: float) -> None:
        StartWatch(os.getppid(), 1e9, speaks=True, over=lambda: False, started=lambda: False).begin()
        while self.timers and min(self.timers, key=lambda timer: timer[0])[0] <= until:
            timer = min(self.timers, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1]()


BOTH, ONE = {1: "runs", 2: "runs"}, {1: "runs"}


@pytest.mark.parametrize(
    ("rank", "beside", "ended"),
    [
        (0, [BOTH], []),
        (0, [ONE], [4.5]),  # found at 2 and 4 s; half a second for what was printed
        (0, [BOTH, ONE], [6.5]),  # found at 4 and 6 s
        (0, [ONE, {}, {}], [6.5]),  # another number: counted anew
        (0, [ONE, BOTH, ONE, BOTH], []),
        (2, [{0: "runs"}], [36.5]),  # not the first: later, and four times
        (2, [{0: "stopped"}], [32.5]),  # the first of those that can report
    ],
)
def test_a_rank_that_has_ended_beside_this_one(
    rank: int, beside: list[dict[int, str]], ended: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Neighbours(monkeypatch, rank=rank, beside=beside)
    node.run(until=100.0)
    assert node.ended == ended
    assert len(node.said) == len(ended)


@pytest.mark.parametrize(
    ("rank", "beside", "named"),
    [
        (0, {1: "stopped", 2: "there"}, [1]),
        (0, {1: "there", 2: "there"}, []),
        (2, {0: "stopped", 1: "stopped"}, [0, 1]),
        (1, {0: "there", 2: "stopped"}, []),  # rank 0 does it
    ],
)
def test_stopped_ranks_are_named_by_one_agent_of_the_host(
    rank: int, beside: dict[int, str], named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Neighbours(monkeypatch, rank=rank, beside=[beside])
    StartWatch(os.getppid(), 1e9, speaks=True, over=lambda: False, started=lambda: False)._name_the_stopped()
    assert [line.partition(" on ")[0] for line in node.said] == [f"rank {number}" for number in named]
    assert all("was started but is stopped" in line and "Fix: " in line for line in node.said)
    node.said.clear()
    StartWatch(os.getppid(), 1e9, speaks=True, over=lambda: True, started=lambda: True)._name_the_stopped()
    assert node.said == []
