"""What a command line says."""

from __future__ import annotations

from typing import Any

import click
import pytest

from dask_gpu_mpi.cli.options import parse_run, resolve_texts, split_run
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import OPTIONS, Options


def resolved(*arguments: str) -> tuple[Options | InputError, tuple[str, ...]]:
    given = parse_run(arguments)
    given, program = split_run(given, given.pop("program"))
    return resolve_texts(given), program


def test_every_option_of_the_table_is_one_of_the_command() -> None:
    given = parse_run([])
    assert given.pop("program") == ()
    assert given.keys() == {option.name for option in OPTIONS.values() if option.cli}
    assert set(given.values()) == {None}


def test_what_comes_after_the_script_is_the_scripts() -> None:
    options, words = resolved("--nthreads", "2", "script.py", "--nthreads", "3", "--flag")
    assert isinstance(options, Options)
    assert options.nthreads == 2
    assert words == ("script.py", "--nthreads", "3", "--flag")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-m mod --nthreads 3 -c", "-m mod --nthreads 3 -c"),
        ("-mmod -x", "-m mod -x"),
        ("-cpass --help", "-c pass --help"),
        ("--no-dashboard --nthreads=2 -m -c", "-m -c"),
        ("--nthreads 2 -c pass", "-c pass"),
        ("--name -m s.py -m x", "s.py -m x"),  # the value of an option
        ("-- -mmod", "-mmod"),
        ("s.py -m mod", "s.py -m mod"),
    ],
)
def test_options_end_at_a_module_or_code(arguments: str, words: str) -> None:
    assert parse_run(arguments.split())["program"] == tuple(words.split())


@pytest.mark.parametrize("option", ["-m", "-c"])
def test_a_module_or_code_is_missing(option: str) -> None:
    with pytest.raises(click.UsageError, match=f"Option '{option}' requires an argument"):
        parse_run(["--nthreads", "2", option])


@pytest.mark.parametrize("address", ["tcp://h1:8786", "tls://10.0.0.1:8786", "h1:8786"])
def test_dask_mpis_way_to_name_a_scheduler(address: str) -> None:
    options, words = resolved("--no-scheduler", address, "script.py")
    assert isinstance(options, Options)
    assert (options.scheduler, options.scheduler_address, words) == (False, address, ("script.py",))


@pytest.mark.parametrize(
    "arguments",
    [
        ("tcp://h1:8786",),  # a scheduler of our own: it is a script, whatever its name
        ("--no-scheduler", "--scheduler-file", "s.json", "h1:8786"),
        ("--no-scheduler", "--scheduler-address", "tcp://h2:1", "h1:8786"),
        ("--no-scheduler", "--scheduler-file", "s.json", "folder/h1:8786"),
    ],
)
def test_what_is_a_script(arguments: tuple[str, ...]) -> None:
    _, words = resolved(*arguments)
    assert words == arguments[-1:]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nthreads": "two"}, "command line: --nthreads"),
        ({"worker_options": "{"}, "command line: --worker-options"),
        ({"layout": "shard"}, "command line: --layout"),
    ],
)
def test_what_is_wrong_is_returned_for_all_ranks(given: dict[str, Any], says: str) -> None:
    error = resolve_texts(given)
    assert isinstance(error, InputError)
    assert says in str(error)


def test_what_was_not_said_is_left_to_the_rest() -> None:
    assert resolve_texts({"nthreads": None, "name": None}) == resolve_texts({})


def test_an_unknown_option_is_clicks_error() -> None:
    with pytest.raises(click.ClickException, match="--layuot"):
        parse_run(["--layuot", "shared"])
