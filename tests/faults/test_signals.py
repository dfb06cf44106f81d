"""Signals of the batch system and of people, and the walltime."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.jobs.clusters import ranks_of, until
from support.jobs.faults import await_cluster, end, mark_time, marks, set_mark, start, strike
from support.jobs.mpi import Mpi

BODY = """
atexit.register(mark, "atexit")
task = client.submit(time.sleep, 60)  # a signal inside of that would leave half a Future, whose end prints a traceback
try:
    mark("running")
    task.result()
finally:
    mark("finally")
"""
#: The marks of its end.
ENDED = ("atexit", "finally")
#: The same with a callback before the walltime.
WALLTIME = (
    """
calls = []

def checkpoint():
    calls.append(client.submit(lambda: 7).result(timeout=10))
    mark(f"checkpoint-{len(calls)}-{calls[-1]}")

session.on_walltime(checkpoint, before=12)
left = session.time_left()
mark("left-none" if left is None else "left-some" if 0 < left < 100 else "left-wrong")
"""
    + BODY
)
CHECKPOINTED = ("checkpoint-1-7", "left-none", *ENDED)
#: Handles the signal itself; it is sent nothing, or knows of it.
OWN = "signal.signal(signal.SIGTERM, lambda *_: mark('own'))\nmark('running')\ntime.sleep(8)\nmark()\n"
#: All ranks go on with MPI when the cluster has ended.
EXECUTES = """
def work():
    CALLS
    mark("running")
    time.sleep(60)

execute(work)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
INITIALIZES = """
if session:
    mark("running")
    time.sleep(60)
    session.close()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
ON_WALLTIME = (
    "from dask_gpu_mpi import current_session\n    current_session().on_walltime(lambda: mark('checkpoint'))"
)
FORKS = """
import multiprocessing
context = multiprocessing.get_context("fork")

def checkpoint():
    with context.Pool(1) as pool:  # which ends its process by SIGTERM
        seven = pool.apply(abs, (-7,))
    mark(f"checkpoint-{client.submit(abs, -seven).result(timeout=20)}-{os.getpid() == script}")

script = os.getpid()
session.on_walltime(checkpoint)
one, other = (context.Process(target=time.sleep, args=(60,)) for _ in range(2))
one.start()
other.start()
one.terminate()
one.join(20)
mark(f"code{one.exitcode}")
task = client.submit(time.sleep, 60)
try:
    mark("running")
    task.result()
finally:
    other.join(20)
    mark(f"other{other.exitcode}")
"""
#: Works when its main program has ended: Python drops an exception there, and the exit code with it.
WORKS = """
def works():
    mark("running")
    time.sleep(8)

"""
IN_THREAD = WORKS + "threading.Thread(target=works).start()"
IN_EXECUTOR = WORKS + "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(works)"
AT_EXIT = WORKS + "atexit.register(works)"
HAS_CALLBACK = "session.on_walltime(lambda: mark('checkpoint'))\n"
#: Rank 0 waits for a rank, or for its agent, until its start-up deadline of minutes.
NO_RANK = """
from dask_gpu_mpi.startup.meeting import Meeting
if rank() == 1:
    Meeting.__init__ = lambda *given: wait_until(lambda: False)
else:
    before = Meeting.__init__
    Meeting.__init__ = lambda *given: (before(*given), mark("running"))[0]
"""
NO_AGENT = """
from dask_gpu_mpi.agent.handle import AgentProcess
if rank() == 0:
    AgentProcess.events = lambda self, timeout: [] if marked("running") else (mark("running"), [])[1]
"""
#: Of signals to the launcher: MPICH's mpiexec passes them on, and hydra reports the rank's end; Open MPI's mpirun makes them a
#: TERM and has a code of its own. docs/exit-codes.md has the same.
TERM = {"openmpi": {1}, "mpich": {143}}
INT = {"openmpi": {1}, "mpich": {2, 130}}  # hydra says 2 of a rank that died of the signal


@dataclass(frozen=True)
class Row:
    """A job whose script is at the mark "running", and a signal to some of its processes."""

    name: str
    form: str
    #: As in `support.jobs.faults.strike`, by the signal's name.
    signal: str
    victims: tuple[int | str, ...]
    #: As in `support.jobs.faults.end`.
    codes: Any
    within: float = 10
    body: str = BODY
    #: Marks that its script makes from then on, and nothing else but "up", "running", "struck".
    marks: tuple[str, ...] = ENDED
    tracebacks: int | None = 0
    says: tuple[str, ...] = ()
    #: Of `support.jobs.faults.start`.
    ranks: int | None = 2
    more: dict[str, Any] = field(default_factory=dict)
    marked: tuple[pytest.MarkDecorator, ...] = ()


both_mpis = pytest.mark.both_mpis
GOES_ON: dict[str, Any] = {"client": False, "call": "initialize(exit=False)"}
ROWS = (
    Row("launcher", "initialize", "TERM", ("launcher",), TERM, marked=(both_mpis, pytest.mark.quick)),
    Row("launcher, interrupted", "command", "INT", ("launcher",), INT, tracebacks=None, marked=(both_mpis,)),
    Row("no script", "bare", "INT", ("launcher",), INT, marks=(), marked=(both_mpis,)),
    Row("no script, alone", "bare", "TERM", ("launcher",), 143, marks=(), ranks=None, marked=(both_mpis,)),
    # one to a rank without the script ends the job as one to the script's rank does: nobody waits for a rank that has left
    Row("other rank", "initialize", "TERM", (1,), 143, 5),
    Row("first rank", "command", "TERM", (0,), 143, 5, more={"options": {"client_rank": 1}}),
    Row("other rank without a script", "bare", "TERM", (1,), 143, 5, marks=()),
    # the script, which has its own handler, is sent nothing, and runs to its end
    Row("other rank, own handler", "initialize", "TERM", (1,), {0, 143}, 40, OWN, ("end",)),
    Row("rank waits for another at the start", "initialize", "TERM", (0,), 143, 15, "", (), None,
        ("SIGTERM came while the cluster started",), more={"before": NO_RANK}),
    Row("rank waits for its agent at the start", "initialize", "TERM", (0,), 143, 15, "", (), None,
        ("SIGTERM came while the cluster started",), more={"before": NO_AGENT}),
    Row("execute", "execute", "TERM", ("launcher",), TERM, 15, EXECUTES.replace("CALLS", ""), (),
        more=GOES_ON, marked=(both_mpis,)),
    Row("exit=False", "initialize", "TERM", (1,), 143, 15, INITIALIZES, (), more=GOES_ON, marked=(both_mpis,)),
    # rank 2 is sent nothing, and waits for the others in MPI
    Row("execute, one of three", "execute", "TERM", (1,), 143, 15, EXECUTES.replace("CALLS", ""), (), ranks=3,
        more=GOES_ON, marked=(both_mpis,)),
    # all ranks are sent the signal, and end with the code of the one that has written the checkpoint
    Row("execute, walltime", "execute", "TERM", (0, 1), 75, 15, EXECUTES.replace("CALLS", ON_WALLTIME), ("checkpoint",),
        more=GOES_ON),
    Row("walltime, USR1", "initialize", "USR1", (0,), 75, 10, WALLTIME, CHECKPOINTED,
        more={"options": {"walltime_signal": "USR1"}}),
    # Slurm sends it twice
    Row("walltime, rank", "initialize", "TERM", (0, 0), 75, 10, WALLTIME, CHECKPOINTED),
    # Open MPI's leaves half a second
    Row("walltime, launcher", "command", "TERM", ("launcher",), {"openmpi": {1, 75, 143}, "mpich": {75}}, 10, WALLTIME,
        CHECKPOINTED, marked=(both_mpis,)),
    # where SIGTERM is somebody else's
    Row("walltime, ignored", "initialize", "TERM", ("launcher",), 75, 10, WALLTIME, CHECKPOINTED, ranks=None,
        more={"before": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"}),
    Row("walltime, handled", "initialize", "TERM", ("launcher",), 75, 10, WALLTIME, (*CHECKPOINTED, "own"), ranks=None,
        more={"before": "signal.signal(signal.SIGTERM, lambda *_: mark('own'))\n"}),
    # as scancel sends it: the callback runs in the session's own process, once
    Row("walltime, everybody, forks", "initialize", "TERM", ("everybody",), 75, 10, FORKS,
        ("checkpoint-7-True", "code-15", "other-15"), marked=(both_mpis,)),
    Row("in a thread, walltime", "initialize", "TERM", (0,), 75, 15, HAS_CALLBACK + IN_THREAD, ("checkpoint",), None),
    Row("in an executor, walltime", "initialize", "TERM", (0,), 75, 15, HAS_CALLBACK + IN_EXECUTOR, ("checkpoint",), None),
    Row("at exit, walltime", "initialize", "TERM", (0,), 75, 15, HAS_CALLBACK + AT_EXIT, ("checkpoint",), None),
    Row("in a thread", "initialize", "TERM", (0,), 143, 15, IN_THREAD, (), None),
)  # fmt: skip


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name, marks=row.marked) for row in ROWS])
def test_signal(mpirun: Mpi, row: Row) -> None:
    job = start(mpirun, row.form, row.body, row.ranks, at="running", **row.more)
    strike(job, *row.victims, number=getattr(signal, f"SIG{row.signal}"))
    done = end(job, row.codes, row.within, says=row.says, tracebacks=row.tracebacks)
    found = {*marks(job)} - {"up", "running", "struck"}
    cut = row.name == "walltime, launcher" and mpirun.name == "openmpi"
    assert found == {*row.marks} or (cut and found <= {*row.marks})
    if row.signal == "INT":  # MPICH's reaches the script, and is its own, once
        own = row.form == "command" and mpirun.name == "mpich"
        assert done.stderr.count("KeyboardInterrupt") == done.stderr.count("Traceback") == own


@pytest.mark.versions
def test_end_of_the_walltime(mpirun: Mpi) -> None:
    """The call is due 12 s before it: some seconds after the start."""
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 24)}
    job = start(mpirun, "initialize", WALLTIME, at="running", env=env)
    end(job, 75, 30, since=time.time())
    assert {*marks(job)} - {"up", "running"} == {*CHECKPOINTED} - {"left-none"} | {"left-some"}


#: What happens at the end of `ScriptCluster.open`, when the cluster is there and the script has not got its session yet.
OPENED = """
from dask_gpu_mpi.job.session import ScriptCluster
opened = ScriptCluster.open

def _open(self):
    opened(self)
    mark("end")
    HAPPENS

ScriptCluster.open = _open
"""


@pytest.mark.parametrize(
    ("happens", "codes"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", 143, id="TERM"),
        pytest.param("raise MemoryError", 1, id="raises"),
    ],
)
def test_between_the_cluster_and_the_script(mpirun: Mpi, happens: str, codes: int) -> None:
    job = start(mpirun, "initialize", before=OPENED.replace("HAPPENS", happens))
    end(job, codes, 5, tracebacks="raise" in happens)
    assert marks(job) == ["end"]


def test_signal_to_execute_without_a_function(mpirun: Mpi) -> None:
    job = start(mpirun, "execute", "execute()\nmark('afterwards')\n", None, client=False)
    await_cluster(job)
    strike(job, "launcher", number=signal.SIGINT)
    # Python ends itself by SIGINT, which a shell reports as 130
    end(job, -2, 10, tracebacks=None)
    assert "afterwards" not in marks(job)


@pytest.mark.parametrize(("when", "name"), [("ends", "INT"), ("parts", "INT"), ("ends", "ALRM")])
def test_interrupted_while_the_cluster_ends(mpirun: Mpi, when: str, name: str) -> None:
    """A second Ctrl-C, or a late one, or an alarm that the script has left: the end has its own deadline, and the other ranks
    wait for this one.
    """
    method = {"ends": "Member.end", "parts": "RankAgents.drop"}[when]
    before = f"""
import dask_gpu_mpi.job.member
before = dask_gpu_mpi.job.member.{method}
is_first = rank() == 0

def interrupted(self, *args, **kwargs):
    if is_first:
        os.kill(os.getpid(), signal.SIG{name})
        time.sleep(0.1)
        mark("afterwards")
    return before(self, *args, **kwargs)

dask_gpu_mpi.job.member.{method} = interrupted
"""
    body = "signal.signal(signal.SIGALRM, signal.default_int_handler)\nmark('running')"
    job = start(mpirun, "initialize", body, at="running", before=before)
    end(job, 0, 15, since=time.time())
    mark_time(job, "afterwards")


def test_a_signal_that_faulthandler_has(mpirun: Mpi) -> None:
    body = "mark('running')\nwait_until(lambda: marked('go'))\nmark()\n"
    before = "import faulthandler\nfaulthandler.register(signal.SIGUSR1)\n"
    job = start(mpirun, "initialize", body, at="running", before=before)
    for number, pid in enumerate(ranks_of(job).values(), 1):
        os.kill(pid, signal.SIGUSR1)
        until(lambda n=number: job.stderr.count("Current thread") == n, 20)  # type: ignore[misc]
    set_mark(job, "go")
    end(job, 0, 5)


def test_a_blocked_sigchld(mpirun: Mpi) -> None:
    """The shell or the script may block it: workers that die start again, and the end is no slower."""
    body = (
        "for pid in client.run(os.getpid).values():\n    os.kill(pid, signal.SIGKILL)\n"
        "assert client.submit(sum, [1, 2]).result(timeout=60) == 3\nmark()\n"
    )
    before = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})\n"
    end(start(mpirun, "initialize", body, before=before), 0, 5, tracebacks=None)
