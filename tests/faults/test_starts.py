"""What keeps a rank or a worker from starting ends the job within seconds, with one report that says which and why."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dask_gpu_mpi.base.timeouts import MPI_GRACE
from support.bed.hosts import TestBed
from support.jobs.faults import end, preload, start
from support.jobs.gpus import gpu_environ
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, SimHost, make_gpus

#: Seconds for what is found while ranks start, start included.
SOON = 20.0
#: And those of a start-up deadline.
DEADLINE = 6.0
#: As sites bind ranks to cores and GPUs: the launcher's child is the shell, and the rank is the shell's.
WRAPPER = ("sh", "-c", '"$0" "$@"; exit $?')


@pytest.mark.parametrize("what", ["interface", "NVML"])
def test_what_one_host_lacks(mpirun: Mpi, hosts: TestBed, what: str) -> None:
    env: dict[str, str | None] = {"DASK_GPU_MPI__INTERFACE": "eth0"}
    per_rank, says = [{}, {"DASK_GPU_MPI__INTERFACE": "ib7"}, {}], "ib7"
    if what == "NVML":
        gpus = {host: SimHost(make_gpus(2, host=host, memory=80 * GIB)) for host in hosts.hosts}
        gpus["h2"] = replace(gpus["h2"], init_fail="LIB_RM_VERSION_MISMATCH")
        env, per_rank, says = gpu_environ(gpus), [{}, {}, {}], "NVML"
    job = start(mpirun, "command", "mark()\n", ranks=3, bed=hosts, env=env, per_rank_env=per_rank)
    report = end(mpirun, job, {1, 2}, SOON, since=job.began).error
    assert [word for word in (says, "rank 1", "h2") if word not in report] == [], report
    assert not (job.directory / "mark-up").exists()


@pytest.mark.both_mpis
def test_import_error_on_one_rank(mpirun: Mpi) -> None:
    # not at once: Open MPI's launcher may hang for ever where one rank ends while another is about to connect to it
    before = "if rank() == 1:\n    time.sleep(1)\n    import no_such_module\n"
    job = start(mpirun, "initialize", "mark()\n", before=before, through=WRAPPER)
    done = end(mpirun, job, None, SOON, since=job.began, tracebacks=1)
    assert done.stderr.count("ModuleNotFoundError: No module named 'no_such_module'") == 1
    if mpirun.name == "mpich":
        # its launcher does not mind a rank that ends before MPI_Init, in which the others wait: their agents find out
        report = done.error
        assert f"1 of the ranks that the launcher started on {os.uname().nodename} ended before MPI" in report
        assert "(left: rank 0)" in report


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
    job = start(mpirun, "initialize", "mark()\n", before=before, call=call)
    says = (
        f"1 of the ranks that the launcher started on {os.uname().nodename} ended before MPI",
        "(left: rank 0)",
    )
    end(mpirun, job, None, SOON, since=job.began, says=says)


def test_process_that_runs_the_script_again(mpirun: Mpi) -> None:
    """A script without a main guard: multiprocessing runs it again in the child."""
    child = (
        "import multiprocessing\nchild = multiprocessing.get_context('spawn').Process(target=print)\n"
        "child.start()\nchild.join(30)\nmark()\nsys.exit(10 + child.exitcode)\n"
    )
    job = start(mpirun, "initialize", child)
    end(mpirun, job, 12, 5, says=("dask_gpu_mpi: error: initialize: called in a child process of a rank",))


def test_child_that_is_a_job_by_itself(mpirun: Mpi) -> None:
    """A program that the script starts has nothing of the launcher's: its cluster is its own."""
    child = (
        "import subprocess\nline = [sys.executable, '-c', 'from dask_gpu_mpi import initialize; "
        "print(len(initialize().plan.workers)); raise SystemExit(2)']\n"
        "child = subprocess.run(line, timeout=30, stdout=subprocess.PIPE)\nassert child.stdout == b'1\\n'\n"
        "mark()\nsys.exit(10 + child.returncode)\n"
    )
    end(mpirun, start(mpirun, "initialize", child), 12, 5)


@pytest.mark.parametrize("where", ["__init__", "start"])
def test_worker_class_that_raises(mpirun: Mpi, where: str) -> None:
    method = "def __init__(self, *a, **k):" if where == "__init__" else "async def start(self):"
    before = (
        "from dask_gpu_mpi import initialize\nfrom distributed import Nanny\n"
        f"class Bad(Nanny):\n    {method}\n        raise RuntimeError('this class is bad')\n"
    )
    job = start(mpirun, "initialize", "mark()\n", before=before, call="initialize(worker_class=Bad)")
    report = end(mpirun, job, 1, SOON, since=job.began).error
    assert "this class is bad" in report
    assert "worker 0 " in report
    assert f"on {os.uname().nodename}" in report


def test_worker_class_that_cannot_be_imported(mpirun: Mpi) -> None:
    job = start(mpirun, "command", "mark()\n", options={"worker_class": "no_such_module.Class"})
    assert "no_such_module" in end(mpirun, job, {1, 2}, SOON, since=job.began).error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "call"),
    [((), "initialize()"), (WRAPPER, "initialize()"), (WRAPPER, "initialize(exit=False)")],
    ids=["direct", "wrapped", "wrapped, own MPI"],
)
def test_rank_stopped_before_mpi(mpirun: Mpi, through: tuple[str, ...], call: str) -> None:
    """The others are inside MPI_Init, which can't say who is missing."""
    before = "import signal\nif rank() == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    options = {"startup_timeout": DEADLINE}
    job = start(mpirun, "initialize", "mark()\n", before=before, options=options, through=through, call=call)
    # MPI_GRACE more for those whose MPI only takes its time
    end(
        mpirun,
        job,
        None,
        DEADLINE + MPI_GRACE + 10,
        since=job.began,
        says=(
            "MPI did not come together before the start-up timeout",
            f"rank 1 on {os.uname().nodename} was started but is stopped (by a signal or a debugger). Fix: ",
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stopped"), [(2, (0,)), (2, (1,)), (3, (0, 1))], ids=["rank 0", "rank 1", "ranks 0 and 1"]
)
def test_rank_stopped_after_mpi(mpirun: Mpi, ranks: int, stopped: tuple[int, ...]) -> None:
    before = f"from mpi4py import MPI\nif rank() in {stopped}:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    options = {"startup_timeout": DEADLINE}
    job = start(mpirun, "initialize", "mark()\n", ranks, before=before, options=options)
    report = end(mpirun, job, 1, DEADLINE + 4 + 10, since=job.began).error
    assert f"no response from rank {stopped[0]} of {ranks} before the start-up timeout" in report
    assert f"rank {stopped[0]} on {os.uname().nodename} is stopped" in report
    if stopped == (1,):
        assert f"rank 0 on {os.uname().nodename}" in report


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stopped", "waits"])
def test_rank_that_has_come_and_does_not_go_on(mpirun: Mpi, what: str) -> None:
    line = "os.kill(os.getpid(), signal.SIGSTOP)" if what == "stopped" else "wait_until(lambda: False, 60)"
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
    job = start(mpirun, "initialize", "mark()\n", before=before, options={"startup_timeout": DEADLINE})
    report = end(mpirun, job, 1, DEADLINE + 2 + 10, since=job.began).error
    assert f"rank 1 of 2 on {os.uname().nodename}: no response before the start-up timeout" in report


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 1])
def test_rank_that_hangs_while_it_inspects_its_node(mpirun: Mpi, hanging: int, tmp_path: Path) -> None:
    """Its local directory is on a file server that is gone: the one report says at which step its agent is."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'HANGS' in os.environ:\n    import time\n    from dask_gpu_mpi.machine import scratch\n"
        "    scratch.exposed_folder = lambda folder: time.sleep(60)\n"
    )
    before = f"if rank() == {hanging}:\n    os.environ['HANGS'] = 'yes'\n"
    env = {"PYTHONPATH": str(tmp_path)}
    options = {"startup_timeout": DEADLINE}
    job = start(mpirun, "initialize", "mark()\n", before=before, options=options, env=env)
    report = end(mpirun, job, 1, DEADLINE + 10 + 10, since=job.began).error
    assert f"rank {hanging} of 2 on {os.uname().nodename}: no response before the start-up timeout" in report
    assert "last step: inspecting its cores, memory and networks, and the local directory. Fix: " in report


@pytest.mark.slow
def test_worker_that_dies_at_each_start(mpirun: Mpi) -> None:
    env = preload(
        "dies.py",
        "import os\n\ndef dask_setup(worker):\n    if str(worker.name) == '1':\n        os._exit(1)\n",
    )
    job = start(mpirun, "command", "mark()\n", env=env)
    done = end(mpirun, job, 1, SOON + 10, since=job.began, tracebacks=None)
    assert done.stderr.count("dask_gpu_mpi: error: ") == 1
    assert "worker 1 did not start" in done.stderr
    assert not (job.directory / "mark-up").exists()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["one", "all"])
def test_worker_that_dies_after_each_start(mpirun: Mpi, which: str) -> None:
    dies = "str(worker.name) == '1'" if which == "one" else "True"
    env = preload(
        "dies.py",
        "import os, threading\n\ndef dask_setup(worker):\n"
        f"    if {dies}:\n        threading.Timer(0.5, os._exit, [1]).start()\n",
    )
    body = (
        "time.sleep(60)\n"
        if which == "all"
        else "wait_for_names('0')\nwait_until(lambda: marked('given-up'))\ncompute()\nmark()\nsys.exit(3)\n"
    )
    job = start(mpirun, "command", body, env=env)
    given_up = "worker 1 on "
    if which == "one":
        job.wait_for(given_up, 40, stream="stderr")
        (job.directory / "mark-given-up").touch()
        end(mpirun, job, 3, 5, says=(given_up,), tracebacks=None)
    else:
        end(mpirun, job, 1, 45, since=job.began, says=(given_up, "no worker is left"), tracebacks=None)


def test_deadline_is_an_option(mpirun: Mpi) -> None:
    """A worker that takes for ever to start, and a plain line about whom the rest waits for."""
    env = preload(
        "slow.py",
        "import time\n\ndef dask_setup(worker):\n    if str(worker.name) == '1':\n        time.sleep(600)\n",
    )
    job = start(mpirun, "command", "mark()\n", env=env, options={"startup_timeout": "11 s"})
    done = end(mpirun, job, 1, 11 + 10, since=job.began, tracebacks=None)
    report = done.error
    assert "rank 1" in report
    assert os.uname().nodename in report
    assert (
        f"1 of 2 workers, waiting for {os.uname().nodename}" in done.stderr
        or "starting, waiting for" in done.stderr
    )
