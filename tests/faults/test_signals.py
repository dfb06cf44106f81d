"""Signals of the batch system and of people, and the walltime."""

from __future__ import annotations

import os
import signal
import time

import pytest

from support.jobs.clusters import ranks_of, until
from support.jobs.faults import await_cluster, end, mark_time, start
from support.jobs.mpi import Job, Mpi

BODY = """
atexit.register(mark, "atexit")
task = client.submit(time.sleep, 60)  # a signal inside of that would leave half a Future, whose end prints a traceback
try:
    mark("running")
    task.result()
finally:
    mark("finally")
"""
#: Of signals to the launcher: MPICH's mpiexec passes them on, and hydra reports the rank's end; Open MPI's mpirun makes them a
#: TERM and has a code of its own. docs/exit-codes.md has the same.
TERM = {"openmpi": {1}, "mpich": {143}}
INT = {"openmpi": {1}, "mpich": {2, 130}}  # hydra says 2 of a rank that died of the signal


@pytest.mark.both_mpis
@pytest.mark.quick(name="TERM")
@pytest.mark.parametrize(("form", "name"), [("initialize", "TERM"), ("command", "INT")])
def test_signal_to_the_launcher(mpirun: Mpi, form: str, name: str) -> None:
    job = start(mpirun, form, BODY)
    mark_time(job, "running")
    fault = time.time()
    job.signal(getattr(signal, f"SIG{name}"))
    done = end(mpirun, job, TERM if name == "TERM" else INT, 10, since=fault, tracebacks=None)
    assert mark_time(job, "finally") >= fault
    assert mark_time(job, "atexit") >= fault
    if name == "INT" and mpirun.name == "mpich":
        # the script's own, once
        assert done.stderr.count("KeyboardInterrupt") == done.stderr.count("Traceback") == 1
    else:
        assert "Traceback" not in done.stderr


#: What happens at the end of `ClientEnd.open`, when the cluster is there and the script has not got its session yet.
OPENED = """
from dask_gpu_mpi.job.session import ClientEnd
opened = ClientEnd.open

def _open(self):
    opened(self)
    mark("end")
    HAPPENS

ClientEnd.open = _open
"""


@pytest.mark.parametrize(
    ("happens", "codes"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", 143, id="TERM"),
        pytest.param("raise MemoryError", 1, id="raises"),
    ],
)
def test_between_the_cluster_and_the_script(mpirun: Mpi, happens: str, codes: object) -> None:
    job = start(mpirun, "initialize", before=OPENED.replace("HAPPENS", happens))
    end(mpirun, job, codes, 5, tracebacks="raise" in happens)
    assert not (job.directory / "mark-up").exists()


#: Rank 0 waits where it says so for what never comes, until its start-up deadline of minutes.
WAITS = {
    "for a rank": """
from dask_gpu_mpi.startup.meeting import Meeting
if rank() == 1:
    Meeting.__init__ = lambda *given: wait_until(lambda: False)
else:
    before = Meeting.__init__
    Meeting.__init__ = lambda *given: (before(*given), mark("waits"))[0]
""",
    "for its agent": """
from dask_gpu_mpi.agent.handle import AgentProcess
if rank() == 0:
    AgentProcess.events = lambda self, timeout: [] if marked("waits") else (mark("waits"), [])[1]
""",
}


@pytest.mark.parametrize("what", WAITS)
def test_while_a_rank_waits_at_the_start(mpirun: Mpi, what: str) -> None:
    job = start(mpirun, "initialize", before=WAITS[what])
    mark_time(job, "waits")
    fault = time.time()
    os.kill(ranks_of(job)[0], signal.SIGTERM)
    says = ["SIGTERM came while the cluster started"]
    end(mpirun, job, 143, 15, since=fault, says=says, tracebacks=None)


@pytest.mark.both_mpis
@pytest.mark.parametrize(("ranks", "name"), [(2, "INT"), (None, "TERM")], ids=["launched", "alone"])
def test_signal_without_a_script(mpirun: Mpi, name: str, ranks: int | None) -> None:
    job = start(mpirun, "bare", ranks=ranks)
    await_cluster(job)
    fault = time.time()
    job.signal(getattr(signal, f"SIG{name}"))
    codes = 143 if ranks is None else INT
    end(mpirun, job, codes, 10, since=fault)


@pytest.mark.parametrize(
    ("form", "client", "rank"),
    [
        ("initialize", 0, 1),
        ("command", 1, 0),
        ("bare", 0, 1),
    ],
)
def test_sigterm_to_one_rank_without_the_script_alone(mpirun: Mpi, form: str, client: int, rank: int) -> None:
    """It ends the job as one to the script's rank does: nobody waits for a rank that has left."""
    job = start(mpirun, form, BODY, options={"client_rank": client} if client else None)
    if form == "bare":
        await_cluster(job)
    else:
        mark_time(job, "running")
    fault = time.time()
    os.kill(ranks_of(job)[rank], signal.SIGTERM)
    end(mpirun, job, 143, 5, since=fault)
    if form != "bare":
        assert mark_time(job, "finally") >= fault
        assert mark_time(job, "atexit") >= fault


def test_sigterm_to_one_rank_alone_where_the_script_handles_it_itself(mpirun: Mpi) -> None:
    """The script has set its own handler, and was sent nothing: it runs to its end."""
    body = "signal.signal(signal.SIGTERM, lambda *_: mark('own'))\nmark('running')\ntime.sleep(8)\nmark()\n"
    job = start(mpirun, "initialize", body)
    mark_time(job, "running")
    os.kill(ranks_of(job)[1], signal.SIGTERM)
    end(mpirun, job, {0, 143}, 40)
    assert not (job.directory / "mark-own").exists()


#: All ranks go on with MPI when the cluster has ended.
GOES_ON = {
    "execute": """
def work():
    mark("running")
    time.sleep(60)

execute(work)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
""",
    "initialize": """
if session:
    mark("running")
    time.sleep(60)
    session.close()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
""",
}


@pytest.mark.both_mpis
@pytest.mark.parametrize(
    ("form", "ranks", "to"),
    [
        ("execute", 2, "the launcher"),
        ("initialize", 2, "rank 1"),
        # rank 2 is sent nothing, and waits for the others in MPI
        ("execute", 3, "rank 1"),
    ],
)
def test_signal_where_all_ranks_go_on(mpirun: Mpi, form: str, ranks: int, to: str) -> None:
    body = GOES_ON[form]
    job = start(mpirun, form, body, ranks, client=False, call="initialize(exit=False)")
    mark_time(job, "running")
    fault = time.time()
    if to == "the launcher":
        job.signal(signal.SIGTERM)
    else:
        os.kill(ranks_of(job)[1], signal.SIGTERM)
    end(mpirun, job, TERM if to == "the launcher" else 143, 15, since=fault)


def test_walltime_where_all_ranks_go_on(mpirun: Mpi) -> None:
    """All ranks are sent the signal, and end with the code of the one that has written the checkpoint."""
    body = GOES_ON["execute"].replace(
        'mark("running")',
        "from dask_gpu_mpi import current_session\n"
        '    current_session().on_walltime(lambda: mark("checkpoint"))\n    mark("running")',
    )
    job = start(mpirun, "execute", body, client=False)
    mark_time(job, "running")
    fault = time.time()
    for pid in ranks_of(job).values():
        os.kill(pid, signal.SIGTERM)
    end(mpirun, job, 75, 15, since=fault)
    assert (job.directory / "mark-checkpoint").exists()


def test_signal_to_execute_without_a_function(mpirun: Mpi) -> None:
    job = start(mpirun, "execute", "execute()\nmark('afterwards')\n", None, client=False)
    await_cluster(job)
    fault = time.time()
    job.signal(signal.SIGINT)
    # Python ends itself by SIGINT, which a shell reports as 130
    end(mpirun, job, -2, 10, since=fault, tracebacks=None)
    assert not (job.directory / "mark-afterwards").exists()


WALLTIME = """
calls = []

def checkpoint():
    calls.append(client.submit(lambda: 7).result(timeout=10))
    mark(f"checkpoint-{len(calls)}-{calls[-1]}")

session.on_walltime(checkpoint, before=BEFORE)
atexit.register(mark, "atexit")
left = session.time_left()
mark("left-none" if left is None else "left-some" if 0 < left < 100 else "left-wrong")
with open("pid", "w") as file:
    file.write(str(os.getpid()))
task = client.submit(time.sleep, 60)  # a signal inside of that would leave half a Future, whose end prints a traceback
try:
    mark("running")
    task.result()
finally:
    mark("finally")
"""


def checkpointed(job: Job) -> list[str]:
    return sorted(path.name for path in job.directory.glob("mark-checkpoint*"))


@pytest.mark.versions(form="initialize", how="end time")
@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("initialize", "end time"),
        ("initialize", "USR1"),
        ("initialize", "TERM to the rank"),
        pytest.param("command", "TERM to the launcher", marks=pytest.mark.both_mpis),
    ],
)
def test_walltime(mpirun: Mpi, form: str, how: str) -> None:
    env, body = {}, WALLTIME.replace("BEFORE", "12")
    if how == "end time":
        # the call is due 12 s before the end: some seconds after the start
        env["SLURM_JOB_END_TIME"] = str(int(time.time()) + 18)
    options = {"walltime_signal": "USR1"} if how == "USR1" else {}
    job = start(mpirun, form, body, env=env, options=options)
    mark_time(job, "running")
    pid = int((job.directory / "pid").read_text())
    fault = time.time()
    if how == "USR1":
        os.kill(pid, signal.SIGUSR1)
    elif how == "TERM to the rank":
        # Slurm sends it twice
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGTERM)
    elif how == "TERM to the launcher":
        job.signal(signal.SIGTERM)
    short = how == "TERM to the launcher" and mpirun.name == "openmpi"  # it leaves half a second
    codes = {1, 75, 143} if short else {75}
    end(mpirun, job, codes, 30 if how == "end time" else 10, since=fault)
    found = checkpointed(job)
    assert found == ["mark-checkpoint-1-7"] or (short and found == [])
    assert (job.directory / ("mark-left-some" if how == "end time" else "mark-left-none")).exists()
    if not short:
        mark_time(job, "finally")
        mark_time(job, "atexit")


#: Where a script may be when its main program has ended.
AFTERWARDS = {
    "thread": "threading.Thread(target=works).start()",
    "executor": "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(works)",
    "atexit": "atexit.register(works)",
}
WORKS = """
import threading

def works():
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    mark("running")
    time.sleep(8)

"""


@pytest.mark.parametrize(
    ("where", "code"), [("thread", 75), ("executor", 75), ("atexit", 75), ("thread", 143)]
)
def test_after_the_main_program(mpirun: Mpi, where: str, code: int) -> None:
    """Python drops an exception there, and the exit code with it."""
    body = "session.on_walltime(lambda: mark('checkpoint'))\n" if code == 75 else ""
    job = start(mpirun, "initialize", body + WORKS + AFTERWARDS[where])
    mark_time(job, "running")
    fault = time.time()
    os.kill(int((job.directory / "pid").read_text()), signal.SIGTERM)
    end(mpirun, job, code, 15, since=fault, tracebacks=None)
    assert checkpointed(job) == (["mark-checkpoint"] if code == 75 else [])


@pytest.mark.parametrize(("when", "name"), [("ends", "INT"), ("parts", "INT"), ("ends", "ALRM")])
def test_interrupted_while_the_cluster_ends(mpirun: Mpi, when: str, name: str) -> None:
    """A second Ctrl-C, or a late one, or an alarm that the script has left: the end has its own deadline, and the other ranks
    wait for this one.
    """
    method = {"ends": "end", "parts": "drop_agent"}[when]
    before = f"""
import dask_gpu_mpi.job.member
before = dask_gpu_mpi.job.member.Member.{method}

def interrupted(self, *args, **kwargs):
    if self.rank == 0:
        os.kill(os.getpid(), signal.SIG{name})
        time.sleep(0.1)
        mark("afterwards")
    return before(self, *args, **kwargs)

dask_gpu_mpi.job.member.Member.{method} = interrupted
"""
    body = "signal.signal(signal.SIGALRM, signal.default_int_handler)\nmark('running')"
    job = start(mpirun, "initialize", body, before=before)
    mark_time(job, "running")
    end(mpirun, job, 0, 15, since=time.time(), tracebacks=False)
    mark_time(job, "afterwards")


FORKS = """
import multiprocessing
context = multiprocessing.get_context("fork")

def checkpoint():
    with context.Pool(1) as pool:  # which ends its process by SIGTERM
        seven = pool.apply(abs, (-7,))
    mark(f"checkpoint-{client.submit(abs, -seven).result(timeout=20)}-{os.getpid()}")

session.on_walltime(checkpoint)
one, other = (context.Process(target=time.sleep, args=(60,)) for _ in range(2))
one.start()
other.start()
one.terminate()
one.join(20)
mark(f"code{one.exitcode}")
with open("pid", "w") as file:
    file.write(str(os.getpid()))
task = client.submit(time.sleep, 60)
try:
    mark("running")
    task.result()
finally:
    other.join(20)
    mark(f"other{other.exitcode}")
"""


@pytest.mark.both_mpis
def test_walltime_of_a_script_that_forks(mpirun: Mpi) -> None:
    """SIGTERM to every process of the job, as scancel sends it: the callback runs in the session's own, once."""
    job = start(mpirun, "initialize", FORKS)
    mark_time(job, "running")
    rank = int((job.directory / "pid").read_text())
    # two ranks, two agents with tracker, fork server and worker, the scheduler, the script's child
    everybody = job.processes(r"^\S*python[\d.]*( |$)")
    assert len(everybody) >= 12
    fault = time.time()
    for pid in everybody:
        os.kill(pid, signal.SIGTERM)
    end(mpirun, job, 75, 10, since=fault)
    assert checkpointed(job) == [f"mark-checkpoint-7-{rank}"]
    assert (job.directory / "mark-code-15").exists()
    assert (job.directory / "mark-other-15").exists()


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda *_: mark('own')"], ids=["ignored", "handled"])
def test_walltime_where_sigterm_is_somebody_elses(mpirun: Mpi, handler: str) -> None:
    before = f"signal.signal(signal.SIGTERM, {handler})\n"
    job = start(mpirun, "initialize", WALLTIME.replace("BEFORE", "12"), None, before=before)
    mark_time(job, "running")
    fault = time.time()
    os.kill(int((job.directory / "pid").read_text()), signal.SIGTERM)
    end(mpirun, job, 75, 10, since=fault)
    assert checkpointed(job) == ["mark-checkpoint-1-7"]
    assert (job.directory / "mark-own").exists() == ("own" in handler)


def test_a_signal_that_faulthandler_has(mpirun: Mpi) -> None:
    body = "mark('running')\nwait_until(lambda: marked('go'))\nmark()\n"
    before = "import faulthandler\nfaulthandler.register(signal.SIGUSR1)\n"
    job = start(mpirun, "initialize", body, before=before)
    mark_time(job, "running")
    for number, pid in enumerate(ranks_of(job).values(), 1):
        os.kill(pid, signal.SIGUSR1)
        until(lambda n=number: job.stderr.count("Current thread") == n, 20)  # type: ignore[misc]
    (job.directory / "mark-go").touch()
    end(mpirun, job, 0, 5)
