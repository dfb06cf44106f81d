"""The command ``plan``: who would work where, in this allocation or in a hypothetical one."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dask_gpu_mpi.base.files import write
from dask_gpu_mpi.base.text import fold_numbers, printable
from dask_gpu_mpi.cli.options import TOPICS, HelpCommand, fail, help_of, resolve_texts, usable, with_options
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.plan.hosts import name_some
from dask_gpu_mpi.plan.model import HostPlan, Planned
from dask_gpu_mpi.plan.nodes import summary
from dask_gpu_mpi.plan.table import HEADER, NO_WORKER, NUMERIC, Block, blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpu_mpi.machine.inventory import Inventory
    from dask_gpu_mpi.options.model import Options
    from dask_gpu_mpi.plan.plan import Plan


# A plan as a table in colour, for a terminal: the plain table's entries, and what is to be warned of in red.

_ROLES = {"scheduler": "bold blue", "client": "bold magenta"}
_RED = "bold red"


def show(plan: Planned, console: Console | None = None) -> None:
    """Print a plan; `console`: standard output, unless given."""
    console = console or Console(highlight=False)
    roles = Text()
    for role, where in (("scheduler", plan.scheduler), ("client", plan.client)):
        roles.append("; " if roles else "").append(role, _ROLES[role])
        roles.append(printable(f": rank {where.rank} on {where.host}"))
    console.print(Text(summary(plan), "bold"))
    console.print(roles)
    devices = {(worker.host, device) for worker in plan.workers for device in worker.devices}
    for block in blocks(plan.hosts, plan.workers):
        console.print()
        console.print(_title(block, plan))
        console.print(_table(block) if block.rows else Text(f"  {NO_WORKER}", "dim"))
        for text, places in (
            (
                "without a worker",
                _places(block.hosts, lambda host, gpu: (host.host, gpu.uuid) not in devices),
            ),
            ("in use by others", _places(block.hosts, lambda _, gpu: bool(gpu.processes))),
        ):
            if places:
                console.print(Text(printable(f"  {text}: {name_some(places)}"), _RED))
    if plan.warnings:
        console.print()
    for warning in plan.warnings:
        console.print(Text.assemble(("warning", _RED), (printable(f": {warning}"), "red")))


def _title(block: Block, plan: Planned) -> Text:
    title = Text(printable(block.title), "bold")
    names = {host.host for host in block.hosts}
    for role, where in (("scheduler", plan.scheduler), ("client", plan.client)):
        if where.host in names:
            title.append("  ").append(role, _ROLES[role])
    return title


def _table(block: Block) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="dim")
    for name, numeric in zip(HEADER, NUMERIC, strict=True):
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in block.rows:
        colour = "cyan" if row[HEADER.index("device")] == "-" else "green"
        cells = [Text(printable(cell)) for cell in row]
        for name in ("worker", "device"):
            cells[HEADER.index(name)].stylize(colour)
        table.add_row(*cells)
    return table


def _places(hosts: Iterable[HostPlan], found: Callable[[HostPlan, Gpu], bool]) -> list[str]:
    """The GPUs of hosts for which that holds, by host."""
    places = []
    for host in hosts:
        numbers = fold_numbers(number for number, gpu in enumerate(host.gpus) if found(host, gpu))
        places += [f"GPU {numbers} of {host.host}"] if numbers else []
    return places


@help_of(
    short=("nodes", "ranks_per_node", "gpus_per_node", "gpus_per_worker", "as_json", "svg"),
    topics=TOPICS,
    examples=("srun python -m dask_gpu_mpi plan", "dask-gpu-mpi plan --nodes 2 --gpus-per-node 4"),
)
@click.command(cls=HelpCommand, short_help="Show who would work where; start nothing.")
@functools.partial(with_options, plan=True)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Plan a hypothetical allocation of so many nodes instead of this one.",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="MPI ranks on each of these nodes.",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="GPUs of each of these nodes.",
)
@click.option(
    "--visible",
    type=click.Choice(["all", "per-rank"]),
    default="all",
    show_default=True,
    help="Whether each rank there sees all GPUs of its node, or its share of them.",
)
@click.option(
    "--cpus-per-node",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Cores of each of these nodes.",
)
@click.option(
    "--memory-per-node",
    help="Memory of each of these nodes: bytes, or a text such as 64GiB.  [default: 512GiB]",
)
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON instead of a table.")
@click.option("--svg", metavar="FILE", help="Write the plan there as a picture, too.")
def plan(
    nodes: int | None,
    ranks_per_node: int,
    gpus_per_node: int,
    visible: Literal["all", "per-rank"],
    cpus_per_node: int,
    memory_per_node: str | None,
    as_json: bool,
    svg: str | None,
    **given: Any,
) -> None:
    """Show who would work where, without starting anything: in this allocation, or in a hypothetical one (--nodes)."""
    options = resolve_texts(given)
    try:
        if nodes is None:
            from dask_gpu_mpi.startup.bringup import plan_of_allocation

            made = plan_of_allocation(options, check=_check_worker_options)
        else:
            from dask_gpu_mpi.plan.synthetic import hypothetical_job

            inventories = hypothetical_job(
                nodes, ranks_per_node, gpus_per_node, visible, cpus_per_node, _memory(memory_per_node)
            )
            made = plan_of_inventories(usable(options), inventories)
        if made is None:  # on another rank
            return
        if svg is not None:
            _draw(made, svg)
    except DaskGpuMpiError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(made.as_json(), indent=1))
    elif _in_colour():
        show(made)
    else:
        click.echo(made.table())


def _check_worker_options(options: Options) -> None:
    """As the agents of a job do: `plan` starts none."""
    if options.worker_options:
        from dask_gpu_mpi.workers.worker_options import read_worker_options

        read_worker_options(options.worker_class, options.worker_options, where="worker_options")


def plan_of_inventories(options: Options, inventories: Sequence[Inventory]) -> Plan:
    """The plan of a hypothetical allocation.

    Raises
    ------
    InputError
        No plan fits the options.
    """
    from dask_gpu_mpi.plan.planner import make_plan

    _check_worker_options(options)
    return make_plan(inventories, options)


def _draw(plan: Plan, path: str) -> None:
    """Write the picture of a plan.

    Raises
    ------
    InputError
        The file can't be written.
    """
    from dask_gpu_mpi.plan.picture import svg

    try:
        write(path, svg(plan).encode())
    except OSError as error:
        raise InputError(
            f"command line: --svg {path!r} can't be written: {error.strerror}. Fix: name a file in a folder that is there "
            "and that you may write"
        ) from None


def _in_colour() -> bool:
    # Open MPI gives its ranks a terminal as standard output, wherever that goes, but not as standard error.
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _memory(text: str | None) -> int:
    from dask_gpu_mpi.base.text import parse_bytes
    from dask_gpu_mpi.plan.synthetic import NODE_MEMORY

    try:
        return NODE_MEMORY if text is None else parse_bytes(text)
    except ValueError as error:
        raise InputError(f"command line: --memory-per-node {text!r}: {error}") from None
