"""From a process that a launcher has started to a rank of the cluster: the agent first, then MPI, then the session."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.agent.cuda_keepalive import CudaKeepalive, start_cuda_keepalive
from dask_gpu_mpi.agent.handle import AgentProcess, begin_agent
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.job import process_hooks
from dask_gpu_mpi.job.child_processes import mark_children, refuse_children
from dask_gpu_mpi.job.cluster_file import forget_cluster
from dask_gpu_mpi.mpi.signals import Signals
from dask_gpu_mpi.options.model import Options

# What takes a rank long to import it imports while its agent starts.
if TYPE_CHECKING:
    from dask_gpu_mpi.job.member import Member
    from dask_gpu_mpi.job.session import Session

__all__ = ["command_session", "prepare_process", "refuse_second", "start"]

#: This process's part in its last cluster.
_member: Member | None = None
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
) -> tuple[Member, Session | None]:
    """Join the cluster; a session on the client rank, None elsewhere and without a script.

    Parameters
    ----------
    read_options : callable
        Returns what the user asked for; takes a while, since it imports Dask's configuration. Its InputError is reported once
        for all ranks.
    comm : mpi4py.MPI.Intracomm, optional
        None = ``COMM_WORLD``.
    leave_open : bool
        ``exit=False``.
    has_client : bool
        Whether some rank runs a script.
    check : callable, optional
        ``check(rank, options)`` raises an InputError where this rank can't do what it is for.
    by_command : bool
        Whether ``python -m dask_gpu_mpi`` starts it: `initialize` in its script returns that session (`command_session`).

    Raises
    ------
    DaskGpuMpiError
        It did not come up; the same error on all ranks.
    """
    global _member, _by_command
    refuse_children()
    forget_cluster()  # of a script that has started this job
    started = time.monotonic()
    signals = Signals()
    signals.take()
    environ = dict(os.environ)
    mark_children()  # for the script's children only: the agent is given `environ`
    timeline = Timeline("rank")
    timeline.lap("python")
    keepalive: CudaKeepalive | None = None
    agent: AgentProcess | None = None
    try:
        try:
            # Before everything else: it imports while this process does, and while MPI initialises.
            agent = _start_agent(environ)
            options = read_options()
            timeline.lap("read the options")
            keepalive = start_cuda_keepalive(options, environ)
            agent = begin_agent(agent, options, environ)
        except (InputError, StartupError) as error:
            from dask_gpu_mpi.startup.bringup import WITHOUT_OPTIONS, report_only
            from dask_gpu_mpi.startup.start_context import StartContext

            deadline = started + WITHOUT_OPTIONS
            report_only(error, StartContext(environ, comm, has_client, started, deadline, signals, timeline))
        timeline.lap("start the agent")
        from dask_gpu_mpi.job.announcement import announce, announce_waiting
        from dask_gpu_mpi.job.ending import PAYLOADS
        from dask_gpu_mpi.job.member import Member
        from dask_gpu_mpi.job.session import Session
        from dask_gpu_mpi.startup.bringup import Bringup
        from dask_gpu_mpi.startup.start_context import StartContext

        timeline.lap("import")
        deadline = started + options.startup_timeout
        context = StartContext(
            environ,
            comm,
            has_client,
            started,
            deadline,
            signals,
            timeline,
            payloads=PAYLOADS,
        )
        checked = None if check is None else lambda rank: check(rank, options)
        joined = Bringup(options, agent, context, check=checked).run()
    except BaseException:
        if agent is not None:
            agent.close(1.0)
        signals.give_back()
        raise
    finally:
        if keepalive is not None:
            keepalive.release()
    _by_command = by_command
    _member = member = Member(joined, signals, leave_open=leave_open, has_client=has_client)
    if not joined.start.is_client:
        return member, None
    announce(joined, time.monotonic() - started)
    if not has_client:
        if joined.options.report is not None:
            say("warning: report: no effect without a script. Fix: give a script, or leave it out")
        announce_waiting(options)
        return member, None
    return member, _open_session(Session(member, started, process_hooks.on_signal), options, signals)


def _start_agent(environ: Mapping[str, str]) -> AgentProcess:
    if not sys.executable:
        raise InputError(
            f"this process does not know where Python is: sys.executable is {sys.executable!r} (expected the path of a Python "
            "program). Fix: set sys.executable before initialize()"
        )
    try:
        return AgentProcess(environ)
    except OSError as error:
        raise StartupError(
            f"could not start the agent of this rank ({error.strerror}). Fix: allow more files, processes, memory (ulimit -a)"
        ) from error


def _open_session(session: Session, options: Options, signals: Signals) -> Session:
    """Hand the signals, and the end of this process, to the session."""
    try:
        session._open()
        # The very last thing of the interpreter, however it ends: threads of the script may outlive its main program.
        atexit.register(session._finish)
    except BaseException:
        session._finish()  # else the other ranks would wait for this one
        signals.give_back()
        raise
    # Not before: what a signal raises ends the script, and the cluster with it, from here on.
    signals.give_back()
    process_hooks.handle_loss()
    if options.walltime_signal is not None:
        process_hooks.handle_signal(getattr(signal, f"SIG{options.walltime_signal}"))
    if signals.got is not None:
        # It came while the cluster started, and is the script's to hear of.
        signal.raise_signal(signals.got[0])
    return session


def command_session() -> tuple[Session, Options] | None:
    """The open session that ``python -m dask_gpu_mpi`` has started for this script, and its options; None: there is none."""
    if _member is None or not _by_command:
        return None
    from dask_gpu_mpi.job.session import current_session

    session = current_session()
    return None if session is None or session.closed else (session, _member.joined.options)


def refuse_second() -> None:
    """One cluster at a time.

    Raises
    ------
    InputError
        There is a cluster already. Raised here and now: the other ranks are inside it, and can't be asked.
    """
    if _member is not None and not (_member.leave_open and _member.ending.state.over):
        raise InputError(
            "initialize or execute: called a second time in this job (expected once: one cluster at a time). Fix: remove this "
            "call, or end the first cluster before it, with initialize(exit=False) and session.close()"
        )


def prepare_process() -> None:
    """Let an uncaught error of ours end the script with its line and its exit code, and SIGTERM run the script's `finally`."""
    process_hooks.prepare(_label)


def _label() -> str | None:
    """Where a script goes on on other ranks as well (``exit=False``): which of the many tracebacks is it?"""
    if _member is None or _member.joined.start.is_client:
        return None
    return f"rank {_member.rank} of {_member.channels.size} on {_member.joined.host} failed:"
