"""The start of a rank: the agent first, then the meeting with the other ranks, then the session."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.agent.cuda_keepalive import release, start_cuda_keepalive
from dask_gpu_mpi.agent.handle import AgentProcess, begin_agent, import_path
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
    from dask_gpu_mpi.job.session import ClientEnd, Session
    from dask_gpu_mpi.mpi.world import World

#: This process's part in its last cluster.
_member: Member | None = None
#: Whether this process has met the other ranks of its launcher by another process than its own MPI.
_has_met = False
#: Whether the command started that cluster, and not the script.
_by_command = False


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
    its script returns that session (`command_session`). `quiet`: print nothing about the cluster that is up. Raises a
    DaskGpuMpiError, the same on all ranks.
    """
    global _member, _by_command
    joined, started, signals = _enter(
        read_options,
        comm=comm,
        leave_open=leave_open,
        has_client=has_client,
        check=check,
        by_command=by_command,
    )
    from dask_gpu_mpi.job.member import Member

    _by_command = by_command
    if _member is not None:  # of an earlier cluster of this program
        atexit.unregister(_member.abort_after_failure)
    _member = member = Member(joined, signals, leave_open=leave_open, has_client=has_client)
    if joined.world.is_own:
        from dask_gpu_mpi.mpi.library import unlink_shared_memory

        unlink_shared_memory()
        if not leave_open:
            # nobody else could: most ranks never return from `initialize`, and the script's would wait for them in MPI
            atexit.register(joined.world.finalize)
    if not joined.is_client:
        return member, None
    from dask_gpu_mpi.job.announcement import announce, announce_waiting
    from dask_gpu_mpi.job.dask_client import note_start
    from dask_gpu_mpi.job.session import ClientEnd, Session

    if not quiet:
        announce(joined, time.monotonic() - started)
    if not has_client:
        if joined.options.recorded:
            name = "summary" if joined.options.report is None else "report"
            say(f"warning: {name}: no effect without a script. Fix: give a script, or leave it out")
        announce_waiting(joined.options)
        return member, None
    end = ClientEnd(member, started, on_signal, quiet=quiet)
    _open(end, joined.options, signals)
    if by_command:
        note_start()
    joined.world.before_end(end.end)  # the other ranks end their MPI after the cluster
    if by_command:
        # What was made before the script stays until the end, where Python would look at it three times: 0.1 s, with cuDF more.
        gc.freeze()
    return member, Session(end)


def plan_of_allocation(read_options: Callable[[], Options]) -> Plan | None:
    """The start up to the plan, for the command `plan`: the plan on rank 0, None on the other ranks.

    A DaskGpuMpiError is the one report of all failures, as of `start`.
    """
    made, _, signals = _enter(read_options, has_client=True, plan_only=True, by_command=True)
    signals.give_back()
    return made if isinstance(made, Plan) else None


def _enter(
    read_options: Callable[[], Options],
    *,
    comm: Any = None,
    leave_open: bool = False,
    has_client: bool = True,
    check: Callable[[int, Options], None] | None = None,
    plan_only: bool = False,
    by_command: bool = False,
) -> tuple[Any, float, Signals]:
    """Enter the job: what `Entering.run` returns, when this began (``time.monotonic()``), and the signals that were taken."""
    global _has_met
    refuse_children()
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
    forget_cluster()  # of a script that has started this job
    if _has_met and launchers.detect(os.environ) is not None:
        raise InputError(
            "initialize: called again after a start that has failed",
            expected="once: a launcher lets its ranks meet once",
            fix="correct the reason of the failure, and start the job again",
            reported=not launchers.reports_for_all(os.environ),
        )
    started = time.monotonic()
    signals = Signals()
    signals.take()
    environ = dict(os.environ)
    mark_children()  # for the script's children only: the agent gets `environ`
    timeline = Timeline("rank")
    timeline.lap("python")
    # as in the agent: modules that are imported stay, and collections of garbage would be a tenth of the import
    collects = gc.isenabled()
    gc.disable()
    keepalive = None
    agent: AgentProcess | None = None
    options: Options | None = None
    failure: Failure | None = None
    child: World | None = None
    from dask_gpu_mpi.mpi.world import World, own_world, world_of

    try:
        try:
            # First, since both work while this process imports. MPI's child has no descriptor of the agent's.
            if not (comm is not None or leave_open or "mpi4py.MPI" in sys.modules):
                _has_met = True
                child = world_of(environ, import_path(), forks=by_command)
            with _agent_starts():
                agent = AgentProcess(environ)
            options = read_options()
            timeline.lap("read the options")
            keepalive = None if plan_only else start_cuda_keepalive(options, environ)
            with _agent_starts():
                agent = begin_agent(agent, options, environ)
        except (InputError, StartupError) as error:
            failure = Failure.of(error)
            if agent is not None:
                agent.close(1.0)
                agent = None
        timeline.lap("start the agent")
        from dask_gpu_mpi.job.entering import Entering
        from dask_gpu_mpi.job.member import configuration

        timeline.lap("import")
        timeout = options.startup_timeout if options is not None and failure is None else WITHOUT_OPTIONS
        if options is not None and agent is not None:
            agent.configure(
                configuration(
                    options,
                    environ,
                    leave_open=leave_open,
                    has_client=has_client,
                    contexts=own_contexts(),
                    mpi_in_rank=leave_open and child is None,
                    plan_only=plan_only,
                    started=started,
                    deadline=started + timeout,
                )
            )
            timeline.lap("configure the agent")

        def world() -> World:
            nonlocal child
            own = own_world(comm, environ, socket.gethostname(), starts=leave_open)
            if own is None and child is None:  # there was no agent, or mpi4py is imported but not initialized
                child = world_of(environ, import_path())
            return own or child or World()

        def checked(rank: int) -> None:
            assert options is not None  # called if they could be read
            if options.report is not None and rank == options.script_rank:
                from dask_gpu_mpi.view.report_data import check_report

                check_report(options.report, f"rank {rank} on {socket.gethostname()}")
            if check is not None:
                check(rank, options)

        joined = Entering(
            environ, signals, timeline, started + timeout, world, options, agent, failure, checked
        ).run()
    except BaseException:
        if agent is not None:
            agent.close(1.0)
        signals.give_back()
        raise
    finally:
        if collects:
            gc.enable()
        if keepalive is not None:
            release(keepalive)
    if child is not None:
        # MPI of the script, or of its children, is a world of one: this process is no MPI process.
        kept = launchers.scrub(os.environ)
        for name in [name for name in os.environ if name not in kept]:
            del os.environ[name]
    return joined, started, signals


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


def _open(end: ClientEnd, options: Options, signals: Signals) -> None:
    """Open the cluster to the script, which gets the signals, and end it with this process."""
    try:
        end.open()
        # The last step of the interpreter, since threads of the script may outlive its main program.
        atexit.register(end.end)
    except BaseException:
        end.end()  # else the other ranks would wait for this one
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


def command_session() -> tuple[Session, Options] | None:
    """The open session that ``python -m dask_gpu_mpi`` has started for this script, and its options; None: there is none."""
    if _member is None or not _by_command:
        return None
    from dask_gpu_mpi.job.session import session_of_process

    session = session_of_process()
    return None if session is None or session.closed else (session, _member.joined.options)


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
    from dask_gpu_mpi.job.session import current_end

    end = current_end()
    if end is not None and end.member.ending.lost is not None:  # else another process has sent it
        on_signal(number, frame)


def on_signal(number: int, frame: FrameType | None) -> None:
    """End the script by a SystemExit, or by the exception of its session."""
    # Slurm sends TERM twice at once, and KILL some seconds later, so the script's `finally` must not be interrupted.
    # Not SIG_IGN, which children inherit: a Pool in `finally`, or in a callback, could not end its processes.
    install(number, lambda *_: None)
    if outcome.is_reporting():
        return  # the script has ended, and can't receive an exception
    from dask_gpu_mpi.job.session import State, current_end

    end = current_end()
    if end is not None:
        ends = python_ends()
        if ends and end.state is State.ENDED and not end.member.leave_open:
            return
        try:
            end.interrupt(number, frame)
        except BaseException as error:
            if ends:  # Python drops exceptions while it waits for the script's threads, and in its `atexit`
                insist_on(outcome.code_of_exception(error))
            raise
    stopped = outcome.SignalExit(number)
    outcome.note(stopped.outcome)
    raise stopped
