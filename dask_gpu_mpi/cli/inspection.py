"""The commands that inspect: an allocation, before its job (``plan``, ``check``), or a running cluster (``top``).

Their work is done in `dask_gpu_mpi.plan`, `dask_gpu_mpi.check` and `dask_gpu_mpi.cli.live_view`, mostly imported
when needed.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Literal

import click

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.text import is_terminal, show
from dask_gpu_mpi.cli.options import (
    TOPICS,
    HelpCommand,
    RunCommand,
    click_options,
    fail,
    is_given,
    of_job,
    read_texts,
    split_run,
    write_file,
)
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, OptionError
from dask_gpu_mpi.options.model import OPTIONS, Options
from dask_gpu_mpi.plan.nodes import display

if TYPE_CHECKING:
    from dask_gpu_mpi.check.report import Report

# fmt: off
#: The shape of a hypothetical allocation, and the output.
PLAN_OPTIONS = [
    click.Option(["--nodes"], type=click.IntRange(min=1), help="Plan a hypothetical allocation with this number of nodes."),
    click.Option(["--ranks-per-node"], type=click.IntRange(min=1), default=1, show_default=True,
                 help="Ranks on each of these nodes."),
    click.Option(["--gpus-per-node"], type=click.IntRange(min=0), default=0, show_default=True,
                 help="GPUs of each of these nodes."),
    click.Option(["--gpus", "total"], type=click.IntRange(min=1),
                 help="GPUs in all, instead of --nodes: each node but the last has --gpus-per-node. Default: one node."),
    click.Option(["--visible"], type=click.Choice(["all", "per-rank"]), default="all", show_default=True,
                 help="GPUs that each of these ranks sees: all of its node, or its share."),
    click.Option(["--cpus-per-node"], type=click.IntRange(min=1), default=64, show_default=True,
                 help="Cores of each of these nodes."),
    click.Option(["--memory-per-node"], help="Memory of each of these nodes: bytes, or a text such as 64GiB.  [default: 512GiB]"),
    click.Option(["--json", "as_json"], is_flag=True, help="The plan as JSON instead of a table."),
    click.Option(["--svg"], metavar="FILE", help="Write the plan there as a picture, too."),
]
# fmt: on


@click.command(
    cls=HelpCommand,
    params=[
        *PLAN_OPTIONS,
        *click_options(option for option in OPTIONS.values() if option.cli and option.plan),
    ],
    short=("nodes", "ranks_per_node", "gpus_per_node", "gpus_per_worker", "as_json", "svg"),
    topics=TOPICS,
    examples=("srun dask-gpu-mpi plan", "dask-gpu-mpi plan --nodes 2 --gpus-per-node 4"),
    short_help="Show which worker gets which GPU; start nothing.",
)
def plan(
    nodes: int | None,
    ranks_per_node: int,
    gpus_per_node: int,
    total: int | None,
    visible: Literal["all", "per-rank"],
    cpus_per_node: int,
    memory_per_node: str | None,
    as_json: bool,
    svg: str | None,
    **given: Any,
) -> None:
    """Show which worker gets which GPU, in this allocation or in a hypothetical one (--nodes). Starts no cluster."""
    try:
        if total is not None:
            if nodes is not None:
                raise InputError("command line: --gpus with --nodes", expected="one of them")
            gpus_per_node = gpus_per_node or total
            nodes = -(-total // gpus_per_node)
        # nor a script, if the name of the picture was forgotten
        if svg is not None and (
            svg.lower().endswith((".png", ".pdf", ".jpg", ".html")) or svg.endswith(".py")
        ):
            raise InputError(f"command line: --svg {svg!r}", expected="a name that ends with .svg")
        if nodes is None:
            _refuse_shape()
            from dask_gpu_mpi.job.start import plan_of_allocation

            made = plan_of_allocation(lambda: read_texts(given))
        else:
            from dask_gpu_mpi.machine.inventory import hypothetical_job
            from dask_gpu_mpi.plan.planner import make_plan

            options = read_texts(given)
            _check_worker_options(options)
            inventories = hypothetical_job(
                nodes, ranks_per_node, gpus_per_node, visible, cpus_per_node, _memory(memory_per_node), total
            )
            made = make_plan(inventories, options)
        if made is None:  # on another rank
            return
        if svg is not None:
            from dask_gpu_mpi.plan.nodes import svg as picture_of

            write_file("--svg", svg, picture_of(made).encode())
    except DaskGpuMpiError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(made.as_json(), indent=1))
    else:
        show(display(made, terminal=is_terminal()))


def _refuse_shape() -> None:
    """Refuse options that describe nodes, in a plan of this allocation."""
    for name in ("ranks_per_node", "gpus_per_node", "visible", "cpus_per_node", "memory_per_node"):
        if is_given(name):
            raise InputError(
                f"command line: --{name.replace('_', '-')} without --nodes",
                expected="--nodes N, for a plan of nodes that you describe",
                fix="add --nodes 1, or leave it out for a plan of this allocation",
            )


def _check_worker_options(options: Options) -> None:
    """Check the options of workers as the agents of a job do, since `plan` starts no agent."""
    if options.worker_options:
        from dask_gpu_mpi.workers.worker_options import read_worker_options

        read_worker_options(options.worker_class, options.worker_options)


def _memory(text: str | None) -> int:
    from dask_gpu_mpi.base.text import parse_bytes
    from dask_gpu_mpi.machine.inventory import NODE_MEMORY

    try:
        memory = NODE_MEMORY if text is None else parse_bytes(text)
    except ValueError as error:
        raise InputError(f"command line: --memory-per-node {text!r}: {error}") from None
    if memory < 2**20:
        raise InputError(
            f"command line: --memory-per-node {text!r}: {memory} bytes", expected="a size such as 64G"
        )
    return memory


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
    help="GPUs expected on each node; without it, as many as the batch system or CUDA_VISIBLE_DEVICES says.",
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON instead of a table.")
def check(
    kernel: bool, expect_gpus: int | None, as_json: bool, program: tuple[str, ...], **given: Any
) -> None:
    """Check whether a job in this allocation would work: start its cluster, run small tasks on its workers, end it.

    Give it the arguments that the job will have after `run`. SCRIPT does not run. Takes as long as the start, and at most
    15 seconds more; then ends with code 1 if something is wrong (red), else 0.
    """
    from dask_gpu_mpi.check.report import as_data
    from dask_gpu_mpi.check.report import display as display_report
    from dask_gpu_mpi.check.run import run_check
    from dask_gpu_mpi.job.program import Program

    def print_report(report: Report) -> None:
        if as_json:
            click.echo(json.dumps(as_data(report), indent=1))
        else:
            show(display_report(report, terminal=is_terminal()))

    given, words = split_run(given, program)
    try:
        # a module is found by a path that is not set here
        script = Program.of(words) if words and words[0] != "-m" else None
        code = run_check(
            lambda: of_job(given, words, check),
            kernel=kernel,
            show=print_report,
            expect_gpus=expect_gpus,
            check=None if script is None else script.check_on,
        )
    except DaskGpuMpiError as error:
        report_error(error)
        # 2 is for options that can't be used; all else is a finding
        code = 1 if isinstance(error, InputError) and not isinstance(error, OptionError) else error.exit_code
    sys.exit(code)


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
