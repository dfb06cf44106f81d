"""Whether Dask's configuration says nothing of something: found without importing Dask.

To import `dask.config` is to import all of Dask, jinja2 included: a tenth of a second and 300 files in every rank, before the
agent starts. Most users have configured nothing of what is asked for here, and most ranks need Dask for nothing else.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

__all__ = ["is_unsaid"]

#: A variable that holds all of a configuration, in a form of its own.
WHOLE = "internal-inherit-config"


def is_unsaid(environ: Mapping[str, str], words: Collection[str]) -> bool:
    """Whether neither environment nor files speak of it; False also where Dask is imported already, whose configuration counts.

    Parameters
    ----------
    environ : mapping
        The process's environment.
    words : collection of str
        Keys, or parts of them, as in YAML, with hyphens: one of them is in whatever says something.

    Notes
    -----
    Where Dask looks: https://docs.dask.org/en/stable/configuration.html, `dask.config.paths`.
    """
    if "dask" in sys.modules:
        return False
    if any(_speaks(name, (*words, WHOLE)) for name in environ if name.upper().startswith("DASK_")):
        return False
    return not any(_speaks(line, words) for path in _files(_places(environ)) for line in _lines(path))


def _speaks(text: str, words: Collection[str]) -> bool:
    text = text.lower().replace("_", "-")
    return any(word in text for word in words)


def _places(environ: Mapping[str, str]) -> list[str]:
    """Directories, and files, that Dask's configuration is made of."""
    places = [
        environ.get("DASK_ROOT_CONFIG", "/etc/dask"),
        *(os.path.join(prefix, "etc", "dask") for prefix in (sys.prefix, *site.PREFIXES)),
        os.path.join(os.path.expanduser("~"), ".config", "dask"),
    ]
    if "DASK_CONFIG" in environ:
        places.append(environ["DASK_CONFIG"])
    return list(dict.fromkeys(places))


def _files(places: Iterable[str]) -> Iterator[str]:
    for place in places:
        try:
            names = os.listdir(place)
        except NotADirectoryError:
            yield place
        except OSError:
            continue  # Dask leaves out what is not there or can't be read
        else:
            yield from (
                os.path.join(place, name)
                for name in names
                if os.path.splitext(name)[1].lower() in (".json", ".yaml", ".yml")
            )


def _lines(path: str) -> Iterator[str]:
    """The lines of a file, without comments: whole copies of Dask's defaults, all commented, lie about in many homes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.partition("#")[0]
    except OSError:
        return
