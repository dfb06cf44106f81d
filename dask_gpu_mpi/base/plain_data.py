"""Messages between ranks as plain data: what arrives runs no code, no matter who has sent it.

A dataclass or a named tuple is sent as the list of its fields, a `StrEnum` as its value, a tuple as a list. The receiver knows
the type and refuses data that do not fit it. `Any` is any plain data. All ranks run the same version, and have the same types.

The bytes are msgpack, which distributed needs as well: JSON has neither bytes nor integers as keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

#: Names of files and variables may have bytes that are not text. Python has surrogates for them.
_ANY_TEXT = "surrogatepass"
_SCALARS: frozenset[type] = frozenset({types.NoneType, bool, int, float, str, bytes})


class PlainDataError(ValueError):
    """A value that its type does not allow, or bytes that are not a message."""

    @classmethod
    def of(cls, error: Exception) -> PlainDataError:
        """The one error for all that msgpack, this module or a class that checks its own fields may raise."""
        return cls(f"{type(error).__name__}: {error}"[:200])


def pack(value: Any) -> bytes:
    """A value as bytes; PlainDataError: it is not plain, is nested too deeply, or has an integer of more than 64 bits."""
    import msgpack  # here and below: most processes send no messages

    try:
        packed: bytes = msgpack.packb(value, default=_plain, unicode_errors=_ANY_TEXT)
    except Exception as error:
        raise PlainDataError.of(error) from error
    return packed


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The plain data in these bytes, from anyone; PlainDataError: there are none. Allocates nothing larger than the bytes."""
    import msgpack

    try:
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            timestamp=1,  # as a number
            ext_hook=lambda code, data: _refuse(data, f"plain data (extension {code})"),
            unicode_errors=_ANY_TEXT,
        )
    except Exception as error:  # of texts, of keys that can't be one, of depth and of memory
        raise PlainDataError.of(error) from error


def from_plain(hint: Any, data: Any) -> Any:
    """The value of type `hint` that has been sent as this plain data; PlainDataError: the data do not fit the type.

    >>> from_plain(dict[int, tuple[str, float | None]], unpack(pack({1: ("a", None)})))
    {1: ('a', None)}
    >>> from_plain(tuple[int, ...], [1, "2"])
    Traceback (most recent call last):
    dask_gpu_mpi.base.plain_data.PlainDataError: TypeError: 'str' instead of int
    """
    form = _form(hint)
    try:
        return _value(form, data)
    except Exception as error:
        raise PlainDataError.of(error) from error


def _plain(value: Any) -> Any:
    """The parts of a value that msgpack does not know."""
    if names := _field_names(value.__class__):
        return [getattr(value, name) for name in names]
    if isinstance(value, Mapping):
        return dict(value)
    for convert in (operator.index, float):  # a number of numpy's that a user has set
        if hasattr(value, f"__{convert.__name__}__"):
            return convert(value)
    _refuse(value, "plain data")


@functools.cache
def _field_names(cls: Hashable) -> list[str]:
    return [each.name for each in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def _refuse(value: Any, expected: str) -> NoReturn:
    raise TypeError(f"{type(value).__name__!r} instead of {expected}")


class _Form(NamedTuple):
    """The plain data of one type."""

    #: Makes a value of data that are not of the types `ready`; any error: there is none.
    convert: Callable[[Any], Any]
    #: Data of these types are values of the type already.
    ready: frozenset[type] = frozenset()


def _value(form: _Form, data: Any) -> Any:
    return data if type(data) in form.ready else form.convert(data)


@functools.cache
def _form(hint: Any) -> _Form:
    """The plain data of this type; TypeError for a type that can't be sent."""
    origin, arguments = get_origin(hint), get_args(hint)
    name = getattr(hint, "__name__", str(hint))
    if hint is Any:
        return _Form(lambda data: _refuse(data, "plain data"), _SCALARS | {list, dict})
    if hint is None or hint in _SCALARS:
        # A whole number is a float as well, as for type checkers.
        ready = {float: {float, int}, None: {types.NoneType}}.get(hint, {hint})
        return _Form(lambda data: _refuse(data, name), frozenset(ready))
    if origin in (Union, types.UnionType):
        return _union([_form(each) for each in arguments], str(hint))
    if origin is Literal:
        return _choice({each: each for each in arguments}, str(hint))
    if origin is tuple and arguments[1:] != (...,):
        return _record(lambda *parts: parts, arguments, str(hint))
    if origin in (tuple, list, Sequence):
        return _sequence(list if origin is list else tuple, _form(arguments[0]))
    if origin in (dict, Mapping):
        return _mapping(*map(_form, arguments))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice({member.value: member for member in hint}, name)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, tuple)):
        hints = get_type_hints(hint)
        return _record(hint, [hints[each] for each in _field_names(hint) or hints], name)
    raise TypeError(f"{hint!r} can't be sent to another rank")


def _union(forms: Sequence[_Form], name: str) -> _Form:
    """Of several classes, the one that fits: they must differ in the number of their fields, or in the types of these."""
    *first, last = [each.convert for each in forms if not each.ready] or [lambda data: _refuse(data, name)]

    def convert(data: Any) -> Any:
        for each in first:
            with contextlib.suppress(Exception):
                return each(data)
        return last(data)

    return _Form(convert, frozenset[type]().union(*(each.ready for each in forms)))


def _choice(members: Mapping[Any, Any], name: str) -> _Form:
    known = {(type(value), value): member for value, member in members.items()}

    def convert(data: Any) -> Any:
        found = type(data) in _SCALARS and (type(data), data) in known
        return known[type(data), data] if found else _refuse(data, name)

    return _Form(convert)


def _record(make: Callable[..., Any], hints: Sequence[Any], name: str) -> _Form:
    converts, ready = zip(*map(_form, hints), strict=True)

    def convert(data: Any) -> Any:
        if type(data) is not list or len(data) != len(hints):
            _refuse(data, f"the {len(hints)} fields of {name}")
        parts = zip(data, converts, ready, strict=True)
        return make(*[part if type(part) in plain else to_value(part) for part, to_value, plain in parts])

    return _Form(convert)


def _sequence(make: type, form: _Form) -> _Form:
    def convert(data: Any) -> Any:
        if type(data) is not list:
            _refuse(data, make.__name__)
        # In C if all are numbers or texts: a node has hundreds of cores, and a job thousands of nodes.
        all_ready = form.ready.issuperset(map(type, data))
        return make(data if all_ready else [_value(form, each) for each in data])

    return _Form(convert)


def _mapping(keys: _Form, values: _Form) -> _Form:
    def convert(data: Any) -> Any:
        if type(data) is not dict:
            _refuse(data, "dict")
        return {_value(keys, key): _value(values, value) for key, value in data.items()}

    return _Form(convert)
