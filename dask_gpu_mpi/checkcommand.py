"""The command ``check``; what it does is in `dask_gpu_mpi.check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from .errors import DaskGpuMpiError, InputError
from .options import Options

if TYPE_CHECKING:
    from .findings import Report

__all__ = ["add_check"]

#: Options that change what there is to check.
_NAMES = (
    "interface",
    "local_directory",
    "nthreads",
    "memory_limit",
    "dashboard",
    "dashboard_address",
    "protocol",
    "security",
    "worker_class",
    "scheduler_port",
    "scheduler_rank",
    "client_rank",
    "layout",
    "cpu_workers",
)


def add_check(
    group: click.Group,
    option_decorators: Callable[[Any], Callable[[Any], Any]],
    resolve: Callable[[dict[str, Any]], Options | InputError],
) -> None:
    """Add the command to a group.

    Parameters
    ----------
    group : click.Group
        The command line.
    option_decorators : callable
        Makes click's options of names in the table of options.
    resolve : callable
        Adds up what was said.
    """

    @group.command()
    @option_decorators(_NAMES)
    @click.option(
        "--kernel/--no-kernel", default=True, show_default=True, help="Run a CUDA kernel on each GPU."
    )
    @click.option("--json", "as_json", is_flag=True, help="The report as JSON instead of a table.")
    def check(kernel: bool, as_json: bool, **given: Any) -> None:
        """Look whether a job in this allocation would work: versions, launcher, GPUs, network, scratch. Starts no cluster.

        Say the options that the job will have. Ends within 20 seconds, with code 1 where something is wrong (red), else 0.
        """
        from .check import run_check
        from .checktable import as_data, render

        def show(report: Report) -> None:
            # Open MPI gives its ranks a terminal for their output, wherever that goes; but none for their errors.
            color = None if sys.stderr.isatty() else False
            click.echo(json.dumps(as_data(report), indent=1) if as_json else render(report), color=color)

        try:
            code = run_check(resolve(given), kernel=kernel, show=show)
        except DaskGpuMpiError as error:
            if not error.reported:
                print(f"dask_gpu_mpi: error: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)
        sys.exit(code)
