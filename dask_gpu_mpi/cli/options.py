"""The options of commands, made from the table of options: from a command line to `Options`, or to an error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.options.model import OPTIONS, Option, Options
from dask_gpu_mpi.options.resolve import resolve

# Help that fits a screen: options in topics, the most used ones with examples; all of them with ``--help-all``.

#: The width of help, which fits all terminals.
COLUMNS = 80
#: Names of options, or of commands, below their heading.
Topics = Mapping[str, Sequence[str]]


def help_of(
    *, short: Sequence[str] = (), topics: Topics | None = None, examples: Sequence[str] = ()
) -> Callable[[Any], Any]:
    """Decorate a `HelpCommand` with the content of its help.

    ``--help`` shows the options in `short`, ``--help-all`` all of them; without `short`, ``--help`` shows all. `topics` are the
    headings, with the names of the options below each; other options come first. `examples` are command lines.
    """

    def decorate(command: Any) -> Any:
        command.short, command.topics, command.examples = tuple(short), dict(topics or {}), tuple(examples)
        if short:
            command.params.append(_help_all())
        return command

    return decorate


def _help_all() -> click.Option:
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
        help="Show all options.",
    )


class _Help(click.Command):
    """The common part of the help of commands and of the group: width, topics, examples."""

    topics: Topics = MappingProxyType({})
    examples: tuple[str, ...] = ()

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write Click's help, in a width that all terminals have."""
        formatter.width = COLUMNS
        super().format_help(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        _write_examples(formatter, self.examples)


class HelpCommand(_Help):
    """A command whose help has the content of `help_of`."""

    short: tuple[str, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below the headings of their topics, or the most used ones."""
        rows = {
            parameter.name or "": row
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and (row := parameter.get_help_record(ctx)) is not None
        }
        everything = ctx.meta.get(__name__, False) or not self.short
        topics = self._all_topics(rows) if everything else {"Most used options": (*self.short, "help_all")}
        for heading, names in topics.items():
            found = [rows[name] for name in names if name in rows]
            if found:
                with formatter.section(heading):
                    formatter.write_dl(found, col_max=30)

    def _all_topics(self, rows: Mapping[str, Any]) -> Topics:
        placed = {name for names in self.topics.values() for name in names}
        others = [name for name in rows if name not in placed]
        return {"Options of this command" if self.topics else "Options": others, **self.topics}


class HelpGroup(_Help, click.Group):
    """A group whose help shows its commands below headings, its `topics`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands below their headings; the group's own options are in its text."""
        for heading, names in self.topics.items():
            rows = [
                (name, command.get_short_help_str(COLUMNS - 16))
                for name in names
                if (command := self.get_command(ctx, name)) is not None
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)


def _write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


#: Options of a command come before the script. All arguments after it belong to the script.
RUN_CONTEXT = {"allow_interspersed_args": False}
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
    """A command whose options end at ``-m MODULE`` or ``-c CODE``, as Python's own do; the rest belongs to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as Click does, with ``--`` before such a program."""
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
    """An option for Click, as text: one place checks and reports all values."""
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


def with_options(function: Any, *, plan: bool = False) -> Any:
    """Decorate a command with all options, or with those of a plan."""
    for option in reversed([*OPTIONS.values()]):
        if option.cli and (option.plan or not plan):
            function = click_option(option)(function)
    return function


def read_texts(given: dict[str, Any]) -> Options:
    """The options of a command line; InputError if one of them is wrong."""
    explicit = {name: value for name, value in given.items() if value is not None}
    return resolve(explicit, source="command line")


def resolve_texts(given: dict[str, Any]) -> Options | InputError:
    """The options of a command line, or their error, which is reported once for all ranks."""
    try:
        return read_texts(given)
    except InputError as error:
        return error


def usable(options: Options | InputError) -> Options:
    """The options; raise their error if there is one."""
    if isinstance(options, InputError):
        raise options
    return options


def fail(error: DaskGpuMpiError) -> NoReturn:
    """Report an error and exit with its code."""
    report_error(error)
    sys.exit(error.exit_code)


def run_parameters(function: Any) -> Any:
    """Decorate a `RunCommand` with the parameters of `run`: all options of the table, the script and its arguments."""
    program = click.argument(
        "program",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="[SCRIPT | -m MODULE | -c CODE] [ARGS]...",
        shell_complete=complete_files,
    )
    return with_options(program(function))


def run_help(*examples: str, short: Sequence[str] = MOST_USED) -> Callable[[Any], Any]:
    """Decorate a command that has the parameters of `run` with its help; `short`: the options that ``--help`` shows."""
    return help_of(short=short, topics=TOPICS, examples=examples)


def split_run(given: dict[str, Any], program: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The texts of a job's options, and its script with arguments."""
    scheduler = (given["scheduler"], given["scheduler_file"], given["scheduler_address"])
    if scheduler == (False, None, None) and program and _ADDRESS.fullmatch(program[0]):
        # dask-mpi: --no-scheduler ADDRESS
        return {**given, "scheduler_address": program[0]}, program[1:]
    return given, program
