"""One rank of a cluster that is up, without processes: what it hears of its agent, what it tells it, and when and how it leaves.

The hub's part: tests/pure/agent.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.timeouts import TERM_GRACE
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.job import member as module
from dask_gpu_mpi.job.member import DELAYS, Ending, Member, configuration
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Entry, Kind
from support.mocks.clocks import Clock
from support.mocks.launchers import SAMPLES

Message = tuple[Kind, Any]
END: Message = (Kind.END, (0, None))
ENDED: Message = (Kind.ENDED, 0)


class Agent:
    """Says one batch of messages each time that it is listened to, then the answers to what it was sent, then nothing."""

    fd = 9

    def __init__(self, clock: Clock, *heard: Sequence[Message]) -> None:
        self._clock, self._heard = clock, [*heard]
        self.answers: dict[Kind, Sequence[Message]] = {}
        self.lost = False
        self.scratch: str | None = None
        #: Its connection to the hub, which comes with ENTERED.
        self.line: int | None = None
        #: What it was sent, and whether it was killed and closed.
        self.sent: list[Any] = []

    def events(self, timeout: float) -> list[Message]:
        if self._heard:
            return list(self._heard.pop(0))
        self._clock.sleep(timeout)
        return []

    def say(self, *messages: Message) -> None:
        self._heard.append(messages)

    def send(self, kind: Kind, payload: Any = None) -> None:
        self.sent.append((kind, payload))
        if kind in self.answers:
            self.say(*self.answers[kind])

    def begin(self, options: Options, environ: Any, *, inspect_gpus: bool) -> None:
        self.sent.append(("begin", inspect_gpus))

    def configure(self, configuration: Any) -> None:
        assert configuration.deadline >= self._clock.now + 10.0  # the hub may be busy
        self.sent.append("configure")

    def take_line(self) -> int | None:
        return self.line

    def kill(self) -> None:
        self.sent.append("killed")

    def close(self, timeout: float) -> None:
        self.sent.append("closed")

    def exit_text(self) -> str:
        return "exit code 9"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the job was aborted."""
    codes: list[int] = []
    monkeypatch.setattr(module, "end_job", lambda code, environ: codes.append(code))
    return codes


Make = Callable[..., tuple[Member, Agent]]


@pytest.fixture
def member(clock: Clock) -> Make:
    def make(
        *heard: Sequence[Message],
        rank: int = 1,
        is_client: bool = False,
        has_client: bool = True,
        leave_open: bool = False,
        got: tuple[int, float] | None = None,
        environ: dict[str, str] | None = None,
        shutdown_timeout: float = 10.0,
        scheduler_file: tuple[str, str] | None = None,
        line: int | None = None,
        **options: Any,
    ) -> tuple[Member, Agent]:
        agent = Agent(clock, *heard)
        joined: Any = SimpleNamespace(
            rank=rank,
            size=3,
            host="h1",
            agent=agent,
            options=Options(shutdown_timeout=shutdown_timeout, **options),
            environ=environ or {},
            is_client=is_client,
            has_scheduler=rank == 0 or scheduler_file is not None,
            scheduler_file=scheduler_file,
            line=line,
            entry=Entry(rank, 3, ("10.0.0.1", 7), {}),
            world=World(),
        )
        signals: Any = SimpleNamespace(got=got, give_back=lambda: agent.sent.append("given back"))
        return Member(joined, signals, leave_open=leave_open, has_client=has_client), agent

    return make


def state(rank: Member) -> str:
    """How far its end has come."""
    return " ".join(each for each in ("stopped", "ended", "closed", "done") if getattr(rank.ending, each))


def hear(rank: Member, times: int = 1) -> None:
    for _ in range(times):
        rank.pump(0.0)


def test_exit_code_of_a_rank_without_the_script() -> None:
    ending = Ending()
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 143)  # it leaves by itself
    ending.stopped = True
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 143)
    ending.end()
    assert (ending.exit_code(), ending.exit_code(15)) == (0, 0)
    ending.signal = 2
    assert (ending.exit_code(), ending.exit_code(15)) == (130, 130)
    ending.lost = "no worker is left"
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 1)
    ending.must_have = 75
    assert ending.exit_code() == 75


# -- ranks without the script


@pytest.mark.parametrize("leave_open", [False, True])
def test_a_rank_that_serves_until_the_job_ends(leave_open: bool, member: Make, clock: Clock) -> None:
    """The script's session may be closed long before. If the program goes on, that is the end."""
    end = [] if leave_open else [[END], []]
    rank, agent = member([(Kind.STOP, None)], [(Kind.CLOSED, None)], *end, [ENDED], leave_open=leave_open)
    assert rank.serve() == 0
    assert agent.sent == ["closed", "given back"]
    assert (rank.agents.fd, state(rank)) == (-1, "stopped ended closed done")
    assert clock.now < 101.0


@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.parametrize("own", [True, False])
def test_a_signal_where_the_program_goes_on_is_raised_again(
    own: bool, code: int, member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own, or that of another rank; but all ranks end with the code of a script that has written its checkpoint."""
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(module, "is_ours", lambda number: True)
    heard = [(Kind.END, (code, None if own else 15))], [ENDED]
    rank, agent = member(*heard, leave_open=True, got=(15, 100.0) if own else None)
    with pytest.raises(SystemExit, match=str(code)) if code else contextlib.nullcontext():
        assert rank.serve() == 0
    assert raised == ([] if code else [15])
    assert agent.sent[-1] == "given back"


@pytest.mark.parametrize(
    ("passed", "busy", "leaves"), [(-0.5, False, False), (0.1, False, True), (0.1, True, False)]
)
def test_a_rank_leaves_some_seconds_after_its_signal_if_the_script_does_not_clean_up(
    passed: float, busy: bool, leaves: bool, member: Make, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has reported the signal once, and waits for the end; else it ends its agent itself."""
    heard: list[list[Message]] = [[(Kind.BUSY, None)] if busy else [], [], [END], [ENDED]]
    rank, agent = member(*heard, got=(15, clock.now - TERM_GRACE - passed))
    assert rank.serve() == 0
    told = [(Kind.WORKERS_ENDED, False)] if leaves else []  # for the hub not to count it as lost
    assert agent.sent == [(Kind.SIGNAL, 15), *told, "closed", "given back"]
    assert capsys.readouterr().err == ""
    assert clock.now < 101.0


# -- the client's rank


def test_a_session_that_is_closed_and_then_the_end(member: Make, clock: Clock) -> None:
    """Its agent stays until the script's end."""
    rank, agent = member(is_client=True)
    agent.answers = {Kind.OVER: [(Kind.STOP, None), (Kind.CLOSED, None)]}
    for _ in range(2):
        rank.end(final=False)
    assert (agent.sent, state(rank)) == ([(Kind.OVER, (False, None, None))], "stopped closed")
    agent.answers = {Kind.OVER: [END, ENDED]}
    for _ in range(2):
        rank.end(final=True, code=3)
    assert agent.sent[1:] == [(Kind.OVER, (True, None, 3)), "closed"]
    assert (rank.agents.fd, state(rank)) == (-1, "stopped ended closed done")
    assert clock.now < 101.0


@pytest.mark.parametrize("final", [False, True])
def test_a_cluster_that_was_over_before_the_script(final: bool, member: Make) -> None:
    """The client hears why; the hub hears only of the script's end."""
    rank, agent = member([(Kind.STOP, "the scheduler ended")], [(Kind.CLOSED, None)], is_client=True)
    agent.answers = {Kind.OVER: [END, ENDED]}
    hear(rank)
    assert (state(rank), rank.ending.lost) == ("stopped", "the scheduler ended")
    rank.end(final=final)
    assert agent.sent == ([(Kind.OVER, (True, None, None)), "closed"] if final else [])
    other, _ = member([(Kind.STOP, "the scheduler ended")])
    hear(other)
    assert other.ending.lost is None


def test_what_the_client_hears(member: Make) -> None:
    messages: list[Message] = [(Kind.CLIENT, None), (Kind.SIGNAL, 10)]
    for is_client in (True, False):
        rank, _ = member(messages, is_client=is_client)
        hear(rank)
        assert rank.for_script == (10 if is_client else None)
    assert rank.had_client


# -- its agent is lost


def test_an_agent_that_dies_again_and_again(
    member: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one starts no workers, for the rank has to hear of the end; then nothing is left to hear it."""
    rank, agent = member()
    started: list[Agent] = []

    def start(environ: Any) -> Agent:
        started.append(Agent(clock, [(Kind.PREPARED, "/scratch")]))
        return started[-1]

    monkeypatch.setattr(module, "AgentProcess", start)
    for number, delay in enumerate((*DELAYS, 0.0)):
        [agent, *started][-1].lost = True
        hear(rank)
        assert (rank.agents.fd, rank.agents.seconds_until_due()) == (-1, delay)
        if delay:
            hear(rank)
            assert len(started) == number  # not before it is time
        clock.now += delay + 0.01
        hear(rank)
        assert (len(started), rank.agents.seconds_until_due()) == (number + 1, math.inf)
        *first, (kind, entry) = started[-1].sent
        assert first == [("begin", False), "configure"]
        assert (kind, entry.again, entry.workers) == (Kind.ENTER, True, number < len(DELAYS))
        assert (entry.hub, entry.rank) == (("10.0.0.1", 7), 1)
    started[-1].lost = True
    hear(rank)
    assert (state(rank), rank.ending.exit_code()) == ("stopped ended closed done", 0)
    begin = "dask_gpu_mpi: the agent of rank 1 on h1 ended (exit code 9); "
    assert capsys.readouterr().err.splitlines() == [
        *(f"{begin}restarting it in {seconds} s" for seconds in (0.5, 2, 8)),
        f"{begin}rank 1 removed, continuing with the other ranks",
    ]


def test_a_rank_that_waits_with_its_next_agent_starts_it_when_the_hub_has_something_to_say(
    member: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end, which does not wait so long."""
    monkeypatch.setattr(module, "AgentProcess", lambda environ: Agent(clock))
    line, hub = socket.socketpair()
    with hub:
        rank, agent = member(line=line.detach())
        agent.lost = True
        hear(rank, 2)
        assert rank.agents.seconds_until_due() == DELAYS[0]
        hub.send(b"END")
        hear(rank)
        assert rank.agents.seconds_until_due() == 0.0
        hear(rank)
        assert rank.agents.present is not agent
        rank.agents.hang_up()


def test_the_hub_hears_of_the_end_of_a_rank_and_of_its_agent_together(member: Make) -> None:
    """The rank keeps its agent's connection, until another agent has entered, or it ends."""
    (first, end_of_first), (second, end_of_second) = pairs = socket.socketpair(), socket.socketpair()
    rank, agent = member([(Kind.ENTERED, None)], [(Kind.START, 1.0)], [END], [ENDED], line=first.detach())
    agent.line = second.detach()
    with contextlib.ExitStack() as stack:
        for _, end in pairs:
            stack.enter_context(end).setblocking(False)
        hear(rank)
        with pytest.raises(
            BlockingIOError
        ):  # the hub may hear the end of this one before it hears the other agent
            end_of_first.recv(1)
        hear(rank)
        assert end_of_first.recv(1) == b""
        with pytest.raises(BlockingIOError):
            end_of_second.recv(1)
        assert rank.serve() == 0
        assert end_of_second.recv(1) == b""


def test_an_agent_that_can_not_be_started_again(
    member: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(environ: Any) -> Agent:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, "AgentProcess", full)
    rank, agent = member()
    agent.lost = True
    hear(rank)
    for _ in range(2):
        clock.now += 10.0
        hear(rank)
    assert rank.agents.seconds_until_due() == pytest.approx(8.0)
    begin = "dask_gpu_mpi: the agent of rank 1 on h1"
    assert capsys.readouterr().err.splitlines() == [
        f"{begin} ended (exit code 9); restarting it in 0.5 s",
        *[f"{begin} could not be started (Too many open files)"] * 2,
    ]
    rank.end(final=True)  # nobody is left to be told
    assert state(rank) == "stopped ended closed done"


@pytest.mark.parametrize("over", [END, (Kind.STOP, None)])
def test_an_agent_that_dies_after_the_end_is_no_news(
    over: Message, member: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    rank, agent = member([over])
    hear(rank)
    agent.lost = True
    hear(rank)
    assert state(rank) == "stopped ended closed done"  # nobody else would tell the rank of the job's end
    assert (rank.agents.seconds_until_due(), capsys.readouterr().err) == (math.inf, "")
    assert rank.serve() == 0


@pytest.mark.parametrize(
    ("rank", "is_client", "has_client", "then"),
    [
        (0, True, True, "stopped closed done"),  # its script goes on, and raises
        (0, False, True, "stopped ended closed done"),
        (0, True, False, "stopped ended closed done"),
        (1, False, True, "stopped ended closed done"),
    ],
)
def test_an_agent_without_which_the_cluster_is_lost(
    rank: int, is_client: bool, has_client: bool, then: str, member: Make, monkeypatch: Any, capsys: Any
) -> None:
    """With rank 0's the scheduler and the hub are lost. The scheduler file goes with the agent that has written it."""
    removed: list[Any] = []
    monkeypatch.setattr(module, "remove_scheduler_file", lambda *file: removed.append(file))
    file = ("/scheduler.json", "Scheduler-1")
    this, agent = member(rank=rank, is_client=is_client, has_client=has_client, scheduler_file=file)
    agent.lost = True
    hear(this)
    why = f"the agent of rank {rank} on h1 ended (exit code 9), and the scheduler with it"
    assert (state(this), this.ending.lost) == (then, None if rank else why)  # rank 0 reports it
    assert capsys.readouterr().err.startswith(f"dask_gpu_mpi: error: {why}: the cluster is lost. Fix: ")
    assert removed == [file]
    if "ended" in then and not rank:
        with pytest.raises(ClusterLostError, match="ended") as caught:
            this.serve()
        assert caught.value.reported


# -- the hub, or the cluster, is lost


@pytest.mark.parametrize(
    "kind", [Kind.GONE, Kind.FAILED]
)  # its agent loses it, or another one can't reach it
@pytest.mark.parametrize(
    ("rank", "is_client", "tolerated", "told"),
    [(1, False, 0, 1), (2, False, 0, 0), (2, False, 1, 1), (2, True, 0, 1)],
)
def test_a_hub_that_is_lost(
    rank: int,
    is_client: bool,
    tolerated: int,
    told: int,
    kind: Kind,
    member: Make,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The client's script raises it; of the others as many report it as must be left."""
    this, agent = member([(kind, None)], rank=rank, is_client=is_client, tolerate_lost_ranks=tolerated)
    agent.answers = {Kind.OVER: [ENDED]}
    hear(this)
    assert (
        capsys.readouterr().err.count("error: rank 0 lost, and with it the script and the scheduler") == told
    )
    assert state(this) == ("stopped" if is_client else "stopped ended")
    assert (this.ending.lost is not None) is is_client
    late, _ = member([END], [(kind, None)])  # it ends as well
    hear(late, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("code", "raises"), [(1, True), (0, False)])
def test_a_job_without_a_script_whose_cluster_is_lost(code: int, raises: bool, member: Make) -> None:
    for rank in (0, 1):
        this, _ = member([(Kind.END, (code, None))], [ENDED], rank=rank, has_client=False)
        with pytest.raises(ClusterLostError) if raises and not rank else contextlib.nullcontext():
            assert this.serve() == 0
    this, _ = member([(Kind.END, (0, 15))], [ENDED], rank=0, has_client=False, is_client=True)
    assert this.serve() == 143


# -- ends that are not in order


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("code", [0, 75])
def test_ranks_that_did_not_respond_at_the_end(rank: int, code: int, member: Make, aborts: list[int]) -> None:
    """Rank 0 aborts the job with the script's code, for which a requeue tests."""
    this, agent = member(rank=rank, is_client=True)
    agent.answers = {Kind.OVER: [(Kind.END, (code, None)), (Kind.ENDED, code or 1)]}
    this.end(final=True, code=code)
    assert aborts == [code or 1] * (rank == 0)
    assert this.ending.exit_code() == (code or 1)


@pytest.mark.parametrize(
    ("rank", "timeout", "environ", "seconds"),
    [
        (1, 10.0, {}, 3.0 + 1.0),
        (0, 3.0, {}, 2 * 2.5 + 1.0 + 3.0 + 5.0),
        (0, 10.0, {}, 2 * 3.0 + 1.0 + 3.0 + 5.0),
        (0, 60.0, {}, 2 * 3.0 + 1.0 + 18.0 + 5.0),
        # with a profiler, which writes its data then, half of `shutdown_timeout`
        (0, 10.0, {"CUDA_INJECTION64_PATH": "1"}, 2 * 6.0 + 1.0 + 3.0 + 5.0),
    ],
)
def test_an_agent_that_does_not_end_is_killed(
    rank: int,
    timeout: float,
    environ: dict[str, str],
    seconds: float,
    member: Make,
    clock: Clock,
    aborts: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Workers get their grace and a second, and so does the scheduler; the other ranks a share of the shutdown timeout."""
    this, agent = member([END], rank=rank, environ=environ, shutdown_timeout=timeout)
    assert this.serve() == 0
    assert clock.now - 100.0 == pytest.approx(seconds, abs=0.15)
    assert agent.sent == ["killed", "closed", "given back"]
    assert (aborts, capsys.readouterr().err) == ([], "")


def test_scratch_that_can_not_be_removed_in_time_is_named(
    tmp_path: Path,
    member: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also that of an agent that was lost before."""
    seconds: list[float] = []
    monkeypatch.setattr(module, "remove_scratch", lambda path, *, within: seconds.append(within))
    monkeypatch.setattr(module, "AgentProcess", lambda environ: other)
    rank, agent = member()
    other = Agent(clock, [END], [ENDED])
    for each, name in ((agent, "first"), (other, "second")):
        each.scratch = str(tmp_path / name)
        Path(each.scratch).mkdir()
    agent.lost = True
    hear(rank)
    clock.now += 1.0
    assert rank.serve() == 0
    assert seconds == [pytest.approx(10.0, abs=0.2)] * 2
    told = capsys.readouterr().err
    for name in ("first", "second"):
        assert f"could not remove all of {tmp_path / name} within 10 s" in told


@pytest.mark.usefixtures("handlers")
def test_the_abort_after_a_failure_is_not_interrupted(member: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher, since another rank has failed as well."""
    rank, _ = member(leave_open=True)
    codes: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("no exception while the job is aborted"))
    monkeypatch.setattr(module.outcome, "failure", lambda: 3)
    monkeypatch.setattr(
        rank.joined.world, "abort", lambda code: (signal.raise_signal(signal.SIGTERM), codes.append(code))
    )
    rank.abort_after_failure()
    assert codes == [3]


@pytest.mark.parametrize(
    ("launcher", "leave_open", "forks", "programs"),
    [
        ("srun", False, True, True),
        ("srun", True, False, False),
        ("dask-gpu-mpi launch", False, True, False),
        ("dask-gpu-mpi launch", True, False, False),
        (None, False, False, False),
    ],
)
def test_who_ends_the_programs_of_the_script(
    launcher: str | None, leave_open: bool, forks: bool, programs: bool
) -> None:
    """An agent, unless `launch` does it for its ranks, or the program goes on."""
    environ = SAMPLES[launcher] if launcher else {}
    found = configuration(Options(), environ, leave_open=leave_open)
    assert (found.ends_forks, found.ends_programs) == (forks, programs)
