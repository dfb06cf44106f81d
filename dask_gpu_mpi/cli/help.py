"""Help that fits a screen: options in topics, the most used ones with examples; all of them with ``--help-all``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click

__all__ = ["HelpCommand", "HelpGroup", "Topics", "help_of"]

#: Columns that help fills: what a terminal has at least, whatever this one has.
COLUMNS = 80
#: Names of options, or of commands, below their heading.
Topics = Mapping[str, Sequence[str]]


def help_of(
    *, short: Sequence[str] = (), topics: Topics | None = None, examples: Sequence[str] = ()
) -> Callable[[Any], Any]:
    """Give a `HelpCommand` what its help is made of.

    Parameters
    ----------
    short : sequence of str
        Names of the options that ``--help`` shows; all others only ``--help-all``. Without them, all, and there is no
        ``--help-all``.
    topics : mapping
        The headings, and the names of the options below each; the command's own that are in none stand first.
    examples : sequence of str
        Command lines.
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
    """What the help of commands and of the group have in common: width, topics, examples."""

    topics: Topics = MappingProxyType({})
    examples: tuple[str, ...] = ()

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click's, of the width that all terminals have."""
        formatter.width = COLUMNS
        super().format_help(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        _write_examples(formatter, self.examples)


class HelpCommand(_Help):
    """A command whose help is made as `help_of` says."""

    short: tuple[str, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, below the headings of their topics, or the most used ones."""
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
    """A group whose help shows its commands below headings.

    Attributes
    ----------
    topics : mapping
        The headings, and the names of the commands below each.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands below their headings; the group's own options stand in its text."""
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
