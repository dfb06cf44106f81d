"""The inventory of one rank, once its agent has accepted the options: the agent, the GPUs, the node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Answer
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import InputError, Problem, StartupError
from dask_gpu_mpi.machine.gpu_probe import hangs, nvml_grace
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.machine.scratch import exposed_folder, exposed_text
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Channels
from dask_gpu_mpi.startup.start_context import StartContext

#: Waits so many seconds for the GPUs, for which a process of its own queries NVML; None: no answer yet.
Probe = Callable[[float], "tuple[Gpu, ...] | None"]


def inspect(options: Options, agent: AgentProcess, context: StartContext, channels: Channels) -> Inventory:
    """The inventory of this rank.

    Raises DaskGpuMpiError: its agent refuses the options, NVML does not respond, or a signal came.
    """
    # First: an error of the agent may be why the GPUs are not known.
    channels.begin_step("waiting for its agent to import Dask")
    scratch = await_agent(agent, context)
    context.timeline.lap("wait for the agent")
    inventory = inspect_node(options, context, channels, agent.gpus if agent.looks else None)
    if folder := exposed_folder(os.path.dirname(scratch)):
        warning = Problem(
            f"host {context.host}: {exposed_text(folder)}",
            fix=f"chmod +t {folder}, or another directory by local_directory (--local-directory)",
            hosts=(context.host,),
        )
        inventory = replace(inventory, warnings=(*inventory.warnings, warning))
    context.timeline.lap("inventory")
    return inventory


def inspect_node(
    options: Options, context: StartContext, channels: Channels, probe: Probe | None
) -> Inventory:
    """The inventory, from the GPUs that were probed (None: nobody was to probe them) and from what this process finds.

    Raises DaskGpuMpiError: NVML does not respond, or a signal came.
    """
    seen: tuple[Gpu, ...] | None = None
    if probe is not None:
        channels.begin_step("inspecting the GPUs (NVML)")
        where = f"rank {channels.rank} of {channels.size} on {context.host}"
        seen = _gpus(probe, context, where, nvml_grace(options.startup_timeout))
    channels.begin_step("inspecting its cores, memory and networks, and the local directory")
    return take_inventory(
        channels.rank,
        channels.size,
        context.environ,
        look_for_gpus=options.worker_kind != "cpu",
        seen=seen,
    )


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


def _gpus(probe: Probe, context: StartContext, where: str, grace: float) -> tuple[Gpu, ...]:
    """The GPUs as they were before anything of ours was on them."""
    while True:
        try:
            seen = probe(0.1)
        except (InputError, StartupError) as error:
            raise type(error)(replace(error.problem, where=where)) from error
        if seen is not None:
            return seen
        context.raise_signal()
        if time.monotonic() > context.deadline - grace:
            raise hangs(where)
