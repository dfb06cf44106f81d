"""The table of options as options of commands: from a command line to `Options`, or to the error with which a command exits."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.options.model import OPTIONS, Option, Options
from dask_gpu_mpi.options.resolve import resolve

from .help import HelpCommand, help_of

__all__ = [
    "RUN_CONTEXT",
    "TOPICS",
    "RunCommand",
    "click_option",
    "complete_files",
    "fail",
    "parse_run",
    "read_texts",
    "resolve_texts",
    "run_help",
    "run_parameters",
    "split_run",
    "usable",
    "with_options",
]

#: Options of a command come before the script; all arguments after it are the script's.
RUN_CONTEXT = {"allow_interspersed_args": False}
#: The options of the table by topic, for ``--help-all``.
TOPICS = {
    topic: tuple(option.name for option in OPTIONS.values() if option.topic == topic)
    for topic in dict.fromkeys(option.topic for option in OPTIONS.values() if option.cli)
}
#: Those that ``--help`` shows.
MOST_USED = ("nthreads", "memory_limit", "scheduler_file", "report")
#: An address instead of a script: it has a protocol, or a host and a port.
_ADDRESS = re.compile(r"[a-z]+://\S+|[^\s/]+:\d+")


class RunCommand(HelpCommand):
    """A command whose options end at ``-m MODULE`` or ``-c CODE``, as Python's own: what follows is the program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's, with ``--`` before them."""
        return super().parse_args(ctx, _end_options(ctx, self.get_params(ctx), args))


def _end_options(ctx: click.Context, parameters: Sequence[click.Parameter], args: list[str]) -> list[str]:
    takes_value = {
        flag
        for parameter in parameters
        if isinstance(parameter, click.Option) and not parameter.is_flag
        for flag in parameter.opts
    }
    index = 0
    while index < len(args) and args[index].startswith("-") and args[index] not in ("-", "--"):
        start, rest = args[index][:2], args[index][2:]
        if start in ("-m", "-c"):
            words = [start, *([rest] if rest else []), *args[index + 1 :]]
            if len(words) == 1 and not ctx.resilient_parsing:  # a shell that completes the rest
                raise click.UsageError(f"Option {start!r} requires an argument.", ctx)
            return [*args[:index], "--", *words]
        index += 2 if args[index] in takes_value else 1
    return args


def click_option(option: Option, *, multiple: bool = False) -> Callable[[Any], Any]:
    """An option for click: as text, so that one place checks and reports it."""
    metavar = None if option.kind == "bool" else "|".join(option.choices) or option.kind.upper()
    return click.option(
        *option.flags,
        option.name,
        default=None,
        multiple=multiple,
        metavar=metavar,
        help=option.help,
        shell_complete=_completion(option),
    )


def complete_files(*_: Any) -> list[CompletionItem]:
    """Have the shell complete names of files."""
    return [CompletionItem("", type="file")]


def _completion(option: Option) -> Callable[..., list[CompletionItem]] | None:
    if option.kind == "path":
        return complete_files
    if not option.choices:
        return None
    return lambda context, parameter, begun: [
        CompletionItem(choice) for choice in option.choices if choice.startswith(begun)
    ]


def with_options(function: Any, *, plan: bool = False) -> Any:
    """Give a command all options, or those that shape the plan."""
    for option in reversed([*OPTIONS.values()]):
        if option.cli and (option.plan or not plan):
            function = click_option(option)(function)
    return function


def read_texts(given: dict[str, Any]) -> Options:
    """The options of a command line.

    Raises
    ------
    InputError
        One of them is wrong.
    """
    explicit = {name: value for name, value in given.items() if value is not None}
    return resolve(explicit, source="command line")


def resolve_texts(given: dict[str, Any]) -> Options | InputError:
    """The options of a command line, or what is wrong with them: to be reported once for all ranks."""
    try:
        return read_texts(given)
    except InputError as error:
        return error


def usable(options: Options | InputError) -> Options:
    """The options, or raise what is wrong with them."""
    if isinstance(options, InputError):
        raise options
    return options


def fail(error: DaskGpuMpiError) -> NoReturn:
    """Report an error and exit with its code."""
    report_error(error)
    sys.exit(error.exit_code)


def run_parameters(function: Any) -> Any:
    """What `run` takes (with `RunCommand`): all options of the table, the script and its arguments."""
    program = click.argument(
        "program",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="[SCRIPT | -m MODULE | -c CODE] [ARGS]...",
        shell_complete=complete_files,
    )
    return with_options(program(function))


def run_help(*examples: str, short: Sequence[str] = MOST_USED) -> Callable[[Any], Any]:
    """The help of a command that takes what `run` takes: `short` are the options that ``--help`` shows."""
    return help_of(short=short, topics=TOPICS, examples=examples)


def parse_run(arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters of `run` from its command line, without running it.

    Raises
    ------
    click.ClickException
        It is not valid.
    click.exceptions.Exit
        It asks for help.
    """
    command = click.command("run", cls=RunCommand, context_settings=RUN_CONTEXT)(
        run_parameters(lambda **_: None)
    )
    with command.make_context("run", list(arguments)) as context:
        return dict(context.params)


def split_run(given: dict[str, Any], program: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The texts of a job's options, and its script with arguments."""
    scheduler = (given["scheduler"], given["scheduler_file"], given["scheduler_address"])
    if scheduler == (False, None, None) and program and _ADDRESS.fullmatch(program[0]):
        # dask-mpi: --no-scheduler ADDRESS
        return {**given, "scheduler_address": program[0]}, program[1:]
    return given, program
