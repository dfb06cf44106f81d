"""The start of ranks, each in a thread, with worlds and agents without processes: who reports what, once, and who enters.

With real jobs: tests/mpi, tests/faults/test_starts.py. The hub's part: tests/pure/agent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure, one_report, report_by
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import (
    HANGING,
    MPI_GRACE,
    NAME_MISSING,
    RANK_0_GRACE,
    RANK_0_LOST,
    in_place_of_rank_0,
)
from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    InputError,
    OptionError,
    Problem,
    StartupError,
)
from dask_gpu_mpi.job import entering as module
from dask_gpu_mpi.job.entering import Entering
from dask_gpu_mpi.mpi import library, neighbours
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.startup.meeting import Hello, Meeting
from dask_gpu_mpi.startup.messages import Cluster, Kind
from support.mocks.launchers import SAMPLES

#: Seconds for a rank of a test to end.
LIMIT = 20.0
CLUSTER = Cluster("tls://h:1", None)
FILE = ("/scheduler.json", "Scheduler-1")
BAD = OptionError("--nthreads: invalid value 'x'")


class JobEnded(BaseException):
    """In place of the end of a rank's process."""


#: Descriptors and sockets of a test.
OPEN: list[Callable[[], None]] = []


class Box:
    """Messages, and a descriptor that is readable while there are some."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        OPEN.append(lambda: os.close(self.fd))
        self._messages: deque[Any] = deque()

    def put(self, *message: Any) -> None:
        self._messages.append(message)
        os.eventfd_write(self.fd, 1)

    def take(self) -> Iterator[Any]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._messages:
            yield self._messages.popleft()


class Agent:
    """The agent of a rank; `job` is the hub, and gets what it is sent."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self._box = job, rank, Box()
        self.fd = self._box.fd
        self.say = self._box.put
        self.lost = False
        self.entry: Any = None
        self.listener: socket.socket | None = None
        self.line: int | None = rank or None  # the descriptor of its connection to the hub
        self.closed = 0

    def send(self, kind: Kind, payload: Any = None, *, fds: Any = ()) -> None:
        if fds:
            self.listener = socket.socket(fileno=os.dup(fds[0]))
            OPEN.append(self.listener.close)
        if kind == Kind.ENTER:
            self.entry = payload
        if not self.lost:
            self._job.on_agent(self._rank, kind, payload)

    def events(self, timeout: float) -> Iterator[Any]:
        return self._box.take()

    def take_line(self) -> int | None:
        return self.line

    def exit_text(self) -> str:
        return "exit code 9"

    def close(self, timeout: float) -> None:
        self.closed += 1


class MemoryWorld(World):
    """One rank's, in a job whose ranks are in this process."""

    library = "mock"

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self.rank, self.size = job, rank, job.size
        self.box = Box()
        self.left = self.ended = False

    def fileno(self) -> int:
        return self.box.fd

    def send(self, rank: int, data: bytes) -> None:
        self._job.worlds[rank].box.put(self.rank, data)

    def receive(self) -> list[tuple[int, bytes]]:
        if self._job.aborts:
            raise JobEnded
        return list(self.box.take())

    def leave(self) -> None:
        self.left = True

    def end(self) -> None:
        self.ended = True

    def abort(self, code: int) -> None:
        self._job.aborts.append(code)


class Job:
    """Ranks that start; the agents of those in `failures` were not started, since their options can't be used.

    `seconds`: until the start-up deadline. `reports`: failures that the hub waits for before it reports. `planned`: what ends the
    start as the command `plan`.
    """

    def __init__(
        self,
        size: int = 2,
        failures: Mapping[int, DaskGpuMpiError] | None = None,
        *,
        seconds: float = 30.0,
        environ: Mapping[str, str] | None = None,
        reports: int = 1,
        planned: Any = None,
        **options: Any,
    ) -> None:
        self.size, self.failures, self.reports, self.planned = size, failures or {}, reports, planned
        self.seconds, self.environ = seconds, environ or {}
        self.options = Options(protocol=Protocol.TLS, **options)
        self.aborts: list[int] = []
        self.worlds = [MemoryWorld(self, rank) for rank in range(size)]
        self.agents = [Agent(self, rank) for rank in range(size)]
        #: By rank, its signals.
        self.signals: list[Any] = [type("Signals", (), {"got": None})() for _ in range(size)]
        self.check: Callable[[int], None] | None = None
        #: What each rank has returned or raised, and how many errors were printed by then.
        self.outcomes: dict[int, Any] = {}
        self.printed_before: dict[int, int] = {}
        self.printed: list[str] = []
        self.reported: dict[int, Failure] = {}
        self.entered: set[int] = set()
        #: What a rank's agent does instead of the hub's answer when it is sent a message.
        self.instead: dict[tuple[int, Kind], Callable[[Agent], None]] = {}

    def on_agent(self, rank: int, kind: Kind, payload: Any) -> None:
        """The part of the agents and the hub."""
        agent = self.agents[rank]
        if (rank, kind) in self.instead:
            self.instead[rank, kind](agent)
        elif kind == Kind.ENTER:
            agent.say(Kind.ENTERED, None)
            self.entered.add(rank)
            if len(self.entered) == self.size:
                for each in range(self.size):
                    up = (Kind.UP, (CLUSTER, each == self.options.script_rank, each == 0, FILE))
                    done = (Kind.DONE, self.planned if each == 0 else 0)
                    self.agents[each].say(*(up if self.planned is None else done))
        elif kind == Kind.FAILED:
            self.reported[payload[0]] = payload[1]
            if len(self.reported) == self.reports:
                report = one_report(self.reported, dict.fromkeys(range(self.size), "h"), self.size)
                self.agents[0].say(Kind.FAIL, (report, False))
        elif kind == Kind.FAIL:
            for each in self.entered - {0}:
                self.agents[each].say(Kind.FAIL, payload)
            agent.say(Kind.ENDED, 0)

    def begin(self, rank: int) -> threading.Thread:
        def run() -> None:
            start = self.environ, self.signals[rank], Timeline("rank"), time.monotonic() + self.seconds
            error = self.failures.get(rank)
            failure = None if error is None else Failure.of(error)
            agent: Any = self.agents[rank] if failure is None else None
            options = self.options if failure is None else None
            world: Callable[[], World] = lambda: self.worlds[rank]  # noqa: E731
            try:
                self.outcomes[rank] = Entering(*start, world, options, agent, failure, self.check).run()
            except BaseException as error:
                self.outcomes[rank] = error
            self.printed_before[rank] = len(self.printed)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def run(self, *ranks: int) -> list[Any]:
        """What these ranks have returned or raised, all unless some are named."""
        chosen = ranks or range(self.size)
        with report_by(lambda error: not self.printed.append(str(error))):  # type: ignore[func-returns-value]
            threads = [self.begin(rank) for rank in chosen]
            for thread in threads:
                thread.join(LIMIT)
                assert not thread.is_alive()
        return [self.outcomes[rank] for rank in chosen]

    def report(self, *ranks: int) -> DaskGpuMpiError:
        """The one error that all ranks have raised, and rank 0 has printed before another rank ended."""
        raised = self.run(*ranks)
        assert [str(error) for error in raised] == self.printed * len(raised)
        assert {type(error) for error in raised} == {type(raised[0])}
        assert min(self.printed_before.values()) == 1
        assert all(error.reported and not error.fatal for error in raised)
        assert self.aborts == []
        for rank in self.outcomes:
            assert self.agents[rank].closed == (rank not in self.failures)
            assert self.worlds[rank].ended
        error: DaskGpuMpiError = raised[0]
        return error


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which ranks have ended their job."""
    codes: list[int] = []

    def end_job(code: int, environ: Any) -> None:
        codes.append(code)
        raise JobEnded

    monkeypatch.setattr(module, "end_job", end_job)
    monkeypatch.setattr(socket, "gethostname", lambda: "h")
    monkeypatch.setattr(module, "neighbours", lambda pid: {})
    monkeypatch.setattr(library, "RANK_0_GRACE", 0.0)
    monkeypatch.setattr(module, "GATHER_FAILURES", 0.5)
    yield codes
    while OPEN:
        OPEN.pop()()


# -- ranks that enter


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_enter_and_the_cluster_is_up(size: int) -> None:
    job, begun = Job(size), time.monotonic()
    joined = job.run()
    assert time.monotonic() - begun < module.MEETING_END
    assert [(one.rank, one.size, one.host, one.is_client) for one in joined] == [
        (rank, size, "h", rank == 0) for rank in range(size)
    ]
    assert all(one.cluster is CLUSTER and one.agent.entry is one.entry for one in joined)
    assert [(one.has_scheduler, one.scheduler_file, one.line) for one in joined] == [
        (rank == 0, FILE, rank or None) for rank in range(size)
    ]
    assert [world.left or size == 1 for world in job.worlds] == [True] * size  # the meeting is over
    assert all(world.ended for world in job.worlds)  # a script has no child that it has not started
    assert [agent.closed for agent in job.agents] == [0] * size
    assert (job.printed, job.aborts) == ([], [])


def test_the_invitation_leads_to_rank_0s_agent_with_one_certificate() -> None:
    job = Job(3)
    job.run()
    listener, (first, *others) = job.agents[0].listener, [agent.entry for agent in job.agents]
    assert listener is not None
    for entry in others:
        assert (entry.hub, entry.config, entry.hosts) == (first.hub, first.config, {})
        with socket.create_connection(entry.hub, timeout=5):
            listener.accept()[0].close()
    assert first.hosts == dict.fromkeys(range(3), "h")
    assert "distributed.comm.tls.ca-file" in first.config
    alone = Job(1)
    alone.run()
    assert (alone.agents[0].entry.hub, alone.agents[0].listener) == (("", 0), None)


def test_the_plan_is_the_end_of_the_command_plan() -> None:
    job = Job(planned="the plan")
    assert job.run() == ["the plan", 0]
    assert all(agent.closed for agent in job.agents)
    assert all(world.left and world.ended for world in job.worlds)


def test_a_late_rank_that_the_cluster_has_started_without(capsys: pytest.CaptureFixture[str]) -> None:
    """The others do not wait until it has entered."""
    job, begun = Job(), time.monotonic()
    up = replace(CLUSTER, absent=(1,)), True, True, None
    job.instead[1, Kind.ENTER] = lambda agent: agent.say(Kind.DONE, 1)
    job.instead[0, Kind.ENTER] = lambda agent: (agent.say(Kind.ENTERED, None), agent.say(Kind.UP, up))  # type: ignore[func-returns-value]
    _, late = job.run()
    assert isinstance(late, SystemExit)  # rank 0's code is the job's
    assert late.code == 0
    said = "warning: rank 1 of 2 on h: the cluster started without this rank, which was late. Fix: "
    assert said in capsys.readouterr().err
    assert time.monotonic() - begun < module.MEETING_END


# -- failures: one report


#: Why one rank can't take part: its error and the exit code.
FAILURES = {
    "options": (str(BAD), 2),
    "its part": ("no such script", 2),
    "agent died": ("the agent ended before it was ready (exit code 9). Fix: read its output above; out of memory, most often", 1),
    "agent reports": ("no such class", 2),
    "signal": ("SIGTERM came while the cluster started", 143),
}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("why", FAILURES)
def test_a_failure_of_one_rank_is_the_error_of_all(why: str, rank: int) -> None:
    job = Job(2, {rank: BAD} if why == "options" else None)
    text, code = FAILURES[why]

    def check(each: int) -> None:
        if each == rank:
            raise InputError(text)

    def interrupt(agent: Agent) -> None:
        job.entered.add(1)
        agent.say(Kind.ENTERED, None)
        job.signals[rank].got = (signal.SIGTERM, 0.0)  # once both have met

    if why == "its part":
        job.check = check
    elif why == "agent died":
        job.agents[rank].lost = True
    elif why == "agent reports":
        job.instead[rank, Kind.ENTER] = lambda agent: None  # the invitation may have come before
        job.agents[rank].say(Kind.PREPARED, "/scratch")
        job.agents[rank].say(Kind.FAILED, Failure.of(InputError(text)))
    elif why == "signal":
        job.instead = {
            (0, Kind.ENTER): lambda agent: agent.say(Kind.ENTERED, None),
            (1, Kind.ENTER): interrupt,
        }
    error = job.report()
    assert (str(error), error.exit_code) == (f"rank {rank} of 2 on h: {text}", code)
    assert isinstance(error, OptionError if why == "options" else InputError if code == 2 else StartupError)


def test_a_failure_of_all_ranks_and_one_that_rank_0_finds() -> None:
    assert str(Job(2, {0: BAD, 1: BAD}).report()) == str(BAD)
    assert ": no network interface 'none'" in str(Job(interface="none").report())


def test_a_failure_that_comes_before_that_of_rank_0s_agent_is_in_the_report() -> None:
    job = Job(2, {1: BAD})

    def fail_too(agent: Agent) -> None:
        agent.say(Kind.FAILED, Failure.of(InputError("no such folder")))
        agent.lost = True

    job.instead = {(0, Kind.ENTER): lambda agent: None, (0, Kind.FAILED): fail_too}
    report = str(job.report())
    assert "no such folder" in report
    assert str(BAD.problem.found) in report


def test_rank_0s_agent_that_dies_before_all_are_connected_to_it() -> None:
    job = Job()

    def die(agent: Agent) -> None:
        agent.say(Kind.ENTERED, None)
        agent.lost = True

    job.instead = {(0, Kind.ENTER): die, (1, Kind.ENTER): lambda agent: None}
    assert "rank 0 of 2 on h: the agent of this rank ended while the cluster started" in str(job.report())


def test_an_agent_of_rank_0_that_can_not_lead_the_job() -> None:
    """Rank 0 reports it then, and the agents of others still wait for an answer of the hub."""
    job, begun = Job(), time.monotonic()
    failed = (Kind.FAILED, Failure.of(InputError("no such scheduler file")))
    job.instead = dict.fromkeys([(1, Kind.ENTER), (0, Kind.FAILED)], lambda agent: None)
    job.instead[0, Kind.ENTER] = lambda agent: agent.say(*failed)
    error = job.report()
    assert (str(error), error.exit_code) == ("rank 0 of 2 on h: no such scheduler file", 2)
    assert time.monotonic() - begun < 3 * module.GATHER_FAILURES


def test_rank_0_that_fails_once_its_agent_leads_the_start_tells_it_once() -> None:
    job, told = Job(), []

    def enter(agent: Agent) -> None:
        agent.say(Kind.ENTERED, None)
        job.signals[0].got = (signal.SIGINT, 0.0)

    def report(agent: Agent) -> None:
        told.append(1)
        agent.say(Kind.FAIL, (Failure(Problem("SIGINT came"), 130), False))

    job.instead = {(0, Kind.ENTER): enter, (0, Kind.FAILED): report, (1, Kind.ENTER): lambda agent: None}
    error = job.report()
    assert (str(error), error.exit_code, told) == ("SIGINT came", 130, [1])


def test_an_agent_that_does_not_finish_its_imports() -> None:
    """Rank 0 reports then, since its agent can't; the other ranks leave theirs to their hub."""
    job = Job(seconds=0.5)
    for rank in (0, 1):
        job.instead[rank, Kind.ENTER] = lambda agent: None
    assert "rank 0 of 2 on h: the agent did not finish its imports before the start-up" in str(job.report())


# -- ranks that are missing or silent: the job is aborted


@pytest.mark.parametrize("beside", [{}, {2: "stopped"}])
def test_rank_0_reports_a_rank_that_has_not_come(
    beside: dict[int, str], ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "neighbours", lambda pid: beside)
    job = Job(3, seconds=0.2)
    error, other = job.run(0, 1)
    assert isinstance(error, JobEnded)
    assert isinstance(other, JobEnded)  # by the abort
    (line,) = job.printed
    named = " (rank 2 on h is stopped)" if beside else ""
    assert line.startswith(
        f"no response from rank 2 of 3 before the start-up timeout (startup_timeout){named}"
    )
    assert "; ranks 0-1 on h responded. Fix: " in line
    assert (job.aborts, ended) == ([1], [1])
    assert [job.agents[rank].closed for rank in (0, 1)] == [1, 1]


def silent_rank_0(job: Job) -> None:
    """Rank 0 comes to the meeting, and does nothing more."""
    meeting = Meeting(job.worlds[0], Hello("h", b""))

    def answer() -> None:
        deadline = time.monotonic() + LIMIT
        while len(meeting.hosts) < 2 and time.monotonic() < deadline:
            select.select([job.worlds[0].fileno()], [], [], 0.1)
            meeting.receive()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    OPEN.append(lambda: thread.join(LIMIT))


@pytest.mark.parametrize(
    ("rank", "has_come"), [(1, False), (2, False), (3, False), (1, True), (2, True)], ids=str
)
def test_rank_0_that_is_silent_is_reported_by_one_rank_after_the_other(
    rank: int, has_come: bool, ended: list[int]
) -> None:
    """Later than rank 0 would report, and later than the ranks before it, which may be silent as well."""
    left, after = 0.4, RANK_0_LOST - RANK_0_GRACE if has_come else NAME_MISSING
    job = Job(4, seconds=left - after - in_place_of_rank_0(rank))
    if has_come:
        silent_rank_0(job)
    begun = time.monotonic()
    assert isinstance(job.run(rank)[0], JobEnded)
    assert time.monotonic() - begun >= left
    (line,) = job.printed
    found = "rank 0: no response" if has_come else "no response from rank 0 of 4"
    assert line.startswith(f"{found} before the start-up timeout (startup_timeout)")
    assert (job.aborts, ended) == ([1], [1])


def test_a_start_that_takes_longer_moves_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATHER_FAILURES", "FLUSH"):  # in which rank 0 reports, if it lives
        monkeypatch.setattr(module, name, 0.1)
    job = Job(2, seconds=-RANK_0_LOST)
    silent_rank_0(job)
    job.agents[1].say(Kind.START, 100.0)
    ends = threading.Timer(0.3, lambda: job.agents[1].say(Kind.GONE, False))  # its connection to the hub
    ends.start()
    job.run(1)
    ends.join()
    (line,) = job.printed
    assert line.startswith("rank 0: the connection to its agent has ended while the cluster started")


@pytest.mark.parametrize("code", [0, 1])
def test_a_report_of_silent_ranks_aborts_the_job_unless_all_agents_end(code: int, ended: list[int]) -> None:
    job = Job(1)
    failure = Failure(Problem("no response from rank 1"), 2)
    job.instead[0, Kind.ENTER] = lambda agent: agent.say(Kind.FAIL, (failure, True))
    job.instead[0, Kind.FAIL] = lambda agent: agent.say(Kind.ENDED, code)
    (error,) = job.run()
    assert isinstance(error, JobEnded if code else StartupError | InputError)
    assert (job.printed, ended) == (["no response from rank 1"], [2] * code)


def test_a_failure_to_which_nobody_answers(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNHEARD", 0.1)
    job = Job(2, {1: BAD})
    silent_rank_0(job)
    assert isinstance(job.run(1)[0], JobEnded)
    assert (job.printed, job.aborts, ended) == ([str(BAD)], [2], [2])


def test_an_agent_of_rank_0_that_hangs(ended: list[int]) -> None:
    job = Job(1, seconds=-HANGING)
    job.instead[0, Kind.ENTER] = lambda agent: agent.say(Kind.ENTERED, None)
    job.agents[0].say(Kind.ENTERED, None)
    job.run()
    assert job.printed[0].startswith("rank 0 of 1 on h: the agent of rank 0 has not responded before")
    assert ended == [1]


@pytest.mark.parametrize("size", [1, 2])
def test_a_defect_does_not_leave_other_ranks_waiting(
    size: int, ended: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(size)
    monkeypatch.setattr(job.agents[0], "events", lambda timeout: 1 / 0)
    assert isinstance(job.run(0)[0], ZeroDivisionError if size == 1 else JobEnded)
    assert ended == job.aborts == [1] * (size - 1)
    assert ("ZeroDivisionError" in capsys.readouterr().err) is (size > 1)


# -- MPI that does not come


@pytest.mark.parametrize(
    ("launcher", "why", "printed"),
    [(None, "signal", 1), ("srun", "signal", 1), (None, "deadline", 1), ("srun", "deadline", 0)],
)
def test_ranks_that_wait_for_mpi_and_can_not_communicate(
    launcher: str | None, printed: int, why: str, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank reports the end; a signal that a rank was sent is told by it, for the others may not have been sent it."""
    pauses: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    environ = SAMPLES[launcher] if launcher else None
    job = Job(1, environ=environ, seconds=-MPI_GRACE if why == "deadline" else 30.0)
    launched = None if launcher is None else SimpleNamespace(rank=1, local_rank=1)
    monkeypatch.setattr(neighbours, "launched_as", lambda pid: launched)
    monkeypatch.setattr(job.worlds[0], "size", 0)
    if why == "signal":
        job.signals[0].got = (signal.SIGINT, 0.0)
    assert isinstance(job.run()[0], JobEnded)
    text = "MPI did not come together" if why == "deadline" else "SIGINT came while the cluster started"
    assert [line[: len(text)] for line in job.printed] == [text] * printed
    assert ended == [130 if why == "signal" else 1]
    assert len(pauses) == (launcher is not None and why == "signal")  # rank 0 reports it first


def test_a_launcher_that_is_gone_takes_the_rank_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exits(code: int) -> None:
        raise JobEnded

    job = Job(1, environ=SAMPLES["srun"])
    monkeypatch.setattr(job.worlds[0], "size", 0)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "_exit", exits)
    assert isinstance(job.run()[0], JobEnded)
    assert capsys.readouterr().err.count(") has ended, and this rank with it. Fix: ") == 1
