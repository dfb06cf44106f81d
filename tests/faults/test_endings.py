"""However the script ends, and whatever it leaves behind, the job ends with its exit code."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.jobs.clusters import COMMAND
from support.jobs.faults import FORMS, end, marks, start, strike
from support.jobs.mpi import Mpi


@dataclass(frozen=True)
class Row:
    """A script's last lines."""

    #: What it does.
    name: str
    #: How.
    body: str
    #: As in `support.jobs.faults.end`.
    codes: Any = 0
    within: float = 3.0
    says: tuple[str, ...] = ()
    tracebacks: int = 0
    #: Whether it has made a client.
    client: bool = True
    #: Those that it is tested in.
    forms: tuple[str, ...] = FORMS
    marks: tuple[pytest.MarkDecorator, ...] = ()
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)


#: What is the same in either form is tested in one of them.
ONE, OTHER = FORMS[:1], FORMS[1:]

FINALIZE = "from mpi4py import MPI\nassert MPI.COMM_WORLD.size == 1\nMPI.Finalize()\nmark()\nsys.exit(3)\n"
#: One while another thread is inside the rank's messages, as the monitor nearly always is.
FORK = """
def fork(end):
    pid = os.fork()
    if not pid:
        end()
        sys.exit(4)
    codes = []
    def ended():
        found, status = os.waitpid(pid, os.WNOHANG)
        codes.append(os.waitstatus_to_exitcode(status))
        return found
    wait_until(ended, 20)
    assert codes[-1] == 4, codes[-1]

held, over = threading.Event(), threading.Event()

def hold():
    with session._cluster.member._lock:
        held.set()
        over.wait(30)

threading.Thread(target=hold).start()
held.wait(30)
fork(lambda: None)
over.set()
fork(session.close)
assert not session.closed
"""

#: All ranks would wait in MPI for the one that has failed.
GOES_ON = "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nmark('passed')\n"


def executes(line: str, options: str = "") -> str:
    return f"def work():\n    mark()\n    {line}\n\nexecute(work{options})\n"


quick, both_mpis = pytest.mark.quick, pytest.mark.both_mpis
ROWS = [
    Row("returns early", "mark()\n", client=False, forms=ONE),
    Row("sys.exit(7)", "compute()\nmark()\nsys.exit(7)\n", 7, forms=OTHER),
    Row("raises", "compute()\nmark()\nraise ValueError('of the script')\n", 1, says=("ValueError: of the script",),
        tracebacks=1, marks=(both_mpis, quick(form="initialize"))),
    Row("raises in a thread",
        "def fail():\n    raise ValueError('of the thread')\n"
        "thread = threading.Thread(target=fail)\nthread.start()\nthread.join()\nmark()\n",
        says=("ValueError: of the thread",), tracebacks=1, forms=OTHER),
    # MPICH's launcher kills the other ranks then, and may report the last of them
    Row("os._exit(5)", "compute()\nmark()\nos._exit(5)\n", {"openmpi": {5}, "mpich": {5, 9}}, forms=OTHER,
        marks=(both_mpis,)),
    Row("os._exit(0)", "compute()\nmark()\nos._exit(0)\n", forms=ONE, marks=(both_mpis,)),
    Row("leaves tasks, futures and a client",
        "other = session.client()\nfutures = other.map(lambda x: x, range(100))\n"
        "tasks = client.map(lambda x: time.sleep(60), range(20), pure=False)\n"
        "wait_until(lambda: any(client.processing().values()))\nmark()\n",
        within=5.0, marks=(pytest.mark.versions(form="initialize"),)),
    Row("leaves a thread that ends", "threading.Thread(target=lambda: (time.sleep(1), mark())).start()\n", within=5.0,
        forms=OTHER),
    Row("client.shutdown()", "compute()\nclient.shutdown()\nmark()\n"),
    Row("client.shutdown() as the last line", "compute()\nmark()\nclient.shutdown()\n", forms=ONE),
    Row("session.close()", "compute()\nsession.close()\nmark()\n", forms=OTHER),
    Row("both, twice", "compute()\nmark()\n" + "session.close()\nclient.shutdown()\n" * 2, forms=ONE),
    Row("both, the other way round", "compute()\nmark()\nclient.shutdown()\nsession.close()\n", forms=OTHER),
    # what Dask's own second shutdown() does; the client would then wait for its dead event loop for ever
    Row("leaves a client half closed",
        "client.shutdown()\ntry:\n    client.sync(client._shutdown)\nexcept AttributeError:\n    pass\nmark()\n", forms=ONE),
    Row("MPI.Finalize()", "compute()\n" + FINALIZE, 3, forms=ONE, marks=(both_mpis, pytest.mark.versions)),
    Row("client.shutdown() and MPI.Finalize()", "compute()\nclient.shutdown()\n" + FINALIZE, 3, forms=OTHER,
        marks=(both_mpis,)),
    Row("forks children that end", "compute()\n" + FORK + "compute()\nmark()\nsys.exit(3)\n", 3,
        marks=(quick(form="command"),)),
    # defects of ours, or what else nobody has thought of: the other ranks must not wait for a word that never comes
    Row("its end fails", "session._cluster.member.end = lambda **_: 1 / 0\nmark()\n", 1,
        says=("this rank could not end the cluster", "ZeroDivisionError"), tracebacks=1, forms=ONE),
    Row("its monitor fails",
        "def fail(_):\n    raise OSError('no pump')\nsession._cluster.member.pump = fail\nmark()\ntime.sleep(30)\n", 1, 5.0,
        says=("the monitor of the cluster failed: OSError: no pump",), tracebacks=1, forms=OTHER),
    Row("changes configuration, environment and directory",
        "compute()\nimport dask\ndask.config.refresh()\nos.environ.clear()\n"
        "os.mkdir('gone')\nos.chdir('gone')\nos.rmdir(HERE + '/gone')\nmark()\n"),
    # the client is not on the first rank, and goes on for longer than any deadline of the cluster's end
    Row("client.shutdown(), goes on", "compute()\nclient.shutdown()\ntime.sleep(5)\nmark()\nsys.exit(7)\n", 7, forms=OTHER,
        ranks=3, options={"layout": "exclusive"}),
    Row("session.close(), goes on", "compute()\nsession.close()\ntime.sleep(5)\nmark()\nsys.exit(7)\n", 7, forms=OTHER,
        ranks=3, options={"client_rank": 1}),
    Row("function raises, all end", executes("raise ValueError('of the function')"), 1, 5.0, tracebacks=1, client=False,
        forms=("execute",)),
    Row("function raises, all go on", executes("raise ValueError('of the function')", ", client_rank=1") + GOES_ON, 1, 12.0,
        says=("rank 1 of 2 has failed (exit code 1)", "other ranks may wait for it in MPI; aborting the job"),
        tracebacks=1, client=False, forms=("execute",), marks=(both_mpis,)),
    Row("function exits, all go on", executes("sys.exit(7)", ", client_rank=0") + GOES_ON, 7, 12.0,
        says=("rank 0 of 2 has failed (exit code 7)", "other ranks may wait for it in MPI; aborting the job"),
        client=False, forms=("execute",), marks=(both_mpis,)),
]  # fmt: skip
CASES = [
    pytest.param(form, row, id=f"{row.name}-{form}", marks=row.marks) for row in ROWS for form in row.forms
]


@pytest.mark.parametrize(("form", "row"), CASES)
def test_ending(mpirun: Mpi, form: str, row: Row) -> None:
    job = start(mpirun, form, row.body, row.ranks, client=row.client, options=row.options)
    end(job, row.codes, row.within, says=row.says, tracebacks=row.tracebacks)
    assert marks(job) == ["end", "up"]


#: Programs that still run when the script has ended: with the job's output, without it, and one whose parent has ended. The last
#: one ends by itself, as the processes of a pool do.
PROGRAMS = """
import subprocess
subprocess.Popen(["sleep", "300.1"])
subprocess.Popen(["sleep", "300.2"], stdout=-3, stderr=-3, start_new_session=True)
subprocess.run("setsid sleep 300.3 >/dev/null 2>&1 &", shell=True)
subprocess.Popen(["cat"], stdin=-1)
print("of the script")
mark()
"""


@pytest.mark.both_mpis
@pytest.mark.parametrize("code", [0, 7])
def test_programs_that_the_script_leaves_behind(mpirun: Mpi, code: int) -> None:
    job = start(mpirun, "initialize", f"{PROGRAMS}sys.exit({code})\n")
    # Open MPI's launcher ends at once if the code is not 0
    done = job.wait(grace=10.0).check(code)
    assert done.seconds < 60
    assert done.stdout == "of the script\n"
    if mpirun.name == "mpich" or not code:
        assert_programs(done.stderr)


#: Forks, whose environment does not show that they are the script's: a child, and a daemon, with the job's output.
FORKS = """
import multiprocessing
multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,)).start()
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(300)
    os._exit(0)
mark()
"""


@pytest.mark.both_mpis
@pytest.mark.parametrize(
    ("line", "codes"), [("os._exit(7)", (7, 9)), ("os.kill(os.getpid(), signal.SIGKILL)", (9, 137))]
)
def test_forks_that_the_script_leaves_behind(mpirun: Mpi, line: str, codes: tuple[int, ...]) -> None:
    """The launcher would wait for their end."""
    done = start(mpirun, "initialize", f"{FORKS}time.sleep(1)\n{line}\n").wait(grace=10.0)
    assert done.rc in codes, done.output
    assert done.seconds < 60


@pytest.mark.parametrize("line", ["sys.exit(7)", "os._exit(7)"])
def test_programs_that_a_script_of_launch_leaves_behind(mpirun: Mpi, line: str) -> None:
    """Nothing is left when `launch` has ended."""
    text = f"import os, sys\ndef mark(): pass\n{PROGRAMS}sys.stdout.flush()\n{line}\n"
    done = mpirun.run([*COMMAND, "launch", "-n", "1", "--interface", "lo", "-c", text], None, grace=0.5)
    assert done.check(7).stdout == "of the script\n"
    assert_programs(done.stderr)


def assert_programs(stderr: str) -> None:
    (line,) = (line for line in stderr.splitlines() if "had started" in line)
    assert "3 programs that the script had started on " in line
    assert line.count("sleep (process ") == 3


@pytest.mark.both_mpis
@pytest.mark.parametrize("client", [0, 1])
def test_silent_rank_at_the_end(mpirun: Mpi, client: int) -> None:
    """A launcher would wait for it forever; the code is the script's: 75 is run again."""
    body = "mark('ready')\nwait_until(lambda: marked('struck'))\nmark()\nsys.exit(75)\n"
    options = {"client_rank": client, "shutdown_timeout": 2}
    job = start(mpirun, "command", body, 3, at="ready", options=options)
    strike(job, 2, number=signal.SIGSTOP)
    # Open MPI's launcher kills it at once
    says = ("rank 2 on", "does not end; it is sent SIGCONT") if mpirun.name == "mpich" else ()
    end(job, 75, 15.0, says=says, tracebacks=None)


@pytest.mark.quick
def test_quiet(mpirun: Mpi) -> None:
    """A script that returns: at most three lines on standard error, all ours."""
    job = start(mpirun, "command", "compute()\nprint('of the script')\nmark()\n")
    done = end(job, 0, 3.0)
    assert done.stdout == "of the script\n"
    lines = done.stderr.splitlines()
    assert len(lines) <= 3, lines
    assert all(line.startswith("dask_gpu_mpi: ") for line in lines), lines
    assert "INFO" not in done.stderr
    assert "2 workers on 1 host" in lines[0]
    assert "dashboard at http://" in lines[1]
    assert "ended after" in lines[2]


def test_log_directory(mpirun: Mpi) -> None:
    """Of a script that returns: a file for the scheduler, each rank and each worker, with rank or name, and host, in its name."""
    options = {"log_level": "info", "log_directory": "logs"}
    job = start(mpirun, "initialize", "compute()\nmark()\n", options=options)
    done = end(job, 0, 3.0)
    assert len(done.stderr.splitlines()) <= 3
    found = {path.name for path in (job.directory / "logs").iterdir()}
    host = os.uname().nodename
    assert found == {f"{kind}-{number}-{host}.log" for kind in ("rank", "worker") for number in (0, 1)} | {
        f"scheduler-{host}.log"
    }  # fmt: skip
    assert "Registered to" in (job.directory / "logs" / f"worker-1-{host}.log").read_text()
    assert "Receive client connection" in (job.directory / "logs" / f"scheduler-{host}.log").read_text()


def test_label_of_another_rank(mpirun: Mpi) -> None:
    """A script that goes on everywhere (exit=False), and fails on a rank that is not the client's."""
    program = (
        "from dask_gpu_mpi import initialize\n"
        "if not initialize(exit=False, dashboard=False):\n    raise RuntimeError('no session here')\n"
    )
    done = mpirun.run(program, 2)
    assert done.rc == 1
    assert f"dask_gpu_mpi: rank 1 of 2 on {os.uname().nodename} failed:\nTraceback" in done.stderr
