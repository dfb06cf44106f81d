"""The start of one rank: it meets the others, lets its agent enter the job, and waits for the cluster, or for the one report.

A rank that can't take part, because of its options, its node or its agent, sends that failure, and waits for the one report.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.base.failures import Failure, one_report, report_error
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
from dask_gpu_mpi.network.interfaces import boot_id, choose_addresses, list_interfaces
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.sites.batch import allocated_hosts, end_time
from dask_gpu_mpi.startup.meeting import DEADLINE, Hello, Invitation, Meeting, listen
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
    #: Its agent; None: it has ended.
    agent: AgentProcess | None
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
    """One rank's way into the job."""

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
    failure: Failure | None = None
    #: ``check(rank)`` raises an InputError if this rank can't do its part.
    check: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self._host = socket.gethostname()
        self._world = World()
        #: When `failure` was noted (``time.monotonic()``), and whether it was sent to those who make the report.
        self._failed_at = time.monotonic()
        self._is_told = False
        #: The agent has ended, or is of no use to the start.
        self._agent_is_lost = False
        #: What the agent was sent to enter the job.
        self._entry: Entry | None = None
        #: Ranks whose agents have entered.
        self._entered: set[int] = set()
        #: Rank 0 makes the report itself if its agent does not lead the start: the failures of which it knows, by rank, and until
        #: when it gathers more of them (``time.monotonic()``); None: it does not, or not yet.
        self._failures: dict[int, Failure] = {}
        self._gathers_until: float | None = None
        self._asked_neighbours = False

    def run(self) -> Any:
        """Return a `Joined`, or what the command `plan` has found: the plan on rank 0, an int elsewhere.

        A DaskGpuMpiError is the one report of all failures, the same on all ranks, and printed already (`reported`).
        """
        try:
            self._meet()
            return self._until_over()
        except BaseException as error:
            code = 0
            if isinstance(error, DaskGpuMpiError):
                if error.fatal:
                    report_error(error)
                    code = error.exit_code
            elif isinstance(error, Exception) and self._world.size > 1:
                # A defect of ours: the others can't know, and would wait for this rank.
                traceback.print_exc()
                code = 1
            if self.agent is not None:
                self.agent.close(1.0)
            if code:
                self._world.abort(code)
                end_job(code, self.environ)
            self._world.end()
            raise

    # -- the world ----------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Wait until the ranks of this job are known, and begin the meeting."""
        try:
            self._world = world = self.make_world()
            watch = NeighbourWatch(os.getpid(), self.deadline)
            while not world.size:
                self._wait(world.fileno())
                world.receive()
                watch.check(time.monotonic())
                self._end_without_launcher()
                self._check_signal(alone=True)
        except InputError as error:
            # Without MPI no other rank can be informed. If all have the error, one report is enough.
            error.reported = wait_for_rank_0_to_report(self.environ)
            raise
        self.timeline.lap("import mpi4py, MPI_Init")
        rank, size = world.rank, world.size
        try:
            if world.is_whole:
                cross_check(self.environ, size, rank, self._host, library=world.library)
            if self.check is not None and self.failure is None:
                self.check(rank)
        except DaskGpuMpiError as error:
            self._fail(Failure.of(error))
        options = self.options
        if options is not None and rank == options.script_rank:
            threading.Thread(target=_import_for_client, daemon=True).start()
        wanted = options.interface if options is not None else None
        self._meeting = Meeting(world, Hello(self._host, b"", boot_id(), list_interfaces(), wanted))

    @property
    def _is_first(self) -> bool:
        """Whether this is rank 0, which all others meet, and whose agent leads the start."""
        return self._world.rank == COORDINATOR

    def _check_signal(self, *, alone: bool) -> None:
        """Let a signal end the start on all ranks; `alone`: the others have not come, so this raises, and the job is aborted."""
        if self.signals.got is None:
            return
        number = self.signals.got[0]
        failure = Failure(
            Problem(f"{signal.Signals(number).name} came while the cluster started"), 128 + number
        )
        if not alone:
            self._fail(failure)
            return
        error = failure.error(reported=False)
        error.fatal = True
        if not launchers.reports_for_all(self.environ):  # rank 0 reports it first, if all have it
            time.sleep(FAILED_GRACE)
        raise error

    def _end_without_launcher(self) -> None:
        if launchers.detect(self.environ) is not None and os.getppid() != _PARENT:
            report_lost_launcher(os.getpid(), _PARENT)
            flush()
            os._exit(1)

    def _wait(self, *fds: int | None) -> None:
        """Wait for a message; for MPI in this process a moment only."""
        poller = select.poll()
        for fd in fds:
            if fd is not None and fd >= 0:
                poller.register(fd, select.POLLIN)
        poller.poll(1000 * (POLL_MPI if self._world.is_own and self._meeting.open else POLL))

    # -- until the cluster is up --------------------------------------------------------------------------------

    def _until_over(self) -> Any:
        while True:
            agent = self.agent
            self._wait(self._world.fileno(), None if agent is None or agent.lost else agent.fd)
            self._end_without_launcher()
            self._check_signal(alone=bool(self._meeting.missing))
            for source, kind, payload in self._meeting.receive():
                self._on_meeting(source, kind, payload)
            if agent is not None:
                for kind, payload in agent.events(0.0):
                    if kind == Kind.UP:
                        return self._joined(*payload)
                    if kind == Kind.DONE:
                        return self._done(payload)
                    self._on_agent(kind, payload)
                if agent.lost and not self._agent_is_lost:
                    self._on_lost_agent(agent)
            self._go_on()
            self._check_deadlines(time.monotonic())

    def _go_on(self) -> None:
        """Do what can be done now."""
        if self._is_first:
            self._lead()
        elif self.failure is not None and not self._is_told:
            self._tell(self.failure)

    def _tell(self, failure: Failure) -> None:
        """On another rank: send this rank's failure to the hub, or to rank 0, as soon as that is possible."""
        rank = self._world.rank
        if self.agent is not None and not self._agent_is_lost and rank in self._entered:
            self.agent.send(Kind.FAILED, (rank, failure))
        elif self._meeting.open and not self._meeting.missing:
            self._meeting.send(COORDINATOR, Kind.FAILED, failure)
        else:
            return
        self._is_told = True
        self._failed_at = time.monotonic()

    def _lead(self) -> None:
        """On rank 0: invite the others when all have come, end the meeting when all have entered; else report failures."""
        meeting, size = self._meeting, self._world.size
        if not meeting.missing:
            if self.failure is None and self._entry is None:
                self._invite()
            if (
                self.failure is not None
                and self._gathers_until is None
                and not self._tell_agent(self.failure)
            ):
                self._failures[COORDINATOR] = self.failure
                self._gathers_until = time.monotonic() + GATHER_FAILURES
            if len(self._entered) == size and meeting.open:
                meeting.send_all(Kind.CLOSE)
                meeting.close()
        until = self._gathers_until
        if until is not None and (len(self._failures) == size or time.monotonic() > until):
            failure = one_report(self._failures, meeting.hosts, size)
            # Ranks that are worlds of one, under a foreign launcher, are all rank 0.
            error = failure.error(reported=size == 1 and wait_for_rank_0_to_report(self.environ))
            report_error(error)
            self._spread(failure, fatal=False)
            raise error

    def _tell_agent(self, failure: Failure) -> bool:
        """On rank 0: send its agent this rank's failure, once; False: that does not lead the start, and makes no report."""
        if self.agent is None or self._agent_is_lost or self._entry is None:
            return False
        if not self._is_told:
            self._is_told = True
            self.agent.send(Kind.FAILED, (COORDINATOR, failure))
        return True

    def _fail(self, failure: Failure) -> None:
        """Note that this rank can't take part; the first reason counts."""
        if self.failure is None:
            self.failure = failure
            self._failed_at = time.monotonic()

    def _spread(self, failure: Failure, *, fatal: bool) -> None:
        """On rank 0: tell all ranks how the start ends. The hub may not know yet of a rank that has entered."""
        self._meeting.send_all(Kind.FAIL, (failure, fatal))
        if not fatal:
            self._meeting.close()

    def _invite(self) -> None:
        """On rank 0, when all ranks have come: tell all where the hub is."""
        meeting = self._meeting
        ranks = sorted(meeting.here)
        hellos = [meeting.here[rank] for rank in ranks]
        config = make_credentials(job_end=end_time(self.environ))
        size = len(ranks)
        hub: tuple[str, int] = ("", 0)
        sock: socket.socket | None = None
        if size > 1:
            names, machines = [each.host for each in hellos], [each.machine for each in hellos]
            same = names if len(set(machines)) == len(set(names)) else machines
            networks = {rank: meeting.here[rank].interfaces for rank in ranks}
            wanted = [each.wanted for each in hellos]
            try:
                sock = listen(choose_addresses(same, networks, wanted)[1][COORDINATOR])
            except InputError as error:
                self._fail(Failure.of(error))
                return
            except OSError as error:
                self._fail(
                    Failure(
                        Problem(
                            f"rank 0 can't listen for the other ranks ({error.strerror})",
                            fix="choose another network with interface (--interface)",
                        ),
                        InputError.exit_code,
                    )
                )
                return
            hub = sock.getsockname()[:2]
        self._enter(hub, config, meeting.hosts, fds=[] if sock is None else [sock.fileno()])
        if sock is not None:
            sock.close()

    def _enter(
        self,
        hub: tuple[str, int],
        config: dict[str, Any],
        hosts: Mapping[int, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Let the agent enter the job, at its hub."""
        assert self.agent is not None  # otherwise this rank has failed
        self.timeline.lap("join the ranks")
        self._entry = Entry(
            self._world.rank,
            self._world.size,
            hub,
            config,
            dict(hosts or {}),
            closes_launcher=not self._world.is_own,
            steps=self.timeline.take(),
        )
        self.agent.send(Kind.ENTER, self._entry, fds=fds)

    # -- messages -----------------------------------------------------------------------------------------------

    def _on_meeting(self, source: int, kind: Kind, payload: Any) -> None:
        is_first = self._is_first
        match kind:
            case Kind.ENTERED if is_first:
                self._entered.add(source)
            case Kind.FAILED if is_first:
                # this rank's agent may fail before it leads the start
                self._failures.setdefault(source, payload)
                if self._gathers_until is None and self.agent is not None and not self._agent_is_lost:
                    self.agent.send(Kind.FAILED, (source, payload))
            case Kind.ENTER if not is_first and self.agent is not None and self.failure is None:
                self._enter((payload.address, payload.port), payload.config)
            case Kind.FAIL if not is_first:
                raise payload[0].error(reported=True)
            case Kind.CLOSE if not is_first:
                self._meeting.close()

    def _on_agent(self, kind: Kind, payload: Any) -> None:
        rank = self._world.rank
        match kind:
            case Kind.PREPARED:
                self.timeline.lap("wait for the agent")
            case Kind.ENTERED:
                self._entered.add(rank)
                if not self._is_first:
                    self._meeting.send(COORDINATOR, Kind.ENTERED)
                elif self._entry is not None:  # its agent has the hub
                    self._meeting.send_all(Kind.ENTER, Invitation(*self._entry.hub, self._entry.config))
            case Kind.FAILED:
                self._fail(payload)
                if self._is_first and rank not in self._entered:  # it can't lead the start
                    self._agent_is_lost = True
            case Kind.START:
                self.deadline = max(self.deadline, time.monotonic() + payload)
            case Kind.GONE:
                time.sleep(GATHER_FAILURES + FLUSH)  # rank 0 knows more, if it lives
                found = "the connection to its agent has ended while the cluster started"
                raise self._lost_rank_0(found, reported=rank != 1)
            case Kind.FAIL:
                failure, fatal = payload
                error = failure.error(reported=not self._is_first)
                if self._is_first:
                    # printed before any other rank can exit: a launcher ends all ranks when one fails
                    report_error(error)
                    self._spread(failure, fatal=fatal)
                    error.fatal = not self._have_ended(payload) and fatal
                raise error

    def _have_ended(self, payload: tuple[Failure, bool]) -> bool:
        """On rank 0: let its agent tell the others how the start ends; returns whether they all end then."""
        if self.agent is None:
            return False
        self.agent.send(Kind.FAIL, payload)
        until = time.monotonic() + UNHEARD + 1.0
        while not self.agent.lost and time.monotonic() < until:
            for kind, code in self.agent.events(POLL):
                if kind == Kind.ENDED:
                    return not code
        return False

    def _on_lost_agent(self, agent: AgentProcess) -> None:
        self._agent_is_lost = True
        why = agent.exit_text()
        if self._world.rank in self._entered:
            text = f"the agent of this rank ended while the cluster started ({why})"
        else:
            text = f"the agent ended before it was ready ({why})"
        self._fail(Failure(Problem(text, fix="read its output above; out of memory, most often")))

    def _joined(
        self, cluster: Cluster, is_client: bool, has_scheduler: bool, scheduler_file: tuple[str, str] | None
    ) -> Joined:
        options, agent, world = self.options, self.agent, self._world
        assert options is not None  # a rank that has joined has both
        assert agent is not None
        assert self._entry is not None
        if cluster.absent:  # they never say that they have entered
            self._meeting.send_all(Kind.CLOSE)
            self._meeting.close()
        until = time.monotonic() + MEETING_END
        while self._meeting.open and time.monotonic() < until:
            for source, kind, payload in self._meeting.receive():
                self._on_meeting(source, kind, payload)
            self._go_on()
            time.sleep(0.002)
        self._meeting.close()
        world.end()  # the script's process has no child that it has not started
        self.timeline.lap("wait for the other ranks")
        return Joined(
            world.rank,
            world.size,
            self._host,
            agent,
            options,
            self.environ,
            cluster,
            is_client,
            has_scheduler,
            scheduler_file,
            self._entry,
            agent.take_line(),
            world,
        )

    def _done(self, outcome: Any) -> Any:
        """The start has ended without a cluster for this rank."""
        if self.agent is not None:
            self.agent.close(1.0)
        if outcome == 1:
            say(
                f"warning: rank {self._world.rank} of {self._world.size} on {self._host}: the cluster started without "
                "this rank, which was late. Fix: inspect this node, or set a longer startup_timeout (--startup-timeout)"
            )
            self._world.end()
            raise SystemExit(0)  # the exit code of rank 0 is the job's
        self._meeting.close()
        self._world.end()
        return outcome

    # -- what does not come -------------------------------------------------------------------------------------

    def _check_deadlines(self, now: float) -> None:
        """Raise a StartupError for a rank that has not come, for an agent that hangs, or if nobody answers to a failure."""
        meeting, rank, is_first = self._meeting, self._world.rank, self._is_first
        over = now - self.deadline
        if meeting.missing and over > 0:
            if not self._asked_neighbours:
                self._asked_neighbours = True
                # of the other ranks of this host: a missing rank can't report itself
                meeting.report_neighbours(neighbours(os.getpid()))
            if over > NAME_MISSING + in_place_of_rank_0(rank):
                raise StartupError(meeting.missing_problem(allocated_hosts()), fatal=True)
            return
        if is_first and over > 0 and rank not in self._entered and self.failure is None:
            self._fail(
                Failure(
                    Problem(
                        "the agent did not finish its imports before the start-up timeout (startup_timeout)",
                        fix="have the environment on a faster file system or in a container image, or set a longer "
                        "startup_timeout (--startup-timeout)",
                    )
                )
            )
            self._agent_is_lost = True  # it can't lead the start
        if is_first and over > HANGING and self._gathers_until is None:
            raise StartupError(
                f"the agent of rank 0 has not responded before {DEADLINE}",
                fix="inspect that node (nvidia-smi, df, no memory left?), or leave it out of the job",
                where=f"rank {rank} of {self._world.size} on {self._host}",
                fatal=True,
            )
        if not is_first and over > RANK_0_LOST + in_place_of_rank_0(rank) - RANK_0_GRACE:
            raise self._lost_rank_0()
        if (
            self._gathers_until is None
            and self.failure is not None
            and not meeting.missing
            and now > self._failed_at + UNHEARD
        ):
            # rank 0 has noticed the end of the agent, or it is lost itself
            error = self.failure.error(reported=not self._is_told)
            error.fatal = True
            raise error

    def _lost_rank_0(
        self, found: str = f"no response before {DEADLINE}", *, reported: bool = False
    ) -> StartupError:
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
