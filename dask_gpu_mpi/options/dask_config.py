"""Dask's configuration: whether it says nothing of something, found without importing Dask; what to say where it can't be read.

To import `dask.config` is to import all of Dask, jinja2 included: a tenth of a second and 300 files in every rank, before the
agent starts. Most users have configured nothing of what is asked for here, and most ranks need Dask for nothing else.
"""

from __future__ import annotations

import ast
import os
import re
import site
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from dask_gpu_mpi.errors import InputError

__all__ = ["import_config", "interpret", "is_configured", "is_unsaid"]

#: A variable that holds all of a configuration, in a form of its own.
WHOLE = "internal-inherit-config"


def import_config() -> Any:
    """Import `dask.config`, which reads the configuration.

    Raises
    ------
    InputError
        One of its files is malformed.
    """
    try:
        import dask.config
    except ValueError as error:
        raise InputError(
            f"Dask's configuration can't be read: {' '.join(str(error).split())}; mend that file, or take it away"
        ) from None
    return dask.config


def interpret(text: str) -> Any:
    """What Dask takes the text of a variable for: a Python value, the words for true, false and none, or else the text.

    Source: `dask.config.interpret_value`.
    """
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return {"none": None, "null": None, "false": False, "true": True}.get(text.lower(), text)


def is_configured(key: str) -> bool:
    """Whether the user has configured this key of Dask's: in a file, in the environment or in the program."""
    import dask.config

    value = dask.config.get(key, None)
    # distributed registers its own defaults when it is imported
    defaults = [dask.config.get(key, None, config=dict(known)) for known in dask.config.defaults]
    return value is not None and value not in defaults


def is_unsaid(words: Collection[str], besides: Collection[str] = ()) -> bool:
    """Whether neither environment nor files speak of it; False also where Dask is imported already, whose configuration counts.

    Parameters
    ----------
    words : collection of str
        Keys as in YAML, with hyphens: one of them is in whatever says something.
    besides : collection of str
        Variables that the caller reads itself.

    Notes
    -----
    Where Dask looks: https://docs.dask.org/en/stable/configuration.html, `dask.config.paths`.
    """
    if "dask" in sys.modules:
        return False
    for name, value in os.environ.items():
        if not name.startswith("DASK_") or name in besides:
            continue
        # as Dask does: two underscores stand between a key and the next
        if _speaks(f"{name[5:].replace('__', '.')}={value}", (*words, WHOLE)):
            return False
    places = [place for place in _places() if os.path.exists(place)]
    if not all(os.path.isdir(place) or os.path.isfile(place) for place in places):
        return False  # a pipe can be read once only
    return not any(_speaks(line, words) for path in _files(places) for line in _lines(path))


def _speaks(text: str, words: Collection[str]) -> bool:
    text = text.lower().replace("_", "-")
    return any(re.search(rf"(?<![\w-]){word}(?![\w-])", text) for word in words)


def _places() -> list[str]:
    """Directories, and files, that Dask's configuration is made of."""
    places = [
        os.environ.get("DASK_ROOT_CONFIG", "/etc/dask"),
        *(os.path.join(prefix, "etc", "dask") for prefix in (sys.prefix, *site.PREFIXES)),
        os.path.join(os.path.expanduser("~"), ".config", "dask"),
    ]
    if "DASK_CONFIG" in os.environ:
        places.append(os.environ["DASK_CONFIG"])
    return list(dict.fromkeys(places))


def _files(places: Iterable[str]) -> Iterator[str]:
    for place in places:
        try:
            names = os.listdir(place)
        except NotADirectoryError:
            yield place
        except OSError:
            continue  # Dask leaves out what can't be read
        else:
            yield from (
                os.path.join(place, name)
                for name in names
                if os.path.splitext(name)[1].lower() in (".json", ".yaml", ".yml")
            )


def _lines(path: str) -> Iterator[str]:
    """The lines of a file that are not comments: whole copies of Dask's defaults, all commented, lie about in many homes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from (line for line in file if not line.lstrip().startswith("#"))
    except OSError:
        return
