"""The inventory of one rank, once its agent has accepted the options: the agent, the GPUs, the node."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.agent.orders import Answer
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.machine.gpu_probe import hangs, nvml_grace
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.machine.scratch import exposed_folder, exposed_text
from dask_gpu_mpi.options.model import Options

from .start_context import StartContext

__all__ = ["await_agent", "inspect"]


def inspect(options: Options, agent: AgentProcess, context: StartContext, rank: int, size: int) -> Inventory:
    """The inventory of this rank.

    Raises
    ------
    DaskGpuMpiError
        Its agent refuses the options, NVML does not respond, or a signal came.
    """
    # First: an error of the agent may be why the GPUs are not known.
    scratch = await_agent(agent, context)
    context.timeline.lap("wait for the agent")
    inventory = take_inventory(
        rank,
        size,
        context.environ,
        look_for_gpus=options.worker_kind != "cpu",
        seen=_gpus(
            agent,
            context,
            f"rank {rank} of {size} on {context.host}",
            context.deadline - nvml_grace(options.startup_timeout),
        ),
    )
    if folder := exposed_folder(os.path.dirname(scratch)):
        warning = (
            f"host {context.host}: {exposed_text(folder)}. Fix: chmod +t {folder}, or another directory by local_directory "
            "(--local-directory)"
        )
        inventory = replace(inventory, warnings=(*inventory.warnings, warning))
    context.timeline.lap("inventory")
    return inventory


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
                f"the agent ended before it was ready ({agent.exit_text()}). Fix: read its output above; out of memory, most "
                "often"
            )
        context.raise_signal()
    raise StartupError(
        "the agent did not finish its imports before the start-up timeout (startup_timeout). Fix: have the environment on a "
        "faster file system or in a container image, or set a longer startup_timeout (--startup-timeout)"
    )


def _gpus(agent: AgentProcess, context: StartContext, where: str, deadline: float) -> tuple[Gpu, ...] | None:
    """The GPUs as they were before anything of ours was on them; None where nobody was to probe them."""
    while True:
        try:
            seen = agent.gpus(0.1)
        except (InputError, StartupError) as error:
            raise type(error)(f"{where}: {error}") from error
        if seen is not None or not agent.looks:
            return seen
        context.raise_signal()
        if time.monotonic() > deadline:
            raise hangs(where)
