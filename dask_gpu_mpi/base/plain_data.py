"""Messages between ranks as plain data: what arrives runs no code, whoever has sent it.

A value is coded by its type, as its annotations declare it: dataclasses and named tuples as lists of their fields, enums as
their values, tuples and sequences as lists, mappings as mappings; `Any` is plain data, unchecked but for that. Of a union with
several classes the value comes after the number of its class. Both sides have the same types: all ranks run the same version.

The bytes are msgpack, which distributed needs as well: JSON has neither bytes nor integers as keys.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

__all__ = ["PlainDataError", "from_plain", "pack", "to_plain", "unpack"]

_NONE = type(None)
#: Names of files and variables may have bytes that are no text, for which Python has surrogates.
_ANY_TEXT = "surrogatepass"
#: What msgpack and `Any` may hold, besides lists and mappings of these.
_SCALARS: frozenset[type] = frozenset({_NONE, bool, int, float, str, bytes})
#: A whole number is a float as well, as for type checkers.
_ACCEPTED: dict[Any, frozenset[type]] = {
    None: frozenset({_NONE}),
    **{each: frozenset({each}) for each in _SCALARS},
    float: frozenset({float, int}),
}


class PlainDataError(ValueError):
    """A value that its type does not allow, or bytes that are no message."""


class _Codec(NamedTuple):
    """Both directions for one type; each raises PlainDataError for what is not of it."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    #: Whether a value is of this type, as far as unions need to know.
    accepts: Callable[[Any], bool]


def to_plain(hint: Any, value: Any) -> Any:
    """The plain data of a value of the type `hint`.

    Raises
    ------
    PlainDataError
        It is not of that type.
    """
    return _codec(hint).encode(value)


def from_plain(hint: Any, data: Any) -> Any:
    """The value of type `hint` that `to_plain` has made this data of.

    Raises
    ------
    PlainDataError
        It has not.

    Examples
    --------
    >>> from_plain(dict[int, tuple[str, float | None]], to_plain(dict[int, tuple[str, float | None]], {1: ("a", None)}))
    {1: ('a', None)}
    >>> from_plain(tuple[int, ...], [1, "2"])
    Traceback (most recent call last):
    dask_gpu_mpi.base.plain_data.PlainDataError: 'str' instead of int
    """
    try:
        return _codec(hint).decode(data)
    except PlainDataError:
        raise
    except Exception as error:  # of a class that checks its own fields
        raise PlainDataError(f"{type(error).__name__}: {error}"[:200]) from error


def pack(data: Any) -> bytes:
    """Plain data as bytes.

    Raises
    ------
    PlainDataError
        It is none, is nested too deeply, or has an integer of more than 64 bits.
    """
    import msgpack  # here and below: most processes send no messages

    try:
        packed: bytes = msgpack.packb(data, unicode_errors=_ANY_TEXT)
    except Exception as error:
        raise PlainDataError(f"{type(error).__name__}: {error}"[:200]) from error
    return packed


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The plain data in these bytes, whoever has made them; nothing larger than they are is allocated.

    Raises
    ------
    PlainDataError
        They are no plain data.
    """
    import msgpack

    try:
        return msgpack.unpackb(
            data, strict_map_key=False, ext_hook=_refuse_extension, unicode_errors=_ANY_TEXT
        )
    except Exception as error:  # msgpack's own, of texts, of keys that can't be one, of depth and of memory
        raise PlainDataError(f"{type(error).__name__}: {error}"[:200]) from error


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise PlainDataError(f"extension {code}")


def _refuse(value: Any, expected: str) -> NoReturn:
    raise PlainDataError(f"{type(value).__name__!r} instead of {expected}")


@functools.cache
def _codec(hint: Any) -> _Codec:
    """How values of this type are coded; TypeError for a type that is none of ours to send."""
    if hint is Any:
        return _Codec(_encode_any, _decode_any, lambda value: True)
    if hint in _ACCEPTED:
        return _scalar(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple and arguments[1:] != (...,):
        return _record(tuple, [(each, _codec(each)) for each in arguments], operator.itemgetter, "tuple")
    if origin in (tuple, list, Sequence):
        return _sequence(list if origin is list else tuple, arguments[0])
    if origin in (dict, Mapping):
        return _mapping(*arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, tuple)):
        hints = get_type_hints(hint)
        names = (
            [field.name for field in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else hints
        )
        parts = [(name, _codec(hints[name])) for name in names]
        return _record(functools.partial(_call, hint), parts, operator.attrgetter, hint.__name__, hint)
    raise TypeError(f"{hint!r} can't be sent to another rank")


def _call(cls: Any, values: Sequence[Any]) -> Any:
    return cls(*values)


def _scalar(hint: Any) -> _Codec:
    accepted = _ACCEPTED[hint]
    name = getattr(hint, "__name__", "None")

    def check(value: Any) -> Any:
        if type(value) not in accepted:
            _refuse(value, name)
        return value

    def accepts(value: Any) -> bool:
        return type(value) in accepted or (type(value) is not bool and isinstance(value, tuple(accepted)))

    def encode(value: Any) -> Any:
        # A text or number of a class of its own, such as a StrEnum, arrives as a plain one.
        return value if accepts(value) else _refuse(value, name)

    return _Codec(encode, check, accepts)


def _literal(values: Sequence[Any]) -> _Codec:
    def accepts(value: Any) -> bool:
        return any(type(value) is type(each) and value == each for each in values)

    def check(value: Any) -> Any:
        return value if accepts(value) else _refuse(value, repr(values))

    return _Codec(check, check, accepts)


def _enum(cls: type[Enum]) -> _Codec:
    by_value = {member.value: member for member in cls}

    def encode(value: Any) -> Any:
        return value.value if type(value) is cls else _refuse(value, cls.__name__)

    def decode(data: Any) -> Any:
        if type(data) not in _SCALARS or data not in by_value:
            _refuse(data, cls.__name__)
        return by_value[data]

    return _Codec(encode, decode, lambda value: type(value) is cls)


def _union(members: Sequence[Any]) -> _Codec:
    """Scalars as they are, since their types are told apart; so is a single other type beside None."""
    scalars = [each for each in members if each in _ACCEPTED]
    others = sorted((each for each in members if each not in _ACCEPTED), key=str)
    allowed = frozenset[type]().union(*(_ACCEPTED[each] for each in scalars))
    plain = [_codec(each) for each in scalars]
    codecs = [_codec(each) for each in others]
    numbered = len(codecs) > 1 or bool(codecs and allowed - {_NONE})

    def encode(value: Any) -> Any:
        if any(codec.accepts(value) for codec in plain):
            return value
        for number, codec in enumerate(codecs):
            if codec.accepts(value):
                encoded = codec.encode(value)
                return [number, encoded] if numbered else encoded
        _refuse(value, " or ".join(map(str, members)))

    def decode(data: Any) -> Any:
        if type(data) in allowed:
            return data
        if not codecs:
            _refuse(data, " or ".join(map(str, members)))
        if not numbered:
            return codecs[0].decode(data)
        if (
            type(data) is not list
            or len(data) != 2
            or type(data[0]) is not int
            or not 0 <= data[0] < len(codecs)
        ):
            _refuse(data, " or ".join(map(str, members)))
        return codecs[data[0]].decode(data[1])

    return _Codec(encode, decode, lambda value: any(codec.accepts(value) for codec in [*plain, *codecs]))


def _record(
    make: Callable[[Sequence[Any]], Any],
    parts: Sequence[tuple[Any, _Codec]],
    getter: Callable[[Any], Callable[[Any], Any]],
    name: str,
    cls: type = tuple,
) -> _Codec:
    """A fixed number of parts, each with a type of its own: a dataclass, a named tuple, a tuple."""
    keys = range(len(parts)) if cls is tuple else [key for key, _ in parts]
    encoders = [(getter(key), codec.encode) for key, (_, codec) in zip(keys, parts, strict=True)]
    decoders = [codec.decode for _, codec in parts]

    def accepts(value: Any) -> bool:
        return type(value) is cls

    def encode(value: Any) -> Any:
        if type(value) is not cls or (isinstance(value, tuple) and len(value) != len(encoders)):
            _refuse(value, name)
        return [encode_part(get(value)) for get, encode_part in encoders]

    def decode(data: Any) -> Any:
        if type(data) is not list or len(data) != len(decoders):
            _refuse(data, f"the {len(decoders)} fields of {name}")
        return make([decode_part(part) for decode_part, part in zip(decoders, data, strict=True)])

    return _Codec(encode, decode, accepts)


def _all_of(values: Any, types_: frozenset[type]) -> bool:
    """Whether all are exactly of these types; in C, since a node has hundreds of cores and a job thousands of nodes."""
    return types_.issuperset(map(type, values))


def _sequence(make: type, hint: Any) -> _Codec:
    encode_part, decode_part, _ = _codec(hint)
    scalar = _ACCEPTED.get(hint, frozenset())

    def accepts(value: Any) -> bool:
        return isinstance(value, (list, tuple, range))

    def encode(value: Any) -> Any:
        if not accepts(value):
            _refuse(value, make.__name__)
        return list(value) if _all_of(value, scalar) else [encode_part(each) for each in value]

    def decode(data: Any) -> Any:
        if type(data) is not list:
            _refuse(data, make.__name__)
        return make(data if _all_of(data, scalar) else [decode_part(each) for each in data])

    return _Codec(encode, decode, accepts)


def _mapping(key: Any, value: Any) -> _Codec:
    keys, values = _codec(key), _codec(value)

    def encode(found: Any) -> Any:
        if not isinstance(found, Mapping):
            _refuse(found, "dict")
        return {keys.encode(name): values.encode(each) for name, each in found.items()}

    def decode(data: Any) -> Any:
        if type(data) is not dict:
            _refuse(data, "dict")
        return {keys.decode(name): values.decode(each) for name, each in data.items()}

    return _Codec(encode, decode, lambda found: isinstance(found, Mapping))


def _encode_any(value: Any) -> Any:
    """Plain data of what a user has set: a tuple becomes a list, and a number of numpy's a plain one."""
    try:
        return _plain(value)
    except RecursionError:
        raise PlainDataError("nested too deeply") from None


def _plain(value: Any) -> Any:
    if type(value) in _SCALARS or isinstance(value, (int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, (str, int)) for key in value):
            raise PlainDataError("keys other than texts and integers")
        return {key: _plain(each) for key, each in value.items()}
    for convert in (operator.index, float):
        if hasattr(value, f"__{convert.__name__}__"):
            return convert(value)
    _refuse(value, "plain data")


def _decode_any(data: Any) -> Any:
    """Checked without recursion: strangers may nest as deeply as msgpack allows."""
    waiting = [data]
    while waiting:
        each = waiting.pop()
        if type(each) is list:
            waiting += each
        elif type(each) is dict:
            if not _all_of(each, frozenset({str, int})):
                raise PlainDataError("keys other than texts and integers")
            waiting += each.values()
        elif type(each) not in _SCALARS:  # a time stamp of msgpack's
            _refuse(each, "plain data")
    return data
