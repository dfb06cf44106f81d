"""What keeps a rank or a worker from starting ends the job within seconds, with one report that says which and why."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.base.timeouts import MPI_GRACE
from support.bed.hosts import TestBed
from support.jobs.faults import end, hangs, marks, preload, set_mark, start
from support.jobs.gpus import gpu_environ
from support.jobs.mpi import CompletedJob, Job, Mpi
from support.mocks.gpus import GIB, SimHost, make_gpus

#: Seconds for what is found while ranks start, start included.
SOON = 20.0
#: And those of a start-up deadline.
DEADLINE = 6.0
HURRIED = {"startup_timeout": DEADLINE}
#: As sites bind ranks to cores and GPUs: the launcher's child is the shell, and the rank is the shell's.
WRAPPER = ("sh", "-c", '"$0" "$@"; exit $?')


HOST = os.uname().nodename
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


def fails(job: Job, codes: Any, within: float = SOON, **more: Any) -> CompletedJob:
    """The end of a job whose script has not begun."""
    done = end(job, codes, within, since=job.began, **more)
    assert "up" not in marks(job)
    return done


@pytest.mark.parametrize("what", ["interface", "NVML"])
def test_what_one_host_lacks(mpirun: Mpi, hosts: TestBed, what: str) -> None:
    env: dict[str, str | None] = {"DASK_GPU_MPI__INTERFACE": "eth0"}
    per_rank, says = [{}, {"DASK_GPU_MPI__INTERFACE": "ib7"}, {}], "ib7"
    if what == "NVML":
        gpus = {host: SimHost(make_gpus(2, host=host, memory=80 * GIB)) for host in hosts.hosts}
        gpus["h2"] = replace(gpus["h2"], init_fail="LIB_RM_VERSION_MISMATCH")
        env, per_rank, says = gpu_environ(gpus), [{}, {}, {}], "NVML"
    job = start(mpirun, "command", ranks=3, bed=hosts, env=env, per_rank_env=per_rank)
    report = fails(job, {1, 2}).error
    assert [word for word in (says, "rank 1", "h2") if word not in report] == [], report


@pytest.mark.both_mpis
def test_import_error_on_one_rank(mpirun: Mpi) -> None:
    # not at once: Open MPI's launcher may hang for ever where one rank ends while another is about to connect to it
    before = "if rank() == 1:\n    time.sleep(1)\n    import no_such_module\n"
    job = start(mpirun, "initialize", before=before, through=WRAPPER)
    done = fails(job, None, tracebacks=1)
    assert done.stderr.count("ModuleNotFoundError: No module named 'no_such_module'") == 1
    if mpirun.name == "mpich":
        # its launcher does not mind a rank that ends before MPI_Init, in which the others wait: their agents find out
        assert f"1 of the ranks that the launcher started on {HOST} ended before MPI" in done.error
        assert "(left: rank 0)" in done.error


@pytest.mark.both_mpis
@pytest.mark.parametrize("call", ["initialize()", "initialize(exit=False)"])
def test_rank_that_exits_with_0_before_mpi(mpirun: Mpi, call: str) -> None:
    """Neither launcher minds (Open MPI's: where no other rank is inside MPI yet): the others find out.

    With ``exit=False`` MPI starts in the rank's own process, which its agent watches.
    """
    before = (
        "if rank() == 1:\n    os.symlink(str(os.getpid()), 'ended')\n    sys.exit()\n"
        "wait_until(lambda: os.path.islink('ended') and not os.path.exists('/proc/' + os.readlink('ended')))\n"
    )
    says = (f"1 of the ranks that the launcher started on {HOST} ended before MPI", "(left: rank 0)")
    fails(start(mpirun, "initialize", before=before, call=call), None, says=says)


@pytest.mark.parametrize(
    ("child", "says"),
    [
        # a script without a main guard: multiprocessing runs it again in the child
        (
            "import multiprocessing\nchild = multiprocessing.get_context('spawn').Process(target=print)\n"
            "child.start()\nchild.join(30)\nmark()\nsys.exit(10 + child.exitcode)\n",
            ("dask_gpu_mpi: error: initialize: called in a child process of a rank",),
        ),
        # a program that the script starts has nothing of the launcher's: its cluster is its own
        (
            "import subprocess\nline = [sys.executable, '-c', 'from dask_gpu_mpi import initialize; "
            "print(len(initialize().plan.workers)); raise SystemExit(2)']\n"
            "child = subprocess.run(line, timeout=30, stdout=subprocess.PIPE)\nassert child.stdout == b'1\\n'\n"
            "mark()\nsys.exit(10 + child.returncode)\n",
            (),
        ),
    ],
    ids=["runs the script again", "is a job by itself"],
)
def test_child(mpirun: Mpi, child: str, says: tuple[str, ...]) -> None:
    end(start(mpirun, "initialize", child), 12, 5, says=says)


@pytest.mark.parametrize("where", ["__init__", "start"])
def test_worker_class_that_raises(mpirun: Mpi, where: str) -> None:
    method = "def __init__(self, *a, **k):" if where == "__init__" else "async def start(self):"
    before = (
        "from dask_gpu_mpi import initialize\nfrom distributed import Nanny\n"
        f"class Bad(Nanny):\n    {method}\n        raise RuntimeError('this class is bad')\n"
    )
    job = start(mpirun, "initialize", before=before, call="initialize(worker_class=Bad)")
    report = fails(job, 1).error
    assert [word for word in ("this class is bad", "worker 0 ", f"on {HOST}") if word not in report] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "call"),
    [((), "initialize()"), (WRAPPER, "initialize()"), (WRAPPER, "initialize(exit=False)")],
    ids=["direct", "wrapped", "wrapped, own MPI"],
)
def test_rank_stopped_before_mpi(mpirun: Mpi, through: tuple[str, ...], call: str) -> None:
    """The others are inside MPI_Init, which can't say who is missing."""
    before = f"if rank() == 1:\n    {STOPS}\n"
    job = start(mpirun, "initialize", before=before, options=HURRIED, through=through, call=call)
    says = (
        "MPI did not come together before the start-up timeout",
        f"rank 1 on {HOST} was started but is stopped (by a signal or a debugger). Fix: ",
    )
    # MPI_GRACE more for those whose MPI only takes its time
    fails(job, None, DEADLINE + MPI_GRACE + 10, says=says)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "ranks 0 and 1"])
def test_rank_stopped_after_mpi(mpirun: Mpi, stopped: tuple[int, ...]) -> None:
    before = f"from mpi4py import MPI\nif rank() in {stopped}:\n    {STOPS}\n"
    ranks = len(stopped) + 1
    report = fails(
        start(mpirun, "initialize", "", ranks, before=before, options=HURRIED), 1, DEADLINE + 14
    ).error
    assert f"no response from rank {stopped[0]} of {ranks} before the start-up timeout" in report
    assert f"rank {stopped[0]} on {HOST} is stopped" in report
    if stopped == (1,):
        assert f"rank 0 on {HOST}" in report


@pytest.mark.slow
@pytest.mark.parametrize("line", [STOPS, "wait_until(lambda: False, 60)"], ids=["stopped", "waits"])
def test_rank_that_has_come_and_does_not_go_on(mpirun: Mpi, line: str) -> None:
    before = f"""
from dask_gpu_mpi.startup.meeting import Meeting
close = Meeting.receive

def stops(self):
    if self.here.keys() == {{0, 1}}:
        {line}
    return close(self)

if rank() == 1:
    Meeting.receive = stops
"""
    report = fails(start(mpirun, "initialize", before=before, options=HURRIED), 1, DEADLINE + 12).error
    assert f"rank 1 of 2 on {HOST}: no response before the start-up timeout" in report


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 1])
def test_rank_that_hangs_while_it_inspects_its_node(mpirun: Mpi, hanging: int) -> None:
    """The one report says at which step its agent is."""
    job = start(mpirun, "initialize", options=HURRIED, **hangs(hanging, 60))
    report = fails(job, 1, DEADLINE + 20).error
    assert f"rank {hanging} of 2 on {HOST}: no response before the start-up timeout" in report
    assert "last step: inspecting its cores, memory and networks, and the local directory. Fix: " in report


def setup(which: str, does: str) -> dict[str, str]:
    """Environment of ranks whose workers do this at their start, if this is true of them."""
    text = f"import os, threading, time\n\ndef dask_setup(worker):\n    if {which}:\n        {does}\n"
    return preload("setup.py", text)


ONE = "str(worker.name) == '1'"


@pytest.mark.slow
def test_worker_that_dies_at_each_start(mpirun: Mpi) -> None:
    job = start(mpirun, "command", env=setup(ONE, "os._exit(1)"))
    assert "worker 1 did not start" in fails(job, 1, SOON + 10, tracebacks=None).error


@pytest.mark.slow
@pytest.mark.parametrize("which", [ONE, "True"], ids=["one", "all"])
def test_worker_that_dies_after_each_start(mpirun: Mpi, which: str) -> None:
    body = "wait_for_names('0')\nwait_until(lambda: marked('given-up'))\ncompute()\nmark()\nsys.exit(3)\n"
    env = setup(which, "threading.Timer(0.5, os._exit, [1]).start()")
    job = start(mpirun, "command", body if which == ONE else "time.sleep(60)\n", env=env)
    given_up = "worker 1 on "
    if which == ONE:
        job.wait_for(given_up, 40, stream="stderr")
        set_mark(job, "given-up")
        end(job, 3, 5, says=(given_up,), tracebacks=None)
    else:
        end(job, 1, 45, since=job.began, says=(given_up, "no worker is left"), tracebacks=None)


def test_deadline_is_an_option(mpirun: Mpi) -> None:
    """A worker that takes for ever to start, and a plain line about whom the rest waits for."""
    job = start(mpirun, "command", env=setup(ONE, "time.sleep(600)"), options={"startup_timeout": "11 s"})
    done = fails(job, 1, 11 + 10, tracebacks=None)
    assert "rank 1" in done.error
    assert HOST in done.error
    assert f"1 of 2 workers, waiting for {HOST}" in done.stderr or "starting, waiting for" in done.stderr
