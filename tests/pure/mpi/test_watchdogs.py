"""Watchdogs: a launcher that does not end, a rank that stays in ``MPI_Init``, and the ranks of a host as seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dask_gpu_mpi.mpi import launcher_check, watchdogs
from dask_gpu_mpi.mpi.launcher_check import first_process, launched_as, neighbours, started_here
from dask_gpu_mpi.mpi.watchdogs import StartWatch, look_after_launcher
from support.jobs.clusters import until

# -- a launcher that does not end


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not mind SIGTERM."""
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=stderr) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def look(pid: int | None, patience: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it is meant to outlive its parent
        look_after_launcher(pid, patience)


def test_a_launcher_that_does_not_end_is_killed(deaf: subprocess.Popen[bytes], tmp_path: Path) -> None:
    look(deaf.pid, 0.1)
    assert deaf.wait(20) == -signal.SIGKILL
    said = (tmp_path / "stderr").read_text()  # where the launcher's own words go
    assert said == "dask_gpu_mpi: the launcher has not ended 0.1 s after the job was aborted: it is killed\n"


def test_no_process_but_a_launcher_that_does_not_end_is_killed(
    deaf: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    look(deaf.pid, 600)  # one that ends
    assert deaf.stdin is not None
    deaf.stdin.close()
    assert deaf.wait(20) == 0
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    look(None, 0.0)  # this process's parent is no launcher
    look(2**22 + 1, 0.0)  # one that has ended


# -- a rank that stays in MPI_Init is ended by its agent, and nobody else is


def watcher(rank: int, *, over: bool = False) -> StartWatch:
    """The watch of a rank that does not join."""
    return StartWatch(rank, 1e9, speaks=True, over=lambda: over, started=lambda: over)


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
        watcher(other.pid)._end_rank()
        other.terminate()
        assert other.wait(30) == -signal.SIGTERM  # SIGKILL would have come first


def test_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    monkeypatch.setattr(watchdogs.os, "getppid", lambda: gone.pid)
    watcher(gone.pid)._end_rank()
    assert (launched_as(gone.pid), neighbours(gone.pid), started_here(gone.pid)) == (None, {}, 0)
    assert not launcher_check._typed(gone.pid, gone.pid)


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
        monkeypatch.setattr(watchdogs.asyncio, "get_running_loop", lambda: self)
        monkeypatch.setattr(watchdogs, "launched_as", lambda pid: SimpleNamespace(rank=rank, local_rank=rank))
        monkeypatch.setattr(watchdogs, "started_here", lambda pid: 3)
        monkeypatch.setattr(
            watchdogs, "neighbours", lambda pid: self.beside.pop(0) if self.beside[1:] else self.beside[0]
        )
        monkeypatch.setattr(watchdogs, "say", self.said.append)
        monkeypatch.setattr(StartWatch, "_end_rank", lambda watch: self.ended.append(self.now))

    def call_later(self, delay: float, call: Callable[..., object], *arguments: object) -> None:
        self.timers.append((self.now + delay, lambda: call(*arguments)))

    def call_at(self, when: float, call: Callable[..., object], *arguments: object) -> None:
        pass

    def run(self, until: float) -> None:
        watcher(os.getppid()).begin()
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
        (1, [BOTH, ONE, ONE, ONE, ONE], [10.5]),  # not the first: four times
        (0, [ONE, {}, {}], [6.5]),  # another number: counted anew
        (0, [ONE, BOTH, ONE, BOTH], []),
        (1, [{0: "stopped"}], [4.5]),  # the first of those that can report
        (2, [{0: "runs"}], []),  # two of a host check
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
    watcher(os.getppid())._name_the_stopped()
    assert [line.partition(" on ")[0] for line in node.said] == [f"error: rank {number}" for number in named]
    assert all("was started but is stopped" in line and "Fix: " in line for line in node.said)
    node.said.clear()
    watcher(os.getppid(), over=True)._name_the_stopped()
    assert node.said == []


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
DIRECT = ("sleep", "600")
WRAPPED = ("sh", "-c", "sh -c 'sleep 600; exit $?'; exit $?")


@pytest.fixture(params=[DIRECT, WRAPPED], ids=["direct", "wrapped"])
def ranks(request: pytest.FixtureRequest) -> Iterator[dict[int, int]]:
    yield from _ranks("hydra_pmi_proxy", request.param)


def _ranks(name: str, command: tuple[str, ...]) -> Iterator[dict[int, int]]:
    """Process id of each rank, below its wrappers."""
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", DAEMON, name, str(RANKS), *command]
    with subprocess.Popen(line, stdin=pipe, stdout=pipe) as daemon:
        below = psutil.Process(daemon.pid)
        try:
            assert daemon.stdout is not None
            daemon.stdout.readline()
            until(lambda: len(_sleepers(below)) == RANKS)
            yield _sleepers(below)
        finally:
            for process in below.children(recursive=True):
                process.kill()
            daemon.kill()


def _sleepers(daemon: psutil.Process) -> dict[int, int]:
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
    typed: tuple[int, Callable[[bytes], object], Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``srun --pty bash``: the launcher waits for it as for a wrapper script, but it is the user's."""
    job, type_in, end_of_shell = typed
    assert launched_as(psutil.Process(job).ppid()) == launched_as(job) is not None
    monkeypatch.setattr(watchdogs.os, "getppid", lambda: job)
    watcher(job)._end_rank()
    until(lambda: not psutil.pid_exists(job))
    type_in(b"exit 7\n")
    assert end_of_shell() == 7


def test_neighbours_are_there_or_stopped_or_gone(ranks: dict[int, int]) -> None:
    """The end of wrapped ranks: tests/faults/test_starts.py."""
    assert first_process(ranks[1], but_shells=True) == first_process(ranks[1])
    assert neighbours(ranks[0]) == {1: "there", 2: "there", 3: "there"}
    assert started_here(ranks[0]) == RANKS
    os.kill(ranks[2], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    until(lambda: neighbours(ranks[0]) == {2: "stopped", 3: "there"})
    assert neighbours(ranks[2]) == {0: "there", 3: "there"}


def test_launchers_that_mind_are_left_alone() -> None:
    for ranks in _ranks("prted", DIRECT):
        assert started_here(ranks[0]) == 0
        assert sorted(neighbours(ranks[0])) == [1, 2, 3]
