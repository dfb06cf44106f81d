"""Conversion of Python values, texts of the command line and values of Dask's configuration to the values of options.

A Python keyword must have the right type. A text of the command line is read. A value of Dask's configuration may be either: Dask
has already guessed the type of an environment variable (``NAME=12`` arrives as an int). There is a converter for each kind of
value (`_KINDS`); `dask_gpu_mpi.options.resolve`, the options of workers and those of job scripts use `convert`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import math
import operator
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.text import one_line, parse_memory_limit
from dask_gpu_mpi.errors import InputError, OptionError
from dask_gpu_mpi.options.model import Kind, Setting, Source

#: Integers, and sizes in bytes, from here on are refused: no message between ranks could have them.
LARGEST = 1 << 63
#: Bytes below which a memory limit is refused: Dask accepts 64 as well, and then kills every process of the worker.
LEAST_MEMORY = 1 << 20
#: Levels of lists and mappings in a value: JSON, pickle and repr call themselves for each, and end at about a thousand.
MOST_LEVELS = 100


class _Unexpected(Exception):
    """A value does not fit its kind; its text, if any, replaces that of `_expected`."""


def convert(setting: Setting, value: Any, origin: str, source: Source) -> Any:
    """Check a value and convert it to the type of its kind: a str, int, float (seconds), bool, dict, class or None.

    `origin` is the place at which it is set, for the OptionError: ``"keyword nthreads"``. A keyword's text is not read.

    >>> nthreads = Setting("int", minimum=1)
    >>> convert(nthreads, "4", "command line: --nthreads", "command line")
    4
    >>> convert(nthreads, 0, "keyword nthreads", "keyword")
    Traceback (most recent call last):
    dask_gpu_mpi.errors.OptionError: keyword nthreads: invalid value 0 (int; expected an integer of 1 or more)
    """
    if value is None and setting.allows_none:
        return None
    try:
        if value is None:
            raise _Unexpected
        _refuse_endless(setting, value)
        return _KINDS[setting.kind](setting, value, source)
    except _Unexpected as error:
        expected = str(error) or _expected(setting, source)
    found = f"{origin}: invalid value {show(value)}"
    if value is None or isinstance(value, str):
        raise OptionError(found, expected=expected)
    raise OptionError(f"{found} ({type(value).__name__}; expected {expected})")


#: The values of each kind, in words.
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


def _expected(setting: Setting, source: Source) -> str:
    if setting.kind == "int":
        text = "an integer"
        if setting.minimum is not None:
            least, most = setting.minimum, setting.maximum
            text += f" of {least} or more" if most is None else f" from {least} to {most}"
    elif setting.kind == "choice":
        text = f"one of {', '.join(setting.choices)}"
    else:
        text = setting.expected or _EXPECTED[setting.kind]
    return f"{text}, or None" if setting.allows_none and source != "command line" else text


def _refuse_endless(setting: Setting, value: Any) -> None:
    """Refuse numbers of thousands of digits, and values that are nested as deeply, which no message could have."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        if setting.kind in ("int", "memory"):
            raise _Unexpected("an integer below 2**63")
        raise _Unexpected
    # all values of a level, then all that these contain; one that contains itself is not followed again
    level, seen = [value], set[int]()
    for _ in range(MOST_LEVELS):
        level = [each for each in level if isinstance(each, (list, tuple, Mapping)) and id(each) not in seen]
        if not level:
            return
        seen.update(map(id, level))
        level = [inner for each in level for inner in (each.values() if isinstance(each, Mapping) else each)]
    raise _Unexpected(f"a value of at most {MOST_LEVELS} levels of lists and objects")


# The kinds of values. A converter raises `_Unexpected` and nothing else.

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def _str(setting: Setting, value: Any, source: Source) -> str:
    if source == "configuration" and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    text = _text(value)
    if not text or not text.isprintable() or (setting.pattern and not re.fullmatch(setting.pattern, text)):
        raise _Unexpected
    return text


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unexpected
    return value.strip()


def _number(value: Any) -> float:
    """A number of any type, numpy's among them."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _Unexpected from None


def _path(setting: Setting, value: Any, source: Source) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    # U+DC80 to U+DCFF stand for bytes that Python could not decode (PEP 383): under LC_ALL=C every letter that is not ASCII.
    if not isinstance(text, str) or not re.sub("[\udc80-\udcff]", "", text).isprintable():
        raise _Unexpected
    # dask-mpi's execute() has local_directory="" for "no choice".
    if not text:
        return None
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # there is no such user
        raise _Unexpected(f"{_expected(setting, source)} in the home directory of a user") from None
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise _Unexpected(
            f"a path in {error.encoding}, by which Python names files here, or PYTHONUTF8=1"
        ) from None
    try:
        path.absolute()
    except FileNotFoundError:
        raise _Unexpected("an absolute path, since the working directory was deleted") from None
    return str(path)


def _int(setting: Setting, value: Any, source: Source) -> int:
    if isinstance(value, bool):
        raise _Unexpected
    if isinstance(value, str) and source != "keyword":
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            raise _Unexpected
        value = int(value) if len(value) < 100 else LARGEST  # Python reads no number of thousands of digits
        _refuse_endless(setting, value)
    try:
        number = operator.index(value)  # numpy's integers have one, a float has none
    except TypeError:
        raise _Unexpected from None
    low = -math.inf if setting.minimum is None else setting.minimum
    high = math.inf if setting.maximum is None else setting.maximum
    if not low <= number <= high:
        raise _Unexpected
    return number


def _bool(setting: Setting, value: Any, source: Source) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if source == "keyword" or text not in _TRUE + _FALSE:
        raise _Unexpected
    return text in _TRUE


def _choice(setting: Setting, value: Any, source: Source) -> str:
    text = _text(value).lower()
    spelled = {choice.lower(): choice for choice in setting.choices}
    if text not in spelled:
        near = nearest(text, setting.choices)
        raise _Unexpected(_expected(setting, source) + (f"; did you mean {near!r}?" if near else ""))
    return spelled[text]


def _json(setting: Setting, value: Any, source: Source) -> dict[str, Any]:
    if isinstance(value, str) and source != "keyword":
        value = _parse_json(value)
        _refuse_endless(setting, value)
    if not isinstance(value, Mapping):
        raise _Unexpected
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

    def refuse(name: str) -> None:
        raise _Unexpected(f"JSON, which has no {name}")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        near = show(text[max(0, error.pos - 10) : error.pos + 20]) if error.pos < len(text) else "the end"
        # The usual cause: the shell has removed the double quotes, because there were no single ones around them.
        raise _Unexpected(
            'an object as JSON, on a shell in single quotes, such as \'{"rmm_pool_size": "10GB"}\'; '
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}, near {near}"
        ) from None
    except (ValueError, RecursionError):
        raise _Unexpected("JSON with numbers below 2**63, and not nested deeply") from None


def _class(setting: Setting, value: Any, source: Source) -> str | type:
    if isinstance(value, type) and source == "keyword":
        return value
    text = _text(value)
    if not _DOTTED.fullmatch(text):
        raise _Unexpected
    return text


def _duration(setting: Setting, value: Any, source: Source) -> float:
    if isinstance(value, bool):
        raise _Unexpected
    if isinstance(value, str):
        from dask.utils import parse_timedelta

        text = value.strip()
        # parse_timedelta puts a 1 before a text that does not start with a digit: ".5s" would be 1.5 s, and "minutes" one minute.
        if not re.match(r"[0-9.]", text):
            raise _Unexpected
        try:
            value = float(parse_timedelta(f"0{text}"))
        except (ValueError, KeyError, OverflowError):  # KeyError: an unknown unit
            raise _Unexpected from None
    elif isinstance(value, timedelta):
        value = value.total_seconds()
    seconds = _number(value)
    if not 0 < seconds < math.inf:
        raise _Unexpected
    return seconds


def _memory(setting: Setting, value: Any, source: Source) -> Any:
    if isinstance(value, bool):
        raise _Unexpected
    if isinstance(value, str):
        value = value.strip()
        if source != "keyword" and value.lower() in ("none", "null"):
            return None
        if value.lower() == "auto":
            return "auto"
    elif not isinstance(value, int):
        value = _number(value)
    try:
        size = parse_memory_limit(value)
    except OptionError:
        raise _Unexpected from None
    if size is not None and size >= LARGEST:
        raise _Unexpected("less than 2**63 bytes")
    if isinstance(size, int) and 0 < size < LEAST_MEMORY:
        raise _Unexpected(
            "1 MiB or more, with a unit such as '64GB', a fraction up to 1, 'auto' or 0 (no limit)"
        )
    return value


def _listen(setting: Setting, value: Any, source: Source) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    host, colon, port = _text(value).rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535 or not re.fullmatch(r"[^\s/]*", host):
        raise _Unexpected
    return f"{host}:{port}" if colon else f"127.0.0.1:{port}"


_KINDS: dict[Kind, Callable[[Setting, Any, Source], Any]] = {
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
    "object": lambda setting, value, source: value,
}


# Values and names in messages.

#: Names of options in Coiled and in Dask's LocalCluster, and ours.
ELSEWHERE = {
    "worker_gpu": "gpus_per_worker",
    "worker_memory": "memory_limit",
    "worker_cpu": "nthreads",
    "threads_per_worker": "nthreads",
}


def show(value: Any) -> str:
    """Write a value into a message: one line, and not a long one.

    >>> show("a value"), show("x" * 90)
    ("'a value'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx ... xxxxxxxxxxxxxx'")
    """
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits, or what is nested as deeply
        text = f"<{type(value).__name__} that is too large to show>"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that is most similar to an unknown one, without regard to case and dashes; None: none is similar.

    >>> nearest("Memory-Limits", ["memory_limit", "layout"]), nearest("x", ["tls", "tcp"])
    ('memory_limit', None)
    >>> nearest("worker_memory", ["memory_limit", "worker_class"])
    'memory_limit'
    """
    names = {_folded(each): each for each in valid}
    if (ours := ELSEWHERE.get(_folded(name))) in names:
        return names[ours]
    near = difflib.get_close_matches(_folded(name), sorted(names), 1)
    return names[near[0]] if near else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def suggest(name: str, valid: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """The end of a message about an unknown `name`: the most similar valid one, or all if they are few, or nothing.

    `spell` turns a valid name into the user's spelling.

    >>> suggest("nthread", ["nthreads", "layout"]), suggest("x", ["tls", "tcp"])
    ("; did you mean 'nthreads'?", '; valid: tcp, tls')
    """
    names = sorted(set(valid))
    if near := nearest(name, names):
        return f"; did you mean {spell(near)!r}?"
    return f"; valid: {', '.join(map(spell, names))}" if 0 < len(names) <= 8 else ""


# Dask's configuration: import it, and find out what the user has configured in it.


#: `dask.config` as `import_config` has loaded it without its package.
_alone: Any = None


def import_config(*, alone: bool = False) -> Any:
    """Import `dask.config`, which reads the configuration; an InputError if one of its files is malformed.

    `alone`: without the rest of Dask, whose import takes 0.1 s, if nothing has imported that yet. A later import of Dask does not
    notice: it reads the configuration again.
    """
    try:
        own = os.environ.get("DASK_CONFIG", "")
        # a pipe can be read once
        if alone and "dask" not in sys.modules and (not own or os.path.isfile(own) or os.path.isdir(own)):
            with contextlib.suppress(ImportError):  # of another version, which needs more of its package
                return _import_alone()
        import dask.config
    # the last two: a variable that is nested too deeply
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"Dask's configuration can't be read: {one_line(error)}", fix="correct or remove that file"
        ) from None
    except ModuleNotFoundError as error:
        raise InputError(
            f"{sys.executable} can't import Dask: {one_line(error)}",
            fix="activate the environment that has it; or rename a file of yours with such a name",
        ) from None
    return dask.config


def _import_alone() -> Any:
    global _alone
    if _alone is None:
        found = importlib.util.find_spec("dask")
        package = ModuleSpec("dask", None, is_package=True)  # as if its __init__.py were empty
        folders = package.submodule_search_locations
        if folders is not None and found is not None:
            folders.extend(found.submodule_search_locations or ())
        sys.modules["dask"] = importlib.util.module_from_spec(package)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the rank with the script repeats them
                _alone = importlib.import_module("dask.config")
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "dask"]:
                del sys.modules[name]
    return _alone


def loaded_config() -> Any:
    """`dask.config` as this process has loaded it; None: it has not."""
    return sys.modules.get("dask.config") or _alone


def is_configured(key: str) -> bool:
    """Whether the user has set this key of Dask's configuration: in a file, in the environment or in the program."""
    import dask.config

    value = dask.config.get(key, None)
    return value not in (None, dask.config.get(key, None, config=defaults_of(dask.config)))


def defaults_of(config: Any) -> dict[str, Any]:
    """The defaults that packages have registered with `dask.config`: distributed, when it is imported, and others."""
    found: dict[str, Any] = {}
    config.refresh(found, paths=[], env={})
    return found
