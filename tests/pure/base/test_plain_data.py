"""Messages as plain data: every payload that ranks send arrives as it was, and nothing else arrives at all."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import pickle
import types
from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.options.model import Protocol
from dask_gpu_mpi.startup import messages
from dask_gpu_mpi.startup.meeting import Hello, Invitation

PAYLOADS: dict[str, Any] = {**messages.PAYLOADS, "meeting: hello": Hello, "meeting: enter": Invitation}

INTEGERS = st.integers(-(2**63), 2**64 - 1)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    None: st.none(),
    types.NoneType: st.none(),
    bool: st.booleans(),
    int: INTEGERS,
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(exclude_categories=())),  # surrogates too: a path that is no UTF-8
    bytes: st.binary(max_size=40),
}
PLAIN = st.recursive(
    st.one_of(*SCALARS.values()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS[str] | INTEGERS, inner, max_size=4),
    max_leaves=12,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """All values of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return PLAIN
    if hint in SCALARS:
        return SCALARS[hint]
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] != (...,):
        return st.tuples(*map(values, arguments))
    if origin in (tuple, list, Sequence):
        lists = st.lists(values(arguments[0]), max_size=3)
        return lists if origin is list else lists.map(tuple)
    if origin in (dict, Mapping):
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    return st.builds(lambda **parts: hint(**parts), **{k: values(v) for k, v in get_type_hints(hint).items()})


@pytest.mark.parametrize("payload", PAYLOADS)
@given(data=st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
def test_every_payload_arrives_as_it_was(payload: str, data: st.DataObject) -> None:
    hint = PAYLOADS[payload]
    value = data.draw(values(hint))
    arrived = from_plain(hint, unpack(pack(value)))
    assert arrived == value
    assert repr(arrived) == repr(value)  # tuples are tuples, and what is left out of comparisons is there


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Colour(StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Checked:
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise KeyError("size")


@pytest.mark.parametrize(
    ("hint", "value", "data"),
    [
        (float, 1, 1), (str, Protocol.TLS, "tls"), (str | None, Protocol.TLS, "tls"), (Colour, Colour.RED, "red"),
        (Point | None, Point(1, 2), [1, 2]), (Point | Checked, Point(1, 2), [1, 2]), (Point | Checked, Checked(3), [3]),
        (Point | Checked | None, None, None), (Colour | int, Colour.RED, "red"), (Colour | int, 3, 3),
        (Mapping[str, int], types.MappingProxyType({"a": 1}), {"a": 1}), (Any, (1, {"a": (2.0,)}), [1, {"a": [2.0]}]),
    ],
)  # fmt: skip
def test_how_values_are_coded(hint: Any, value: Any, data: Any) -> None:
    assert unpack(pack(value)) == data
    assert from_plain(hint, data) == value or hint is Any


def test_numbers_of_numpy_that_a_user_has_set_are_plain() -> None:
    numpy = pytest.importorskip("numpy")
    assert repr(unpack(pack([numpy.int64(3), numpy.float32(0.5)]))) == "[3, 0.5]"
    assert repr(unpack(msgpack.packb([msgpack.Timestamp(1, 5 * 10**8)]))) == "[1.5]"  # somebody else's


@pytest.mark.parametrize(
    ("hint", "data"),
    [
        (int, True), (bool, 1), (int, 1.0), (float, "1"), (str, b"a"), (bytes, "a"), (None, 0), (str | None, 1),
        (Literal["gpu", "cpu"], "tpu"), (Literal["gpu", "cpu"], ["gpu"]), (Colour, "blue"), (Colour, ["red"]),
        (Point, [1]), (Point, [1, 2.0, 3]), (Point, {"x": 1, "y": 2.0}),
        (Point | Checked, [1, "a"]), (Point | Checked, [-1]), (Point | Checked, []), (Point | Checked, [0, [1, 2]]),
        (Checked, [-1]), (tuple[int, str], [1, "a", 2]), (tuple[int, ...], (1, 2)), (tuple[int, ...], [1, [2]]),
        (list[int], 3), (dict[int, str], {"1": "a"}), (dict[str, int], {"a": None}), (dict[str, int], [["a", 1]]),
        (dict[str, Any], {"a": datetime.datetime.now(tz=datetime.UTC)}), (Any, msgpack.Timestamp(1)),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_the_type(hint: Any, data: Any) -> None:
    with pytest.raises(PlainDataError):
        from_plain(hint, data)


DEEP: Any = functools.reduce(lambda value, _: [value], range(100_000), 0)


@pytest.mark.parametrize(
    "value",
    [1 << 64, {1}, {(1, 2): 3}, object(), lambda: None, DEEP],
    ids=["size", "set", "key", "object", "function", "depth"],
)
def test_values_that_are_not_plain_are_not_sent(value: Any) -> None:
    with pytest.raises(PlainDataError):
        unpack(pack(value))


GARBAGE = [
    b"",
    b"\xc1",  # never used
    b"\x93\x01",  # ends too early
    b"\x01\x01",  # more than one
    b"\x91" * 1_000_000,  # nested
    b"\xdd\xff\xff\xff\xff" * 3_000,  # claims 4 billion items, each of as many
    b"\xdf\xff\xff\xff\xff",
    b"\x81\x90\x01",  # a list as a key
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xd4\x05\x00",  # extensions
    pickle.dumps(print),
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage(data: bytes) -> None:
    for made in (bytes, bytearray, memoryview):
        with pytest.raises(PlainDataError):
            from_plain(tuple[str, Any], unpack(made(data)))


@given(st.binary(max_size=200) | PLAIN.map(pack), st.sampled_from(sorted(PAYLOADS)))
@settings(max_examples=300, deadline=None)
def test_what_somebody_else_has_made_is_refused_or_of_the_type(data: bytes, payload: str) -> None:
    hint = PAYLOADS[payload]
    try:
        value = from_plain(hint, unpack(data))
    except PlainDataError:
        return
    assert pack(from_plain(hint, unpack(pack(value)))) == pack(value)
