"""The start of one rank, whose agent is running: it meets the others, its agent enters the job, and the cluster comes up.

`job.start` makes an `Entering`, and calls `run`. Once the ranks have met, a rank has one of two roles. `FirstRank` is rank 0: it
invites the others to the hub in its agent, and prints the one report of a start that fails. `OtherRank` is any other. A rank that
can't take part, because of its options, its node or its agent, meets the others all the same, sends that failure, and waits for
the report.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.base.failures import Failure, one_report, report_error
from dask_gpu_mpi.base.frames import wait_for_any
from dask_gpu_mpi.base.signals import Signals
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import (
    FAILED_GRACE,
    FLUSH,
    GATHER_FAILURES,
    HANGING,
    NAME_MISSING,
    RANK_0_GRACE,
    RANK_0_LOST,
    UNHEARD,
    in_place_of_rank_0,
)
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem, StartupError
from dask_gpu_mpi.mpi.launcher import end_job, report_lost_launcher
from dask_gpu_mpi.mpi.library import cross_check, wait_for_rank_0_to_report
from dask_gpu_mpi.mpi.neighbours import NeighbourWatch, neighbours
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.interfaces import boot_id, list_interfaces
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.sites.batch import allocated_hosts, end_time
from dask_gpu_mpi.startup.meeting import DEADLINE, Hello, Invitation, Meeting
from dask_gpu_mpi.startup.messages import COORDINATOR, Cluster, Entry, Kind

#: Seconds between polls: of a descriptor, and of MPI in this process, which has none.
POLL, POLL_MPI = 0.05, 0.005
#: Seconds for the last messages of the meeting, once the cluster is up.
MEETING_END = 5.0


@dataclass
class Joined:
    """A rank that has joined."""

    rank: int
    size: int
    #: Where it runs.
    host: str
    #: The agent with which it has joined.
    agent: AgentProcess
    #: What the user asked for.
    options: Options
    #: Environment at the start, with the launcher's variables.
    environ: Mapping[str, str] = field(repr=False)
    #: The cluster; with the plan on the client rank and on rank 0.
    cluster: Cluster
    #: Whether the script runs here, and the scheduler in this rank's agent.
    is_client: bool
    has_scheduler: bool
    #: Path and scheduler id, if the agent has written a scheduler file, which it removes unless it is killed.
    scheduler_file: tuple[str, str] | None
    #: For another agent.
    entry: Entry = field(repr=False)
    #: Descriptor of the agent's connection to the hub, which ends if this rank and its agent are gone; None: it is rank 0.
    line: int | None
    #: How the ranks have met.
    world: World


@dataclass
class Entering:
    """One rank's way into the job, until it has met the others; then a `Role` goes on."""

    #: With the launcher's variables.
    environ: Mapping[str, str]
    #: One that comes ends the start on all ranks.
    signals: Signals
    timeline: Timeline
    #: Of the start (``time.monotonic()``).
    deadline: float
    #: Makes the launcher's world.
    make_world: Callable[[], World]
    #: None if they can't be read, or if there is no agent; then `failure` is the reason.
    options: Options | None
    agent: AgentProcess | None
    #: Why this rank can't take part: the first reason that was found.
    failure: Failure | None = None
    #: ``check(rank)`` raises an InputError if this rank can't do its part.
    check: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.host = socket.gethostname()
        self.world = World()

    def run(self) -> Any:
        """Return a `Joined`, or what the command `plan` has found: the plan on rank 0, an int elsewhere.

        A DaskGpuMpiError is the one report of all failures, the same on all ranks, and printed already (`reported`).
        """
        try:
            self._wait_for_world()
            meeting = self._begin_meeting()
            role = FirstRank if self.world.rank == COORDINATOR else OtherRank
            return role(self, meeting).run()
        except BaseException as error:
            self._leave_after(error)
            raise

    def _leave_after(self, error: BaseException) -> None:
        """End what the start has begun, and the job too if the other ranks would wait for this one."""
        code = 0
        if isinstance(error, DaskGpuMpiError):
            if error.fatal:
                report_error(error)
                code = error.exit_code
        elif isinstance(error, Exception) and self.world.size > 1:
            # A defect of ours: the others can't know, and would wait for this rank.
            traceback.print_exc()
            code = 1
        if self.agent is not None:
            self.agent.close(1.0)
        if code:
            self.world.abort(code)
            end_job(code, self.environ)
        self.world.end()

    def _wait_for_world(self) -> None:
        """Wait until this rank knows its number, and how many ranks there are."""
        try:
            self.world = world = self.make_world()
            watch = NeighbourWatch(os.getpid(), self.deadline)
            while not world.size:
                wait_for_any(POLL, world.fileno())
                world.receive()
                watch.check(time.monotonic())
                self.end_without_launcher()
                if (by_signal := self.failure_by_signal()) is not None:
                    self.abort_by(by_signal)
        except InputError as error:
            # Without MPI no other rank can be informed. If all have the error, one report is enough.
            error.reported = wait_for_rank_0_to_report(self.environ)
            raise
        self.timeline.lap("import mpi4py, MPI_Init")

    def _begin_meeting(self) -> Meeting:
        """Find out whether this rank can do its part, and begin the meeting in any case."""
        world, options = self.world, self.options
        try:
            if world.is_whole:
                cross_check(self.environ, world.size, world.rank, self.host, library=world.library)
            if self.check is not None and self.failure is None:
                self.check(world.rank)
        except DaskGpuMpiError as error:
            self.failure = self.failure or Failure.of(error)
        if options is not None and world.rank == options.script_rank:
            threading.Thread(target=_import_for_client, daemon=True).start()
        wanted = options.interface if options is not None else None
        return Meeting(world, Hello(self.host, b"", boot_id(), list_interfaces(), wanted))

    def failure_by_signal(self) -> Failure | None:
        """The failure of a signal that this rank was sent; None: it was sent none."""
        if self.signals.got is None:
            return None
        number = self.signals.got[0]
        return Failure(Problem(f"{signal.Signals(number).name} came while the cluster started"), 128 + number)

    def abort_by(self, failure: Failure) -> NoReturn:
        """Abort the job by a signal that came before the others: they can't be informed."""
        error = failure.error(reported=False)
        error.fatal = True
        if not launchers.reports_for_all(self.environ):  # rank 0 reports it first, if all have it
            time.sleep(FAILED_GRACE)
        raise error

    def end_without_launcher(self) -> None:
        """End this process if the launcher that started it has ended."""
        if launchers.detect(self.environ) is not None and os.getppid() != _PARENT:
            report_lost_launcher(os.getpid(), _PARENT)
            flush()
            os._exit(1)


class Role:
    """A rank in the meeting, until the start is over: the part that rank 0 and the others have in common.

    It handles messages of two sources, the meeting and its own agent, and looks at the clock.
    """

    def __init__(self, start: Entering, meeting: Meeting) -> None:
        self.start, self.meeting, self.world = start, meeting, start.world
        self.agent = start.agent
        self.deadline = start.deadline
        self.failure = start.failure
        #: When `failure` was noted or sent (``time.monotonic()``), and whether it was sent to a process that makes the report.
        self.failed_at = time.monotonic()
        self.failure_is_sent = False
        #: The agent has ended, or is of no use to the start.
        self.agent_is_lost = False
        #: What the agent was sent to enter the job, and whether it has.
        self.entry: Entry | None = None
        self.has_entered = False
        self._asked_neighbours = False

    def run(self) -> Any:
        """As `Entering.run`."""
        while True:
            self._wait()
            self.start.end_without_launcher()
            if (by_signal := self.start.failure_by_signal()) is not None:
                if self.meeting.missing:
                    self.start.abort_by(by_signal)
                self.fail(by_signal)
            for source, kind, payload in self.meeting.receive():
                self.on_meeting(source, kind, payload)
            if (agent := self.agent) is not None:
                for kind, payload in agent.events(0.0):
                    if kind == Kind.UP:
                        return self._join(*payload)
                    if kind == Kind.DONE:
                        return self._leave(payload)
                    self.on_agent(kind, payload)
                if agent.lost and not self.agent_is_lost:
                    self._on_lost_agent(agent)
            self.go_on()
            self._check_clock(time.monotonic())

    def on_meeting(self, source: int, kind: Kind, payload: Any) -> None:
        """Handle a message of the meeting."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Do what can be done now."""
        raise NotImplementedError

    def check_deadline(self, over: float) -> None:
        """Judge a start that is `over` seconds behind its deadline, once the ranks have met; negative: it has so much left."""
        raise NotImplementedError

    def on_agent(self, kind: Kind, payload: Any) -> None:
        """Handle a message of this rank's agent."""
        if kind == Kind.PREPARED:
            self.start.timeline.lap("wait for the agent")
        elif kind == Kind.FAILED:
            self.fail(payload)
        elif kind == Kind.START:
            self.deadline = max(self.deadline, time.monotonic() + payload)

    def fail(self, failure: Failure) -> None:
        """Note that this rank can't take part; the first reason counts."""
        if self.failure is None:
            self.failure = failure
            self.failed_at = time.monotonic()

    def enter(self, entry: Entry, hub: socket.socket | None = None) -> None:
        """Let the agent enter the job; `hub`: the listening socket for rank 0's."""
        assert self.agent is not None  # otherwise this rank has failed
        self.start.timeline.lap("join the ranks")
        self.entry = replace(entry, closes_launcher=not self.world.is_own, steps=self.start.timeline.take())
        self.agent.send(Kind.ENTER, self.entry, fds=[] if hub is None else [hub.fileno()])

    def _wait(self) -> None:
        """Wait for a message; for MPI in this process, which has no descriptor, a moment only."""
        agent = self.agent
        polls_mpi = self.world.is_own and self.meeting.open
        wait_for_any(
            POLL_MPI if polls_mpi else POLL,
            self.world.fileno(),
            None if agent is None or agent.lost else agent.fd,
        )

    def _on_lost_agent(self, agent: AgentProcess) -> None:
        self.agent_is_lost = True
        why = agent.exit_text()
        if self.has_entered:
            text = f"the agent of this rank ended while the cluster started ({why})"
        else:
            text = f"the agent ended before it was ready ({why})"
        self.fail(Failure(Problem(text, fix="read its output above; out of memory, most often")))

    # -- the end of the start -----------------------------------------------------------------------------------

    def _join(
        self, cluster: Cluster, is_client: bool, has_scheduler: bool, scheduler_file: tuple[str, str] | None
    ) -> Joined:
        """The cluster is up, and this rank is a part of it."""
        start, agent, world = self.start, self.agent, self.world
        assert start.options is not None  # a rank that has joined has all three
        assert agent is not None
        assert self.entry is not None
        if cluster.absent:  # they never say that they have entered
            self.meeting.send_all(Kind.CLOSE)
            self.meeting.close()
        until = time.monotonic() + MEETING_END
        while self.meeting.open and time.monotonic() < until:
            for source, kind, payload in self.meeting.receive():
                self.on_meeting(source, kind, payload)
            self.go_on()
            time.sleep(0.002)
        self.meeting.close()
        world.end()  # the script's process has no child that it has not started
        start.timeline.lap("wait for the other ranks")
        return Joined(
            world.rank,
            world.size,
            start.host,
            agent,
            start.options,
            start.environ,
            cluster,
            is_client,
            has_scheduler,
            scheduler_file,
            self.entry,
            agent.take_line(),
            world,
        )

    def _leave(self, outcome: Any) -> Any:
        """The start has ended without a cluster for this rank: return the outcome of the command `plan`, or end a late rank."""
        if self.agent is not None:
            self.agent.close(1.0)
        if outcome == 1:
            say(
                f"warning: rank {self.world.rank} of {self.world.size} on {self.start.host}: the cluster started without "
                "this rank, which was late. Fix: inspect this node, or set a longer startup_timeout (--startup-timeout)"
            )
            self.world.end()
            raise SystemExit(0)  # the exit code of rank 0 is the job's
        self.meeting.close()
        self.world.end()
        return outcome

    # -- what does not come -------------------------------------------------------------------------------------

    def _check_clock(self, now: float) -> None:
        """Raise a StartupError for a rank that has not come, for an agent that hangs, or if nobody answers to a failure."""
        meeting, over = self.meeting, now - self.deadline
        if meeting.missing and over > 0:
            self._report_missing(over)
            return
        self.check_deadline(over)
        if self.failure is not None and not meeting.missing and now > self.failed_at + UNHEARD:
            # rank 0 has noticed the end of the agent, or it is lost itself
            error = self.failure.error(reported=not self.failure_is_sent)
            error.fatal = True
            raise error

    def _report_missing(self, over: float) -> None:
        """Raise the error of ranks that have not come, once the other ranks of their hosts have been asked about them."""
        if not self._asked_neighbours:
            self._asked_neighbours = True
            # of the other ranks of this host: a missing rank can't report itself
            self.meeting.report_neighbours(neighbours(os.getpid()))
        if over > NAME_MISSING + in_place_of_rank_0(self.world.rank):
            raise StartupError(self.meeting.missing_problem(allocated_hosts()), fatal=True)


class FirstRank(Role):
    """Rank 0: it invites the others, and prints how a start that fails has ended.

    Its agent has the hub and makes the report of all failures. If the agent can't, this rank makes it.
    """

    def __init__(self, start: Entering, meeting: Meeting) -> None:
        super().__init__(start, meeting)
        #: Ranks whose agents have entered.
        self._entered: set[int] = set()
        #: The failures of which this rank knows, by rank.
        self._failures: dict[int, Failure] = {}
        #: Until when this rank gathers failures for its own report (``time.monotonic()``); None: it makes none, or not yet.
        self._gathers_until: float | None = None

    def on_meeting(self, source: int, kind: Kind, payload: Any) -> None:
        """As in the base class."""
        if kind == Kind.ENTERED:
            self._entered.add(source)
        elif kind == Kind.FAILED:
            # kept here as well: this rank's agent may fail before it leads the start
            self._failures.setdefault(source, payload)
            if self._gathers_until is None and self.agent is not None and not self.agent_is_lost:
                self.agent.send(Kind.FAILED, (source, payload))

    def on_agent(self, kind: Kind, payload: Any) -> None:
        """As in the base class."""
        super().on_agent(kind, payload)
        if kind == Kind.ENTERED:
            self.has_entered = True
            self._entered.add(COORDINATOR)
            if self.entry is not None:  # its agent has the hub now
                self.meeting.send_all(Kind.ENTER, Invitation(*self.entry.hub, self.entry.config))
        elif kind == Kind.FAILED and not self.has_entered:
            self.agent_is_lost = True  # it can't lead the start
        elif kind == Kind.FAIL:
            self._end_all(*payload)

    def go_on(self) -> None:
        """Invite the others when all have come, end the meeting when all have entered; else report failures."""
        if self.meeting.missing:
            return
        if self.failure is None and self.entry is None:
            self._invite()
        if self.failure is not None and self._gathers_until is None:
            self._begin_report(self.failure)
        if len(self._entered) == self.world.size and self.meeting.open:
            self.meeting.send_all(Kind.CLOSE)
            self.meeting.close()
        until = self._gathers_until
        if until is not None and (len(self._failures) == self.world.size or time.monotonic() > until):
            self._report()

    def _invite(self) -> None:
        """Let this rank's agent open the hub; the others are invited once it has."""
        # first, since it takes a while: this process listens only until the agent has the socket
        config = make_credentials(job_end=end_time(self.start.environ))
        try:
            hub = self.meeting.open_hub()
        except InputError as error:
            self.fail(Failure.of(error))
            return
        address: tuple[str, int] = ("", 0) if hub is None else hub.getsockname()[:2]
        self.enter(Entry(COORDINATOR, self.world.size, address, config, self.meeting.hosts), hub)
        if hub is not None:
            hub.close()

    def _begin_report(self, failure: Failure) -> None:
        """Send this rank's failure to its agent, once; if that does not lead the start, begin the report here."""
        now = time.monotonic()
        if self.agent is None or self.agent_is_lost or self.entry is None:
            self._failures[COORDINATOR] = failure
            self._gathers_until, self.failed_at = now + GATHER_FAILURES, now
        elif not self.failure_is_sent:
            self.failure_is_sent, self.failed_at = True, now
            self.agent.send(Kind.FAILED, (COORDINATOR, failure))

    def _report(self) -> None:
        """Raise the report of the failures that were gathered, after it was printed and sent to all."""
        size = self.world.size
        failure = one_report(self._failures, self.meeting.hosts, size)
        # Ranks that are worlds of one, under a foreign launcher, are all rank 0.
        error = failure.error(reported=size == 1 and wait_for_rank_0_to_report(self.start.environ))
        report_error(error)
        self._send_end(failure, fatal=False)
        raise error

    def _end_all(self, failure: Failure, fatal: bool) -> None:
        """Raise the report that this rank's agent has made; `fatal`: some ranks are silent."""
        error = failure.error(reported=False)
        report_error(error)  # before any other rank can exit: a launcher ends all ranks when one fails
        self._send_end(failure, fatal=fatal)
        error.fatal = not self._agents_end(failure, fatal) and fatal
        raise error

    def _send_end(self, failure: Failure, *, fatal: bool) -> None:
        """Send all ranks how the start ends, by the meeting: the hub may not know yet of a rank that has entered."""
        self.meeting.send_all(Kind.FAIL, (failure, fatal))
        if not fatal:
            self.meeting.close()

    def _agents_end(self, failure: Failure, fatal: bool) -> bool:
        """Let this rank's agent send the other agents how the start ends; returns whether they have all ended then."""
        if self.agent is None:
            return False
        self.agent.send(Kind.FAIL, (failure, fatal))
        until = time.monotonic() + UNHEARD + 1.0
        while not self.agent.lost and time.monotonic() < until:
            for kind, code in self.agent.events(POLL):
                if kind == Kind.ENDED:
                    return not code
        return False

    def check_deadline(self, over: float) -> None:
        """As in the base class: its agent may hang in its imports, or later."""
        if over > 0 and not self.has_entered and self.failure is None:
            self.fail(
                Failure(
                    Problem(
                        "the agent did not finish its imports before the start-up timeout (startup_timeout)",
                        fix="have the environment on a faster file system or in a container image, or set a longer "
                        "startup_timeout (--startup-timeout)",
                    )
                )
            )
            self.agent_is_lost = True  # it can't lead the start
        if over > HANGING and self._gathers_until is None:
            raise StartupError(
                f"the agent of rank 0 has not responded before {DEADLINE}",
                fix="inspect that node (nvidia-smi, df, no memory left?), or leave it out of the job",
                where=f"rank {COORDINATOR} of {self.world.size} on {self.start.host}",
                fatal=True,
            )


class OtherRank(Role):
    """Any rank but rank 0: it enters the job by rank 0's invitation, and sends its failure to rank 0 or to the hub."""

    def on_meeting(self, source: int, kind: Kind, payload: Any) -> None:
        """As in the base class."""
        if kind == Kind.ENTER and self.agent is not None and self.failure is None:
            invitation: Invitation = payload
            hub = (invitation.address, invitation.port)
            self.enter(Entry(self.world.rank, self.world.size, hub, invitation.config))
        elif kind == Kind.FAIL:
            raise payload[0].error(reported=True)
        elif kind == Kind.CLOSE:
            self.meeting.close()

    def on_agent(self, kind: Kind, payload: Any) -> None:
        """As in the base class."""
        super().on_agent(kind, payload)
        if kind == Kind.ENTERED:
            self.has_entered = True
            self.meeting.send(COORDINATOR, Kind.ENTERED)
        elif kind == Kind.GONE:
            time.sleep(GATHER_FAILURES + FLUSH)  # rank 0 knows more, if it lives
            found = "the connection to its agent has ended while the cluster started"
            raise self._lost_rank_0(found, reported=self.world.rank != 1)
        elif kind == Kind.FAIL:
            raise payload[0].error(reported=True)

    def go_on(self) -> None:
        """Send this rank's failure as soon as that is possible, once."""
        if self.failure is None or self.failure_is_sent:
            return
        if self.agent is not None and not self.agent_is_lost and self.has_entered:
            self.agent.send(Kind.FAILED, (self.world.rank, self.failure))
        elif self.meeting.open and not self.meeting.missing:
            self.meeting.send(COORDINATOR, Kind.FAILED, self.failure)
        else:
            return
        self.failure_is_sent, self.failed_at = True, time.monotonic()

    def check_deadline(self, over: float) -> None:
        """As in the base class: rank 0 leads the start, and may be lost."""
        if over > RANK_0_LOST + in_place_of_rank_0(self.world.rank) - RANK_0_GRACE:
            raise self._lost_rank_0(f"no response before {DEADLINE}", reported=False)

    def _lost_rank_0(self, found: str, *, reported: bool) -> StartupError:
        return StartupError(
            found,
            where="rank 0",
            fix="inspect the node of rank 0 (is that rank stopped, the node down?), or leave that node out of the job",
            reported=reported,
            fatal=True,
        )


#: The process that has started this one.
_PARENT = os.getppid()


def _import_for_client() -> None:
    """Import in a thread what the script's client needs; a failed import is reported where the module is used."""
    with contextlib.suppress(Exception):
        importlib.import_module("distributed")
