"""Ranks that `launch` starts itself: their meeting, exit codes, signals, and their end. Each job in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.command import Launch
from dask_gpu_mpi.sites.execute import run_launch
from dask_gpu_mpi.sites.local import LARGEST, Relay

LAUNCH = """
import os, sys
from dask_gpu_mpi.sites import execute, local
from dask_gpu_mpi.sites.command import Launch
graces = [*map(float, os.environ.get("GRACES", "20 20 20").split()), 20.0]
local.GRACE, local.KILL_AFTER, local.ABORT_GRACE, local.MEETING_GRACE = graces[:4]
check, run = ((sys.executable, "-c", text) if text else () for text in sys.argv[1:3])
sys.exit(execute.run_launch(Launch({}, check, run, **eval(sys.argv[3])), os.environ))
"""
#: A rank, with which the programs below begin.
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

Start = Callable[..., subprocess.Popen[str]]
Ran = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a job of this program; it ends with the test, which may have failed."""
    jobs = []

    def started(
        program: str,
        ranks: int = 2,
        *,
        check: str = "",
        tolerant: bool = False,
        graces: str = "",
        **more: Any,
    ) -> subprocess.Popen[str]:
        texts = [RANK + textwrap.dedent(text) if text else "" for text in (check, program)]
        environ = {**os.environ, "GRACES": graces} if graces else None
        how = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": environ, **more}
        job = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *texts, repr({"ranks": ranks, "tolerant": tolerant})],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **how,
        )
        jobs.append(job)
        return job

    yield started
    for job in jobs:
        job.kill()
        job.communicate(timeout=30)


@pytest.fixture
def ran(start: Start) -> Ran:
    """The exit code of a job, and its lines, sorted, since ranks write at the same time."""

    def run(program: str, ranks: int = 2, **given: Any) -> tuple[int, list[str]]:
        job = start(program, ranks, **given)
        output, _ = job.communicate(timeout=60)
        return job.returncode, sorted(output.splitlines())

    return run


def up(job: subprocess.Popen[str], ranks: int = 2) -> list[int]:
    """Wait until each rank has told its PID as its first line."""
    assert job.stdout is not None
    lines = sorted(job.stdout.readline().split() for _ in range(ranks))
    assert [int(rank) for rank, _ in lines] == [*range(ranks)]
    return [int(pid) for _, pid in lines]


def runs(pid: int) -> bool:
    """Whether there is such a process, other than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- the meeting


def test_packets_arrive_in_order_from_their_sources(ran: Ran) -> None:
    code, lines = ran(
        """
        if rank:
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
        3,
    )
    assert (code, lines) == (0, ["0 [1, 2] True", "1 0 b'you are 1'", "2 0 b'you are 2'"])


def test_large_packets_and_packets_to_oneself_and_to_nobody(ran: Ran) -> None:
    code, lines = ran(
        """
        large = b"x" * (128 << 10)
        send(size, large)
        send(-7)
        meeting.send(b"ab")
        send(rank, large)
        send(1 - rank, large)
        tell(sorted((source, len(text)) for source, text in (receive(), receive())))
        """
    )
    assert (code, lines) == (0, [f"{rank} [(0, 131072), (1, 131072)]" for rank in range(2)])


def test_rank_that_does_not_read_holds_up_nobody(ran: Ran) -> None:
    """Rank 2 reads at last, and nothing is lost."""
    code, lines = ran(
        """
        if rank == 0:
            for number in range(100):
                send(2, b"%d" % number * 50_000)
            send(1)
            tell(receive()[0])
            send(2, b"done")
        elif rank == 1:
            receive()
            send(0)
        else:
            os.sched_yield()
            while meeting.recv(1 << 18, socket.MSG_PEEK) == b"":
                pass
            time.sleep(0.5)
            found = []
            while not found or found[-1] != b"done":
                found.append(receive()[1])
            tell(len(found), found[:-1] == [b"%d" % number * 50_000 for number in range(100)])
        """,
        3,
    )
    assert (code, lines) == (0, ["0 1", "2 101 True"])


def test_packets_to_a_rank_that_has_left_are_dropped(ran: Ran) -> None:
    code, lines = ran(
        """
        if rank == 0:
            receive()
            for _ in range(50):
                send(1, b"x" * 100_000)
                time.sleep(0.001)
            send(0, b"to oneself")
            tell(receive()[1])
        else:
            send(0)
            meeting.close()
        """
    )
    assert (code, lines) == (0, ["0 b'to oneself'"])


def test_a_queue_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpu_mpi.sites.local.MOST_WAITING", 3 * LARGEST)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    (sender, reader), relay = [pair[1] for pair in pairs], Relay([pair[0] for pair in pairs])
    relay.start()
    for number in range(100):
        sender.send(struct.pack("<ii", 1, number) + bytes(100_000))
    sender.send(struct.pack("<i", 0))
    assert sender.recv(LARGEST) == struct.pack("<i", 0)  # all others have been forwarded, kept or dropped
    reader.settimeout(0.5)
    numbers = []
    while True:
        try:
            numbers.append(struct.unpack_from("<ii", reader.recv(LARGEST)))
        except TimeoutError:
            break
    assert 7 < len(numbers) < 50
    assert numbers == [(0, number) for number in range(len(numbers))]
    relay.stop()
    assert not relay.is_alive()
    sender.close()
    reader.close()


def test_ranks_have_their_own_socket_only(ran: Ran) -> None:
    code, lines = ran(
        """
        sockets = [name for name in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket:")]
        tell(sockets == [str(fd)], sorted(map(int, os.listdir("/proc/self/fd")))[:3], size)
        """,
        3,
    )
    assert (code, lines) == (0, [f"{rank} True [0, 1, 2] 3" for rank in range(3)])


def test_launch_keeps_no_file_open() -> None:
    before = os.listdir("/proc/self/fd")
    assert run_launch(Launch({}, (), ("true",), ranks=5), os.environ) == 0
    with pytest.raises(LauncherError, match=r"could not start /gone/nsys: No such file .* Fix: install it"):
        run_launch(Launch({}, (), ("/gone/nsys",), ranks=5), os.environ)
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
        1,
    )
    assert code == 3
    told, said = lines
    pids = [int(pid) for pid in told.split()[1:]]
    assert [runs(pid) for pid in pids] == [True, False, False]
    os.kill(pids[0], signal.SIGKILL)
    assert said.startswith("dask_gpu_mpi: warning: 2 programs that the script had started on ")


def test_programs_of_the_shell_before_launch_stay() -> None:
    """``exec dask-gpu-mpi launch`` makes them its children: one without an environment, or with a title there (Redis)."""
    before = "import subprocess\nprint(subprocess.Popen(['sleep', '300'], env={}, stdout=-3, stderr=-3).pid, flush=True)\n"
    texts = [before + LAUNCH, "", "pass", repr({"ranks": 1})]
    job = subprocess.run([sys.executable, "-c", *texts], capture_output=True, text=True, timeout=60)
    pid = int(job.stdout)
    is_left = runs(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert (job.returncode, job.stderr, is_left) == (0, "", True)


# -- exit codes


@pytest.mark.parametrize(
    ("program", "tolerant", "expected"),
    [
        ("sys.exit(7 if rank == 0 else 0)", False, 7),
        ("sys.exit(7 - rank)", False, 7),
        ("os.kill(os.getpid(), signal.SIGTERM) if rank == 0 else None", False, 143),
        ("sys.exit(3 * rank)", False, 3),
        ("sys.exit(3 * rank)", True, 0),
        # whichever ends first
        ("time.sleep(0.3 * (rank == 0)); sys.exit(3 * rank)", False, 3),
        ("time.sleep(0.3 * (rank == 0)); sys.exit(3 * rank)", True, 0),
        ("time.sleep(0.3 * (rank == 1)); sys.exit(3 * rank)", False, 3),
        ("time.sleep(0.3 * (rank == 0)); sys.exit(3 * rank or 9)", False, 9),
    ],
)
def test_exit_code_is_that_of_rank_0_or_else_of_one_that_failed(
    ran: Ran, program: str, tolerant: bool, expected: int
) -> None:
    assert ran(program, tolerant=tolerant) == (expected, [])


def test_rank_that_is_killed_ends_the_others(ran: Ran) -> None:
    program = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        time.sleep(100)
    """
    code, lines = ran(program, 3, graces="0.5 20 20")
    assert (code, lines) == (
        137,
        [
            "dask_gpu_mpi: launch: rank 1 was ended by SIGKILL",
            "dask_gpu_mpi: launch: ranks 0,2: still running 0 s after a rank failed; ended",
        ],
    )
    stubborn = program.replace("lambda *_: sys.exit(5)", "signal.SIG_IGN")
    assert ran(stubborn, 3, graces="0.1 0.1 20")[0] == 137


@pytest.mark.parametrize(("end", "expected"), [("os._exit(0)", 1), ("os._exit(3)", 3)])
def test_rank_that_ends_before_all_have_met_ends_the_others(ran: Ran, end: str, expected: int) -> None:
    """They would wait for it until the start-up timeout."""
    code, lines = ran(f"{end} if rank == 1 else time.sleep(100)", 3, graces="20 20 20 0.2")
    said = f"rank 1 ended (exit code {end[-2]}) before all ranks had met; the others are killed. Fix: read its output above"
    assert (code, lines) == (expected, [f"dask_gpu_mpi: launch: {said}"])
    waits = f"{end} if rank == 1 else (time.sleep(1), os._exit(4 if rank == 0 else 0))"
    assert ran(waits, 3, graces="20 20 20 0.2", tolerant=True) == (4, [])
    # they have met: its socket is closed
    left = "os.close(fd); os._exit(0) if rank == 1 else (time.sleep(1), os._exit(4 if rank == 0 else 0))"
    assert ran(left, 3, graces="20 20 20 0.2") == (4, [])


def test_job_that_may_lose_ranks_continues(ran: Ran) -> None:
    program = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2.5)
        sys.exit(4)
    """
    expected = (4, ["dask_gpu_mpi: launch: rank 1 was ended by SIGKILL"])
    assert ran(program, tolerant=True, graces="0.1 0.1 20") == expected


def test_ranks_that_continue_without_rank_0_are_killed(ran: Ran) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100 * (rank > 0)); sys.exit(6)"
    expected = "dask_gpu_mpi: launch: ranks 1-2: still running 0 s after rank 0; killed"
    assert ran(program, 3, graces="0.2 20 20") == (6, [expected])


@pytest.mark.parametrize("who", [0, 1])
def test_abort(ran: Ran, who: int) -> None:
    """Whether the rank waits for its end, or ends at once with another code."""
    for then in ("time.sleep(100)", "os._exit(1)"):
        program = f"""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if rank == {who}:
                send(-1, struct.pack("<i", 42))
                {then}
            time.sleep(100)
        """
        began = time.monotonic()
        assert ran(program, 3, graces="20 20 0.2") == (42, [])
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
    assert ran(program) == (1, ["0 ends", "1 ends"])


def test_standard_input_is_for_rank_0_of_the_job(start: Start) -> None:
    reads = "tell(repr(sys.stdin.read()))"
    job = start(reads, check=reads, stdin=subprocess.PIPE)
    output, _ = job.communicate("hello", timeout=60)
    assert job.returncode == 0
    lines = output.splitlines()
    assert [sorted(lines[:2]), sorted(lines[2:])] == [["0 ''", "1 ''"], ["0 'hello'", "1 ''"]]


def test_preflight_that_fails_is_all_there_is(ran: Ran) -> None:
    assert ran("tell('the job')", check="sys.exit(3 * rank)") == (3, [])


# -- signals

HEARS = """
    def heard(number, _):
        tell(signal.Signals(number).name)
        if number != signal.SIGUSR1:
            sys.exit(9)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, heard)
    tell(os.getpid())
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("number", "code", "heard"),
    [
        (signal.SIGTERM, 9, "SIGTERM"),
        (signal.SIGINT, 9, "SIGTERM"),
        (signal.SIGHUP, 9, "SIGTERM"),
        (signal.SIGUSR1, 9, "SIGUSR1"),
    ],
)
def test_signals_are_forwarded_to_all_ranks(start: Start, number: int, code: int, heard: str) -> None:
    job = start(HEARS)
    up(job)
    job.send_signal(number)
    assert job.stdout is not None
    lines = [job.stdout.readline() for _ in range(3 if heard == "SIGTERM" else 2)]
    assert sorted(line for line in lines if "received" not in line) == [f"0 {heard}\n", f"1 {heard}\n"]
    if number == signal.SIGUSR1:
        job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == code


def test_signals_of_a_terminal_reach_ranks_directly(start: Start) -> None:
    """A terminal that is closed ends all processes; ranks end later, in order."""
    job = start(HEARS)
    up(job)
    os.killpg(job.pid, signal.SIGHUP)
    lines = job.communicate(timeout=60)[0].splitlines()
    assert job.returncode == 9
    said = "dask_gpu_mpi: launch: SIGHUP received; ending the job"
    assert sorted(lines) == ["0 SIGTERM", "1 SIGTERM", said]
    job = start(HEARS)
    up(job)
    os.killpg(job.pid, signal.SIGTERM)  # as by `timeout`
    assert {"0 SIGTERM", "1 SIGTERM"} < {*job.communicate(timeout=60)[0].splitlines()}


def test_code_of_an_interrupt(start: Start) -> None:
    job = start("tell(os.getpid()); time.sleep(100)")
    up(job)
    job.send_signal(signal.SIGINT)
    assert "ended by" not in job.communicate(timeout=60)[0]
    assert job.returncode == 130


def test_ranks_end_with_launch(start: Start) -> None:
    job = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); tell(os.getpid()); time.sleep(100)", 3)
    ranks = up(job, 3)
    job.kill()
    job.wait(30)
    wait_until(lambda: not any(map(runs, ranks)))


def test_no_signal_is_blocked_in_ranks(ran: Ran) -> None:
    program = "tell(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGHUP).name)"
    assert ran(program) == (0, ["0 set() SIG_IGN", "1 set() SIG_IGN"])
