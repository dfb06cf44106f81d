"""The start of one rank: its agent, MPI, its inventory, its part of the plan. The other side is `coordinator`.

A rank that can take part relays between the coordinator and its agent until the cluster is up (`join`). One that can't, because
of its options, its node or its agent, registers with that failure, and waits for the one report (`report_only`). The command
`plan` starts no agent, and leaves after the plan (`plan_of_allocation`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Order
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.signals import Signals
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import FLUSH, MPI_GRACE, WITHOUT_OPTIONS
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem, StartupError
from dask_gpu_mpi.machine.gpu_probe import start_own_look
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import check_threads, load_mpi, load_ucx_first
from dask_gpu_mpi.network.interfaces import list_interfaces
from dask_gpu_mpi.network.scheduler_file import Target, read_target
from dask_gpu_mpi.network.ucx import connection_config, extend_handshakes, install_hooks
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.plan.model import Plan, Start
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.plan.scaling import configured_keys
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.sites.batch import end_time
from dask_gpu_mpi.startup.coordinator import (
    Coordinator,
    FailureCoordinator,
    Job,
    MakePlan,
    Phase,
    shared_options,
)
from dask_gpu_mpi.startup.exchange import until_over
from dask_gpu_mpi.startup.inspection import inspect, inspect_node
from dask_gpu_mpi.startup.messages import COORDINATOR, Channels, Cluster, Kind, Registration
from dask_gpu_mpi.startup.reachability import ucx_ability
from dask_gpu_mpi.startup.relay import Relay
from dask_gpu_mpi.startup.start_context import StartContext


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
    """The start of a rank that has invalid options, or no agent: report that through rank 0, once for all ranks."""
    with _uncollected(), context.ending_in_order(None):
        try:
            channels = context.meet(None)
        except InputError as no_mpi:
            raise _first(error, no_mpi) from None
        _register_failure(error, channels, context)


def join(
    options: Options,
    agent: AgentProcess,
    context: StartContext,
    *,
    check: Callable[[int], None] | None = None,
) -> Joined:
    """The start of a rank that can take part; its agent runs already.

    ``check(rank)`` raises an InputError if this rank can't do its part. A DaskGpuMpiError is the one report of all failures, the
    same on all ranks, and printed already by rank 0 (`reported`).
    """
    with _uncollected(), context.ending_in_order(agent):
        agent.configure(
            options, speaks=launchers.speaks(context.environ), mpi_deadline=context.deadline + MPI_GRACE
        )
        context.timeline.lap("configure the agent")
        failed: Exception | None = None
        if may_be_client(options, context.environ):
            try:
                load_ucx_first(context.environ, required=options.protocol.moves_device_memory)
            except InputError as error:
                failed = error
        try:
            channels = context.meet(agent)
        except InputError as no_mpi:
            _check_without_mpi(check, context, no_mpi)
            raise
        shared = shared_options(options)
        try:
            if failed is not None:
                raise failed
            inventory, coordinator = _inspect(options, agent, context, channels, check)
        except (DaskGpuMpiError, OSError) as error:
            failed = error
        if failed is not None:
            _register_failure(failed, channels, context, interface=options.interface, shared=shared)
        registration = Registration(
            context.host,
            inventory,
            list_interfaces(),
            options.interface,
            shared,
            has_client=context.has_client,
            ucx=ucx_ability(options, gpus=bool(inventory.gpus)),
            device_options=device_options(options),
        )
        channels.send(COORDINATOR, Kind.REGISTRATION, registration)
        return _until_up(options, context, channels, coordinator)


def _check_without_mpi(
    check: Callable[[int], None] | None, context: StartContext, no_mpi: InputError
) -> None:
    """Whether this rank can do its part, as far as its launcher shows which rank it is."""
    launched = launchers.detect(context.environ)
    try:
        if check is not None:
            check((launched and launched.rank) or 0)
    except InputError as error:
        raise _first(error, no_mpi) from None


def _inspect(
    options: Options,
    agent: AgentProcess,
    context: StartContext,
    channels: Channels,
    check: Callable[[int], None] | None,
) -> tuple[Inventory, Coordinator | None]:
    """The inventory of this rank, and on rank 0 the coordinator of all."""
    rank, size = channels.rank, channels.size
    if context.comm is None:
        _cross_check(context, rank, size)
    if check is not None:
        check(rank)
    is_client = rank == options.script_rank
    if is_client and context.has_client and size > 1:
        check_threads()
    if options.report is not None and is_client and context.has_client:
        from dask_gpu_mpi.view.report_page import check_report

        check_report(options.report, f"rank {rank} on {context.host}")
    preparation: Preparation | None = None
    if rank == COORDINATOR:
        preparation = prepare_job(options, context.environ)  # while the agent imports
        context.timeline.lap("configuration, credentials")
    if is_client:
        threading.Thread(target=_import_for_client, args=(options.protocol,), daemon=True).start()
    inventory = inspect(options, agent, context, channels)
    if preparation is None:
        return inventory, None
    job = make_job(options, preparation, context.timeline)
    hosts = channels.mailbox.hosts
    return inventory, Coordinator(size, job, send=channels.send, deadline=context.deadline, hosts=hosts)


def _until_up(
    options: Options, context: StartContext, channels: Channels, coordinator: Coordinator | None
) -> Joined:
    """Relay between rank 0 and the agent until the cluster is up."""
    relay = Relay(options, channels, context.host, context.timeline)
    cluster = until_over(channels, context, coordinator, relay)
    if not isinstance(cluster, Cluster):
        raise _started_without(context, channels)
    context.timeline.lap("wait for the other ranks")
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


def plan_of_allocation(
    options: Options | InputError, *, check: Callable[[Options], None] = lambda options: None
) -> Plan | None:
    """The start up to the plan, without agents, for the command `plan`: the plan on rank 0, None on the other ranks.

    `options` may be the reason why they can't be used; `check` raises an InputError for options that an agent would refuse. A
    DaskGpuMpiError is the one report of all failures, as that of `join`.
    """
    started = time.monotonic()
    timeout = options.startup_timeout if isinstance(options, Options) else WITHOUT_OPTIONS
    context = StartContext(
        os.environ, None, True, started, started + timeout, Signals(), Timeline("rank"), quiet=True
    )
    if isinstance(options, InputError):
        report_only(options, context)
    look = start_own_look() if options.worker_kind != "cpu" else None
    try:
        with _uncollected(), context.ending_in_order(None):
            channels = context.meet(None)
            shared, rank, size = shared_options(options), channels.rank, channels.size

            failed: Exception | None = None
            try:
                _cross_check(context, rank, size)
                check(options)
                inventory = inspect_node(options, context, channels, None if look is None else look.gpus)
            except (DaskGpuMpiError, OSError) as error:
                failed = error
            if failed is not None:
                _register_failure(failed, channels, context, shared=shared)
            coordinator = None
            if rank == COORDINATOR:
                job = Job(options.protocol, planner(options, context.timeline, None), dict)
                coordinator = Coordinator(
                    size,
                    job,
                    send=channels.send,
                    deadline=context.deadline,
                    hosts=channels.mailbox.hosts,
                    last=Phase.PLAN,
                )
            sizes = device_options(options)
            registration = Registration(context.host, inventory, (), None, shared, device_options=sizes)
            channels.send(COORDINATOR, Kind.REGISTRATION, registration)
            until_over(channels, context, coordinator, None)
            channels.mailbox.flush(FLUSH)
            return None if coordinator is None else coordinator.plan
    finally:
        if look is not None:
            look.close()


def _cross_check(context: StartContext, rank: int, size: int) -> None:
    library = load_mpi().Get_library_version()
    launcher_check.cross_check(context.environ, size, rank, context.host, library=library)


def _register_failure(
    error: Exception,
    channels: Channels,
    context: StartContext,
    *,
    interface: str | None = None,
    shared: tuple[tuple[str, object], ...] = (),
) -> NoReturn:
    """Register as a rank that can't take part, and raise the one report."""
    failure = Failure.of(error) if isinstance(error, DaskGpuMpiError) else _of_node(error)
    coordinator: FailureCoordinator | None = None
    if channels.rank == COORDINATOR:
        coordinator = FailureCoordinator(
            channels.size, deadline=context.deadline, hosts=channels.mailbox.hosts
        )
    registration = Registration(
        context.host, None, list_interfaces(), interface, shared, failure, context.has_client
    )
    channels.send(COORDINATOR, Kind.REGISTRATION, registration)
    until_over(channels, context, coordinator, None)
    raise _started_without(context, channels)


def _started_without(context: StartContext, channels: Channels) -> StartupError:
    """The error of a rank for which the others have not waited."""
    return StartupError(
        "the cluster started without this rank, which was late",
        where=f"rank {channels.rank} of {channels.size} on {context.host}",
    )


def _of_node(error: Exception) -> Failure:
    """The failure of a system call, with which a node is inspected."""
    problem = Problem(
        f"could not inspect this node (CPUs, memory, GPUs, network): {type(error).__name__}: {error}",
        fix="leave it out of the job",
    )
    return Failure(problem)


def _first(error: InputError | StartupError, no_mpi: InputError) -> InputError | StartupError:
    """The error to fix before that of the MPI library, which this rank lacks, or which is not this launcher's."""
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
    """Import in a thread what the script's client needs; a failed import is reported where the module is used.

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
    return launched is None or launched.rank == options.script_rank


@dataclass(frozen=True)
class Preparation:
    """The slow parts of rank 0's start, which are done while its agent imports."""

    #: Keys of `plan.scaling` that the user has configured.
    configured: frozenset[str]
    #: Dask configuration that carries the credentials; None: this job needs none.
    credentials: dict[str, Any] | None = field(repr=False)


def prepare_job(options: Options, environ: Mapping[str, str]) -> Preparation:
    """Read what the user has configured (where that is anything of the kind, it imports Dask), and generate the credentials."""
    if not (options.scheduler and options.protocol.encrypts):
        return Preparation(configured_keys(), None)
    # A batch system that has to be asked may take seconds.
    with ThreadPoolExecutor(1) as pool:
        job_end = pool.submit(end_time, environ)
        configured = configured_keys()
        return Preparation(configured, _generate_credentials(job_end))


def make_job(options: Options, preparation: Preparation, timeline: Timeline) -> Job:
    """The job of these options; an InputError if the cluster to attach to can't be found."""
    target: Target | None = None
    name = options.name
    if not options.scheduler:
        target = read_target(options)
        name = target.unique_name(options.name)
    return Job(
        options.protocol,
        planner(options, timeline, name),
        _credentials(options, preparation),
        target=target,
        configured=preparation.configured,
        patient="startup_timeout" not in options.explicit,
        ucx=options.worker_ucx,
        tolerated=options.tolerate_lost_ranks,
        timeout=options.startup_timeout,
    )


def planner(options: Options, timeline: Timeline, name: str | None) -> MakePlan:
    """How rank 0 makes the plan; `name`: prefix of the workers' names instead of the option."""
    planned = options if name is None else replace(options, name=name)

    def plan(
        inventories: list[Inventory], has_client: bool, device_options: Mapping[int, Mapping[str, Any]]
    ) -> Plan:
        with timeline.step("plan"):
            return make_plan(inventories, planned, has_client=has_client, device_options=device_options)

    return plan


def _credentials(options: Options, preparation: Preparation) -> Callable[[], dict[str, Any]]:
    if options.protocol.moves_device_memory:
        return functools.partial(connection_config, options.worker_options)
    return lambda: preparation.credentials or {}


def _generate_credentials(job_end: Future[float | None]) -> dict[str, Any]:
    from dask_gpu_mpi.network.credentials import make_credentials

    return make_credentials(job_end=job_end.result()).dask_config()
