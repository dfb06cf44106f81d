"""How `launch` runs its commands, a launcher or ranks of its own: their meeting, exit codes and signals, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, LauncherError
from dask_gpu_mpi.sites import execute
from dask_gpu_mpi.sites.command import Launch
from dask_gpu_mpi.sites.execute import run_launch
from dask_gpu_mpi.sites.pbs import PBS
from dask_gpu_mpi.sites.slurm import SLURM
from support.jobs.processes import run_python

#: Runs programs as preflight and job. Deadlines of ranks are long, unless `seconds` has them.
LAUNCH = """
import os, sys
from dask_gpu_mpi.sites import execute, local
from dask_gpu_mpi.sites.batch import batch_system
from dask_gpu_mpi.sites.command import Launch
given = eval(sys.argv[3])
long = dict.fromkeys(("GRACE", "KILL_AFTER", "ABORT_GRACE", "MEETING_GRACE"), 20.0)
for name, seconds in (long | given.pop("seconds", {})).items():
    setattr(local if name in long else execute, name, seconds)
given["batch"] = batch_system(given.pop("batch", "local"))
if given.get("lingers"):
    execute.time.sleep = lambda seconds: print("lingers", flush=True)
check, run = ((sys.executable, "-c", text) if text else () for text in sys.argv[1:3])
def requeue():
    print("requeued", flush=True)
sys.exit(execute.run_launch(Launch({"ADDED": "yes", "GONE": None}, check, run, **given), os.environ, requeue))
"""
#: The beginning of each program; `tell` writes one line at once. (`print` may be at work already in a handler.)
PROGRAM = """
import os, signal, socket, struct, sys, time
def tell(*words):
    os.write(1, " ".join(map(str, words)).encode() + b"\\n")
"""
#: The beginning of the program of a rank.
RANK = """
import os, signal, socket, struct, sys, time
rank, size, fd = (int(os.environ["DGM_" + name]) for name in ("RANK", "SIZE", "MEETING_FD"))
meeting = socket.socket(fileno=fd)
def send(to, text=b""):
    meeting.send(struct.pack("<i", to) + text)
def receive():
    packet = meeting.recv(1 << 18)
    return struct.unpack_from("<i", packet)[0], packet[4:]
def tell(*words):
    os.write(1, " ".join(map(str, (rank, *words))).encode() + b"\\n")
"""
#: Tells which signals it is sent, and takes its time then: it must not be sent another one.
HEARS = """
def heard(number, _):
    tell(signal.Signals(number).name)
    if number != signal.SIGUSR1:
        time.sleep(1.5)
        sys.exit(9)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, heard)
tell(os.getpid())
while True:
    time.sleep(0.05)
"""

Start = Callable[..., subprocess.Popen[str]]
Ran = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `launch` with these programs and fields of `Launch`; it ends with the test, which may have failed."""
    jobs = []

    def started(
        run: str, *, check: str = "", stdin: Any = subprocess.DEVNULL, **launch: Any
    ) -> subprocess.Popen[str]:
        begin = RANK if "ranks" in launch else PROGRAM
        texts = [begin + textwrap.dedent(text) if text else "" for text in (check, run)]
        job = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *texts, repr(launch)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "GONE": "1"},
        )
        jobs.append(job)
        return job

    yield started
    for job in jobs:
        job.kill()
        job.communicate(timeout=30)


def end(job: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The exit code, and the lines without the one about a signal; sorted, since ranks write at the same time."""
    lines = job.communicate(timeout=60)[0].splitlines()
    return job.returncode, sorted(line for line in lines if "received; ending the job" not in line)


@pytest.fixture
def ran(start: Start) -> Ran:
    """The end of a job without signals from outside."""
    return lambda run, **given: end(start(run, **{"seconds": {"LINGER": 0.1}, **given}))


def up(job: subprocess.Popen[str], ranks: int = 1) -> list[int]:
    """Wait until each process has told its PID as its first line."""
    assert job.stdout is not None
    lines = sorted(job.stdout.readline().split() for _ in range(ranks))
    return [int(line[-1]) for line in lines]


def runs(pid: int) -> bool:
    """Whether there is such a process, other than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def said(text: str) -> str:
    return f"dask_gpu_mpi: launch: {text}"


# -- the meeting of ranks


def test_packets_arrive_in_order_from_their_sources(ran: Ran) -> None:
    """Also large ones, and those to oneself; those to nobody, and what is no packet, are dropped."""
    code, lines = ran(
        """
        if rank:
            large = b"x" * (128 << 10)
            send(size, large)
            send(-7)
            meeting.send(b"ab")
            send(rank, large)
            tell(receive() == (rank, large))
            for number in range(1000):
                send(0, b"%d" % number)
            tell(*receive())
        else:
            numbers = {}
            for _ in range(1000 * (size - 1)):
                source, text = receive()
                numbers.setdefault(source, []).append(int(text))
            tell(sorted(numbers), all(each == list(range(1000)) for each in numbers.values()))
            for other in range(1, size):
                send(other, b"you are %d" % other)
        """,
        ranks=3,
    )
    expected = ["0 [1, 2] True", "1 0 b'you are 1'", "1 True", "2 0 b'you are 2'", "2 True"]
    assert (code, lines) == (0, expected)


def test_rank_that_does_not_read_holds_up_nobody(ran: Ran) -> None:
    """Rank 2 reads at last, and nothing is lost. Packets to a rank that has left are dropped."""
    code, lines = ran(
        """
        if rank == 0:
            for number in range(100):
                send(2, b"%d" % number * 50_000)
            send(1)
            tell(receive()[0])
            send(2, b"done")
            for _ in range(50):
                send(1, b"x" * 100_000)
                time.sleep(0.001)
            send(0, b"to oneself")
            tell(receive()[1])
        elif rank == 1:
            receive()
            send(0)
            meeting.close()
        else:
            while meeting.recv(1 << 18, socket.MSG_PEEK) == b"":
                pass
            time.sleep(0.5)
            found = []
            while not found or found[-1] != b"done":
                found.append(receive()[1])
            tell(len(found), found[:-1] == [b"%d" % number * 50_000 for number in range(100)])
        """,
        ranks=3,
    )
    assert (code, lines) == (0, ["0 1", "0 b'to oneself'", "2 101 True"])


def test_ranks_have_their_own_socket_only_and_no_signal_is_blocked(ran: Ran) -> None:
    code, lines = ran(
        """
        sockets = [name for name in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket:")]
        tell(sockets == [str(fd)], sorted(map(int, os.listdir("/proc/self/fd")))[:3], size,
             signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGHUP).name)
        """,
        ranks=3,
    )
    assert (code, lines) == (0, [f"{rank} True [0, 1, 2] 3 set() SIG_IGN" for rank in range(3)])


def test_commands_that_can_not_be_started_and_files_that_are_kept_open() -> None:
    before = os.listdir("/proc/self/fd")
    assert run_launch(Launch({}, (), ("true",), ranks=5), os.environ) == 0
    with pytest.raises(
        LauncherError,
        match=r"could not start /gone/nsys: No such file .* Fix: install it, or load its module$",
    ):
        run_launch(Launch({}, (), ("/gone/nsys",), ranks=5), os.environ)
    with pytest.raises(LauncherError, match="could not start /gone/mpirun: No such file.*--launcher"):
        run_launch(Launch({}, (), ("/gone/mpirun",)), os.environ)
    assert os.listdir("/proc/self/fd") == before


# -- programs that ranks leave behind


def test_programs_of_the_script_are_ended_and_others_stay(ran: Ran) -> None:
    """The runtime of a container, for example, which is there for later ones. One without an environment may be the script's."""
    code, lines = ran(
        """
        import subprocess
        def leave(environ, seconds):
            shell = ["sh", "-c", f"sleep {seconds} >&- 2>&- & echo $!"]
            return int(subprocess.run(shell, env=environ, stdout=-1).stdout)
        others, scripts = {**os.environ, "A": "B"}, {**os.environ, "DGM_RANK_PID": str(os.getpid())}
        tell(leave(others, 300), leave(scripts, 300), subprocess.Popen(["sleep", "300"], env={}, stdout=-3).pid)
        ended = leave(others, 0)
        while os.path.exists(f"/proc/{ended}"):  # nobody else would read its exit code
            time.sleep(0.01)
        sys.exit(3)
        """,
        ranks=1,
    )
    assert code == 3
    told, warning = lines
    pids = [int(pid) for pid in told.split()[1:]]
    assert [runs(pid) for pid in pids] == [True, False, False]
    os.kill(pids[0], signal.SIGKILL)
    assert warning.startswith("dask_gpu_mpi: warning: 2 programs that the script had started on ")


def test_programs_of_the_shell_before_launch_stay() -> None:
    """``exec dask-gpu-mpi launch`` makes them its children: one without an environment, or with a title there (Redis)."""
    before = "import subprocess\nprint(subprocess.Popen(['sleep', '300'], env={}, stdout=-3, stderr=-3).pid, flush=True)\n"
    job = run_python(before + LAUNCH, "", "pass", repr({"ranks": 1}))
    pid = int(job.stdout)
    is_left = runs(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert (job.returncode, job.stderr, is_left) == (0, "", True)


# -- exit codes


@pytest.mark.parametrize(
    ("run", "given", "code", "lines"),
    [
        ("sys.exit(7)", {}, 7, []),
        ("os.kill(os.getpid(), 9)", {}, 137, []),
        ("signal.signal(1, signal.SIG_DFL); os.kill(os.getpid(), 1)", {}, 129, []),  # also below nohup
        ("tell(os.environ['ADDED'], 'GONE' in os.environ)", {"check": "tell('check')"}, 0, ["check", "yes False"]),
        ("tell('the job')", {"check": "sys.exit(1)"}, 1, []),
        ("sys.exit(75)", {}, 75, ["requeued"]),
        # ranks: that of rank 0, or else of one that failed, whichever ends first
        ("tell('the job')", {"ranks": 2, "check": "sys.exit(3 * rank)"}, 3, []),
        ("sys.exit(7 if rank == 0 else 0)", {"ranks": 2}, 7, []),
        ("sys.exit(7 - rank)", {"ranks": 2}, 7, []),
        ("os.kill(os.getpid(), signal.SIGTERM) if rank == 0 else None", {"ranks": 2}, 143, []),
        ("sys.exit(3 * rank)", {"ranks": 2}, 3, []),
        ("sys.exit(3 * rank)", {"ranks": 2, "tolerant": True}, 0, []),
        ("time.sleep(0.3 * (rank == 0)); sys.exit(3 * rank)", {"ranks": 2}, 3, []),
        ("time.sleep(0.3 * (rank == 0)); sys.exit(3 * rank)", {"ranks": 2, "tolerant": True}, 0, []),
        ("time.sleep(0.3 * (rank == 1)); sys.exit(3 * rank)", {"ranks": 2}, 3, []),
        ("time.sleep(0.3 * (rank == 0)); sys.exit(3 * rank or 9)", {"ranks": 2}, 9, []),
    ],
)  # fmt: skip
def test_exit_code(ran: Ran, run: str, given: dict[str, Any], code: int, lines: list[str]) -> None:
    assert ran(run, **given) == (code, lines)


KILLED = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
time.sleep(100)
"""


def test_rank_that_is_killed_ends_the_others(ran: Ran) -> None:
    killed = said("rank 1 was ended by SIGKILL")
    ended = said("ranks 0,2: still running 0 s after a rank failed; ended")
    assert ran(KILLED, ranks=3, seconds={"GRACE": 0.5}) == (137, [killed, ended])
    stubborn = KILLED.replace("lambda *_: sys.exit(5)", "signal.SIG_IGN")
    assert ran(stubborn, ranks=3, seconds={"GRACE": 0.1, "KILL_AFTER": 0.1})[0] == 137
    goes_on = KILLED.replace("100", "2.5") + "sys.exit(4)"
    short = {"GRACE": 0.1, "KILL_AFTER": 0.1}
    assert ran(goes_on, ranks=2, tolerant=True, seconds=short) == (4, [killed])


@pytest.mark.parametrize(("ends", "expected"), [("os._exit(0)", 1), ("os._exit(3)", 3)])
def test_rank_that_ends_before_all_have_met_ends_the_others(ran: Ran, ends: str, expected: int) -> None:
    """They would wait for it until the start-up timeout."""
    short = {"MEETING_GRACE": 0.2}
    unmet = f"rank 1 ended (exit code {ends[-2]}) before all ranks had met; the others are killed. Fix: read its output above"
    found = ran(f"{ends} if rank == 1 else time.sleep(100)", ranks=3, seconds=short)
    assert found == (expected, [said(unmet)])
    waits = "(time.sleep(1), os._exit(4 if rank == 0 else 0))"
    assert ran(f"{ends} if rank == 1 else {waits}", ranks=3, seconds=short, tolerant=True) == (4, [])
    # they have met: its socket is closed
    assert ran(f"os.close(fd); os._exit(0) if rank == 1 else {waits}", ranks=3, seconds=short) == (4, [])


def test_ranks_that_continue_without_rank_0_are_killed(ran: Ran) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100 * (rank > 0)); sys.exit(6)"
    expected = said("ranks 1-2: still running 0 s after rank 0; killed")
    assert ran(program, ranks=3, seconds={"GRACE": 0.2}) == (6, [expected])


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("then", ["time.sleep(100)", "os._exit(1)"])
def test_abort(ran: Ran, who: int, then: str) -> None:
    """Whether the rank waits for its end, or ends at once with another code."""
    abort = f"send(-1, struct.pack('<i', 42)); {then}"
    program = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == {who}: {abort}\ntime.sleep(100)"
    began = time.monotonic()
    assert ran(program, ranks=3, seconds={"ABORT_GRACE": 0.2}) == (42, [])
    assert time.monotonic() < began + 15


def test_abort_lets_ranks_end_by_themselves_first(ran: Ran) -> None:
    program = """
        signal.signal(signal.SIGTERM, lambda *_: (tell("ends"), sys.exit(5)))
        send(1 - rank)
        receive()
        if rank == 0:
            send(-1, b"no code")
        time.sleep(100)
    """
    assert ran(program, ranks=2) == (1, ["0 ends", "1 ends"])


@pytest.mark.parametrize("ranks", [0, 2])
def test_preflight_leaves_standard_input_to_the_script(start: Start, ranks: int) -> None:
    """To rank 0."""
    reads = "tell(repr(sys.stdin.read()))"
    job = start(reads, check=reads, stdin=subprocess.PIPE, **({"ranks": ranks} if ranks else {}))
    lines = job.communicate("hello", timeout=60)[0].splitlines()
    expected = [["0 ''", "1 ''"], ["0 'hello'", "1 ''"]] if ranks else [["''"], ["'hello'"]]
    assert [sorted(lines[: len(lines) // 2]), sorted(lines[len(lines) // 2 :])] == expected
    assert job.returncode == 0


# -- signals


TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@pytest.mark.parametrize(
    ("given", "ends_with", "signals", "rc", "heard"),
    [
        ({}, 9, [TERM] * 2, 9, ["SIGTERM"]),
        ({}, 9, [INT] * 2, 9, ["SIGTERM"]),
        ({}, 9, [HUP], 9, ["SIGTERM"]),
        ({}, 143, [INT], 130, ["SIGTERM"]),  # of Ctrl-C
        ({}, 9, [USR1, TERM], 9, ["SIGTERM", "SIGUSR1"]),
        ({"check": ""}, 0, [USR1, TERM], 143, ["SIGTERM"]),  # the preflight gets no warning, and ends the job
        ({}, 75, [TERM], 75, ["SIGTERM"]),  # cancelled, not requeued
        ({"batch": "lsf"}, 75, [TERM], 143, ["SIGTERM"]),  # nor by LSF, which requeues by the code
        ({"ranks": 2}, 9, [TERM], 9, ["0 SIGTERM", "1 SIGTERM"]),
        ({"ranks": 2}, 9, [INT], 9, ["0 SIGTERM", "1 SIGTERM"]),
        ({"ranks": 2}, 9, [HUP], 9, ["0 SIGTERM", "1 SIGTERM"]),
        ({"ranks": 2}, 9, [USR1, TERM], 9, ["0 SIGTERM", "0 SIGUSR1", "1 SIGTERM", "1 SIGUSR1"]),
    ],
)
def test_signals_are_forwarded(
    start: Start, given: dict[str, Any], ends_with: int, signals: list[int], rc: int, heard: list[str]
) -> None:
    hears = HEARS.replace("sys.exit(9)", f"sys.exit({ends_with})")
    programs = {"run": "tell('the job')", "check": hears} if "check" in given else {"run": hears}
    job = start(**{**given, **programs})
    up(job, given.get("ranks", 1))
    for number in signals:
        job.send_signal(number)
    lines = sorted(job.communicate(timeout=60)[0].splitlines())
    received = said(f"{signal.Signals(signals[-1]).name} received; ending the job")
    assert (job.returncode, lines) == (rc, [*heard, received])


@pytest.mark.parametrize(("given", "number"), [({}, TERM), ({"ranks": 2}, TERM), ({"ranks": 2}, HUP)])
def test_signals_to_the_whole_group(start: Start, given: dict[str, int], number: int) -> None:
    """As by `timeout`: those who were sent it already get no other. A terminal that is closed: ranks end in order."""
    job = start(HEARS.replace("time.sleep(1.5)", "pass"), **given)
    up(job, given.get("ranks", 1))
    os.killpg(job.pid, number)
    assert end(job) == (9, ["0 SIGTERM", "1 SIGTERM"] if given else ["SIGTERM"])


def test_ctrl_c_of_a_terminal_is_not_forwarded() -> None:
    """The whole foreground group gets it, so the launcher has heard it itself."""
    terminal, end = os.openpty()
    job = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "", PROGRAM + HEARS, "{}"],
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    output = b""
    try:
        while True:
            output += os.read(terminal, 1000)
            if output.endswith(b"\n") and b"\x03" not in output and b"^C" not in output:
                os.write(terminal, b"\x03")
    except OSError:  # the terminal has no process any more
        pass
    finally:
        os.close(terminal)
        job.kill()
        job.wait(30)
    text = output.decode().replace("^C", "").splitlines()
    assert [line for line in text if line.startswith("SIG")] == ["SIGINT"]
    assert job.returncode == 9


def test_end_that_is_sent_again_is_forwarded_again(start: Start) -> None:
    job = start(HEARS.replace("time.sleep(1.5)", "return signal.signal(number, lambda *_: sys.exit(9))"))
    up(job)
    for _ in range(2):
        job.send_signal(signal.SIGTERM)
        time.sleep(1.5)
    assert end(job) == (9, ["SIGTERM"])


@pytest.mark.parametrize(
    ("batch", "state", "rc", "heard"),
    [
        ("slurm", "RUNNING", 9, ["SIGTERM", "SIGUSR1"]),
        ("slurm", "COMPLETING", 0, ["SIGUSR1"]),
        ("lsf", "", 9, ["SIGTERM"]),  # LSF sends the warning to all processes
    ],
)
def test_signals_to_launch_alone_if_the_batch_system_signals_the_ranks(
    start: Start, program: Callable[..., Path], batch: str, state: str, rc: int, heard: list[str]
) -> None:
    """As of ``scancel --batch``; a job that Slurm ends is left alone, since srun would kill ranks that clean up."""
    program("squeue", f"#!/bin/sh\necho {state}\n")
    lives = 30 if rc else 3
    launcher = HEARS.replace(
        "while True", f"limit = time.monotonic() + {lives}\nwhile time.monotonic() < limit"
    )
    # it is longer than the usual delay
    job = start(launcher, forwards_end=False, batch=batch, seconds={"BATCH_DELAY": 1.5})
    up(job)
    for number in (USR1, TERM):
        job.send_signal(number)
    late = said("the ranks have not ended after 2 s; the launcher gets SIGTERM")
    assert end(job) == (rc, [*heard, late] if rc else heard)


def test_ranks_end_with_launch(start: Start) -> None:
    job = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(os.getpid()); time.sleep(100)", ranks=3)
    pids = up(job, 3)
    job.kill()
    job.wait(30)
    deadline = time.monotonic() + 30
    while any(map(runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- the end of a job that may be requeued

#: A launcher that ends with a checkpoint; the signal that cancels the job comes a moment before or after its end.
CANCELLED = {
    "before": "os.kill(os.getppid(), signal.SIGTERM); sys.exit(75)",
    "after": """
        parent = os.getppid()
        if os.fork() == 0:
            time.sleep(1)
            os.kill(parent, signal.SIGTERM)
            os._exit(0)
        sys.exit(75)
    """,
}


@pytest.mark.parametrize("when", CANCELLED)
@pytest.mark.parametrize("lingers", [False, True])
def test_job_that_is_cancelled_while_it_ends_is_not_requeued(ran: Ran, when: str, lingers: bool) -> None:
    # `launch` waits for what is left on other nodes, which cleans up
    found = ran(CANCELLED[when], lingers=lingers, seconds={"LINGER": 3.0})
    assert found == (75, ["lingers"] * lingers)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_that_comes_too_late_to_be_forwarded_does_not_end_launch(number: signal.Signals) -> None:
    """While it asks for the second run: Slurm ends the first one then."""
    launch = LAUNCH.replace('print("requeued"', f'os.kill(os.getpid(), {int(number)}); print("requeued"')
    done = run_python(launch, "", "raise SystemExit(75)", repr({"seconds": {"LINGER": 0.1}}))
    assert (done.returncode, done.stdout) == (75, "requeued\n"), done.stderr


@pytest.mark.parametrize("code", [0, 255])
def test_mark_of_a_job_that_has_completed(ran: Ran, tmp_path: Path, code: int) -> None:
    mark = tmp_path / "ended"
    mark.touch()  # of the run before
    rc, lines = ran(f"os._exit({code})", mark=str(mark))
    assert rc == 75  # it can't go on without the node: it is requeued
    assert f"exited with code {code}, but the job has not completed" in lines[0]
    assert "a node was lost. Fix: look for the node" in lines[0]
    assert lines[1:] == ["requeued"]
    # srun's signals kill mpirun's daemons on the other nodes
    assert "log; after a signal before the walltime, request it as --signal=B:USR1@" in "".join(
        ran(f"os._exit({code})", mark=str(mark), lingers=True)[1]
    )
    assert run_launch(Launch({}, (), ("true",), mark=str(mark)), os.environ) == 1
    assert ran(f"open({str(mark)!r}, 'w')", mark=str(mark)) == (0, [])
    assert not mark.exists()  # nobody reads it any more


@pytest.mark.parametrize(
    ("text", "code", "expected", "requeued"),
    [
        # whatever the launcher makes of the ranks that were killed
        ("3", 9, 3, False),
        ("3", None, 3, False),  # it waits for the lost rank, and is killed
        ("75", 9, 75, True),
        ("0", 9, 0, False),
        ("1 lost", 9, 75, True),
        ("\n", 9, 9, False),
        ("no code", 9, 9, False),
        # a rank was killed; or a daemon of Open MPI's mpirun, which then ends with code 0, and its ranks with it
        ("gone", 0, 75, True),
        ("gone", 255, 255, False),
        ("gone", 137, 137, False),
    ],
)
def test_mark_of_a_job_that_has_lost_ranks(
    ran: Ran, tmp_path: Path, text: str, code: int | None, expected: int, requeued: bool
) -> None:
    mark = str(tmp_path / "ended")
    ends = "time.sleep(60)" if code is None else f"sys.exit({code})"
    run = f"with open({mark!r}, 'w') as file: file.write({text!r})\n{ends}"
    found, lines = ran(run, mark=mark, seconds={"LINGER": 0.1, "LAUNCHER_GRACE": 0.1})
    assert (found, lines[-1:]) == (expected, ["requeued"] * requeued)
    why = "but the job has not completed (a rank has gone before its end)"
    assert (why in "".join(lines)) == (text == "gone" and requeued)


@pytest.mark.parametrize("planted", ["file", "link", "folder"])
def test_mark_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """A job that was lost is not completed because somebody else says so."""
    mark, ours = tmp_path / "ended", tmp_path / "ours"
    ours.touch()
    if planted == "file":
        monkeypatch.setattr(execute, "is_ours", lambda status: False)
    how = {"file": ["touch"], "link": ["ln", "-s", str(ours)], "folder": ["mkdir"]}[planted]
    assert run_launch(Launch({}, (), (*how, str(mark)), mark=str(mark)), os.environ) == 1


# -- folders of log files, and copies of an environment


@pytest.mark.parametrize(("private", "mode"), [(True, 0o700), (False, 0o755)])
def test_the_folder_that_a_profiler_writes_into(private: bool, mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "42"
    launch = Launch({}, (), ("true",), make=str(folder), private=private)
    assert run_launch(launch, os.environ) == 0
    assert (folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777) == (mode, 0o755)
    folder.chmod(0o750)  # the user's
    assert run_launch(launch, os.environ) == 0
    assert folder.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("what", ["make", "mark"])
def test_folder_of_the_logs_that_is_not_ours(
    tmp_path: Path, what: str, links_are_strangers: Callable[[], None]
) -> None:
    launch = Launch({}, check=(), run=("true",), **{what: str(tmp_path / "logs" / "1")})
    (tmp_path / "logs").touch()
    with pytest.raises(
        InputError, match=r"log files can't be written \(.*/logs/1: Not a directory\).*DGM_LOGS"
    ):
        run_launch(launch, os.environ)
    (tmp_path / "logs").unlink()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "1").touch()
    (tmp_path / "logs").symlink_to("home")
    links_are_strangers()
    with pytest.raises(InputError, match=r"logs/1: the symbolic link .* belongs to another user .*DGM_LOGS"):
        run_launch(launch, os.environ)
    assert os.listdir(tmp_path / "home") == ["1"]


@pytest.fixture
def staged(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run a job with copies, whose steps end with `codes` and write their names: its exit code, and these names."""
    order = tmp_path / "order"

    def run(codes: Mapping[str, int], answer: int | None = None, **given: Any) -> tuple[int, list[str]]:
        steps = {
            name: ("sh", "-c", f"echo {name} >> $ORDER; exit {codes.get(name, 0)}")
            for name in ("check", "run", "stage", "unstage")
        }
        code = run_launch(
            Launch({}, **{**steps, **given}), {**os.environ, "ORDER": str(order)}, lambda: answer
        )
        return code, order.read_text().split()

    return run


@pytest.mark.parametrize(
    ("codes", "answer", "keeps", "rc", "order"),
    [
        ({}, None, False, 0, "stage check run unstage"),
        ({"run": 7}, None, False, 7, "stage check run unstage"),
        ({"stage": 2}, None, False, 2, "stage unstage"),
        ({"check": 1}, None, False, 1, "stage check unstage"),
        # requeued under its own number, under another one, and not at all
        ({"run": 75}, None, True, 75, "stage check run"),
        ({"run": 75}, None, False, 75, "stage check run unstage"),
        ({"run": 75}, 75, True, 75, "stage check run unstage"),
    ],
)
def test_copies_are_removed_unless_the_job_comes_again(
    staged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], answer: int | None,
    keeps: bool, rc: int, order: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(execute, "LINGER", 0.0)
    assert staged(codes, answer, batch=SLURM if keeps else PBS) == (rc, order.split())


def test_copies_that_hang_end(
    staged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(execute, "STAGE_TIMEOUT", 0.2)
    monkeypatch.setattr(execute, "LAUNCHER_GRACE", 0.2)
    hangs = ("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
    assert staged({}, stage=hangs) == (137, ["unstage"])
    assert "launch: --stage: did not end within 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["stage", "check"])
def test_a_signal_before_the_job_is_the_exit_code(ran: Ran, step: str) -> None:
    """MPICH's launcher ends with 15 then."""
    ends = "import os, signal, time; signal.signal(15, lambda *_: os._exit(15)); os.kill(os.getppid(), 15); time.sleep(30)"
    given = (
        {"stage": (sys.executable, "-c", ends), "unstage": ("true",)} if step == "stage" else {"check": ends}
    )
    assert ran("print('run')", **given) == (143, [])


def test_a_signal_does_not_stop_the_removal_of_copies(ran: Ran) -> None:
    signals_launch = "kill -TERM $PPID; sleep 1.5; echo removed"
    code, lines = ran("pass", stage=("true",), unstage=("sh", "-c", signals_launch))
    assert (code, lines[1:]) == (0, ["removed"])
