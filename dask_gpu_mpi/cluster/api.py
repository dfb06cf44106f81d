"""The calls that bring a cluster up: `initialize`, `execute`, `connect`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.agent.cuda_keepalive import Driver
from dask_gpu_mpi.agent.early import start_agent, start_driver
from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.base.signal_actions import install
from dask_gpu_mpi.base.streams import open_missing
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.mpi import launchers
from dask_gpu_mpi.mpi.local_ranks import is_child_of
from dask_gpu_mpi.mpi.signals import Signals
from dask_gpu_mpi.options.table import Options, resolve

from . import excepthook, exit_codes
from .script import run_script

# What takes a rank long to import it imports while its agent starts.
if TYPE_CHECKING:
    from distributed import Client

    from .member import Member
    from .session import Session

__all__ = ["connect", "execute", "initialize", "prepare_process", "send_close_signal", "start"]


class _Unsaid:
    """Default of the arguments for which None or the default itself may be said, against the environment or a file."""

    def __repr__(self) -> str:
        return "<from the configuration>"


_UNSAID: Any = _Unsaid()
#: Variable in the environment of the script's children: process id of the rank.
_RANK = "DGM_RANK_PID"
#: Arguments whose None means something.
_NULLABLE = ("memory_limit",)


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller has said: everything but the defaults."""
    return {
        key: value
        for key, value in given.items()
        if value is not _UNSAID and (value is not None or key in _NULLABLE)
    }


#: This process's part in its last cluster.
_member: Member | None = None


def start(
    options: Options | InputError,
    *,
    comm: Any = None,
    leave_open: bool = False,
    has_client: bool = True,
    check: Callable[[int], None] | None = None,
) -> tuple[Member, Session | None]:
    """Join the cluster; a session on the client rank, None elsewhere and without a script.

    Parameters
    ----------
    options : Options or InputError
        What the user asked for, or why that can't be.
    comm : mpi4py.MPI.Intracomm, optional
        None = ``COMM_WORLD``.
    leave_open : bool
        ``exit=False``.
    has_client : bool
        Whether some rank runs a script.
    check : callable, optional
        ``check(rank)`` raises an InputError where this rank can't do what it is for.

    Raises
    ------
    DaskGpuMpiError
        It did not come up; the same error on all ranks.
    """
    global _member
    _refuse_children()
    started = time.monotonic()
    if not sys.executable and isinstance(options, Options):
        options = InputError(
            f"this process does not know where Python is: sys.executable is {sys.executable!r} (expected the path of a Python "
            "program). Fix: set sys.executable before initialize()"
        )
    signals = Signals()
    signals.take()
    environ = dict(os.environ)
    os.environ[_RANK] = str(os.getpid())  # for the script's children only: the agent is given `environ`
    timeline = Timeline("rank")
    timeline.lap("python")
    driver: Driver | None = None
    agent: AgentProcess | None = None
    try:
        if isinstance(options, Options):
            # Before everything else: they go on while this process imports, and while MPI initialises.
            driver = start_driver(options, environ)
            agent = start_agent(options, environ)
            timeline.lap("start the agent")
        from .bringup import Bringup
        from .member import Member
        from .session import Session, announce

        timeline.lap("import")
        bringup = Bringup(
            options,
            environ,
            comm=comm,
            has_client=has_client,
            check=check,
            started=started,
            signals=signals,
            agent=agent,
            timeline=timeline,
        )
        joined = bringup.run()
    except BaseException:
        if agent is not None:
            agent.close(1.0)
        signals.give_back()
        raise
    finally:
        if driver is not None:
            driver.release()
    _member = member = Member(joined, signals, leave_open=leave_open, has_client=has_client)
    member.write_timeline()  # of the start, in case nobody gets so far as to write the end
    if not joined.start.is_client:
        return member, None
    announce(joined, time.monotonic() - started)
    if not has_client:
        return member, None
    session = Session(member, started, _on_term)
    assert isinstance(options, Options)  # with an InputError there is no cluster
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
    if options.walltime_signal is not None:
        _handle(getattr(signal, f"SIG{options.walltime_signal}"))
    joined.timeline.lap("open the session")
    if signals.got is not None:
        signal.raise_signal(
            signals.got[0]
        )  # it came while the cluster started, and is the script's to hear of
    return member, session


def initialize(
    interface: str | None = None,
    nthreads: int | None = None,
    local_directory: str | None = None,
    memory_limit: int | float | str | None = _UNSAID,
    nanny: bool | None = None,
    dashboard: bool = _UNSAID,
    dashboard_address: str | None = None,
    protocol: str | None = None,
    worker_class: str | type | None = None,
    worker_options: Mapping[str, Any] | None = None,
    comm: Any = None,
    exit: bool = True,
    *,
    layout: str | None = None,
    cpu_workers: int | None = None,
    gpus_per_worker: int | None = None,
    require_idle_gpus: bool | None = None,
    name: str | None = None,
    security: bool | None = None,
    scheduler_file: str | None = None,
    scheduler_port: int | None = None,
    scheduler_rank: int | None = None,
    client_rank: int | None = None,
    startup_timeout: float | str | None = None,
    shutdown_timeout: float | str | None = None,
    walltime_signal: str | None = None,
    log_level: str | None = None,
    log_directory: str | None = None,
    timeline: str | None = None,
    **options: Any,
) -> Session | bool:
    """Turn the MPI ranks that run this script into a Dask cluster.

    Called by all ranks. On the client rank it returns when all workers are there, and a plain ``distributed.Client()`` connects.
    All other ranks stay inside until the script ends on the client rank, however it ends, and then exit with code 0.

    Arguments up to `exit` are dask-mpi's, in dask-mpi's order and meaning.

    Parameters
    ----------
    interface : str, optional
        Network interface, like ``"ib0"``. Default: loopback on one host, else the fastest that all hosts have.
    nthreads : int, optional
        Threads per worker. Default: 1 on a GPU; on CPUs the cores that the rank may use, shared with the ranks of its host.
    local_directory : str, optional
        Node-local scratch for spilled data.
    memory_limit : int, float, str or None
        Bytes of host memory per worker, or a text like ``"4 GiB"``, or a fraction; ``"auto"``: the job's memory on the host,
        shared by the workers there; None or 0: no limit.
    nanny : bool, optional
        Deprecated: use `worker_class`.
    dashboard : bool
        Whether to serve the dashboard.
    dashboard_address : str, optional
        ``"host:port"``. Default: ``"127.0.0.1:8787"``, or another port where that is taken; ``":8787"`` is open to the network.
    protocol : {"tls", "tcp", "ucx"}, optional
        Default: ``"tls"``, with certificates made for this job.
    worker_class : str or type, optional
        Default: ``dask_cuda.CUDAWorker`` on GPUs, ``distributed.Nanny`` without.
    worker_options : dict, optional
        Keyword arguments for the class.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part. Default: ``COMM_WORLD``.
    exit : bool
        False: the other ranks return False when the cluster ends, instead of exiting.
    gpus_per_worker : int, optional
        GPUs that each GPU worker sees. Default: 1.
    require_idle_gpus : bool, optional
        Refuse GPUs on which other processes hold memory. Default: a warning.
    layout, cpu_workers, name, security, scheduler_file, scheduler_port, scheduler_rank, client_rank
        What dask-mpi's ``initialize`` does not have; see ``docs/options.md``.
    startup_timeout, shutdown_timeout, walltime_signal, log_level, log_directory, timeline
        As above. None: from the environment, the Dask configuration, or the default.
    **options
        Nothing else: unknown names are refused, with the nearest that is known.

    Returns
    -------
    Session or bool
        A (true) session on the client rank; False on the others with ``exit=False``.

    Raises
    ------
    InputError
        An option, the placement or the launcher is wrong; uncaught, the script ends with one line and exit code 2.
    StartupError
        The cluster did not come up; uncaught, one report and exit code 1.
    """
    given = {
        "interface": interface,
        "nthreads": nthreads,
        "local_directory": local_directory,
        "memory_limit": memory_limit,
        "nanny": nanny,
        "dashboard": dashboard,
        "dashboard_address": dashboard_address,
        "protocol": protocol,
        "worker_class": worker_class,
        "worker_options": worker_options,
        "layout": layout,
        "cpu_workers": cpu_workers,
        "gpus_per_worker": gpus_per_worker,
        "require_idle_gpus": require_idle_gpus,
        "name": name,
        "security": security,
        "scheduler_file": scheduler_file,
        "scheduler_port": scheduler_port,
        "scheduler_rank": scheduler_rank,
        "client_rank": client_rank,
        "startup_timeout": startup_timeout,
        "shutdown_timeout": shutdown_timeout,
        "walltime_signal": walltime_signal,
        "log_level": log_level,
        "log_directory": log_directory,
        "timeline": timeline,
    }
    explicit = _said(given) | options
    prepare_process()
    member, session = start(_resolve(explicit), comm=comm, leave_open=not exit)
    if session is not None:
        return session
    code = member.serve()
    if not exit:
        return False
    sys.exit(code)


def execute(
    client_function: Callable[..., Any] | None = None,
    client_args: Sequence[Any] = (),
    client_kwargs: Mapping[str, Any] | None = None,
    client_rank: int | None = None,
    scheduler: bool = _UNSAID,
    scheduler_rank: int = _UNSAID,
    scheduler_address: str | None = None,
    scheduler_port: int | None = None,
    scheduler_file: str | None = None,
    interface: str | None = None,
    nthreads: int | None = None,
    local_directory: str | None = "",
    memory_limit: int | float | str | None = _UNSAID,
    nanny: bool | None = None,
    dashboard: bool = _UNSAID,
    dashboard_address: str | None = None,
    protocol: str | None = None,
    exclusive_workers: bool | None = None,
    worker_class: str | type | None = None,
    worker_options: Mapping[str, Any] | None = None,
    worker_name: str | None = None,
    comm: Any = None,
    **options: Any,
) -> Any:
    """Run a function as the client of a cluster that lives as long as the function runs.

    Called by all ranks; arguments are dask-mpi's, in dask-mpi's order and meaning (see `initialize` for those not listed here).

    Parameters
    ----------
    client_function : callable, optional
        Runs on the client rank, in its main thread. None: the cluster stays until it is interrupted or shut down.
    client_args, client_kwargs : sequence, mapping
        Its arguments.
    client_rank : int, optional
        Where it runs. Default: 0 (layout ``shared``) or 1 (``exclusive``).
    scheduler : bool
        False: join the cluster of `scheduler_address` or `scheduler_file`, which goes on afterwards.
    exclusive_workers : bool, optional
        True is layout ``exclusive``, False layout ``shared``.
    worker_name : str, optional
        Prefix of the workers' names.

    Returns
    -------
    object
        What the function returned, on the client rank; None on the others.

    Raises
    ------
    Exception
        What the function raised, on the client rank.
    """
    given = {
        "client_rank": client_rank,
        "scheduler": scheduler,
        "scheduler_rank": scheduler_rank,
        "scheduler_address": scheduler_address,
        "scheduler_port": scheduler_port,
        "scheduler_file": scheduler_file,
        "interface": interface,
        "nthreads": nthreads,
        "local_directory": local_directory or None,
        "memory_limit": memory_limit,
        "nanny": nanny,
        "dashboard": dashboard,
        "dashboard_address": dashboard_address,
        "protocol": protocol,
        "exclusive_workers": exclusive_workers,
        "worker_class": worker_class,
        "worker_options": worker_options,
        "name": worker_name,
    }
    explicit = _said(given) | options
    prepare_process()
    has_client = client_function is not None
    member, session = start(_resolve(explicit), comm=comm, leave_open=True, has_client=has_client)
    if client_function is None or session is None:
        member.serve()
        excepthook.retire()
        return None
    try:
        result = client_function(*client_args, **(client_kwargs or {}))
    finally:
        session._finish()
        session._give_back()
    return result


def connect(scheduler_file: str | os.PathLike[str], **kwargs: Any) -> Client:
    """A ``distributed.Client`` of the cluster that wrote this scheduler file, TLS included.

    Parameters
    ----------
    scheduler_file : str or path
        As given to ``--scheduler-file``.
    **kwargs
        For ``distributed.Client``.

    Raises
    ------
    InputError
        There is no such file, or it is none.
    """
    import dask
    from distributed import Client, Security

    from dask_gpu_mpi.network.scheduler_file import read_scheduler_file

    target = read_scheduler_file(scheduler_file)
    if target.protocol == "ucx":
        dask.config.set(target.config)  # for as long as the client lives: UCX starts with it, and once
    elif target.config and "security" not in kwargs:
        with dask.config.set(target.config):
            kwargs["security"] = Security()
    return Client(target.address, **kwargs)


def send_close_signal() -> None:
    """End the cluster of this process's session; dask-mpi's name for `Session.close`."""
    from .session import current_session

    session = current_session()
    if session is not None:
        session.close()


def _resolve(explicit: dict[str, Any]) -> Options | InputError:
    """The options, or the error that all ranks are to report together.

    Raises
    ------
    InputError
        There is a cluster already. Raised here and now: the other ranks are inside it, and can't be asked.
    """
    if _member is not None and not (_member.leave_open and _member.ending.state.over):
        raise InputError(
            "initialize() was called a second time in this job: one cluster at a time; call it once (a script that "
            "`python -m dask_gpu_mpi` runs has its cluster already)"
        )
    try:
        return resolve(explicit, source="keyword")
    except InputError as error:
        return error


def _refuse_children() -> None:
    """A child of a rank has the rank's variables: its MPI would join as a rank that is there already, and wait for ever.

    Raises
    ------
    InputError
        This is one. Raised here and now: the other ranks are in the cluster of the rank.
    """
    rank = os.environ.get(_RANK, "")
    launched = launchers.detect(os.environ) if rank.isdigit() else None
    if launched is not None and is_child_of(int(rank)):
        size = "" if launched.size is None else f" of {launched.size}"
        raise InputError(
            f"initialize: called in a child process of rank {launched.rank}{size}, which has its cluster already (expected once "
            'per rank). Fix: put the script under `if __name__ == "__main__":`, since multiprocessing runs it again in each '
            "child; a child may connect with Client(session.address, security=session.security)"
        )


def prepare_process() -> None:
    """Let an uncaught error of ours end the script with its line and its exit code, and SIGTERM run the script's `finally`."""
    open_missing()
    excepthook.install(_label)
    terminate_like_an_exit()


def _label() -> str | None:
    """Where a script goes on on other ranks as well (``exit=False``): which of the many tracebacks is it?"""
    if _member is None or _member.joined.start.is_client:
        return None
    return f"rank {_member.rank} of {_member.post.size} on {_member.joined.host} failed:"


def terminate_like_an_exit() -> None:
    """Turn SIGTERM into an exception in the main thread: without a handler Python dies of it with no `finally` at all."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _handle(signal.SIGTERM)


def _handle(number: int) -> None:
    if threading.current_thread() is threading.main_thread():
        install(number, _on_term)


def _on_term(number: int, frame: FrameType | None) -> None:
    # Slurm sends TERM twice at once, and then KILL some seconds later: the script's `finally` has until then.
    # Not SIG_IGN, which children inherit: a Pool in `finally`, or in a callback, could not end its processes.
    install(number, lambda *_: None)
    from .session import current_session

    session = current_session()
    if session is not None:
        if _script_has_ended(frame):
            return
        session._on_signal(number, frame)
    raise SystemExit(exit_codes.of_signal(number))


def _script_has_ended(frame: FrameType | None) -> bool:
    """Whether the signal came between the script's own end, by an exception, say, and ours: there is nothing to raise into."""
    from .session import Session

    ours = (excepthook.ExceptHook.__call__.__code__, Session._finish.__code__)
    if frame is not None and frame.f_code is run_script.__code__:
        return True  # not in the script, but in what reports its exception
    while frame is not None:
        if frame.f_code in ours:
            return True
        frame = frame.f_back
    return False
