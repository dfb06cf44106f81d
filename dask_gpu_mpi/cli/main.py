"""The command line: ``python -m dask_gpu_mpi``, ``dask-gpu-mpi`` and ``dask gpu-mpi`` are the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.streams import open_missing, say
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.options.model import Options

from .check import check
from .jobscript import jobscript
from .options import RUN_CONTEXT, option_decorators, resolve_run, resolve_texts, run_parameters

__all__ = ["cli", "main"]


class _RunByDefault(click.Group):
    """A group whose first word need not be a command: ``dask-gpu-mpi SCRIPT`` is ``dask-gpu-mpi run SCRIPT``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not (args and (args[0] in self.commands or args[0] in ("--help", "--version"))):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(name="gpu-mpi", cls=_RunByDefault, context_settings={"help_option_names": ["--help"]})
@click.version_option(package_name="dask-gpu-mpi")
def cli() -> None:
    """Dask on every GPU of a batch job.

    \b
    mpirun -np N python -m dask_gpu_mpi [OPTIONS] [SCRIPT [ARGS]...]

    turns the MPI ranks into one Dask cluster, runs SCRIPT as its client, and ends when the script ends, with its exit code.
    Without SCRIPT the cluster stays until it is interrupted or a client calls shutdown(). See `run --help` for the options.
    """  # noqa: D301 - click takes the character, not the two letters
    open_missing()


@cli.command(context_settings=RUN_CONTEXT)
@run_parameters
def run(words: tuple[str, ...], **given: Any) -> None:
    """Start the cluster, run SCRIPT on its client rank, end with its exit code."""
    _run(*resolve_run(given, words))


def _run(options: Options | InputError, words: Sequence[str]) -> None:
    from dask_gpu_mpi.cluster.start import prepare_process, start
    from dask_gpu_mpi.script.run import check_script, prepare_script, run_script

    prepare_process()
    check_rank: Callable[[int], None] | None = None
    if words:
        prepare_script(words[0], words[1:])
        if isinstance(options, Options):

            def check_rank(rank: int) -> None:
                from dask_gpu_mpi.plan.from_options import expected_client

                if rank == expected_client(options):
                    check_script(words[0], cli.commands)

    try:
        member, session = start(options, check=check_rank, has_client=bool(words))
        if session is None:
            code = member.serve()
            if not words and member.joined.start.is_client:
                say("ended")
            sys.exit(code)
    except DaskGpuMpiError as error:
        _fail(error)
    run_script(words[0])


@cli.command()
@option_decorators(
    [
        "layout",
        "cpu_workers",
        "gpus_per_worker",
        "require_idle_gpus",
        "nthreads",
        "memory_limit",
        "worker_class",
        "worker_options",
        "name",
        "scheduler_rank",
        "client_rank",
    ]
)
@click.option(
    "--nodes", type=click.IntRange(min=1), help="Pretend this many hosts instead of looking at the ranks."
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Pretended ranks on each.",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Pretended GPUs of each.",
)
@click.option(
    "--visible",
    type=click.Choice(["all", "per-rank"]),
    default="all",
    show_default=True,
    help="Whether each rank sees all GPUs of its host, or its share of them.",
)
@click.option(
    "--cpus-per-node",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Pretended cores of each.",
)
@click.option(
    "--memory-per-node",
    help="Pretended memory of each, bytes or a text.  [default: 512GiB]",
)
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON instead of a table.")
def plan(
    nodes: int | None,
    ranks_per_node: int,
    gpus_per_node: int,
    visible: Literal["all", "per-rank"],
    cpus_per_node: int,
    memory_per_node: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Show who would work where, without starting anything: of this very allocation, or of a hypothetical one (--nodes)."""
    from .plan import plan_of_allocation, plan_of_inventories

    options = resolve_texts(given)
    try:
        if nodes is None:
            made = plan_of_allocation(options)
        else:
            from dask_gpu_mpi.base.sizes import parse_bytes
            from dask_gpu_mpi.plan.synthetic import NODE_MEMORY, hypothetical_job

            if isinstance(options, InputError):
                raise options
            try:
                memory = NODE_MEMORY if memory_per_node is None else parse_bytes(memory_per_node)
            except ValueError as error:
                raise InputError(f"command line: --memory-per-node {memory_per_node!r}: {error}") from None
            inventories = hypothetical_job(
                nodes,
                ranks_per_node,
                gpus_per_node,
                visible=visible,
                cpus_per_node=cpus_per_node,
                memory_per_node=memory,
            )
            made = plan_of_inventories(options, inventories)
    except DaskGpuMpiError as error:
        _fail(error)
    if made is not None:
        click.echo(json.dumps(made.as_json(), indent=1) if as_json else made.table())


def _fail(error: DaskGpuMpiError) -> None:
    report_error(error)
    sys.exit(error.exit_code)


cli.add_command(check)
cli.add_command(jobscript)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    What click refuses (an unknown option) is told like every other error: once for all ranks.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        cli.main(arguments, prog_name="dask-gpu-mpi", standalone_mode=False)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        if arguments[:1] == ["jobscript"]:  # on a login node, where there are no ranks
            _fail(InputError(f"command line: {error.format_message()}"))
        _run(InputError(f"command line: {error.format_message()}"), ())
    sys.exit(0)
