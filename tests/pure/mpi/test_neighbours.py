"""The ranks of a node as seen from outside, and ranks that never come."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from dask_gpu_mpi.errors import StartupError
from dask_gpu_mpi.mpi import neighbours as module
from dask_gpu_mpi.mpi.launcher import _launcher_above
from dask_gpu_mpi.mpi.neighbours import (
    NeighbourWatch,
    is_child_of,
    is_stopped,
    kill_rank,
    launched_as,
    neighbours,
    started_here,
)
from support.jobs.clusters import until
from support.mocks.clocks import Clock


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    kill_rank(gone.pid)
    assert (launched_as(gone.pid), neighbours(gone.pid), started_here(gone.pid)) == (None, {}, 0)
    assert (is_stopped(gone.pid), is_child_of(gone.pid), is_child_of(os.getppid())) == (False, False, True)


# -- ranks that never come


class Node:
    """The ranks of a node beside this one, of which three were started; what its watch says, and when it gives up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, *beside: dict[int, str]) -> None:
        self.beside, self.said, self.looks = list(beside), list[str](), 0
        self.error: StartupError | None = None
        monkeypatch.setattr(module, "time", Clock())
        monkeypatch.setattr(module, "launched_as", lambda pid: SimpleNamespace(rank=rank, local_rank=rank))
        monkeypatch.setattr(module, "started_here", lambda pid: 3)
        monkeypatch.setattr(module, "neighbours", self.look)
        monkeypatch.setattr(module, "say", self.said.append)

    def look(self, pid: int) -> dict[int, str]:
        assert pid == os.getpid()
        self.looks += 1
        return self.beside.pop(0) if self.beside[1:] else self.beside[0]

    def watch(self, deadline: float = 1e9) -> float | None:
        """Watch for a hundred seconds; when ranks had ended."""
        watch = NeighbourWatch(os.getpid(), deadline)
        for tenth in range(1000):
            try:
                watch.check(tenth / 10)
            except StartupError as error:
                self.error = error
                return tenth / 10
        return None


BOTH, ONE, FIRST = {1: "there", 2: "there"}, {1: "there"}, {0: "there"}


@pytest.mark.parametrize(
    ("rank", "beside", "ended"),
    [
        (0, [BOTH], None),
        (0, [ONE], 4.0),  # found at 2 and 4 s
        (0, [BOTH, ONE], 6.0),
        (1, [FIRST | {2: "there"}, FIRST], 10.0),  # not the first: four times
        (0, [ONE, {}, {}], 6.0),  # another number: counted anew
        (0, [ONE, BOTH, ONE, BOTH], None),
        (1, [{0: "stopped"}], 4.0),  # the first of those that can report
        (2, [{0: "there"}], None),  # two of a node inspect it
    ],
)
def test_a_rank_that_has_ended_beside_this_one(
    rank: int, beside: list[dict[int, str]], ended: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, rank, *beside)
    found = node.watch()
    assert found is None if ended is None else found == pytest.approx(ended, abs=0.15)
    assert (node.looks == 0) is (rank == 2)
    if node.error is not None:
        assert node.error.fatal
        number, left = (2, "rank 0") if beside[-1] == {} else (1, "ranks 0-1")
        assert re.match(f"{number} of the ranks that .* ended before .*left: {left}\\)", str(node.error))


@pytest.mark.parametrize(
    ("rank", "beside", "named"),
    [
        (0, {1: "stopped", 2: "there"}, [1]),
        (0, {1: "there", 2: "there"}, []),
        (2, {0: "stopped", 1: "stopped"}, [0, 1]),
        (1, {0: "there", 2: "stopped"}, []),  # rank 0 does it
    ],
)
def test_stopped_ranks_are_named_once_by_one_rank_of_the_node(
    rank: int, beside: dict[int, str], named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, rank, beside)
    assert node.watch(deadline=95.0) is None
    assert [line.partition(" on ")[0] for line in node.said] == [f"error: rank {number}" for number in named]
    assert all("was started but is stopped" in line and "Fix: " in line for line in node.said)
    assert NeighbourWatch(os.getpid(), 96.0).check(99.9) is None  # not before rank 0 reports
    assert len(node.said) == len(named)


@pytest.mark.parametrize(("rank", "found"), [(0, 46.0), (1, 46.5)])
def test_mpi_that_does_not_come_together(rank: int, found: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reports it, and the others end as well should it not be there."""
    node = Node(monkeypatch, rank, BOTH)
    assert node.watch(deadline=40.0) == pytest.approx(found, abs=0.15)
    assert node.error is not None
    assert node.error.fatal
    assert node.error.reported is (rank != 0)


# -- the ranks of a host: real processes, below one that calls itself Hydra's

RANKS = 4
DAEMON = """
import os, subprocess, sys
with open("/proc/self/comm", "w") as file:
    file.write(sys.argv[1])
ranks = int(sys.argv[2])
for rank in range(ranks):
    told = {"PMI_RANK": rank, "PMI_SIZE": ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": ranks}
    subprocess.Popen(sys.argv[3:], env={**os.environ, **{name: str(value) for name, value in told.items()}})
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def below(name: str, command: tuple[str, ...]) -> Iterator[dict[int, int]]:
    """Ranks below a process of this name: the process id of each, below its wrappers."""
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", DAEMON, name, str(RANKS), *command]
    with subprocess.Popen(line, stdin=pipe, stdout=pipe) as started:
        daemon = psutil.Process(started.pid)
        try:
            assert started.stdout is not None
            started.stdout.readline()
            until(lambda: len(sleepers(daemon)) == RANKS)
            yield sleepers(daemon)
        finally:
            for process in daemon.children(recursive=True):
                process.kill()
            started.kill()


def sleepers(daemon: psutil.Process) -> dict[int, int]:
    found = {}
    for process in daemon.children(recursive=True):
        launched = launched_as(process.pid) if process.name() == "sleep" else None
        if launched is not None:
            found[launched.rank] = process.pid
    return found


@pytest.fixture
def typed() -> Iterator[tuple[int, Callable[[bytes], object], Callable[[], int]]]:
    """A command typed in an interactive shell that a launcher has started: its process id, how to type, and the shell's end."""
    master, slave = os.openpty()
    told = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    line = ["setsid", "--ctty", "--wait", "bash", "--norc", "--noprofile", "-i"]
    with subprocess.Popen(
        line, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **told}, start_new_session=True
    ) as launcher:
        below = psutil.Process(launcher.pid)
        try:
            os.write(master, b"sleep 600\n")
            until(lambda: any(process.name() == "sleep" for process in below.children(recursive=True)))
            (job,) = [process for process in below.children(recursive=True) if process.name() == "sleep"]
            yield job.pid, lambda keys: os.write(master, keys), lambda: launcher.wait(30)
        finally:
            for process in below.children(recursive=True) if below.is_running() else ():
                process.kill()
            os.close(master)
            os.close(slave)


def test_a_shell_in_which_the_command_was_typed_is_not_ended(
    typed: tuple[int, Callable[[bytes], object], Callable[[], int]],
) -> None:
    """``srun --pty bash``: the launcher waits for it as for a wrapper script, but it is the user's."""
    job, type_in, end_of_shell = typed
    assert launched_as(psutil.Process(job).ppid()) == launched_as(job) is not None
    kill_rank(job)
    until(lambda: not psutil.pid_exists(job))
    type_in(b"exit 7\n")
    assert end_of_shell() == 7


@pytest.mark.parametrize(
    ("name", "command", "started"),
    [
        ("hydra_pmi_proxy", ("sleep", "600"), RANKS),
        ("hydra_pmi_proxy", ("sh", "-c", "sh -c 'sleep 600; exit $?'; exit $?"), RANKS),
        ("prted", ("sleep", "600"), 0),  # it does not ignore the end of a rank
    ],
)
def test_neighbours_are_there_or_stopped_or_gone(name: str, command: tuple[str, ...], started: int) -> None:
    """The end of wrapped ranks: tests/faults/test_starts.py."""
    with below(name, command) as ranks:
        assert [each.name() for each in _launcher_above(ranks[0])] == [name]
        assert started_here(ranks[0]) == started
        assert neighbours(ranks[0]) == {1: "there", 2: "there", 3: "there"}
        os.kill(ranks[2], signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGKILL)
        until(lambda: neighbours(ranks[0]) == {2: "stopped", 3: "there"})
        assert (is_stopped(ranks[2]), is_stopped(ranks[3])) == (True, False)
        assert neighbours(ranks[2]) == {0: "there", 3: "there"}
