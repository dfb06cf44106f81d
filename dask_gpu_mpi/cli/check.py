"""The options of the command ``check``, which is in `dask_gpu_mpi.check.run`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.text import is_terminal, show
from dask_gpu_mpi.cli.options import RunCommand, read_texts, split_run
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, OptionError

if TYPE_CHECKING:
    from dask_gpu_mpi.check.report import Report


@click.command(
    cls=RunCommand,
    short=("kernel", "expect_gpus", "as_json", "local_directory"),
    examples=("mpirun -np 4 dask-gpu-mpi check analysis.py", "dask-gpu-mpi launch check --expect-gpus 4"),
    short_help="Check whether a job would work in this allocation.",
)
@click.option("--kernel/--no-kernel", default=True, show_default=True, help="Run a CUDA kernel on each GPU.")
@click.option(
    "--expect-gpus",
    type=click.IntRange(min=0),
    metavar="G",
    help="GPUs expected on each node; without it, as many as Slurm has allocated (SLURM_GPUS_ON_NODE).",
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON instead of a table.")
def check(
    kernel: bool, expect_gpus: int | None, as_json: bool, program: tuple[str, ...], **given: Any
) -> None:
    """Check whether a job in this allocation would work: start its cluster, run small tasks on its workers, end it.

    Give it the arguments that the job will have after `run`. SCRIPT is ignored. Takes as long as the start, and at most 15
    seconds more; then ends with code 1 if something is wrong (red), else 0.
    """
    from dask_gpu_mpi.check.report import as_data, display
    from dask_gpu_mpi.check.run import run_check

    def print_report(report: Report) -> None:
        if as_json:
            click.echo(json.dumps(as_data(report), indent=1))
        else:
            show(display(report, terminal=is_terminal()))

    given, _ = split_run(given, program)
    try:
        code = run_check(lambda: read_texts(given), kernel=kernel, show=print_report, expect_gpus=expect_gpus)
    except DaskGpuMpiError as error:
        report_error(error)
        # 2 is for options that can't be used; all else is a finding
        code = 1 if isinstance(error, InputError) and not isinstance(error, OptionError) else error.exit_code
    sys.exit(code)
