"""The command line, with the command ``run``: ``python -m dask_gpu_mpi``, ``dask-gpu-mpi`` and ``dask gpu-mpi`` are the same.

The other commands are in modules of this package. An error of the command line is reported once for all ranks, so `run` and the
errors of click go the same way, through the start of a job (`_run`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.streams import open_missing, say
from dask_gpu_mpi.cli.inspection import check, plan, top
from dask_gpu_mpi.cli.jobscript import jobscript
from dask_gpu_mpi.cli.launch import launch
from dask_gpu_mpi.cli.options import (
    COLUMNS,
    Help,
    RunCommand,
    complete_files,
    fail,
    flags_of,
    of_job,
    split_run,
)
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, LauncherError
from dask_gpu_mpi.job.child_processes import forget_cluster
from dask_gpu_mpi.options.convert import ELSEWHERE
from dask_gpu_mpi.options.model import OPTIONS, Options
from dask_gpu_mpi.sites.jobscript import SCRIPTED, format_of
from dask_gpu_mpi.sites.launchers import detect

#: Some options of workers that ``dask cuda worker`` and ``dask worker`` have, and that are not ours.
OF_WORKERS = ("device_memory_limit", "enable_cudf_spill", "worker_port", "pre_import", "preload", "lifetime")


class _RunByDefault(Help, click.Group):
    """A group whose first argument need not be a command: ``dask-gpu-mpi SCRIPT`` is ``dask-gpu-mpi run SCRIPT``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands below their headings; the group's own options are in its text."""
        for heading, names in self.topics.items():
            rows = [(name, self.commands[name].get_short_help_str(COLUMNS - 16)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)  # the shell completes the first word
        if not args and not _is_rank():  # otherwise a cluster of one rank would run until it is interrupted
            click.echo(ctx.get_help(), err=True)
            sys.exit(InputError.exit_code)
        if not (args and (args[0] in self.commands or args[0] in ("--help", "--version"))):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands, and the options and files of `run`."""
        command = self.commands["run"]
        with click.Context(command, parent=ctx, resilient_parsing=True) as context:
            words = super().shell_complete(ctx, incomplete) + command.shell_complete(context, incomplete)
        # files first: in bash, those that come after words replace them
        return [*(complete_files() if not incomplete.startswith("-") else ()), *words]


@click.group(
    name="gpu-mpi",
    cls=_RunByDefault,
    topics={
        "Start a cluster": ("run", "launch", "jobscript"),
        "Inspect before and during the run": ("plan", "check", "top"),
    },
    examples=(
        "mpirun -np 4 dask-gpu-mpi analysis.py --input data",
        "dask-gpu-mpi launch --check analysis.py --input data",
        "dask-gpu-mpi plan --nodes 2 --gpus-per-node 4",
    ),
    subcommand_metavar="[COMMAND] [OPTIONS] [SCRIPT [ARGS]...]",
    context_settings={"help_option_names": ["--help"], "terminal_width": COLUMNS},
)
# otherwise `dask gpu-mpi --version` would print the name of dask
@click.version_option(package_name="dask-gpu-mpi", prog_name="dask-gpu-mpi")
def cli() -> None:
    """Dask on every GPU of a batch job: its ranks become one cluster, SCRIPT its client.

    The job ends when SCRIPT ends, with its exit code; without SCRIPT, when it is interrupted or a client calls shutdown().
    Without a command: run. See `COMMAND --help`, `--help-all`; `--version`.
    """
    open_missing()
    if click.get_current_context().invoked_subcommand != top.name:
        forget_cluster()  # the one of a script that has started this command, which only `top` needs


@cli.command(
    cls=RunCommand,
    examples=(
        "mpirun -np 4 dask-gpu-mpi analysis.py --input data",
        "srun --mpi=pmix dask-gpu-mpi run --nthreads 2 -m package.module",
    ),
    short_help="Run SCRIPT on the cluster of these ranks.",
)
def run(program: tuple[str, ...], **given: Any) -> None:
    """Start the cluster, run SCRIPT on its client rank, end with its exit code.

    SCRIPT is a file, a folder or zip file with __main__.py, -m MODULE or -c CODE, as for python.
    """
    given, program = split_run(given, program)
    _run(lambda: of_job(given, program, launch), program)


def _run(read_options: Callable[[], Options], words: Sequence[str]) -> None:
    """Start this rank of a job, run the script of these words on the client's rank, and exit.

    An error is reported once for all ranks, even one of `read_options`.
    """
    from dask_gpu_mpi.job.program import Program, hides_library, run_script
    from dask_gpu_mpi.job.start import prepare_process, start

    program: Program | None = None

    def options() -> Options:
        if program is not None:
            program.check_name()  # before Dask is imported
        return read_options()

    prepare_process()
    try:
        program = Program.of(words) if words else None
        check = None
        if program is not None:
            program.prepare()
            check = partial(program.check_on, commands=cli.commands)
        member, session = start(options, check=check, has_client=program is not None, by_command=True)
        if session is None or program is None:
            code = member.serve()
            if program is None and member.joined.is_client:
                say("ended")
            sys.exit(code)
    except DaskGpuMpiError as error:
        report_error(error)
        if program is not None and "the agent" in str(error) and (file := program.neighbour()):
            say(
                f"perhaps because {file!r} has the name of a library, and is imported instead. Fix: rename it"
            )
        sys.exit(error.exit_code)
    except Exception:
        if program is None or not (file := program.neighbour(imported=True)):
            raise
        fail(InputError(hides_library(file), fix="rename it"))
    run_script(program)


for command in (launch, jobscript, plan, check, top):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    An error of click, such as an unknown option, is reported once for all ranks, like every other error.
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
        refused = InputError(f"command line: {_explained(error, arguments)}")
        if _is_without_ranks(arguments):
            fail(refused)

        def refuse() -> Options:
            raise refused

        _run(refuse, ())
    sys.exit(0)


def _explained(error: click.ClickException, arguments: Sequence[str]) -> str:
    """The message of an error of click, with the fix if it is known."""
    text = error.format_message()
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error, arguments) or text
    if isinstance(error, click.BadParameter):
        return _bad_value(error, arguments)
    if arguments[:1] == [top.name] and "unexpected extra argument" in text:
        return f"top: {text.removesuffix('.')}. Fix: --scheduler-file FILE"
    if arguments[:1] == [plan.name] and "unexpected extra argument" in text:
        return f"plan: {text.removesuffix('.')}. Fix: leave the script out, since a plan needs none"
    return text


def _unknown_option(error: click.NoSuchOption, arguments: Sequence[str]) -> str:
    """The message for an option that belongs to another command, to a worker or to another library; empty: it does not."""
    flag, is_jobscript = error.option_name, arguments[0] == jobscript.name
    name = flag.lstrip("-").replace("-", "_")
    if is_jobscript and flag in ("-n", "--ranks", "--hosts"):
        return f"{flag} is an option of launch. Fix: --nodes and --ranks-per-node"
    if is_jobscript and flag in flags_of(launch):
        return f"{flag} is an option of launch. Fix: put it behind --, before the script"
    if ours := ELSEWHERE.get(name):
        return f"{error.message} Did you mean {OPTIONS[ours].flags[0]!r}?"
    if (name.startswith("rmm_") or name in OF_WORKERS) and arguments[0] != top.name:
        return f"No such option {flag!r}. Fix: --worker-options '{{\"{name}\": VALUE}}'"
    if flag in ("--np", "--workers", "--n-workers"):
        return f"No such option {flag!r}. Fix: -n"
    of_cluster = any(flag in option.flags for option in OPTIONS.values())
    if arguments[0] != launch.name and flag in flags_of(launch) and not of_cluster:
        value = " N" if flag in ("-n", "--ranks") else ""
        return f"No such option {flag!r}. Fix: it is an option of launch: dask-gpu-mpi launch {flag}{value} SCRIPT"
    if is_jobscript and "--" not in arguments:
        return f"No such option {flag!r}. Fix: `--` before the script"
    if is_jobscript:
        # for click -gpu is -g
        word = next((each for each in arguments if each.startswith(flag)), flag).partition("=")[0]
        directive = f"{word}=VALUE" if word.startswith("--") else f"'{word} VALUE'"
        found = (
            f"{error.format_message()} Fix: that, or"
            if error.possibilities
            else f"No such option {word!r}. Fix:"
        )
        system = next((each for each in arguments if each in SCRIPTED), "")
        if word.startswith("--") and not (system and format_of(system).has_long_options):
            return f"{found} --directive with an option of {format_of(system).submit[0] if system else 'the batch system'}"
        return f"{found} --directive={directive} for an option of the batch system"
    if flag in flags_of(jobscript):
        of_gpus = name.startswith("gpus") and arguments[0] != top.name
        fix = f"leave it out{', or set CUDA_VISIBLE_DEVICES' if of_gpus else '; jobscript has it'}"
        return f"No such option {flag!r}. A job runs on all its nodes and GPUs. Fix: {fix}"
    if arguments[0] in (top.name, plan.name):
        return ""
    return f"{error.format_message()} Options of the script come after it."


def _bad_value(error: click.BadParameter, arguments: Sequence[str]) -> str:
    """The message for a value, with the variable that has it and the limits of a number."""
    text, kind = error.format_message(), getattr(error.param, "type", None)
    variable = getattr(error.param, "envvar", None)
    flags = error.param.opts if error.param is not None else ()
    if variable and not any(word.partition("=")[0] in flags for word in arguments):
        text = re.sub("for '.*?'", f"for {variable}", text, count=1)
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return text
    if "'p'" in text and "-np" in arguments:  # mpirun's option
        return f"No such option '-np'. Fix: -n {[*arguments, 'N'][arguments.index('-np') + 1]}"
    number = "whole number" if isinstance(kind, click.IntRange) else "number"
    limits = f"{kind.min} or more" if kind.max is None else f"{kind.min} to {kind.max}"
    return f"{re.split(' is not (?:a valid|in the) ', text)[0]} is not a {number} of {limits}"


def _is_rank() -> bool:
    """Whether a launcher has started this process as one of its ranks."""
    try:
        return detect(os.environ) is not None
    except LauncherError:
        return True  # the start reports it


def _is_without_ranks(arguments: Sequence[str]) -> bool:
    """Whether this command runs without MPI and other ranks, on a login node for instance."""
    if arguments[:1] == ["plan"]:
        return any(word.partition("=")[0] == "--nodes" for word in arguments)
    return arguments[:1] in (["jobscript"], ["launch"], ["top"])
