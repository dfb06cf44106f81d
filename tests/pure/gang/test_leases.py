"""Leases of workers: all or none, first come first served where they overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.gang.gang import Leases


def test_a_gang_that_waits_is_not_passed_by_one_that_overlaps() -> None:
    leases = Leases()
    assert leases.ask("a", "12") == ["a"]
    assert leases.ask("b", "23") == []
    assert leases.ask("c", "3") == []  # 3 is free, but b was first
    assert leases.ask("d", "4") == ["d"]
    assert leases.release("a") == ["b"]
    assert leases.release("b") == ["c"]


def test_one_that_gives_up_lets_others_pass() -> None:
    leases = Leases()
    leases.ask("a", "1")
    leases.ask("b", "12")
    leases.ask("c", "2")
    assert leases.release("b") == ["c"]
    assert leases.release("unknown") == []
    assert leases.ask("b", "1") == []


def test_a_gang_asks_once() -> None:
    leases = Leases()
    leases.ask("a", "1")
    with pytest.raises(ValueError, match="a has requested workers already"):
        leases.ask("a", "2")


@given(st.lists(st.frozensets(st.integers(0, 4), min_size=1), max_size=12))
def test_everybody_has_a_turn_and_no_worker_two_gangs(wanted: list[frozenset[int]]) -> None:
    leases, running, done = Leases(), set[str](), list[str]()
    for number, workers in enumerate(wanted):
        running.update(leases.ask(str(number), map(str, workers)))
    while running:
        held = [worker for gang in running for worker in wanted[int(gang)]]
        assert len(held) == len(set(held))
        first = min(running, key=int)
        running.remove(first)
        done.append(first)
        running.update(leases.release(first))
    assert sorted(done, key=int) == [str(number) for number in range(len(wanted))]
