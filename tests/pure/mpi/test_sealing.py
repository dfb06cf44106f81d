"""Sealed messages: only the other side opens them, once and in order."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.mpi.wire import Channel, ForeignMessageError, KeyPair

ZERO, ONE, TWO = KeyPair(), KeyPair(), KeyPair()


def pair(rank: int = 1, keys: KeyPair = ONE) -> tuple[Channel, Channel]:
    """Rank 0's side, and the rank's."""
    return ZERO.channel(keys.public, rank, to_rank=True), keys.channel(ZERO.public, rank, to_rank=False)


def test_both_directions() -> None:
    zero, one = pair()
    for number in range(300):
        text = b"x" * number
        assert one.open(zero.seal(text)) == [text]
        assert zero.open(bytearray(one.seal(text))) == [text]


def test_nothing_of_it_is_to_be_seen() -> None:
    text = b"-----BEGIN PRIVATE KEY-----"
    zero, _ = pair()
    first, second = zero.seal(text), zero.seal(text)
    assert text not in first
    assert first[8:] != second[8:]
    assert repr(zero) == "Channel()"


def test_repeated() -> None:
    zero, one = pair()
    messages = [zero.seal(b"0"), zero.seal(b"1"), zero.seal(b"2")]
    assert one.open(messages[0]) == [b"0"]
    assert one.open(messages[2]) == []
    for message in (messages[0], messages[2]):
        with pytest.raises(ForeignMessageError, match="repeated"):
            one.open(message)
    assert one.open(messages[1]) == [b"1", b"2"]
    for message in messages:
        with pytest.raises(ForeignMessageError, match="repeated"):
            one.open(message)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_whatever_order_they_come_in_they_are_opened_as_they_were_sent(order: tuple[int, ...]) -> None:
    zero, one = pair()
    messages = [zero.seal(bytes([number])) for number in range(4)]
    opened: list[bytes] = []
    for number in order:
        opened += one.open(messages[number])
        assert opened == [bytes([each]) for each in range(len(opened))]
    assert len(opened) == 4


def test_messages_of_others() -> None:
    zero, one = pair()
    another_rank = pair(2)[0]
    another_key = pair(1, TWO)[0]
    another_job = KeyPair().channel(ONE.public, 1, to_rank=True)
    for channel in (another_rank, another_key, another_job, one):
        with pytest.raises(ForeignMessageError, match="not sealed with the job's key"):
            one.open(channel.seal(b"x"))
    assert one.open(zero.seal(b"x")) == [b"x"]


@given(st.data())
def test_one_bit_that_is_another(data: st.DataObject) -> None:
    zero, one = pair()
    message = bytearray(zero.seal(b"message"))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ForeignMessageError):
        one.open(message)


@given(st.binary(max_size=100))
def test_garbage(message: bytes) -> None:
    with pytest.raises(ForeignMessageError):
        pair()[1].open(message)


def test_each_part_of_a_message() -> None:
    zero, one = pair()
    message = zero.seal(b"message")
    for length in range(len(message)):
        with pytest.raises(ForeignMessageError):
            one.open(message[:length])
    assert one.open(message) == [b"message"]


@pytest.mark.parametrize("key", [b"", b"x" * 31, b"x" * 33, bytes(32), b"\1" + bytes(31)])
def test_what_is_no_public_key(key: bytes) -> None:
    with pytest.raises(ForeignMessageError, match="no public key"):
        ZERO.channel(key, 1, to_rank=True)
