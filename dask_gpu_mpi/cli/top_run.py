"""What the command ``top`` does: find the cluster, and show it once, as JSON, or live."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import TYPE_CHECKING

from dask_gpu_mpi.diagnostics import snapshot as snapshots
from dask_gpu_mpi.diagnostics.link import Link
from dask_gpu_mpi.diagnostics.snapshot import Snapshot
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.scheduler_file import Target, read_scheduler_file

from .options import read_texts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["find_cluster", "print_table", "run_top"]

#: Seconds between the two samples that rates come from: workers report at least so often in a cluster of up to 200.
BETWEEN = 1.0
#: Columns of a table that goes into a file or a pipe: as many as it needs.
ANY_WIDTH = 10_000


def find_cluster(scheduler_file: str | None) -> Target:
    """The cluster of this file, else of this process's Dask configuration: its scheduler's address, or ours of a file.

    Raises
    ------
    InputError
        There is none, or the file can't be used.
    """
    import dask

    address = dask.config.get("scheduler-address", None)
    if scheduler_file is None and address:
        return Target(str(address))
    configured = read_texts({"scheduler_file": scheduler_file}).scheduler_file
    if not configured:
        raise InputError(
            "top: no cluster is known here (expected --scheduler-file FILE, or a process that a running job's script has "
            "started). Fix: start the job with --scheduler-file FILE, and give top the same"
        )
    return read_scheduler_file(configured)


def run_top(scheduler_file: str | None, *, once: bool, as_json: bool, interval: float) -> int:
    """Do what the command says; returns the exit code.

    Raises
    ------
    DaskGpuMpiError
        There is no such cluster, or it has ended meanwhile.
    """
    from rich.console import Console

    if not (once or as_json):
        from .live_view import check_terminal, watch

        check_terminal()
    target = find_cluster(scheduler_file)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a name that this terminal can't show
    # distributed logs each connection that ends; what it means is said in one line.
    logging.disable(logging.CRITICAL)
    try:
        if once or as_json:
            snapshot = asyncio.run(_sampled(target))
            if as_json:
                print(json.dumps(snapshots.as_json(snapshot)))
            else:
                print_table(Console(highlight=False), snapshot)
            return 0
        return asyncio.run(watch(lambda: Link(target), interval))
    finally:
        logging.disable(logging.NOTSET)


async def _sampled(target: Target) -> Snapshot:
    link = Link(target)
    try:
        await link.sample()
        await asyncio.sleep(BETWEEN)
        return await link.sample()
    finally:
        link.close()


def print_table(console: Console, snapshot: Snapshot) -> None:
    """Print all rows and warnings, in the width of the terminal, if it is one."""
    from dask_gpu_mpi.diagnostics.top_table import plain

    width = console.width if console.is_terminal else None
    if width is None:
        console.width = ANY_WIDTH
    console.print(plain(snapshot, width))
