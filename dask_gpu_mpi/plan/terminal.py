"""A plan as a table in colour, for a terminal: the plain table's entries, and what is to be warned of in red."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dask_gpu_mpi.base.hostlist import fold_numbers
from dask_gpu_mpi.base.printable import printable
from dask_gpu_mpi.machine.gpus import Gpu

from .hosts import name_some
from .model import HostPlan, Planned
from .nodes import summary
from .table import HEADER, NO_WORKER, NUMERIC, Block, blocks

__all__ = ["show"]

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
