"""The start of a rank: MPI's child and the agent first, then the meeting and the session; and the signals that end the script.

`start` is called by `initialize` and `execute` (`job.api`), by the command that runs a script (`cli.main`) and by `check`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.agent.handle import (
    AgentProcess,
    begin_agent,
    import_path,
    release_cuda_keepalive,
    start_cuda_keepalive,
)
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.signals import LOST, Action, Signals, insist_on, install, is_ours, python_ends
from dask_gpu_mpi.base.streams import open_missing, say
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import WITHOUT_OPTIONS
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.child_processes import forget_cluster, mark_children, refuse_children
from dask_gpu_mpi.machine.nvidia import own_contexts
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.sites import launchers

# Modules whose import takes long are imported while the agent starts.
if TYPE_CHECKING:
    from dask_gpu_mpi.job.member import Member
    from dask_gpu_mpi.job.session import Session
    from dask_gpu_mpi.mpi.world import World

#: This process's part in its last cluster, and whether the command started that, and not the script; written by `start`.
_member: Member | None = None
_by_command = False
#: Whether this process has met the other ranks of its launcher by another process than its own MPI, which a launcher lets it do
#: once; written by `RankStart`.
_has_met = False


def start(
    read_options: Callable[[], Options],
    *,
    comm: Any = None,
    leave_open: bool = False,
    has_client: bool = True,
    check: Callable[[int, Options], None] | None = None,
    by_command: bool = False,
    quiet: bool = False,
) -> tuple[Member, Session | None]:
    """Join the cluster; returns a session on the client rank, None elsewhere and without a script.

    `read_options` imports Dask's configuration, which takes long; its InputError is reported once for all ranks. `comm`: None is
    ``COMM_WORLD``. `leave_open`: ``exit=False``. `has_client`: some rank runs a script. ``check(rank, options)`` raises an
    InputError if this rank can't do its part. `by_command`: ``python -m dask_gpu_mpi`` starts the cluster, and `initialize` in
    its script returns that session. `quiet`: print nothing about the cluster. Raises a DaskGpuMpiError, the same on all ranks.
    """
    global _member, _by_command
    rank = RankStart(read_options, comm, leave_open, has_client, check, by_command)
    joined = rank.run()
    from dask_gpu_mpi.job.member import Member

    if _member is not None:  # of an earlier cluster of this program
        atexit.unregister(_member.abort_after_failure)
    member = Member(joined, rank.signals, leave_open=leave_open, has_client=has_client)
    _member, _by_command = member, by_command
    if joined.world.is_own:
        from dask_gpu_mpi.mpi.library import unlink_shared_memory

        unlink_shared_memory()
        if not leave_open:
            # nobody else could: most ranks never return from `initialize`, and the script's would wait for them in MPI
            atexit.register(joined.world.finalize)
    if not joined.is_client:
        return member, None
    from dask_gpu_mpi.job.announcement import announce, announce_waiting

    if not quiet:
        announce(joined, time.monotonic() - rank.began)
    if not has_client:
        if joined.options.recorded:
            name = "summary" if joined.options.report is None else "report"
            say(f"warning: {name}: no effect without a script. Fix: give a script, or leave it out")
        announce_waiting(joined.options)
        return member, None
    return member, _open_session(member, rank, quiet=quiet)


def plan_of_allocation(read_options: Callable[[], Options]) -> Plan | None:
    """The start up to the plan, for the command `plan`: the plan on rank 0, None on the other ranks.

    A DaskGpuMpiError is the one report of all failures, as of `start`.
    """
    rank = RankStart(read_options, by_command=True, plan_only=True)
    made = rank.run()
    rank.signals.give_back()
    return made if isinstance(made, Plan) else None


def _open_session(member: Member, rank: RankStart, *, quiet: bool) -> Session:
    """Open the cluster to the script, which gets the signals, and end it with this process."""
    from dask_gpu_mpi.job.dask_client import note_start
    from dask_gpu_mpi.job.session import ScriptCluster, Session

    options, signals = member.joined.options, rank.signals
    cluster = ScriptCluster(member, rank.began, on_signal, quiet=quiet)
    try:
        cluster.open()
        # The last step of the interpreter, since threads of the script may outlive its main program.
        atexit.register(cluster.end)
    except BaseException:
        cluster.end()  # else the other ranks would wait for this one
        signals.give_back()
        raise
    # Not before: from here on the exception of a signal ends the script, and with it the cluster.
    signals.give_back()
    handle_loss()
    if options.walltime_signal is not None:
        handle_signal(getattr(signal, f"SIG{options.walltime_signal}"))
    if signals.got is not None:
        # It came while the cluster started, and the script handles it.
        signal.raise_signal(signals.got[0])
    member.joined.world.before_end(cluster.end)  # the other ranks end their MPI after the cluster
    if rank.by_command:
        note_start()
        # What was made before the script stays until the end, where Python would look at it three times: 0.1 s, with cuDF more.
        gc.freeze()
    return Session(cluster)


def command_session() -> tuple[Session, Options] | None:
    """The open session that ``python -m dask_gpu_mpi`` has started for this script, and its options; None: there is none."""
    if _member is None or not _by_command:
        return None
    from dask_gpu_mpi.job.session import session_of_process

    session = session_of_process()
    return None if session is None or session.closed else (session, _member.joined.options)


@dataclass
class RankStart:
    """The start of one rank, until the cluster or the plan is there; the arguments are those of `start`.

    First it starts two processes, which work while this one imports and reads its options: MPI's child, which meets the other
    ranks, and the agent, which imports Dask. If one can't be started, or the options can't be read, that is this rank's failure.
    It meets the other ranks all the same, and rank 0 reports the failures of all (`entering`).
    """

    read_options: Callable[[], Options]
    comm: Any = None
    leave_open: bool = False
    has_client: bool = True
    check: Callable[[int, Options], None] | None = None
    by_command: bool = False
    #: The start ends with the plan.
    plan_only: bool = False

    def __post_init__(self) -> None:
        #: When the start began (``time.monotonic()``).
        self.began = 0.0
        #: Taken by `run`, and given back by its caller.
        self.signals = Signals()
        #: This process's environment, with the launcher's variables.
        self._environ: dict[str, str] = {}
        self._timeline = Timeline("rank")
        #: None: they could not be read, or not yet.
        self._options: Options | None = None
        self._agent: AgentProcess | None = None
        self._failure: Failure | None = None
        #: How this rank meets the others, unless by MPI of its own process.
        self._child: World | None = None
        self._keepalive: subprocess.Popen[bytes] | None = None

    def run(self) -> Any:
        """Return what `Entering.run` does, with the signals still taken; after an error nothing of this start is left."""
        _refuse_second_start()
        forget_cluster()  # of a script that has started this job
        self.began = time.monotonic()
        self.signals.take()
        self._environ = dict(os.environ)
        mark_children()  # for the script's children only: the agent gets the environment from before
        self._timeline.lap("python")
        # as in the agent: modules that are imported stay, and collections of garbage would be a tenth of the import
        collects = gc.isenabled()
        gc.disable()
        try:
            self._start_processes()
            joined = self._enter()
        except BaseException:
            if self._agent is not None:
                self._agent.close(1.0)
            self.signals.give_back()
            raise
        finally:
            if collects:
                gc.enable()
            if self._keepalive is not None:
                release_cuda_keepalive(self._keepalive)
        if self._child is not None:
            # MPI of the script, or of its children, is a world of one: this process is no MPI process.
            kept = launchers.scrub(os.environ)
            for name in [name for name in os.environ if name not in kept]:
                del os.environ[name]
        return joined

    def _start_processes(self) -> None:
        """Start MPI's child and the agent, and read the options meanwhile; sets `_failure` if that fails."""
        global _has_met
        from dask_gpu_mpi.mpi.world import world_of

        try:
            # MPI's child is the first: it has no descriptor of the agent's.
            if not (self.comm is not None or self.leave_open or "mpi4py.MPI" in sys.modules):
                _has_met = True
                self._child = world_of(self._environ, import_path(), forks=self.by_command)
            with _agent_starts():
                self._agent = AgentProcess(self._environ)
            self._options = self.read_options()
            self._timeline.lap("read the options")
            if not self.plan_only:
                self._keepalive = start_cuda_keepalive(self._options, self._environ)
            with _agent_starts():
                self._agent = begin_agent(self._agent, self._options, self._environ)
        except (InputError, StartupError) as error:
            self._failure = Failure.of(error)
            if self._agent is not None:
                self._agent.close(1.0)
                self._agent = None
        self._timeline.lap("start the agent")

    def _enter(self) -> Any:
        """Configure the agent, and enter the job with it, or with the failure."""
        from dask_gpu_mpi.job.entering import Entering
        from dask_gpu_mpi.job.member import configuration

        self._timeline.lap("import")
        options, agent = self._options, self._agent
        deadline = self.began + WITHOUT_OPTIONS
        if options is not None and self._failure is None:
            deadline = self.began + options.startup_timeout
        if options is not None and agent is not None:
            agent.configure(
                configuration(
                    options,
                    self._environ,
                    leave_open=self.leave_open,
                    has_client=self.has_client,
                    contexts=own_contexts(),
                    mpi_in_rank=self.leave_open and self._child is None,
                    plan_only=self.plan_only,
                    started=self.began,
                    deadline=deadline,
                )
            )
            self._timeline.lap("configure the agent")
        return Entering(
            self._environ,
            self.signals,
            self._timeline,
            deadline,
            self._make_world,
            options,
            agent,
            self._failure,
            self._check_rank,
        ).run()

    def _make_world(self) -> World:
        """The ranks of this job: those of this process's own MPI, if it has one."""
        from dask_gpu_mpi.mpi.world import World, own_world, world_of

        own = own_world(self.comm, self._environ, socket.gethostname(), starts=self.leave_open)
        # MPI's child could not be started, or mpi4py.MPI is imported but not initialized
        if own is None and self._child is None:
            self._child = world_of(self._environ, import_path())
        return own or self._child or World()

    def _check_rank(self, rank: int) -> None:
        """Raise an InputError if this rank can't do its part, once its number is known."""
        options = self._options
        assert options is not None  # called if they could be read
        if options.report is not None and rank == options.script_rank:
            from dask_gpu_mpi.view.report_data import check_report

            check_report(options.report, f"rank {rank} on {socket.gethostname()}")
        if self.check is not None:
            self.check(rank, options)


def _refuse_second_start() -> None:
    """Raise an InputError if this process, or the rank that it is a child of, can't start a cluster now."""
    refuse_children()
    if _by_command:
        raise InputError(
            "initialize or execute: the command has started this job's cluster, and a job has one",
            expected="a function that the script calls by itself, and initialize() only while that cluster runs",
            fix="remove this call, or start the script by `mpirun -np N python SCRIPT`",
        )
    if _member is not None and not (_member.leave_open and _member.ending.stopped):
        raise InputError(  # the other ranks are in that cluster, and can't take part in a report
            "initialize or execute: called a second time in this job",
            expected="once: one cluster at a time",
            fix="remove this call, or end the first cluster before it, with initialize(exit=False) and session.close()",
        )
    if not sys.executable:
        raise InputError(
            f"this process has no path of Python: sys.executable is {sys.executable!r}",
            expected="the path of a Python program",
            fix="set sys.executable before initialize()",
        )
    if _has_met and launchers.detect(os.environ) is not None:
        raise InputError(
            "initialize: called again after a start that has failed",
            expected="once: a launcher lets its ranks meet once",
            fix="correct the reason of the failure, and start the job again",
            reported=not launchers.reports_for_all(os.environ),
        )


@contextlib.contextmanager
def _agent_starts() -> Iterator[None]:
    """Turn an error of the system while an agent is started into a StartupError."""
    try:
        yield
    except OSError as error:
        raise StartupError(
            f"could not start the agent of this rank ({error.strerror})",
            fix="allow more files, processes, memory (ulimit -a)",
        ) from error


# Changes in the process of a rank: standard streams, `sys.excepthook`, SIGTERM.


def prepare_process() -> None:
    """Let an uncaught error of ours end the script with its line and its exit code, and SIGTERM run the script's `finally`."""
    open_missing()
    outcome.install(_label)
    # Without a handler it ends Python without any `finally`.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handle_signal(signal.SIGTERM)


def _label() -> str | None:
    """The line before a traceback of a script that continues on other ranks as well (``exit=False``); None on the client rank."""
    if _member is None or _member.joined.is_client:
        return None
    return f"rank {_member.rank} of {_member.joined.size} on {_member.joined.host} failed:"


def handle_signal(number: int) -> None:
    """Let a signal end the script by an exception (`on_signal`); only the main thread can set that."""
    if threading.current_thread() is threading.main_thread():
        install(number, on_signal)


def handle_loss() -> None:
    """Let a lost cluster end the script by an exception in the main thread, even if the script handles SIGTERM."""
    before = Action.now(LOST)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and (is_ours(LOST) or (before.handler is signal.SIG_DFL and not before.in_c)):
        install(LOST, _on_loss)


def _on_loss(number: int, frame: FrameType | None) -> None:
    from dask_gpu_mpi.job.session import script_cluster

    cluster = script_cluster()
    if cluster is not None and cluster.member.ending.lost is not None:  # else another process has sent it
        on_signal(number, frame)


def on_signal(number: int, frame: FrameType | None) -> None:
    """End the script by a SystemExit, or by the exception of its session."""
    # Slurm sends TERM twice at once, and KILL some seconds later, so the script's `finally` must not be interrupted.
    # Not SIG_IGN, which children inherit: a Pool in `finally`, or in a callback, could not end its processes.
    install(number, lambda *_: None)
    if outcome.is_reporting():
        return  # the script has ended, and can't receive an exception
    from dask_gpu_mpi.job.session import State, script_cluster

    cluster = script_cluster()
    if cluster is not None:
        ends = python_ends()
        if ends and cluster.state is State.ENDED and not cluster.member.leave_open:
            return
        try:
            cluster.interrupt(number, frame)
        except BaseException as error:
            if ends:  # Python drops exceptions while it waits for the script's threads, and in its `atexit`
                insist_on(outcome.code_of_exception(error))
            raise
    stopped = outcome.SignalExit(number)
    outcome.note(stopped.outcome)
    raise stopped
