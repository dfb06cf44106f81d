"""From what the user has set to the value of an option: Python values, texts of the command line and Dask's configuration.

A Python keyword must have the right type. A text of the command line is read. What Dask's configuration holds may be either: Dask
has already guessed the type of an environment variable (``NAME=12`` arrives as an int).
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.sizes import parse_memory_limit
from dask_gpu_mpi.errors import OptionError

from .hints import nearest, show
from .model import Kind, Option, Source

__all__ = ["convert"]

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_EXPECTED: dict[Kind, str] = {
    "str": "a text without control characters, not empty",
    "path": "a path",
    "bool": "true or false",
    "json": 'an object of names and values, such as {"rmm_pool_size": "10GB"}',
    "class": "'auto', a class or its dotted path, such as 'dask_cuda.CUDAWorker'",
    "duration": "more than 0 seconds, a number or a text such as '90s' or '5 minutes'",
    "memory": "bytes, a text such as '4GB', a fraction up to 1, 'auto' or 0 (no limit)",
    "listen": "HOST:PORT, a port, or :PORT for all interfaces",
    "object": "a value",
}


class _Unexpected(Exception):
    """A value is wrong; the text says what is expected, better than the kind of the option does."""


def convert(option: Option, value: Any, origin: str, source: Source) -> Any:
    """Check a value and bring it into the one form of its kind.

    Parameters
    ----------
    option : Option
        What is set.
    value : Any
        What it is set to.
    origin : str
        Where it is set, for the message: ``"keyword nthreads"``.
    source : {"keyword", "command line", "configuration"}
        Whether texts are read.

    Returns
    -------
    Any
        A str, int, float (seconds), bool, dict, class or None.

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
    dask_gpu_mpi.errors.OptionError: keyword nthreads: invalid value 0 (int; expected an integer of 1 or more, or None)
    """
    if value is None and option.allows_none:
        return None
    read = _KINDS[option.kind]
    expected = ""
    try:
        if value is not None:
            return read(option, value, source)
    except _Unexpected as error:
        expected = str(error)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        pass
    kind = "" if value is None or isinstance(value, str) else f"{type(value).__name__}; "
    raise OptionError(
        f"{origin}: invalid value {show(value)} ({kind}expected {expected or _expected(option)})"
    )


def _expected(option: Option) -> str:
    if option.kind == "int":
        text = "an integer"
        if option.minimum is not None:
            least = option.minimum
            text += f" of {least} or more" if option.maximum is None else f" from {least} to {option.maximum}"
    elif option.kind == "choice":
        text = f"one of {', '.join(option.choices)}"
    else:
        text = option.expected or _EXPECTED[option.kind]
    return f"{text}, or None" if option.allows_none else text


def _str(option: Option, value: Any, source: Source) -> str:
    if source == "configuration" and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    text = _text(value)
    if not text or not text.isprintable() or (option.pattern and not re.fullmatch(option.pattern, text)):
        raise ValueError
    return text


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value.strip()


def _path(option: Option, value: Any, source: Source) -> str | None:
    text = os.fspath(value)
    # U+DC80 to U+DCFF stand for bytes that Python could not decode (PEP 383): under LC_ALL=C that may be every letter but ASCII.
    if not re.sub("[\udc80-\udcff]", "", text).isprintable():
        raise ValueError
    # dask-mpi's execute() has local_directory="" for "no choice".
    if not text:
        return None
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # a user who is not there
        raise _Unexpected(f"{_expected(option)} in the home directory of a user") from None
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise _Unexpected(
            f"a path in {error.encoding}, by which Python names files here, or PYTHONUTF8=1"
        ) from None
    if not path.is_absolute() and not _has_working_directory():
        raise _Unexpected("an absolute path, since the working directory was deleted")
    return str(path)


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _int(option: Option, value: Any, source: Source) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str) and source != "keyword":
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            raise ValueError
        value = int(value)
    number = operator.index(value)  # takes numpy's integers and no float
    if abs(number) >= 1 << 63:  # no message could show one of thousands of digits
        raise _Unexpected("an integer below 2**63")
    low = -math.inf if option.minimum is None else option.minimum
    high = math.inf if option.maximum is None else option.maximum
    if not low <= number <= high:
        raise ValueError
    return number


def _bool(option: Option, value: Any, source: Source) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if source == "keyword" or text not in _TRUE + _FALSE:
        raise TypeError
    return text in _TRUE


def _choice(option: Option, value: Any, source: Source) -> str:
    text = _text(value).lower()
    spelled = {choice.lower(): choice for choice in option.choices}
    if text not in spelled:
        near = nearest(text, option.choices)
        raise _Unexpected(_expected(option) + (f"; did you mean {near!r}?" if near else ""))
    return spelled[text]


def _json(option: Option, value: Any, source: Source) -> dict[str, Any]:
    if isinstance(value, str) and source != "keyword":
        value = _parse_json(value)
    if not isinstance(value, Mapping):
        raise TypeError
    for name in value:
        if not isinstance(name, str):
            raise _Unexpected(f"names that are texts, found the name {show(name)}")
    return dict(value)


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise _Unexpected(f"JSON with each name once, found the name {show(twice)} twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        near = show(text[max(0, error.pos - 10) : error.pos + 20]) if error.pos < len(text) else "the end"
        # The usual cause: the shell has taken the double quotes, because there were no single ones around them.
        raise _Unexpected(
            'an object as JSON, on a shell in single quotes, such as \'{"rmm_pool_size": "10GB"}\'; '
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}, near {near}"
        ) from None


def _class(option: Option, value: Any, source: Source) -> str | type:
    if isinstance(value, type) and source == "keyword":
        return value
    text = _text(value)
    if not _DOTTED.fullmatch(text):
        raise ValueError
    return text


def _duration(option: Option, value: Any, source: Source) -> float:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        from dask.utils import parse_timedelta

        text = value.strip()
        # parse_timedelta puts a 1 before what does not start with a digit: ".5s" were 1.5 s, and "minutes" one minute.
        if not re.match(r"[0-9.]", text):
            raise ValueError
        value = parse_timedelta(f"0{text}")
    elif hasattr(value, "total_seconds"):
        value = value.total_seconds()
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError
    return seconds


def _memory(option: Option, value: Any, source: Source) -> int | float | str | None:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        value = value.strip()
        if source != "keyword" and value.lower() in ("none", "null"):
            return None
        if value.lower() == "auto":
            return "auto"
    parse_memory_limit(value)
    return value if isinstance(value, (int, str)) else float(value)


def _listen(option: Option, value: Any, source: Source) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    host, colon, port = _text(value).rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535 or not re.fullmatch(r"[^\s/]*", host):
        raise ValueError
    return f"{host}:{port}" if colon else f"127.0.0.1:{port}"


def _object(option: Option, value: Any, source: Source) -> Any:
    return value


_KINDS: dict[Kind, Callable[[Option, Any, Source], Any]] = {
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
