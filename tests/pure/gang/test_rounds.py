"""Rounds of a gang: each ends with the last member's part, and all members have to call the same."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.gang.gang import MismatchError, Rounds


def test_members_may_be_a_round_apart() -> None:
    rounds = Rounds(2)
    assert rounds.put(0, 0, "barrier", b"") is None
    assert rounds.missing(0) == [1]
    assert rounds.put(1, 0, "allgather", b"0") is None
    assert rounds.put(0, 1, "barrier", b"") == [b"", b""]
    assert rounds.put(1, 1, "allgather", b"1") == [b"0", b"1"]
    assert rounds.missing(7) == [0, 1]


def test_members_that_have_returned() -> None:
    rounds = Rounds(3)
    assert rounds.leave(2) is None
    with pytest.raises(MismatchError, match=r"^calls barrier after rank 2 returned \(expected "):
        rounds.put(0, 0, "barrier", b"")
    rounds = Rounds(3)
    rounds.put(0, 0, "barrier", b"")
    rounds.put(0, 1, "barrier", b"")
    assert rounds.leave(1) is None  # it has given up, say
    assert str(rounds.leave(2)).startswith("returned while ranks 0-1 waited in barrier (expected ")


def test_different_calls_are_an_error() -> None:
    rounds = Rounds(3)
    rounds.put(0, 2, "barrier", b"")
    with pytest.raises(MismatchError, match="^calls allgather where rank 2 calls barrier"):
        rounds.put(0, 0, "allgather", b"")
