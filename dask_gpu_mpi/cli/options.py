"""The options of commands, made from the table of options: from a command line to `Options`, or to an error."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.files import replace
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem
from dask_gpu_mpi.options.model import OPTIONS, Option, Options
from dask_gpu_mpi.options.resolve import resolve

# Help that fits a screen: options in topics, the most used ones with examples; all of them with ``--help-all``.

#: The width of help, which fits all terminals.
COLUMNS = 80
#: Names of options, or of commands, below their heading.
Topics = Mapping[str, Sequence[str]]


class Help(click.Command):
    """The help of commands and of the group: `topics` are the names of options, or of commands, below each heading."""

    def __init__(
        self, *args: Any, topics: Topics = MappingProxyType({}), examples: Sequence[str] = (), **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.topics = topics
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class HelpCommand(Help):
    """A command whose ``--help`` shows the options in `short`, and ``--help-all`` all; without `short`, both show all."""

    def __init__(self, *args: Any, short: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self.short = short
        self.params.append(_help_all(hidden=not short))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below the headings of their topics, or the most used ones."""
        rows = {
            parameter.name or "": row
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and (row := parameter.get_help_record(ctx)) is not None
        }
        placed = {name for names in self.topics.values() for name in names}
        others = [name for name in rows if name not in placed]
        topics = {"Options of this command" if self.topics else "Options": others, **self.topics}
        if self.short and not ctx.meta.get(__name__, False):
            topics = {"Most used options": [*self.short, "help_all"]}
        for heading, names in topics.items():
            found = [rows[name] for name in names if name in rows]
            if found:
                with formatter.section(heading):
                    formatter.write_dl(found, col_max=30)


def _help_all(*, hidden: bool) -> click.Option:
    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            context.meta[__name__] = True
            click.echo(context.get_help(), color=context.color)
            context.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        hidden=hidden,
        help="Show all options.",
    )


#: The options of the table by topic, for ``--help-all``.
TOPICS = {
    topic: tuple(option.name for option in OPTIONS.values() if option.topic == topic)
    for topic in dict.fromkeys(option.topic for option in OPTIONS.values() if option.cli)
}
#: Those that ``--help`` shows.
MOST_USED = ("nthreads", "memory_limit", "scheduler_file", "report")
#: An address instead of a script: a protocol, or a host and a port.
_ADDRESS = re.compile(r"[a-z]+://\S+|[^\s/]+:\d+")


class RunCommand(HelpCommand):
    """A command with the options of a job, which end at the script, or at ``-m MODULE`` or ``-c CODE`` as Python's own do."""

    allow_interspersed_args = False

    def __init__(self, *args: Any, short: Sequence[str] = MOST_USED, **more: Any) -> None:
        super().__init__(*args, short=short, topics=TOPICS, **more)
        program = click.Argument(
            ["program"],
            nargs=-1,
            type=click.UNPROCESSED,
            metavar="[SCRIPT | -m MODULE | -c CODE] [ARGS]...",
            shell_complete=complete_files,
        )
        self.params += [*click_options(option for option in OPTIONS.values() if option.cli), program]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as Click does, with ``--`` before a module or code."""
        with_value = {
            flag
            for parameter in self.get_params(ctx)
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
                args = [*args[:index], "--", *words]
                break
            index += 2 if args[index] in with_value else 1
        return super().parse_args(ctx, args)


def click_options(options: Iterable[Option], *, multiple: bool = False) -> list[click.Parameter]:
    """Options for Click, as texts: one place checks and reports all values."""
    return [
        click.Option(
            [*option.flags, option.name],
            default=None,
            multiple=multiple,
            metavar=None if option.kind == "bool" else "|".join(option.choices) or option.kind.upper(),
            help=option.help,
            shell_complete=_completion(option),
        )
        for option in options
    ]


def complete_files(*_: Any) -> list[CompletionItem]:
    """Let the shell complete names of files."""
    return [CompletionItem("", type="file")]


def _completion(option: Option) -> Callable[..., list[CompletionItem]] | None:
    if option.kind == "path":
        return complete_files
    if not option.choices:
        return None
    return lambda context, parameter, begun: [
        CompletionItem(choice) for choice in option.choices if choice.startswith(begun)
    ]


def read_texts(given: dict[str, Any]) -> Options:
    """The options of a command line; InputError if one of them is wrong."""
    explicit = {name: value for name, value in given.items() if value is not None}
    return resolve(explicit, source="command line")


def flags_of(command: click.Command) -> set[str]:
    """All names of the options of a command."""
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}


def of_job(given: dict[str, Any], program: Sequence[str], command: click.Command) -> Options:
    """The options of a command line with a script, and a warning if options of `command` come after it, by mistake.

    The script gets them. It may know them, if its text has their names.
    """
    options, flags = read_texts(given), flags_of(command)
    words = (word.partition("=")[0] for word in program[1:])
    found = [word for word in dict.fromkeys(words) if word.startswith("--") and word in flags]
    if not found or not program[0].endswith(".py") or not os.path.isfile(program[0]):
        return options  # a pipe can be read once
    with contextlib.suppress(OSError):  # an error of its own
        text = Path(program[0]).read_text(encoding="utf-8", errors="replace").replace("_", "-")
        if unknown := [word for word in found if word.strip("-") not in text]:
            problem = Problem(
                f"{', '.join(unknown)} after the script goes to the script, whose text does not contain it",
                fix="options of the job before the script",
            )
            return dataclasses.replace(options, warnings=(*options.warnings, problem))
    return options


def write_file(option: str, path: str, content: bytes) -> None:
    """Write the file of an option; InputError if it can't be written."""
    try:
        replace(path, content, 0o666)
    except OSError as error:
        raise InputError(
            f"command line: {option} {path!r} can't be written: {error.strerror}",
            fix="choose a file in a folder that exists and that you may write",
        ) from None


def is_given(name: str, context: click.Context | None = None) -> bool:
    """Whether an option was on the command line, by default on that of the command that runs."""
    source = (context or click.get_current_context()).get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def fail(error: DaskGpuMpiError) -> NoReturn:
    """Report an error and exit with its code."""
    report_error(error)
    sys.exit(error.exit_code)


def split_run(given: dict[str, Any], program: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The texts of a job's options, and its script with arguments."""
    scheduler = (given["scheduler"], given["scheduler_file"], given["scheduler_address"])
    if scheduler == (False, None, None) and program and _ADDRESS.fullmatch(program[0]):
        # dask-mpi: --no-scheduler ADDRESS
        return {**given, "scheduler_address": program[0]}, program[1:]
    return given, program
