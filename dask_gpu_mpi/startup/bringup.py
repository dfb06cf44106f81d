"""The start of one rank: its agent, MPI, its inventory, its part of the plan. The other side is `coordinator`.

A rank that can take part relays between the coordinator and its agent until the cluster is up (`join`). One that can't, because
of its options, its node or its agent, sends that failure, and waits for the one report (`report_only`). The command
`plan` starts no agent, and leaves after the plan (`plan_of_allocation`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Answer, Order
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.signals import Signals
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.base.timeouts import FLUSH, MPI_GRACE, WITHOUT_OPTIONS
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem, StartupError
from dask_gpu_mpi.machine.gpu_probe import Look, nvml_grace, start_own_look
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.machine.scratch import exposed_folder, exposed_text
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import check_threads, load_mpi, load_ucx_first
from dask_gpu_mpi.network.interfaces import list_interfaces
from dask_gpu_mpi.network.scheduler_file import Target, read_target
from dask_gpu_mpi.network.ucx import connection_config, extend_handshakes, install_hooks
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.plan.model import Plan, Start
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.sites.batch import end_time
from dask_gpu_mpi.startup.coordinator import Coordinator, FailureCoordinator, Phase, shared_options
from dask_gpu_mpi.startup.messages import COORDINATOR, Channels, Cluster, Kind, Registration
from dask_gpu_mpi.startup.reachability import ucx_ability
from dask_gpu_mpi.startup.relay import Relay
from dask_gpu_mpi.startup.start_context import StartContext, until_over


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
        _report_failure(error, context.meet(None), context)


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
        refused: InputError | None = None
        if may_be_client(options, context.environ):
            try:
                load_ucx_first(context.environ, required=options.protocol.moves_device_memory)
            except InputError as error:
                refused = error
        channels = context.meet(agent)
        try:
            if refused is not None:
                raise refused
            inventory, coordinator = _inspect(options, agent, context, channels, check)
        except (DaskGpuMpiError, OSError) as error:
            _report_failure(error, channels, context)
        _register(inventory, channels, context, options)
        return _until_up(options, context, channels, coordinator)


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
        from dask_gpu_mpi.view.report_data import check_report

        check_report(options.report, f"rank {rank} on {context.host}")
    coordinator: Coordinator | None = None
    if rank == COORDINATOR:
        coordinator = make_coordinator(options, context, channels)  # while the agent imports
        context.timeline.lap("configuration, credentials")
    if is_client:
        threading.Thread(target=_import_for_client, args=(options.protocol,), daemon=True).start()
    return inspect(options, agent, context, channels), coordinator


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
    if relay.has_scheduler:
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
        relay.has_scheduler,
        relay.file,
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
            try:
                _cross_check(context, channels.rank, channels.size)
                check(options)
                inventory = inspect_node(options, context, channels, look)
            except (DaskGpuMpiError, OSError) as error:
                _report_failure(error, channels, context)
            coordinator = None
            if channels.rank == COORDINATOR:
                coordinator = make_coordinator(options, context, channels, last=Phase.PLAN)
            _register(inventory, channels, context, options)
            until_over(channels, context, coordinator, None)
            channels.mailbox.flush(FLUSH)
            return None if coordinator is None else coordinator.plan
    finally:
        if look is not None:
            look.close()


def _cross_check(context: StartContext, rank: int, size: int) -> None:
    library = load_mpi().Get_library_version()
    launcher_check.cross_check(context.environ, size, rank, context.host, library=library)


def _register(inventory: Inventory, channels: Channels, context: StartContext, options: Options) -> None:
    registration = Registration(
        context.host,
        inventory,
        list_interfaces(),
        options.interface,
        shared_options(options),
        has_client=context.has_client,
        ucx=ucx_ability(options, gpus=bool(inventory.gpus)),
        device_options=device_options(options),
    )
    channels.send(COORDINATOR, Kind.REGISTRATION, registration)


def _report_failure(error: Exception, channels: Channels, context: StartContext) -> NoReturn:
    """Tell the coordinator that this rank can't take part, and raise the one report."""
    if isinstance(error, DaskGpuMpiError):
        failure = Failure.of(error)
    else:  # of a system call, with which a node is inspected
        problem = Problem(
            f"could not inspect this node (CPUs, memory, GPUs, network): {type(error).__name__}: {error}",
            fix="leave it out of the job",
        )
        failure = Failure(problem)
    coordinator: FailureCoordinator | None = None
    if channels.rank == COORDINATOR:
        coordinator = FailureCoordinator(channels.mailbox.hosts, deadline=context.deadline)
    channels.send(COORDINATOR, Kind.FAILED, failure)
    until_over(channels, context, coordinator, None)
    raise _started_without(context, channels)


def _started_without(context: StartContext, channels: Channels) -> StartupError:
    """The error of a rank for which the others have not waited."""
    return StartupError(
        "the cluster started without this rank, which was late",
        where=f"rank {channels.rank} of {channels.size} on {context.host}",
    )


def inspect(options: Options, agent: AgentProcess, context: StartContext, channels: Channels) -> Inventory:
    """The inventory of this rank.

    Raises DaskGpuMpiError: its agent refuses the options, NVML does not respond, or a signal came.
    """
    # First: an error of the agent may be why the GPUs are not known.
    channels.begin_step("waiting for its agent to import Dask")
    scratch = await_agent(agent, context)
    context.timeline.lap("wait for the agent")
    inventory = inspect_node(options, context, channels, agent.look if agent.looks else None)
    if folder := exposed_folder(os.path.dirname(scratch)):
        warning = Problem(
            f"host {context.host}: {exposed_text(folder)}",
            fix=f"chmod +t {folder}, or another directory by local_directory (--local-directory)",
            what="scratch",
            hosts=(context.host,),
        )
        inventory = replace(inventory, warnings=(*inventory.warnings, warning))
    context.timeline.lap("inventory")
    return inventory


def inspect_node(options: Options, context: StartContext, channels: Channels, look: Look | None) -> Inventory:
    """The inventory, from the GPUs that another process finds (None: none is to) and from what this process finds.

    Raises DaskGpuMpiError: NVML does not respond, or a signal came.
    """
    seen: tuple[Gpu, ...] | None = None
    if look is not None:
        channels.begin_step("inspecting the GPUs (NVML)")
        where = f"rank {channels.rank} of {channels.size} on {context.host}"
        seen = _gpus(look, context, where, nvml_grace(options.startup_timeout))
    channels.begin_step("inspecting its cores, memory and networks, and the local directory")
    return take_inventory(channels.rank, channels.size, context.environ, seen)


def await_agent(agent: AgentProcess, context: StartContext) -> str:
    """Wait until the agent has imported, and has accepted the options; its scratch directory."""
    while time.monotonic() < context.deadline:
        for kind, *payload in agent.events(0.05):
            if kind == Answer.PREPARED:
                return str(payload[0])
            if kind == Answer.FAILED:
                raise Failure(*payload).error(reported=False)
        if agent.lost:
            raise StartupError(
                f"the agent ended before it was ready ({agent.exit_text()})",
                fix="read its output above; out of memory, most often",
            )
        context.raise_signal()
    raise StartupError(
        "the agent did not finish its imports before the start-up timeout (startup_timeout)",
        fix="have the environment on a faster file system or in a container image, or set a longer startup_timeout "
        "(--startup-timeout)",
    )


def _gpus(look: Look, context: StartContext, where: str, grace: float) -> tuple[Gpu, ...]:
    """The GPUs as they were before anything of ours was on them."""
    while True:
        try:
            seen = look.gpus(0.1)
        except (InputError, StartupError) as error:
            raise type(error)(replace(error.problem, where=where)) from error
        if seen is not None:
            return seen
        context.raise_signal()
        if time.monotonic() > context.deadline - grace:
            raise StartupError(
                "NVML did not respond before the start-up timeout (startup_timeout); the NVIDIA driver of this node "
                "probably hangs",
                fix="reset the GPUs or leave this node out of the job, or set CUDA_VISIBLE_DEVICES='' to do without GPUs",
                where=where,
            )


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


def make_coordinator(
    options: Options, context: StartContext, channels: Channels, *, last: Phase = Phase.WORKERS
) -> Coordinator:
    """Rank 0's preparations: the cluster to attach to, or the credentials of a new one, unless the plan is the `last` phase.

    Raises InputError: that cluster can't be found, or Dask's configuration of UCX is invalid.
    """
    target: Target | None = None
    credentials: dict[str, Any] = {}
    if last is Phase.PLAN:
        pass
    elif not options.scheduler:
        target = read_target(options)
    elif options.protocol.moves_device_memory:
        credentials = connection_config(options.worker_options)
    elif options.protocol.encrypts:
        from dask_gpu_mpi.network.credentials import make_credentials

        credentials = make_credentials(job_end=end_time(context.environ))
    return Coordinator(
        channels.mailbox.hosts,
        options,
        context.timeline,
        send=channels.send,
        deadline=context.deadline,
        last=last,
        credentials=credentials,
        target=target,
    )
