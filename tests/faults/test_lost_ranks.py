"""Ranks that are lost while the others continue, with ``tolerate_lost_ranks``. Below srun: tests/slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import Any

import psutil
import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import ranks_of
from support.jobs.faults import end, mark_time, start, write
from support.jobs.mpi import CompletedJob, Job, Mpi

LOST = "its process(es or its node died, or its network is down| has ended)"
TOLERATES = {"tolerate_lost_ranks": 1}

#: What the script does around the loss: it starts something, waits for the loss, and checks what comes of it.
BUSY = {
    "tasks": "futures = start_tasks()\nmark('busy')\nwait_for_names('0', '1')\ncheck_tasks(futures)\n",
    "shuffles": """
import dask.array
array = dask.array.ones((600, 600), chunks=(20, 600)).map_blocks(lambda part: (time.sleep(0.2), part)[1], dtype=float)
futures = [
    client.compute(array.rechunk((600, 20), method=how).sum(), retries=5) for how in ("tasks", "p2p")
]
wait_until(lambda: any(client.processing().values()))
mark('busy')
wait_for_names('0', '1')
assert [future.result(60) for future in futures] == [360_000] * 2
""",
    "gang": """
from dask_gpu_mpi import SpmdError, spmd
def member(group):
    if group.size == 3:
        open(os.path.join(HERE, f"joined-{group.rank}"), "w").close()
        time.sleep(60)
    return group.size
def all_joined():
    if not all(os.path.exists(os.path.join(HERE, f"joined-{rank}")) for rank in range(3)):
        threading.Timer(0.1, all_joined).start()
    else:
        mark("busy")
all_joined()
try:
    spmd(client, member)
except SpmdError as error:
    assert error.died == (2,), error.died
# it waits for the lost one until that is given up
assert spmd(client, member) == [2, 2]
""",
    "end": "mark('busy')\nwait_until(lambda: marked('killed'))\n",
}

#: Before the script: rank 1 is stopped once its part is closed, as if it removed what its workers have spilled.
STOPS_CLOSED = """
if rank() == 1:
    from dask_gpu_mpi.job.member import Member
    drop_agent = Member.drop_agent
    def stop(*given):
        os.kill(os.getpid(), signal.SIGSTOP)
        drop_agent(*given)
    Member.drop_agent = stop
"""


def late(waits: str, before: str = "") -> dict[str, Any]:
    """Options with which the workers of rank 2 wait before they join, for a minute at most."""
    preload = write(
        "late.py",
        f"""
import os, time

def dask_setup(worker):
    if str(worker.name) == "2":
        limit = time.monotonic() + 60
        {before}
        while {waits} and time.monotonic() < limit:
            time.sleep(0.05)
""",
    )
    return {**TOLERATES, "startup_timeout": 15, "worker_options": json.dumps({"preload": [str(preload)]})}


STARTS_WITHOUT = "rank 2 not ready before the start-up timeout (startup_timeout); starting without"


def strike(job: Job, rank: int, victim: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to all processes of a rank, or to the rank's own."""
    process = psutil.Process(ranks_of(job)[rank])
    below = process.children(recursive=True) if victim == "all" else []
    for each in [process, *below]:
        os.kill(each.pid, number)
    (job.directory / "mark-killed").touch()


def ends(mpirun: Mpi, job: Job, codes: Any, within: float, **more: Any) -> CompletedJob:
    """The end of a job that has lost a rank: what that rank has left stays."""
    return end(mpirun, job, codes, within, **{"timeout": 120, "tracebacks": None, "scratch": True, **more})


def is_lost(job: Job) -> None:
    """Wait until rank 2 is lost, and let the script continue."""
    job.wait_for(rf"rank 2 on \S+ lost: {LOST}", 60, stream="stderr")
    (job.directory / "mark-over").touch()


@pytest.mark.both_mpis
@pytest.mark.parametrize(
    ("during", "victim", "form"),
    [
        ("tasks", "rank", "initialize"),
        *[(during, "all", "command") for during in BUSY],
    ],
)
def test_the_others_continue(surviving: Mpi, during: str, victim: str, form: str) -> None:
    code = 75 if form == "command" else 0
    exits = f"mark()\nsys.exit({code})\n" if code else "mark()\n"
    job = start(surviving, form, BUSY[during] + exits, 3, options=TOLERATES)
    mark_time(job, "busy")
    strike(job, 2, victim)
    done = ends(surviving, job, code, 20)
    lost = rf"rank 2 on \S+ lost: {LOST}; it had 1 worker and 0 GPUs. Continuing with 2 workers; 0 more ranks"
    assert (
        re.search(lost, done.stderr)
        or during == "end"
        or "no response from rank 2 of 3 at the end; continuing without" in done.stderr
    )


@pytest.mark.parametrize(
    ("form", "last", "code"),
    [
        ("command", "sys.exit(3)", 3),
        ("initialize", "raise SystemExit(3)", 3),  # Python does not keep this code for us
        ("initialize", "", 0),
    ],
)
def test_rank_that_is_stopped(surviving: Mpi, form: str, last: str, code: int) -> None:
    """Its workers go on; at the end it does not answer, and the launcher does not wait for it."""
    body = "futures = start_tasks()\nmark('busy')\nwait_until(lambda: marked('killed'))\ncheck_tasks(futures)\nmark()\n"
    job = start(surviving, form, body + last + "\n", 3, options=TOLERATES)
    mark_time(job, "busy")
    strike(job, 2, "rank", signal.SIGSTOP)
    ends(surviving, job, code, 25)


@pytest.mark.both_mpis
def test_one_more_than_may_be_lost(surviving: Mpi) -> None:
    job = start(surviving, "command", "mark('busy')\ntime.sleep(120)\n", 3, options=TOLERATES)
    mark_time(job, "busy")
    fault = time.time()
    strike(job, 1, "all")
    strike(job, 2, "all")
    says = ("2 ranks are lost (expected at most 1, tolerate_lost_ranks): the cluster is lost",)
    ends(surviving, job, 1, 30, since=fault, says=says)


@pytest.mark.both_mpis
@pytest.mark.parametrize("victim", ["all", "rank"])
def test_rank_0_ends_the_job(surviving: Mpi, victim: str) -> None:
    """Its launcher does not, and nothing else tells the others."""
    job = start(surviving, "command", "mark('busy')\ntime.sleep(120)\n", 3, options=TOLERATES)
    mark_time(job, "busy")
    fault = time.time()
    strike(job, 0, victim)
    done = ends(surviving, job, None, 20, since=fault)
    assert "error: rank 0 lost, and with it the script and the scheduler" in done.stderr


def test_script_that_keeps_the_interpreter_to_itself(surviving: Mpi) -> None:
    """Rank 0 is silent meanwhile, and yet not lost."""
    hold = "import ctypes\nctypes.PyDLL(None).usleep(int(1e6 * 40))\n"
    job = start(surviving, "command", hold + "compute()\nmark()\nsys.exit(3)\n", 3, options=TOLERATES)
    done = end(surviving, job, 3, 10, timeout=120)
    assert "lost" not in done.stderr


@pytest.mark.both_mpis
@pytest.mark.parametrize("late", [60, 24], ids=["hangs", "is late"])
def test_rank_that_has_not_responded_at_the_start(surviving: Mpi, late: int) -> None:
    """The job starts without it, and ends in order while it hangs, or after it has left."""
    folder = write(
        "sitecustomize.py",
        "import os\nif 'HANGS' in os.environ:\n    import time\n    from dask_gpu_mpi.machine import scratch\n"
        f"    scratch.exposed_folder = lambda folder: time.sleep({late})\n",
    ).parent
    before = "if rank() == 2:\n    os.environ['HANGS'] = 'yes'\n"
    options = {**TOLERATES, "startup_timeout": 15}
    body = f"futures = start_tasks()\ncheck_tasks(futures)\nif {late} < 40:\n    time.sleep({late})\nmark()\nsys.exit(3)\n"
    env = {"PYTHONPATH": str(folder)}
    job = start(surviving, "initialize", body, 3, before=before, options=options, env=env)
    says = (
        f"rank 2 of 3 on {os.uname().nodename} has not responded within 15 s (startup_timeout); starting without it",
    )
    ends(surviving, job, 3, 15, says=says)


def test_rank_that_dies_while_its_workers_start(surviving: Mpi) -> None:
    """Tasks and gangs run on the others."""
    options = late("True", before="open('mark-busy', 'w').write(repr(time.time()))")
    body = """
from dask_gpu_mpi import spmd
check_tasks(start_tasks())
assert spmd(client, lambda group: group.size) == [2, 2]
mark()
sys.exit(3)
"""
    job = start(surviving, "initialize", body, 3, options=options)
    mark_time(job, "busy")
    strike(job, 2, "all")
    ends(surviving, job, 3, 15, says=(STARTS_WITHOUT,))


@pytest.mark.parametrize("joins", [False, True])
def test_rank_whose_workers_are_late(surviving: Mpi, joins: bool) -> None:
    """The job starts without them; they join when they are there."""
    options = late("not os.path.exists('mark-up')" if joins else "True")
    body = "check_tasks(start_tasks())\n" + "wait_for_names('0', '1', '2')\n" * joins
    job = start(surviving, "initialize", body + "mark()\nsys.exit(3)\n", 3, options=options)
    ends(surviving, job, 3, 15, says=(STARTS_WITHOUT,))


def test_rank_whose_workers_are_late_while_the_script_keeps_the_interpreter_to_itself(surviving: Mpi) -> None:
    """Rank 0 receives no message of it meanwhile, but the scheduler's reports; it is not lost."""
    options = late("not os.path.exists('mark-go')")
    hold = "import ctypes\nctypes.PyDLL(None).usleep(int(1e6 * 9))\n"
    body = hold + "time.sleep(1)\nmark('go')\nwait_for_names('0', '1', '2')\nmark()\nsys.exit(3)\n"
    job = start(surviving, "initialize", body, 3, options=options)
    done = end(surviving, job, 3, 15, timeout=120, tracebacks=None)
    assert " lost: " not in done.stderr


def test_rank_that_dies_before_its_late_workers_have_joined(surviving: Mpi) -> None:
    """It counts as lost, and its workers do not count as left."""
    options = late("True")
    body = "mark('busy')\nwait_until(lambda: marked('over'), 60)\ncheck_tasks(start_tasks())\nmark()\nsys.exit(3)\n"
    job = start(surviving, "initialize", body, 3, options=options)
    mark_time(job, "busy")
    strike(job, 2, "all")
    job.wait_for(
        rf"rank 2 on \S+ lost: {LOST}; .*Continuing with 2 workers; 0 more ranks", 30, stream="stderr"
    )
    (job.directory / "mark-over").touch()
    done = ends(surviving, job, 3, 15)
    assert "handshake" not in done.stderr


def test_a_program_that_continues_on_all_ranks_tolerates_none(mpirun: Mpi) -> None:
    job = start(mpirun, "execute", "execute(print)\n", client=False, options=TOLERATES)
    done = end(mpirun, job, 2, 20, since=time.time())
    assert done.stderr.count("can't be combined with exit=False or execute() (expected") == 1


def test_script_that_continues_after_its_cluster(surviving: Mpi) -> None:
    """Rank 0 is not taken for lost, though it has no scheduler any more."""
    body = "session.close()\ntime.sleep(12)\nmark()\nsys.exit(3)\n"
    job = start(surviving, "initialize", body, 3, options=TOLERATES)
    done = end(surviving, job, 3, 10, timeout=120)
    assert "lost" not in done.stderr


@pytest.mark.both_mpis
@pytest.mark.parametrize(
    ("form", "last", "mark"),
    [
        ("command", "session.close()\nmark()\nsys.exit(3)", "3\n"),
        ("command", "with session:\n    mark()\n    sys.exit(3)", "3\n"),
        # `launch` always runs the command, and Python keeps no code of a SystemExit
        ("initialize", "session.close()\nmark()\nsys.exit(3)", ""),
        ("initialize", "mark()\nraise ValueError", "1\n"),
    ],
)
def test_code_in_the_mark(surviving: Mpi, form: str, last: str, mark: str) -> None:
    """`launch` exits with it. If it is not known, the launcher's own counts."""
    body = "mark('busy')\nwait_until(lambda: marked('over'), 60)\n" + last + "\n"
    env = {"DGM_RUN": "5e8f"}  # as `launch` sets it
    job = start(surviving, form, body, 3, options={**TOLERATES, "log_directory": "logs"}, env=env)
    mark_time(job, "busy")
    strike(job, 2, "all")
    is_lost(job)
    ends(surviving, job, 1 if "raise" in last else 3, 15)
    assert (job.directory / "logs" / "ended-5e8f").read_text() == mark


@pytest.mark.slow
def test_another_rank_stops_after_it_has_closed(surviving: Mpi) -> None:
    """The launcher would wait for it after that of the first, which has died."""
    job = start(
        surviving,
        "initialize",
        "mark('busy')\nwait_until(lambda: marked('over'), 60)\nmark()\n",
        3,
        before=STOPS_CLOSED,
        options={"tolerate_lost_ranks": 2},
    )
    mark_time(job, "busy")
    strike(job, 2, "all")
    is_lost(job)
    ends(surviving, job, 0, 50)


@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.slow
def test_rank_that_stops_after_it_has_closed(mpirun: Mpi, code: int) -> None:
    """As one that removes what its workers have spilled; MPI would wait for it forever. With any launcher."""
    job = start(mpirun, "initialize", f"compute()\nmark()\nsys.exit({code})\n", before=STOPS_CLOSED)
    end(mpirun, job, code, 50, timeout=120, tracebacks=None)


def test_without_the_option_the_job_ends(mpirun: Mpi) -> None:
    job = start(mpirun, "command", "mark('busy')\ntime.sleep(60)\n", 3)
    mark_time(job, "busy")
    fault = time.time()
    strike(job, 2, "all")
    end(mpirun, job, None, 20, since=fault, tracebacks=None, scratch=True)


@pytest.mark.both_mpis
@pytest.mark.versions
def test_a_launcher_that_is_not_able_to(mpirun: Mpi) -> None:
    """One line says so at the start, not at the loss."""
    job = start(mpirun, "command", "mark()\nsys.exit(3)\n", options=TOLERATES)
    fix = {"openmpi": "Fix: `mpirun --with-ft ulfm`", "mpich": "Fix: srun with MPICH, or Open MPI 5"}[
        mpirun.name
    ]
    done = end(mpirun, job, 3, 5)
    (line,) = [each for each in done.stderr.splitlines() if "warning: lost ranks: " in each]
    assert "ends the job when a rank is lost" in line
    assert fix in line


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, 60])
def test_network_that_is_down_for_a_while(surviving: Mpi, bed: TestBed, seconds: int) -> None:
    """For less than Dask's time-out nothing is lost; after it the rank is, and ends with the job when it is back."""
    body = "mark('busy')\nwait_until(lambda: marked('over'), 150)\ncheck_tasks(start_tasks())\nmark()\nsys.exit(3)\n"
    job = start(surviving, "command", body, 3, bed=bed, options=TOLERATES)
    mark_time(job, "busy")
    bed.ip("h3", "link", "set", "eth0", "down")
    time.sleep(seconds)
    bed.ip("h3", "link", "set", "eth0", "up")
    time.sleep(5)
    (job.directory / "mark-over").touch()
    done = ends(surviving, job, 3, 60, timeout=200)
    assert ("rank 2 on h3 lost" in done.stderr) is (seconds > 30)
