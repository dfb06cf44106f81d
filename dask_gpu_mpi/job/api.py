"""The calls that bring a cluster up: `initialize`, `execute`, `connect`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.start import command_session, prepare_process, start
from dask_gpu_mpi.options.convert import show
from dask_gpu_mpi.options.model import OPTIONS, Options
from dask_gpu_mpi.options.resolve import resolve

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpu_mpi.job.session import Session

__all__ = ["connect", "execute", "initialize", "send_close_signal"]


class _Unset:
    """Default of the arguments for which None or the default itself may be specified, against the environment or a file."""

    def __repr__(self) -> str:
        return "<from the configuration>"


_UNSET: Any = _Unset()
#: Arguments that are not options.
_NO_OPTIONS = ("client_args", "client_function", "client_kwargs", "comm", "exit", "options")


def _specified(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options among a caller's arguments: everything but the defaults."""
    return {
        key: value
        for key, value in arguments.items()
        if key not in _NO_OPTIONS and value is not _UNSET and (value is not None or OPTIONS[key].nullable)
    }


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
    default_workers: str | None = None,
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
    report: str | None = None,
    **options: Any,
) -> Session | bool:
    """Turn the ranks that run this script into a Dask cluster.

    Called by all ranks. On the client rank it returns when all workers are there, and a plain ``distributed.Client()`` connects.
    All other ranks stay inside until the script ends on the client rank, however it ends. Then they exit, with code 0 unless a
    signal has ended the job or the cluster was lost.

    In a script that ``python -m dask_gpu_mpi`` runs it returns the existing session. Options that differ from the command's have
    no effect, and a warning lists them.

    Arguments up to `exit` are dask-mpi's, in its order; some defaults differ.

    Parameters
    ----------
    interface : str, optional
        Network interface, such as ``"ib0"`` or ``"hsn0"``. Default, or ``"auto"``: loopback if the job has one node, else a fast
        one that all nodes have, else that of the default route.
    nthreads : int, optional
        Threads per worker. Default: 1 on a GPU; on CPUs the cores that the rank may use, shared with the ranks of its host.
    local_directory : str, optional
        Node-local scratch for spilled data.
    memory_limit : int, float, str or None
        Bytes of host memory per worker, a text like ``"4 GiB"``, or a fraction. ``"auto"``: the job's memory on the node, shared
        by the workers there. None or 0: no limit.
    nanny : bool, optional
        Deprecated: use `worker_class`.
    dashboard : bool
        Serve the dashboard.
    dashboard_address : str, optional
        ``"host:port"``. Default: ``"127.0.0.1:8787"``, or another port if that is in use. ``":8787"`` is open to the network.
    protocol : {"auto", "tls", "ucx", "tcp"}, optional
        Default: ``"auto"``, which is TLS with certificates made for this job. If every rank can, GPU memory goes from GPU to GPU
        over UCX, authenticated and not encrypted. See docs/transports.md.
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
    default_workers : {"all", "gpu"}, optional
        Workers for tasks that request no worker and no resource. ``"gpu"``: the GPU workers, if the cluster has any. Default:
        ``"all"``.
    layout, cpu_workers, name, security, scheduler_file, scheduler_port, scheduler_rank, client_rank
        Options that dask-mpi's ``initialize`` does not have; see ``docs/options.md``.
    startup_timeout, shutdown_timeout, walltime_signal, log_level, log_directory, report
        The same. None: from the environment, the Dask configuration, or the default.
    **options
        The other options. An unknown name is an error.

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
    if (running := command_session()) is not None:
        _warn_of_other_options(explicit, running[1], whole_world=comm is None, exits=exit)
        return running[0]
    prepare_process()
    member, session = start(
        functools.partial(resolve, explicit, source="keyword", continues=not exit),
        comm=comm,
        leave_open=not exit,
    )
    if session is not None:
        return session
    code = member.serve()
    if not exit:
        from dask_gpu_mpi.job.dask_client import refuse_clients

        refuse_clients()
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

    Called by all ranks of a program that ``mpirun`` has started, not in a script of the command. Arguments are dask-mpi's, in
    its order; some defaults differ. See `initialize` for those not listed here.

    Parameters
    ----------
    client_function : callable, optional
        Runs on the client rank, in its main thread. None: the cluster stays until it is interrupted or shut down.
    client_args, client_kwargs : sequence, mapping
        Its arguments.
    client_rank : int, optional
        The rank on which it runs. Default: 0; in layout ``exclusive`` 1, or 0 if the scheduler is on 1.
    scheduler : bool
        False: join the cluster of `scheduler_address` or `scheduler_file`, which continues afterwards.
    exclusive_workers : bool, optional
        True is layout ``exclusive``, False layout ``shared``.
    worker_name : str, optional
        Prefix of the workers' names.

    Returns
    -------
    object
        The result of the function, on the client rank; None on the others.

    Raises
    ------
    Exception
        The exception of the function, on the client rank.
    """
    given = dict(locals())  # first: these are the arguments alone
    given.update(name=given.pop("worker_name"), local_directory=local_directory or None)
    explicit = _specified(given) | options

    def read_options() -> Options:
        if not (client_function is None or callable(client_function)):
            raise InputError(
                f"execute: client_function={client_function!r} is not callable", expected="a function or None"
            )
        return resolve(explicit, source="keyword", continues=True)

    def check(rank: int, options: Options) -> None:
        if rank == options.script_rank:
            try:
                iter(client_args)
            except TypeError:
                found = type(client_args).__name__
                raise InputError(
                    f"execute: client_args: found {found}", expected="a sequence", fix="(x,) for one"
                ) from None

    prepare_process()
    member, session = start(
        read_options,
        comm=comm,
        leave_open=True,
        has_client=client_function is not None,
        check=None if client_function is None else check,
    )
    if client_function is None or session is None:
        member.serve()
        outcome.retire()
        return None
    from dask_gpu_mpi.job.session import script_cluster

    try:
        return client_function(*client_args, **(client_kwargs or {}))
    finally:
        if (cluster := script_cluster()) is not None:  # always: there is a session
            cluster.end()


def connect(scheduler_file: str | os.PathLike[str] | None = None, **kwargs: Any) -> Client:
    """A ``distributed.Client`` of this job's cluster, or of the cluster that wrote this scheduler file, TLS included.

    Parameters
    ----------
    scheduler_file : str or path, optional
        The path of ``--scheduler-file``. None, in a job's script and in processes that it has started on its node: the job's
        cluster, as by a plain ``Client()``. If there is no cluster, that is an error, and no ``LocalCluster`` starts.
    **kwargs
        For ``distributed.Client``. `timeout` is also that for the file to appear, unless the client is asynchronous.

    Raises
    ------
    InputError
        The file has not appeared, or is not a scheduler file. Or its scheduler does not answer, or has a certificate that is not
        valid by this node's clock. Or there is neither a file nor a cluster of this process.
    """
    import dask
    from distributed import Client

    outcome.report_uncaught()
    if scheduler_file is None:
        address = dask.config.get("scheduler-address", None)
        if address is None:
            raise InputError(
                "connect: this process has no cluster",
                expected="a running job's script, or a process that it has started on its node",
                fix="start the job with --scheduler-file FILE, and call connect(FILE)",
            )
        return Client(address, **kwargs)
    from dask_gpu_mpi.job.dask_client import client_with_link, expect_client, security_of
    from dask_gpu_mpi.network.credentials import clock_problem
    from dask_gpu_mpi.network.scheduler_file import (
        read_scheduler_file,
        require_credentials,
        wait_for_scheduler_file,
    )

    if "://" in os.fspath(scheduler_file):
        raise InputError(
            f"connect: {os.fspath(scheduler_file)!r} is an address",
            expected="a scheduler file, which also has the certificate",
            fix="connect('cluster.json')",
        )
    if not kwargs.get("asynchronous"):  # the wait would block the client's event loop
        wait_for_scheduler_file(scheduler_file, kwargs.get("timeout"))
    target = read_scheduler_file(scheduler_file)
    if "security" not in kwargs:
        require_credentials(target, scheduler_file)
    if (security := security_of(target.address, target.config)) is not None:
        kwargs.setdefault("security", security)
    expect_client(target.address)
    try:
        return client_with_link(target.dashboard)(target.address, **kwargs)
    except OSError as error:
        if problem := clock_problem(f"{error} {error.__cause__}"):
            raise InputError(f"connect: {problem}") from None
        raise InputError(
            f"connect: no answer from {target.address}, the scheduler of {os.fspath(scheduler_file)!r} ({error})",
            expected="a job that runs",
            fix="look whether it has ended, and whether this host reaches its nodes",
        ) from error


def send_close_signal() -> None:
    """End the cluster of this process's session; dask-mpi's name for `Session.close`."""
    from dask_gpu_mpi.job.session import session_of_process

    session = session_of_process()
    if session is not None:
        session.close()


def _warn_of_other_options(
    explicit: Mapping[str, Any], actual: Options, *, whole_world: bool, exits: bool
) -> None:
    """Print a warning of the options of `initialize` that the command's cluster does not have; raises an OptionError as usual."""
    wanted = resolve(explicit, source="keyword")
    names = {"nanny": "worker_class", "exclusive_workers": "layout"}
    fields = dict.fromkeys(names.get(name, name) for name in explicit)
    differ = [
        f"{name}={show(getattr(wanted, name))} (the cluster has {show(getattr(actual, name))})"
        for name in fields
        if getattr(wanted, name) != getattr(actual, name)
    ]
    differ += ["comm"] * (not whole_world) + ["exit=False"] * (not exits)
    if differ:
        say(
            "warning: initialize: the command has started the cluster already; no effect: "
            f"{', '.join(differ)}. Fix: give these options to the command, or run the script without it"
        )
