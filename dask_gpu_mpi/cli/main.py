"""The command line: ``python -m dask_gpu_mpi``, ``dask-gpu-mpi`` and ``dask gpu-mpi`` are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from dask_gpu_mpi.base.streams import open_missing, say
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.script.cluster_file import forget_cluster

from .check import check
from .jobscript import jobscript
from .launch import launch
from .options import RUN_CONTEXT, RunCommand, fail, read_texts, run_parameters, split_run
from .plan import plan

__all__ = ["cli", "main"]


class _RunByDefault(click.Group):
    """A group whose first argument need not be a command: ``dask-gpu-mpi SCRIPT`` is ``dask-gpu-mpi run SCRIPT``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not (args and (args[0] in self.commands or args[0] in ("--help", "--version"))):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(name="gpu-mpi", cls=_RunByDefault, context_settings={"help_option_names": ["--help"]})
@click.version_option(package_name="dask-gpu-mpi")
def cli() -> None:
    """Dask on every GPU of a batch job.

    \b
    mpirun -np N python -m dask_gpu_mpi [OPTIONS] [SCRIPT | -m MODULE | -c CODE] [ARGS]...

    dask-gpu-mpi launch [-n N] [OPTIONS] [SCRIPT [ARGS]...]

    turns the MPI ranks into one Dask cluster, runs SCRIPT as its client, and ends when the script ends, with its exit code.
    Without SCRIPT the cluster stays until it is interrupted or a client calls shutdown(). See `run --help` for the options.
    """  # noqa: D301 - click takes the character, not the two letters
    open_missing()
    forget_cluster()  # of a script that has started this command


@cli.command(cls=RunCommand, context_settings=RUN_CONTEXT)
@run_parameters
def run(program: tuple[str, ...], **given: Any) -> None:
    """Start the cluster, run SCRIPT on its client rank, end with its exit code.

    SCRIPT is a file, a folder or zip file with __main__.py, -m MODULE or -c CODE, as for python.
    """
    given, program = split_run(given, program)
    _run(lambda: read_texts(given), program)


def _run(read_options: Callable[[], Options], words: Sequence[str]) -> None:
    from dask_gpu_mpi.cluster.start import prepare_process, start
    from dask_gpu_mpi.script.program import Program
    from dask_gpu_mpi.script.run import run_script

    def check_client(rank: int, options: Options) -> None:
        from dask_gpu_mpi.plan.roles import expected_client

        if program is not None and rank == expected_client(options):
            program.check(cli.commands)

    prepare_process()
    program = Program.of(words) if words else None
    if program is not None:
        program.prepare()
    try:
        member, session = start(
            read_options,
            check=check_client if words else None,
            has_client=program is not None,
            by_command=True,
        )
        if session is None or program is None:
            code = member.serve()
            if program is None and member.joined.start.is_client:
                say("ended")
            sys.exit(code)
    except DaskGpuMpiError as error:
        fail(error)
    run_script(program)


for command in (launch, plan, check, jobscript):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    What click refuses (an unknown option) is reported like every other error: once for all ranks.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        cli.main(arguments, prog_name="dask-gpu-mpi", standalone_mode=False)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.Abort:
        say("error: SIGINT came before the start")
        sys.exit(130)
    except click.ClickException as error:
        refused = InputError(f"command line: {error.format_message()}")
        if _is_without_ranks(arguments):
            fail(refused)

        def refuse() -> Options:
            raise refused

        _run(refuse, ())
    sys.exit(0)


def _is_without_ranks(arguments: Sequence[str]) -> bool:
    """Whether this command has no other ranks, with which it would agree on one report, nor needs MPI: on a login node."""
    if arguments[:1] == ["plan"]:
        return any(word.partition("=")[0] == "--nodes" for word in arguments)
    return arguments[:1] in (["jobscript"], ["launch"])
