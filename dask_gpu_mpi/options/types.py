"""What an option's value may be: one small language of kinds, for Python values, texts and configuration alike.

Three strictnesses: a Python keyword must have the right type; a text of the command line is read; what Dask's configuration
holds may be either, since Dask has already guessed at the type of an environment variable (``NAME=12`` arrives as an int).
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dask_gpu_mpi.base.sizes import parse_memory_limit
from dask_gpu_mpi.errors import OptionError

__all__ = ["Kind", "Option", "Source", "convert", "parse_json", "show", "suggest"]

Kind = Literal[
    "str", "path", "int", "bool", "choice", "json", "class", "duration", "memory", "listen", "object"
]
Source = Literal["keyword", "command line", "configuration"]

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Option:
    """One option: its name, what it may be, and where it may be said.

    Attributes
    ----------
    name : str
        The Python keyword; the configuration key is the same with ``-`` for ``_``.
    kind : str
        ``str``, ``path``, ``int``, ``bool``, ``choice``, ``json`` (an object), ``class`` (dotted path or class), ``duration``
        (seconds, or a text like "5 minutes"), ``memory`` (bytes, a fraction, "4GB", "auto"), ``listen`` (where to listen:
        "HOST:PORT", ":PORT" for all interfaces, a port for the loopback interface) or ``object`` (not checked).
    default : Any
        Its value where nobody says anything. Where it is None, None may be said as well: "let dask_gpu_mpi choose".
    help : str
        One or two sentences, for ``--help`` and the documentation.
    flags : tuple of str
        Its spelling on the command line; a switch has both, as click writes it: ``"--dashboard/--no-dashboard"``.
    choices : tuple of str
        What a ``choice`` may be.
    minimum, maximum : int or None
        Bounds of an ``int``, both allowed.
    pattern : str
        Regular expression that a ``str`` must match as a whole; "" allows every text without control characters.
    needs : str
        What `pattern` asks for, in words.
    nullable : bool
        Whether None is a value even though the default is another.
    cli, config : bool
        Whether it exists on the command line, and in the configuration and the environment.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    pattern: str = ""
    needs: str = ""
    nullable: bool = False
    cli: bool = True
    config: bool = True

    @property
    def allows_none(self) -> bool:
        """Whether None may be said."""
        return self.nullable or self.default is None

    @property
    def key(self) -> str:
        """Its key below ``gpu-mpi`` in Dask's configuration."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that Dask reads it from."""
        return f"DASK_GPU_MPI__{self.name.upper()}"


def show(value: Any) -> str:
    """Write a value into a message: one line, and not a long one.

    >>> show("a value"), show("x" * 90)
    ("'a value'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx ... xxxxxxxxxxxxxx'")
    """
    text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"


def suggest(name: str, valid: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Write the end of a message about an unknown `name`: the nearest valid one, or all if they are few, or nothing.

    Parameters
    ----------
    name : str
        What was said.
    valid : iterable of str
        What may be said.
    spell : callable, optional
        How a valid name is to be written where the user will read it.

    Examples
    --------
    >>> suggest("nthread", ["nthreads", "layout"]), suggest("x", ["tls", "tcp"])
    ("; did you mean 'nthreads'?", '; valid: tcp, tls')
    """
    names = sorted(set(valid))
    for attempt in (name, name.replace("-", "_"), name.lower().replace("-", "_")):
        near = difflib.get_close_matches(attempt, names, 1, 0.6)
        if near:
            return f"; did you mean {spell(near[0])!r}?"
    return f"; valid: {', '.join(map(spell, names))}" if 0 < len(names) <= 8 else ""


def convert(option: Option, value: Any, origin: str, source: Source) -> Any:
    """Check a value and bring it into its one form.

    Parameters
    ----------
    option : Option
        What is asked for.
    value : Any
        What was said.
    origin : str
        Where it was said, for the message: ``"keyword nthreads"``.
    source : {"keyword", "command line", "configuration"}
        How strict to be about texts.

    Returns
    -------
    Any
        A str, int, float (seconds), bool, dict, class or None, as the kind has it.

    Raises
    ------
    OptionError
        The value is of the wrong type, or out of bounds.

    Examples
    --------
    >>> nthreads = Option("nthreads", "int", None, "", minimum=1)
    >>> convert(nthreads, "4", "command line: --nthreads", "command line")
    4
    >>> convert(nthreads, 0, "keyword nthreads", "keyword")
    Traceback (most recent call last):
    dask_gpu_mpi.errors.OptionError: keyword nthreads: 0 (int) can't be used; needed: an integer of 1 or more, or None
    """
    if value is None:
        if option.allows_none:
            return None
        raise _wrong(option, value, origin)
    try:
        return _KINDS[option.kind](option, value, origin, source)
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, OptionError):
            raise
        raise _wrong(option, value, origin, str(error)) from None


def _wrong(option: Option, value: Any, origin: str, why: str = "") -> OptionError:
    kind = "" if value is None or isinstance(value, str) else f" ({type(value).__name__})"
    return OptionError(f"{origin}: {show(value)}{kind} can't be used; needed: {why or _needed(option)}")


def _needed(option: Option) -> str:
    if option.kind == "int":
        low, high = option.minimum, option.maximum
        text = "an integer"
        if low is not None:
            text += f" of {low} or more" if high is None else f" from {low} to {high}"
    else:
        text = {
            "str": option.needs or "a text without control characters, not empty",
            "path": "a path",
            "bool": "true or false",
            "choice": f"one of {', '.join(option.choices)}",
            "json": 'an object of names and values, such as {"rmm_pool_size": "10GB"}',
            "class": "'auto', a class or its dotted path, such as 'dask_cuda.CUDAWorker'",
            "duration": "more than 0 seconds, a number or a text such as '90s' or '5 minutes'",
            "memory": "bytes, a text such as '4GB', a fraction up to 1, 'auto' or 0 (no limit)",
            "listen": "HOST:PORT, a port, or :PORT for all interfaces",
            "object": "a value",
        }[option.kind]
    return f"{text}, or None" if option.allows_none else text


def _str(option: Option, value: Any, origin: str, source: Source) -> str:
    if source == "configuration" and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise TypeError
    text = value.strip()
    if not text or not text.isprintable() or (option.pattern and not re.fullmatch(option.pattern, text)):
        raise ValueError
    return text


def _path(option: Option, value: Any, origin: str, source: Source) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError
    # U+DC80 to U+DCFF stand for bytes that Python could not decode (PEP 383): under LC_ALL=C that may be every letter but ASCII.
    if not re.sub("[\udc80-\udcff]", "", text).isprintable():
        raise ValueError
    # dask-mpi's execute() has local_directory="" for "no choice".
    if not text:
        return None
    path = Path(text).expanduser()
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a path in {error.encoding}, by which Python names files here, or PYTHONUTF8=1"
        ) from None
    if not path.is_absolute() and not _has_working_directory():
        raise ValueError("an absolute path, since the working directory was deleted")
    return str(path)


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _int(option: Option, value: Any, origin: str, source: Source) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str) and source != "keyword":
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            raise ValueError
        number = int(value)
    else:
        # __index__ takes numpy's integers and no float
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError from None
    low = -math.inf if option.minimum is None else option.minimum
    high = math.inf if option.maximum is None else option.maximum
    if not low <= number <= high:
        raise ValueError
    return number


def _bool(option: Option, value: Any, origin: str, source: Source) -> bool:
    if isinstance(value, bool):
        return value
    if source != "keyword" and (isinstance(value, str) or value in (0, 1)):
        text = str(value).strip().lower()
        if text in _TRUE | _FALSE:
            return text in _TRUE
    raise TypeError


def _choice(option: Option, value: Any, origin: str, source: Source) -> str:
    if not isinstance(value, str):
        raise TypeError
    text = value.strip().lower()
    spelled = {choice.lower(): choice for choice in option.choices}
    if text not in spelled:
        near = difflib.get_close_matches(text, option.choices, 1, 0.6)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(_needed(option) + hint)
    return spelled[text]


def _json(option: Option, value: Any, origin: str, source: Source) -> dict[str, Any]:
    if isinstance(value, str) and source != "keyword":
        value = parse_json(value, origin)
    if not isinstance(value, Mapping):
        raise TypeError
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"names that are texts, found {show(name)} as a name")
    return dict(value)


def parse_json(text: str, origin: str) -> Any:
    """Read JSON; what is wrong comes as one line with its position.

    Raises
    ------
    OptionError
        The text is not JSON, or has a name twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise OptionError(f"{origin}: the JSON has the name {show(twice)} twice; needed: each name once")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        near = show(text[max(0, error.pos - 10) : error.pos + 20]) if error.pos < len(text) else "the end"
        # The usual cause: the shell has taken the double quotes, because there were no single ones around them.
        raise OptionError(
            f"{origin}: not JSON: {error.msg} at {where}, near {near}; needed: an object, on a shell in single quotes, "
            'such as \'{"rmm_pool_size": "10GB"}\''
        ) from None


def _class(option: Option, value: Any, origin: str, source: Source) -> str | type:
    if isinstance(value, type):
        if source != "keyword":
            raise TypeError
        return value
    if not isinstance(value, str):
        raise TypeError
    text = value.strip()
    if not _DOTTED.fullmatch(text):
        raise ValueError
    return text


def _duration(option: Option, value: Any, origin: str, source: Source) -> float:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        from dask.utils import parse_timedelta

        text = value.strip()
        # parse_timedelta puts a 1 before what does not start with a digit: ".5s" were 1.5 s, and "minutes" one minute.
        if not re.match(r"[0-9.]", text):
            raise ValueError
        try:
            seconds = float(parse_timedelta(f"0{text}" if text.startswith(".") else text))
        except (KeyError, IndexError, ValueError):
            raise ValueError from None
    elif hasattr(value, "total_seconds"):
        seconds = float(value.total_seconds())
    else:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            raise TypeError from None
    if not 0 < seconds < math.inf:
        raise ValueError
    return seconds


def _memory(option: Option, value: Any, origin: str, source: Source) -> int | float | str | None:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        text = value.strip()
        if source != "keyword" and text.lower() in ("none", "null"):
            return None
        value = "auto" if text.lower() == "auto" else text
    try:
        parse_memory_limit(value)
    except (OptionError, ValueError):
        raise ValueError from None
    if isinstance(value, (int, str)):
        return value
    return float(value)


def _listen(option: Option, value: Any, origin: str, source: Source) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise TypeError
    host, colon, port = value.strip().rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535 or not re.fullmatch(r"[^\s/]*", host):
        raise ValueError
    return f"{host}:{port}" if colon else f"127.0.0.1:{port}"


def _object(option: Option, value: Any, origin: str, source: Source) -> Any:
    return value


_KINDS: dict[str, Callable[[Option, Any, str, Source], Any]] = {
    "str": _str,
    "path": _path,
    "int": _int,
    "bool": _bool,
    "choice": _choice,
    "json": _json,
    "class": _class,
    "duration": _duration,
    "memory": _memory,
    "listen": _listen,
    "object": _object,
}
