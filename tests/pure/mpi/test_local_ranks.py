"""Ranks of a host as they are seen from outside: real processes, below one that calls itself Hydra's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi import watchdogs as startwatch
from dask_gpu_mpi.mpi.launcher_check import first_process, launched_as, neighbours, started_here
from dask_gpu_mpi.mpi.watchdogs import StartWatch
from dask_gpu_mpi.sites.batch import allocated_hosts

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

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names a process through /proc")


@pytest.fixture(params=[DIRECT, WRAPPED], ids=["direct", "wrapped"])
def ranks(request: pytest.FixtureRequest) -> Iterator[dict[int, int]]:
    yield from _ranks("hydra_pmi_proxy", request.param)


@pytest.fixture
def ranks_of_another() -> Iterator[dict[int, int]]:
    yield from _ranks("prted", DIRECT)


def _ranks(name: str, command: tuple[str, ...]) -> Iterator[dict[int, int]]:
    """Process id of each rank, below its wrappers."""
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", DAEMON, name, str(RANKS), *command]
    with subprocess.Popen(line, stdin=pipe, stdout=pipe) as daemon:
        below = psutil.Process(daemon.pid)
        try:
            assert daemon.stdout is not None
            daemon.stdout.readline()
            _until(lambda: len(_sleepers(below)) == RANKS)
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


def _until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


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
            _until(lambda: any(process.name() == "sleep" for process in below.children(recursive=True)))
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
    monkeypatch.setattr(startwatch.os, "getppid", lambda: job)
    StartWatch(job, 0.0, speaks=False, over=lambda: False, started=lambda: False)._end_rank()
    _until(lambda: not psutil.pid_exists(job))
    type_in(b"exit 7\n")
    assert end_of_shell() == 7


def test_the_scripts_around_a_rank_end_with_it(
    ranks: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = first_process(ranks[1])
    assert first_process(ranks[1], but_shells=True) == first
    monkeypatch.setattr(startwatch.os, "getppid", lambda: ranks[1])
    StartWatch(ranks[1], 0.0, speaks=False, over=lambda: False, started=lambda: False)._end_rank()
    ended = (psutil.STATUS_ZOMBIE, None)
    _until(lambda: all(_status(pid) in ended for pid in (first, ranks[1])))


def _status(pid: int) -> str | None:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def test_neighbours_are_there_or_stopped_or_gone(ranks: dict[int, int]) -> None:
    assert neighbours(ranks[0]) == {1: "there", 2: "there", 3: "there"}
    assert started_here(ranks[0]) == RANKS
    os.kill(ranks[2], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    _until(lambda: neighbours(ranks[0]) == {2: "stopped", 3: "there"})
    assert neighbours(ranks[2]) == {0: "there", 3: "there"}


def test_launchers_that_mind_are_left_alone(ranks_of_another: dict[int, int]) -> None:
    assert started_here(ranks_of_another[0]) == 0
    assert sorted(neighbours(ranks_of_another[0])) == [1, 2, 3]


def test_one_pass_over_the_processes(ranks: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    real = psutil.pids
    monkeypatch.setattr(psutil, "pids", lambda: passes.append(1) or real())
    monkeypatch.setattr(psutil.Process, "children", None)  # goes through all of them each time
    assert len(neighbours(ranks[0])) == RANKS - 1
    assert len(passes) == 1


def test_no_neighbours_of_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert neighbours(gone.pid) == {}
    assert started_here(gone.pid) == 0


def test_all_processes_are_looked_at_seldom_in_most_agents(
    ranks: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with growing pauses in the two that look at first."""

    def pauses(rank: int) -> list[float]:
        waits: list[float] = []
        watch = StartWatch(ranks[rank], 1e9, speaks=False, over=lambda: False, started=lambda: False)
        # it would be the parent of the process that watches
        monkeypatch.setattr(startwatch.os, "getppid", lambda: ranks[rank])

        async def look() -> None:
            loop = asyncio.get_running_loop()

            def later(delay: float, function: Callable[..., None], *arguments: object) -> None:
                if function == watch._check_launcher:
                    return
                waits.append(delay)
                if len(waits) < 7:
                    function(*arguments)

            monkeypatch.setattr(loop, "call_later", later)
            watch.begin()

        asyncio.run(look())
        return waits

    assert pauses(0) == pauses(1) == [2, 2, 4, 8, 16, 30, 30]
    assert pauses(3) == [30] * 7


#: Group, session, terminal and foreground group of process 10, the group of its child, and whether that was typed.
SHELLS = {
    "a login shell": ((10, 10, 5, 20), 20, True),
    "a login shell, the command in the background": ((10, 10, 5, 30), 20, True),
    "a shell that is no session's leader": ((10, 9, 5, 20), 20, True),
    "that, the command in the background": ((10, 9, 5, 30), 20, False),
    "a script's shell": ((10, 9, 5, 10), 10, False),
    "without a terminal": ((10, 10, 0, -1), 20, False),
}


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_that_has_started_a_job_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (group, session, terminal, foreground), job, typed = SHELLS[name]
    stat = f"10 (a) shell) S 1 {group} {session} {terminal} {foreground} 4194304 0"
    monkeypatch.setattr(
        launcher_check.Path, "read_text", lambda path: stat if str(path) == "/proc/10/stat" else ""
    )
    monkeypatch.setattr(launcher_check.os, "getpgid", {11: job}.__getitem__)
    assert launcher_check._typed(10, 11) is typed


def test_a_process_that_is_gone_was_not_typed() -> None:
    assert not launcher_check._typed(1 << 30, 1 << 30)


def test_node_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_bytes(b"n1\n\xff\n")
    assert allocated_hosts({"PBS_NODEFILE": str(tmp_path / "nodes")}) == "n1, \ufffd"
    assert allocated_hosts({"PBS_NODEFILE": "a\0b"}) == ""
