"""`launch` on one machine: without a launcher, and with the mpirun that lies beside this Python."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import (
    COMMAND,
    TELL,
    facts,
    packed_environment,
    ranks_of,
    small_environment,
)
from support.jobs.mpi import CompletedJob, Job, Mpi

#: What a user has not set: Open MPI's leave for root, and a PATH with its mpirun.
BARE = {"OMPI_ALLOW_RUN_AS_ROOT": None, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": None, "PATH": "/usr/bin:/bin"}
#: How the ranks start.
STARTS = pytest.mark.parametrize("how", [(), ("--launcher", "mpirun")], ids=["alone", "mpirun"])
SCRIPT = """
from support.jobs.scripts.client import client, tell
tell(workers=len(client.scheduler_info(n_workers=-1)["workers"]), argv=sys.argv[1:], mine=os.environ["MINE"])
sys.exit(int(sys.argv[1]))
"""
WAITS = """
import time
print("up", flush=True)
time.sleep(300)
"""


def start(mpirun: Mpi, program: str, *options: str, **how: Any) -> Job:
    """A job of two ranks that `launch` starts, if the options have no other number."""
    words = ["launch", "-n", "2", "--interface", "lo", *options]
    how["env"] = {**BARE, **how.get("env", {})}
    return mpirun.start(program or [*COMMAND, *words], None, command=words, **how)


def run(mpirun: Mpi, program: str, *options: str, **how: Any) -> CompletedJob:
    return start(mpirun, program, *options, **how).wait()


@STARTS
@pytest.mark.slow
def test_more_ranks_than_cores_with_a_preflight_and_the_exit_code_of_the_script(
    mpirun: Mpi, tmp_path: Path, how: tuple[str, ...]
) -> None:
    """Of the job on one node no process has an MPI library, or another parent than `launch`."""
    if not how:
        (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')")
    ranks = len(os.sched_getaffinity(0)) + 2
    words: dict[str, Any] = {"args": ["7", "a b"], "env": {"MINE": "x y"}, "path": tmp_path}
    done = run(mpirun, SCRIPT, *how, "-n", str(ranks), "--check", **words).check(7)
    assert facts(done) == {"workers": ranks, "argv": ["7", "a b"], "mine": "x y"}
    assert ": 0 errors" in done.stdout  # another job here may have the port of the dashboard


@STARTS
def test_a_script_that_reads_its_input_to_the_end(mpirun: Mpi, how: tuple[str, ...]) -> None:
    """A batch job has /dev/null, of which mpirun of Open MPI 5 never forwards the end."""
    script = "import sys; print(sys.stdin.read() + 'the end')"
    assert run(mpirun, "", *how, "-c", script).check().stdout == "the end\n"


def test_the_plan_of_the_allocation(mpirun: Mpi) -> None:
    done = mpirun.run([*COMMAND, "launch", "-n", "2", "plan", "--json"], None, env=BARE).check()
    assert [worker["rank"] for worker in json.loads(done.stdout)["workers"]] == [0, 1]


@pytest.mark.quick(number=signal.SIGTERM, how=("--launcher", "mpirun"))
@STARTS
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_everything_ends_with_launch(mpirun: Mpi, number: int, code: int, how: tuple[str, ...]) -> None:
    job = start(mpirun, WAITS, *how)
    job.wait_for("^up")
    job.signal(number)
    done = job.wait(grace=10)  # no process is left behind
    assert done.rc == code or (how and done.rc)
    assert done.seconds < 60


@pytest.mark.parametrize(("rank", "tolerated"), [(0, 0), (1, 0), (1, 1)])
def test_a_rank_that_is_killed_without_a_launcher(mpirun: Mpi, rank: int, tolerated: int) -> None:
    script = WAITS.replace("300", "15") + "raise SystemExit(6)\n"
    job = start(mpirun, script, "-n", "3", "--tolerate-lost-ranks", str(tolerated))
    job.wait_for("^up")
    os.kill(ranks_of(job)[rank], signal.SIGKILL)
    done = job.wait(grace=15)
    assert f"launch: rank {rank} was ended by SIGKILL" in done.stderr
    assert done.rc == 6 if tolerated else done.rc not in (0, 6), done.output


@STARTS
def test_preflight_that_fails_ends_it(mpirun: Mpi, how: tuple[str, ...]) -> None:
    done = run(mpirun, WAITS, *how, "--check", "--expect-gpus", "64").check(1)
    assert "up" not in done.stdout.split()


def test_check_without_a_script_ends(mpirun: Mpi) -> None:
    done = run(mpirun, "", "--check").check()
    assert ": 0 errors" in done.stdout
    assert "ready after" not in done.stderr


#: In the place of a profiler: it loads itself into all processes by this variable, writes a file, and has the exit code.
PROFILER = """
import os, signal, subprocess, sys
env = {**os.environ, "NVTX_INJECTION64_PATH": "/nothing"}
child = subprocess.Popen(sys.argv[2:], env=env, close_fds=False)  # MPICH or `launch` has given it one
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
code = child.wait()
open(f"{sys.argv[1]}/profile-{child.pid}", "w").close()
sys.exit(code)
"""
#: In the place of the package `nvtx`.
NVTX = """
ranges = []
def start_range(message, domain):
    ranges.append(f"{domain} {message}")
    return len(ranges)
def end_range(number):
    ranges.append(number)
"""
LOOKS = """
from distributed import Client

def look(dask_worker):
    import logging, os, signal, sys
    return {
        "command": open("/proc/self/cmdline").read(),
        "safe_path": "PYTHONSAFEPATH" in os.environ,
        "ranges": getattr(sys.modules.get("nvtx"), "ranges", None),
        "handles": callable(signal.getsignal(signal.SIGTERM)),
        "level": logging.getLogger("distributed").level,
        "services": dask_worker.service_ports,
    }

def step(number):
    return number

with Client() as client:
    assert client.gather(client.map(step, range(2))) == [0, 1]
    tell(workers=[*client.run(look).values()])
sys.exit(3)
"""


@STARTS
@pytest.mark.parametrize("profiled", [True, False])
def test_under_a_profiler_workers_are_new_processes_with_ranges_of_their_tasks(
    mpirun: Mpi, tmp_path: Path, profiled: bool, how: tuple[str, ...]
) -> None:
    (tmp_path / "profiler.py").write_text(PROFILER)
    (tmp_path / "nvtx.py").write_text(NVTX)
    profile = ["--profile", f"{sys.executable} {tmp_path}/profiler.py {tmp_path}"] if profiled else []
    done = run(mpirun, TELL + LOOKS, *how, "-n", "1", *profile, "--nthreads", "1", path=tmp_path).check(3)
    (worker,) = facts(done)["workers"]
    assert ("multiprocessing.spawn" in worker["command"]) == profiled
    assert len([*tmp_path.glob("profile-*")]) == profiled
    # each range ends, by the number that its start has returned
    assert worker["ranges"] == (["dask step", 1, "dask step", 3] if profiled else None)
    # as in processes that are forked
    assert (worker["safe_path"], worker["handles"], worker["services"]) == (False, True, {})
    assert worker["level"] == logging.WARNING


def test_an_environment_that_does_not_run(mpirun: Mpi, tmp_path: Path) -> None:
    """One that does: test_security.py."""
    env = small_environment(tmp_path / "env")
    (env / "bin" / "python").unlink()
    (env / "bin" / "python").symlink_to("/bin/false")
    options = ["--stage", str(packed_environment(tmp_path)), "--local-directory", str(tmp_path / "local")]
    assert "Fix: install the same packages" in run(mpirun, "print('up')", *options).check(2).error
    assert list((tmp_path / "local").iterdir()) == []
