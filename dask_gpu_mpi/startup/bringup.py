"""The start of one rank: its agent, MPI, its inventory, its part of the plan. The other side is `coordinator`.

A rank that can take part (`Bringup`) relays between the coordinator and its agent
until the cluster is up. One that can't, because its options, its node or its agent are not as they must be, registers with that
failure, and waits for the one report (`report_only`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, StartupError
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import check_threads, load_mpi, load_ucx_first
from dask_gpu_mpi.network.interfaces import list_interfaces
from dask_gpu_mpi.network.ucx import extend_handshakes, install_hooks
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import Protocol
from dask_gpu_mpi.plan.roles import expected_client
from dask_gpu_mpi.sites import launchers

from .agent_settings import configuration
from .channels import Channels
from .coordinator import Coordinator
from .exchange import until_up
from .inspection import inspect
from .job import Preparation, make_job, prepare_job
from .messages import COORDINATOR, Cluster, Kind, Registration, Start
from .registrations import FailureCoordinator, shared_options
from .relay import Relay
from .start_context import StartContext
from .transport import ucx_ability

__all__ = [
    "WITHOUT_OPTIONS",
    "Bringup",
    "Joined",
    "report_only",
]

#: Seconds beyond the start-up deadline after which a rank that is still inside MPI's own start is ended. Those that are already
#: out of it report in the first three (`Mailbox`); then the agents name stopped ranks (`start_watchdog.NAMING`).
MPI_GRACE = 6.0
#: Seconds for the ranks to find each other and report, where the options that set a limit can't be read.
WITHOUT_OPTIONS = 60.0


@dataclass
class Joined:
    """A rank that has joined."""

    #: Its messages and its agent.
    channels: Channels
    #: What the user asked for.
    options: Options
    #: Environment to start another agent with.
    environ: Mapping[str, str] = field(repr=False)
    #: Where it runs.
    host: str
    #: The cluster; with the plan on the client rank and on the coordinator.
    cluster: Cluster
    #: Its part.
    start: Start
    #: Whether the scheduler lives in its agent.
    has_scheduler: bool
    #: Path and scheduler id, where this rank has written a scheduler file.
    scheduler_file: tuple[str, str] | None


def report_only(error: InputError | StartupError, context: StartContext) -> NoReturn:
    """The start of a rank that has invalid options, or no agent: report that through the coordinator, once for all ranks.

    Raises
    ------
    DaskGpuMpiError
        The one report of what failed, the same on all ranks; printed already by the coordinator (`reported`).
    """
    with _uncollected(), context.ending_in_order(None):
        try:
            channels = context.meet(None)
        except InputError as no_mpi:
            raise _first(error, no_mpi) from None
        _register_failure(Failure.of(error), channels, context, interface=None, shared=())


class Bringup:
    """The start of a rank that can take part.

    Parameters
    ----------
    options : Options
        What the user asked for.
    agent : AgentProcess
        The agent, started already.
    context : StartContext
        What the rank starts with.
    check : callable, optional
        ``check(rank)`` raises an InputError where this rank can't do what it is for.
    """

    def __init__(
        self,
        options: Options,
        agent: AgentProcess,
        context: StartContext,
        *,
        check: Callable[[int], None] | None = None,
    ) -> None:
        self._options = options
        self._agent = agent
        self._context = context
        self._check = check
        self._timeline = context.timeline

    def run(self) -> Joined:
        """Join.

        Raises
        ------
        DaskGpuMpiError
            The one report of what failed, the same on all ranks; printed already by the coordinator (`reported`).
        """
        options, context = self._options, self._context
        with _uncollected(), context.ending_in_order(self._agent):
            self._agent.configure(
                configuration(
                    options,
                    speaks=launchers.speaks(context.environ),
                    mpi_deadline=context.deadline + MPI_GRACE,
                )
            )
            self._timeline.lap("configure the agent")
            unloaded: Failure | None = None
            if may_be_client(options, context.environ):
                try:
                    load_ucx_first(context.environ, required=options.protocol.moves_device_memory)
                except InputError as error:
                    unloaded = Failure.of(error)
            try:
                channels = context.meet(self._agent)
            except InputError as no_mpi:
                self._check_without_mpi(no_mpi)
                raise
            shared = shared_options(options)
            prepared = unloaded or self._prepare(channels)
            if isinstance(prepared, Failure):
                _register_failure(prepared, channels, context, interface=options.interface, shared=shared)
            inventory, coordinator = prepared
            registration = Registration(
                context.host,
                inventory,
                list_interfaces(),
                options.interface,
                shared,
                has_client=context.has_client,
                ucx=ucx_ability(options, gpus=bool(inventory.gpus)),
            )
            channels.send(COORDINATOR, Kind.REGISTRATION, registration)
            return self._until_up(channels, coordinator)

    def _check_without_mpi(self, no_mpi: InputError) -> None:
        """Whether this rank can do what it is for, as far as its launcher shows which rank it is."""
        launched = launchers.detect(self._context.environ)
        try:
            if self._check is not None:
                self._check((launched and launched.rank) or 0)
        except InputError as error:
            raise _first(error, no_mpi) from None

    def _prepare(self, channels: Channels) -> tuple[Inventory, Coordinator | None] | Failure:
        """The inventory of this rank, and, on rank 0, the coordinator; or why this rank can't take part."""
        try:
            return self._inspect(channels)
        except DaskGpuMpiError as error:
            return Failure.of(error)
        except OSError as error:
            return Failure(
                f"could not inspect this node (CPUs, memory, GPUs, network): {type(error).__name__}: {error}. Fix: leave it out "
                "of the job",
                1,
            )

    def _inspect(self, channels: Channels) -> tuple[Inventory, Coordinator | None]:
        options, context = self._options, self._context
        rank, size = channels.rank, channels.size
        if context.comm is None:
            library = load_mpi().Get_library_version()
            launcher_check.cross_check(context.environ, size, rank, context.host, library=library)
        if self._check is not None:
            self._check(rank)
        is_client = rank == expected_client(options)
        if is_client and context.has_client and size > 1:
            check_threads()
        if options.report is not None and is_client and context.has_client:
            from dask_gpu_mpi.diagnostics.report_file import check_report

            check_report(options.report, f"rank {rank} on {context.host}")
        preparation: Preparation | None = None
        if rank == COORDINATOR:
            preparation = prepare_job(options, context.environ)  # while the agent imports
            self._timeline.lap("configuration, credentials")
        if is_client:
            threading.Thread(target=_import_for_client, args=(options.protocol,), daemon=True).start()
        inventory = inspect(options, self._agent, context, rank, size)
        if preparation is None:
            return inventory, None
        job = make_job(options, preparation, self._timeline)
        hosts = channels.mailbox.hosts
        return inventory, Coordinator(size, job, send=channels.send, deadline=context.deadline, hosts=hosts)

    def _until_up(self, channels: Channels, coordinator: Coordinator | None) -> Joined:
        options, context = self._options, self._context
        relay = Relay(options, channels, context.host, self._timeline)
        cluster = until_up(channels, context, coordinator, relay)
        self._timeline.lap("wait for the other ranks")
        channels.push_back(relay.early)
        assert relay.start is not None  # nobody is ready before it
        if relay.scheduler.started:
            channels.order(Order.DASHBOARD)
        elif not relay.start.workers:
            channels.drop_agent(1.0)  # nothing to do here: give its memory back
        return Joined(
            channels,
            options,
            context.environ,
            context.host,
            cluster,
            relay.start,
            relay.scheduler.started,
            relay.scheduler.file,
        )


def _register_failure(
    failure: Failure,
    channels: Channels,
    context: StartContext,
    *,
    interface: str | None,
    shared: tuple[tuple[str, object], ...],
) -> NoReturn:
    """Register as a rank that can't take part, and raise the one report."""
    coordinator: FailureCoordinator | None = None
    if channels.rank == COORDINATOR:
        coordinator = FailureCoordinator(
            channels.size, deadline=context.deadline, hosts=channels.mailbox.hosts
        )
    registration = Registration(
        context.host, None, list_interfaces(), interface, shared, failure, context.has_client
    )
    channels.send(COORDINATOR, Kind.REGISTRATION, registration)
    until_up(channels, context, coordinator, None)
    raise StartupError("the cluster started without this rank")  # the coordinator waits for all


def _first(error: InputError | StartupError, no_mpi: InputError) -> InputError | StartupError:
    """What the user has to put right before the MPI library, which this rank has not, or not of this launcher."""
    error.reported = no_mpi.reported
    return error


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Garbage collection off: to scan the messages of thousands of ranks again and again would take longest of all."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _import_for_client(protocol: Protocol) -> None:
    """What the script's client needs, in a thread of its own; what can't be imported is reported where it is used.

    Not `ucxx` itself, which the client imports: it must not set what the user has configured before that is read.
    """
    with contextlib.suppress(Exception):
        importlib.import_module("distributed")
        if protocol.moves_device_memory:
            install_hooks()
            extend_handshakes()


def may_be_client(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the script may run here, as far as the launcher shows: MPI, which knows, can't be asked before UCX is loaded."""
    launched = launchers.detect(environ)
    return launched is None or launched.rank == expected_client(options)
