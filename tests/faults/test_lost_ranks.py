"""Ranks that are lost while the others continue, with ``tolerate_lost_ranks``. Below srun: tests/slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from support.bed.hosts import TestBed
from support.jobs.faults import end, hangs, set_mark, start, strike, write
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
    "end": "mark('busy')\nwait_until(lambda: marked('struck'))\n",
}

#: Before the script: rank 1 is stopped once its part is closed, as if it removed what its workers have spilled.
STOPS_CLOSED = """
if rank() == 1:
    from dask_gpu_mpi.job.member import RankAgents
    drop = RankAgents.drop
    def stop(*given):
        os.kill(os.getpid(), signal.SIGSTOP)
        drop(*given)
    RankAgents.drop = stop
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


def ends(job: Job, codes: Any, within: float, **more: Any) -> CompletedJob:
    """The end of a job that has lost a rank: what that rank has left stays."""
    return end(job, codes, within, **{"timeout": 120, "tracebacks": None, "scratch": True, **more})


def lose(job: Job, then: str = "") -> None:
    """Kill rank 2 and all below it, wait until it is lost, and let the script continue."""
    strike(job, 2, below=True)
    job.wait_for(rf"rank 2 on \S+ lost: {LOST}{then}", 60, stream="stderr")
    set_mark(job, "over")


#: A script that waits for the test.
UNTIL_OVER = "mark('busy')\nwait_until(lambda: marked('over'), 150)\n"
SLEEPS = "mark('busy')\ntime.sleep(120)\n"
EXIT = "mark()\nsys.exit(3)\n"
STOPPED = "futures = start_tasks()\nmark('busy')\nwait_until(lambda: marked('struck'))\ncheck_tasks(futures)\nmark()\n"
ONE_LOST = (
    rf"rank 2 on \S+ lost: {LOST}; it had 1 worker and 0 GPUs. Continuing with 2 workers; 0 more ranks"
    "|no response from rank 2 of 3 at the end; continuing without"
)
TOO_MANY = r"2 ranks are lost \(expected at most 1, tolerate_lost_ranks\): the cluster is lost"
RANK_0 = "error: rank 0 lost, and with it the script and the scheduler"


@dataclass(frozen=True)
class Row:
    """A job of three ranks that may lose one, and a signal to some, to all below them if it is of `below`."""

    name: str
    form: str
    body: str
    code: int | None
    within: float
    says: str
    victims: tuple[int, ...] = (2,)
    number: int = signal.SIGKILL
    below: bool = True


ROWS = (
    Row("tasks, rank", "initialize", BUSY["tasks"] + "mark()\n", 0, 20, ONE_LOST, below=False),
    *(
        Row(during, "command", f"{body}mark()\nsys.exit(75)\n", 75, 20, "" if during == "end" else ONE_LOST)
        for during, body in BUSY.items()
    ),
    # its workers go on; at the end it does not answer, and the launcher does not wait for it
    Row("stopped", "command", STOPPED + "sys.exit(3)\n", 3, 25, "", number=signal.SIGSTOP, below=False),
    # Python does not keep this code for us
    Row("stopped, exit", "initialize", STOPPED + "raise SystemExit(3)\n", 3, 25, "", number=signal.SIGSTOP, below=False),
    Row("stopped, no exit", "initialize", STOPPED, 0, 25, "", number=signal.SIGSTOP, below=False),
    Row("one more than may be lost", "command", SLEEPS, 1, 30, TOO_MANY, (1, 2)),
    # its launcher does not end the job, and nothing else tells the others
    Row("rank 0 and all below", "command", SLEEPS, None, 20, RANK_0, (0,)),
    Row("rank 0", "command", SLEEPS, None, 20, RANK_0, (0,), below=False),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_ranks_are_lost(surviving: Mpi, row: Row) -> None:
    job = start(surviving, row.form, row.body, 3, at="busy", options=TOLERATES)
    strike(job, *row.victims, number=row.number, below=row.below)
    assert re.search(row.says, ends(job, row.code, row.within).stderr)


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        # rank 0 is silent meanwhile, and yet not lost
        ("import ctypes\nctypes.PyDLL(None).usleep(int(1e6 * 40))\ncompute()\n", 40),
        # though it has no scheduler any more
        ("session.close()\ntime.sleep(12)\n", 12),
    ],
    ids=["keeps the interpreter to itself", "continues after its cluster"],
)
def test_script_whose_rank_is_not_lost(surviving: Mpi, body: str, seconds: int) -> None:
    job = start(surviving, "command", body + EXIT, 3, options=TOLERATES)
    assert "lost" not in end(job, 3, 10, timeout=seconds + 80).stderr


@pytest.mark.parametrize("seconds", [60, 24], ids=["hangs", "is late"])
def test_rank_that_has_not_responded_at_the_start(surviving: Mpi, seconds: int) -> None:
    """The job starts without it, and ends in order while it hangs, or after it has left."""
    options = {**TOLERATES, "startup_timeout": 15}
    body = f"check_tasks(start_tasks())\nif {seconds} < 40:\n    time.sleep({seconds})\n"
    job = start(surviving, "initialize", body + EXIT, 3, options=options, **hangs(2, seconds))
    said = f"rank 2 of 3 on {os.uname().nodename} has not responded within 15 s (startup_timeout); starting without"
    ends(job, 3, 15, says=(said,))


def test_rank_that_dies_while_its_workers_start(surviving: Mpi) -> None:
    """Tasks and gangs run on the others."""
    options = late("True", before="open('mark-busy', 'w').write(repr(time.time()))")
    gang = "from dask_gpu_mpi import spmd\nassert spmd(client, lambda group: group.size) == [2, 2]\n"
    body = f"check_tasks(start_tasks())\n{gang}{EXIT}"
    job = start(surviving, "initialize", body, 3, at="busy", options=options)
    strike(job, 2, below=True)
    ends(job, 3, 15, says=(STARTS_WITHOUT,))


@pytest.mark.parametrize("joins", [False, True])
def test_rank_whose_workers_are_late(surviving: Mpi, joins: bool) -> None:
    """The job starts without them; they join when they are there."""
    options = late("not os.path.exists('mark-up')" if joins else "True")
    body = "check_tasks(start_tasks())\n" + "wait_for_names('0', '1', '2')\n" * joins
    job = start(surviving, "initialize", body + EXIT, 3, options=options)
    ends(job, 3, 15, says=(STARTS_WITHOUT,))


def test_rank_whose_workers_are_late_while_the_script_keeps_the_interpreter_to_itself(surviving: Mpi) -> None:
    """Rank 0 receives no message of it meanwhile, but the scheduler's reports; it is not lost."""
    options = late("not os.path.exists('mark-go')")
    hold = "import ctypes\nctypes.PyDLL(None).usleep(int(1e6 * 9))\n"
    body = hold + "time.sleep(1)\nmark('go')\nwait_for_names('0', '1', '2')\n"
    job = start(surviving, "initialize", body + EXIT, 3, options=options)
    assert " lost: " not in end(job, 3, 15, timeout=120, tracebacks=None).stderr


def test_rank_that_dies_before_its_late_workers_have_joined(surviving: Mpi) -> None:
    """It counts as lost, and its workers do not count as left."""
    body = UNTIL_OVER + "check_tasks(start_tasks())\n" + EXIT
    job = start(surviving, "initialize", body, 3, at="busy", options=late("True"))
    lose(job, "; .*Continuing with 2 workers; 0 more ranks")
    assert "handshake" not in ends(job, 3, 15).stderr


def test_a_program_that_continues_on_all_ranks_tolerates_none(mpirun: Mpi) -> None:
    job = start(mpirun, "execute", "execute(print)\n", client=False, options=TOLERATES)
    done = end(job, 2, 20, since=time.time())
    assert done.stderr.count("can't be combined with exit=False or execute() (expected") == 1


@pytest.mark.parametrize(
    ("form", "last", "code", "mark"),
    [
        ("command", "session.close()\nmark()\nsys.exit(3)\n", 3, "3\n"),
        ("command", "with session:\n    mark()\n    sys.exit(3)\n", 3, "3\n"),
        # `launch` always runs the command, and Python keeps no code of a SystemExit
        ("initialize", "session.close()\nmark()\nsys.exit(3)\n", 3, ""),
        ("initialize", "mark()\nraise ValueError\n", 1, "1\n"),
    ],
)
def test_code_in_the_mark(surviving: Mpi, form: str, last: str, code: int, mark: str) -> None:
    """`launch` exits with it. If it is not known, the launcher's own counts."""
    options = {**TOLERATES, "log_directory": "logs"}
    # as `launch` sets it
    job = start(surviving, form, UNTIL_OVER + last, 3, at="busy", options=options, env={"DGM_RUN": "5e8f"})
    lose(job)
    ends(job, code, 15)
    assert (job.directory / "logs" / "ended-5e8f").read_text() == mark


@pytest.mark.slow
def test_another_rank_stops_after_it_has_closed(surviving: Mpi) -> None:
    """The launcher would wait for it after that of the first, which has died."""
    how: dict[str, Any] = {"before": STOPS_CLOSED, "options": {"tolerate_lost_ranks": 2}}
    job = start(surviving, "initialize", UNTIL_OVER + "mark()\n", 3, at="busy", **how)
    lose(job)
    ends(job, 0, 50)


@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.slow
def test_rank_that_stops_after_it_has_closed(mpirun: Mpi, code: int) -> None:
    """As one that removes what its workers have spilled; MPI would wait for it forever. With any launcher."""
    job = start(mpirun, "initialize", f"compute()\nmark()\nsys.exit({code})\n", before=STOPS_CLOSED)
    end(job, code, 50, timeout=120, tracebacks=None)


def test_without_the_option_the_job_ends(mpirun: Mpi) -> None:
    job = start(mpirun, "command", SLEEPS, 3, at="busy")
    strike(job, 2, below=True)
    ends(job, None, 20)


@pytest.mark.both_mpis
@pytest.mark.versions
def test_a_launcher_that_is_not_able_to(mpirun: Mpi) -> None:
    """One line says so at the start, not at the loss."""
    done = end(start(mpirun, "command", EXIT, options=TOLERATES), 3, 5)
    fixes = {"openmpi": "Fix: `mpirun --with-ft ulfm`", "mpich": "Fix: srun with MPICH, or Open MPI 5"}
    (line,) = [each for each in done.stderr.splitlines() if "warning: lost ranks: " in each]
    assert "ends the job when a rank is lost" in line
    assert fixes[mpirun.name] in line


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, 60])
def test_network_that_is_down_for_a_while(surviving: Mpi, bed: TestBed, seconds: int) -> None:
    """For less than Dask's time-out nothing is lost; after it the rank is, and ends with the job when it is back."""
    body = UNTIL_OVER + "check_tasks(start_tasks())\n" + EXIT
    job = start(surviving, "command", body, 3, at="busy", bed=bed, options=TOLERATES)
    bed.ip("h3", "link", "set", "eth0", "down")
    time.sleep(seconds)
    bed.ip("h3", "link", "set", "eth0", "up")
    time.sleep(5)
    set_mark(job, "over")
    assert ("rank 2 on h3 lost" in ends(job, 3, 60, timeout=200).stderr) is (seconds > 30)
