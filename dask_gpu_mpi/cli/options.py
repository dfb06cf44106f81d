"""The table of options as options of commands, and what a command line of `run` says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.resolve import parse_text, resolve
from dask_gpu_mpi.options.table import OPTIONS

__all__ = [
    "RUN_CONTEXT",
    "option_decorators",
    "parse_run",
    "resolve_run",
    "resolve_texts",
    "run_parameters",
]

#: Options of ours come before the script, all words after it are the script's.
RUN_CONTEXT = {"allow_interspersed_args": False}
#: What tells an address from a script: a protocol, or a host and a port.
_ADDRESS = re.compile(r"[a-z]+://\S+|[^\s/]+:\d+")


def option_decorators(names: Sequence[str] | None = None) -> Callable[[Any], Any]:
    """The table's options, for click: all texts, so that errors are found, and told, in one place."""

    def decorate(function: Any) -> Any:
        for option in reversed(list(OPTIONS.values())):
            if not option.cli or (names is not None and option.name not in names):
                continue
            if option.kind == "bool":
                function = click.option(option.flags[0], option.name, default=None, help=option.help)(
                    function
                )
            else:
                metavar = "|".join(option.choices) if option.choices else option.kind.upper()
                function = click.option(
                    *option.flags, option.name, default=None, metavar=metavar, help=option.help
                )(function)
        return function

    return decorate


def resolve_texts(given: dict[str, Any]) -> Options | InputError:
    """The options from what the command line said, or what is wrong with them: to be told once for all ranks."""
    try:
        explicit = {
            name: parse_text(OPTIONS[name], value) if isinstance(value, str) else value
            for name, value in given.items()
            if value is not None
        }
        return resolve(explicit, source="command line")
    except InputError as error:
        return error


def run_parameters(function: Any) -> Any:
    """What `run` takes: all options of the table, the script and its arguments."""
    words = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
    return option_decorators()(words(function))


def parse_run(arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters of `run` in a command line that is not to be run now.

    Raises
    ------
    click.ClickException
        What click finds wrong with it.
    click.exceptions.Exit
        It asks for help.
    """
    command = click.command("run", context_settings=RUN_CONTEXT)(run_parameters(lambda **_: None))
    with command.make_context("run", list(arguments)) as context:
        return dict(context.params)


def resolve_run(
    given: dict[str, Any], words: tuple[str, ...]
) -> tuple[Options | InputError, tuple[str, ...]]:
    """The options and the script of a job."""
    if (
        given["scheduler"] is False
        and given["scheduler_file"] is None
        and given["scheduler_address"] is None
        and words
        and _ADDRESS.fullmatch(words[0])
    ):
        given["scheduler_address"], words = words[0], words[1:]  # dask-mpi: --no-scheduler ADDRESS
    return resolve_texts(given), words
