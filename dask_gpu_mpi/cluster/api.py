"""The calls that bring a cluster up: `initialize`, `execute`, `connect`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.agent.cuda_keepalive import Driver
from dask_gpu_mpi.agent.early import start_agent, start_driver
from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.mpi.signals import Signals
from dask_gpu_mpi.options.table import Options, resolve
from dask_gpu_mpi.script import excepthook

from . import process_hooks

# What takes a rank long to import it imports while its agent starts.
if TYPE_CHECKING:
    from distributed import Client

    from .member import Member
    from .session import Session

__all__ = ["connect", "execute", "initialize", "prepare_process", "send_close_signal", "start"]


class _Unset:
    """Default of the arguments for which None or the default itself may be specified, against the environment or a file."""

    def __repr__(self) -> str:
        return "<from the configuration>"


_UNSET: Any = _Unset()
#: Arguments whose None means something.
_NULLABLE = ("memory_limit",)
#: Arguments that are no options.
_NO_OPTIONS = ("client_args", "client_function", "client_kwargs", "comm", "exit", "options")


def _specified(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options among a caller's arguments: everything but the defaults."""
    return {
        key: value
        for key, value in arguments.items()
        if key not in _NO_OPTIONS and value is not _UNSET and (value is not None or key in _NULLABLE)
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
    process_hooks.refuse_children()
    started = time.monotonic()
    if not sys.executable and isinstance(options, Options):
        options = InputError(
            f"this process does not know where Python is: sys.executable is {sys.executable!r} (expected the path of a Python "
            "program). Fix: set sys.executable before initialize()"
        )
    signals = Signals()
    signals.take()
    environ = dict(os.environ)
    process_hooks.mark_children()  # for the script's children only: the agent is given `environ`
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
    assert isinstance(options, Options)  # with an InputError there is no cluster
    return member, _open_session(Session(member, started, process_hooks.on_signal), options, signals)


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
    if options.walltime_signal is not None:
        process_hooks.handle_signal(getattr(signal, f"SIG{options.walltime_signal}"))
    session._member.joined.timeline.lap("open the session")
    if signals.got is not None:
        # It came while the cluster started, and is the script's to hear of.
        signal.raise_signal(signals.got[0])
    return session


def initialize(
    interface: str | None = None,
    nthreads: int | None = None,
    local_directory: str | None = None,
    memory_limit: int | float | str | None = _UNSET,
    nanny: bool | None = None,
    dashboard: bool = _UNSET,
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
    explicit = _specified(locals()) | options  # first: these are the arguments alone
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
    scheduler: bool = _UNSET,
    scheduler_rank: int = _UNSET,
    scheduler_address: str | None = None,
    scheduler_port: int | None = None,
    scheduler_file: str | None = None,
    interface: str | None = None,
    nthreads: int | None = None,
    local_directory: str | None = "",
    memory_limit: int | float | str | None = _UNSET,
    nanny: bool | None = None,
    dashboard: bool = _UNSET,
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
    given = dict(locals())  # first: these are the arguments alone
    given.update(name=given.pop("worker_name"), local_directory=local_directory or None)
    explicit = _specified(given) | options
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


def prepare_process() -> None:
    """Let an uncaught error of ours end the script with its line and its exit code, and SIGTERM run the script's `finally`."""
    process_hooks.prepare(_label)


def _label() -> str | None:
    """Where a script goes on on other ranks as well (``exit=False``): which of the many tracebacks is it?"""
    if _member is None or _member.joined.start.is_client:
        return None
    return f"rank {_member.rank} of {_member.post.size} on {_member.joined.host} failed:"
