"""The options of the command ``top``, which is in `dask_gpu_mpi.cli.live_view`: that imports Rich."""

from __future__ import annotations

import sys

import click

from dask_gpu_mpi.cli.options import HelpCommand, fail
from dask_gpu_mpi.errors import DaskGpuMpiError


@click.command(
    cls=HelpCommand,
    examples=("dask-gpu-mpi top --scheduler-file FILE", "dask-gpu-mpi top --scheduler-file FILE --json"),
    short_help="Show GPUs, workers and tasks of a running cluster.",
)
@click.option(
    "--scheduler-file", metavar="FILE", help="The scheduler file of the cluster. Default: this job's cluster."
)
@click.option("--once", is_flag=True, help="Print one table, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.5, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds between updates.",
)
def top(scheduler_file: str | None, once: bool, as_json: bool, interval: float) -> None:
    """Show the GPUs, workers and tasks of a running cluster, live. Starts nothing; needs no MPI.

    Keys: q quits. s sorts by the next column, r reverses. n and N show only the next or previous node. f folds each node into
    one row. The arrows, or j and k, scroll.
    """
    from dask_gpu_mpi.cli.live_view import run_top

    try:
        code = run_top(scheduler_file, once=once, as_json=as_json, interval=interval)
    except DaskGpuMpiError as error:
        fail(error)
    sys.exit(code)
