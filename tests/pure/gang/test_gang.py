"""One gang: who is in it, its start and its first failure; leases of workers, and rounds in which all call the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.gang.gang import Gang, GangEnd, Leases, MemberStage, MismatchError, Rounds, rank_members


async def test_deaths_and_who_runs_until_when() -> None:
    gang = Gang("g", "client", 5.0)
    workers: Any = [SimpleNamespace(name=name, host="h") for name in "012"]
    gang.assign(rank_members(workers))
    for rank in range(3):
        gang.join(rank, "h")
    gang.leave(0)
    gang.die(1)
    gang.leave(1)  # the answer to its call comes after its death
    assert gang.stages == [MemberStage.LEFT, MemberStage.DEAD, MemberStage.JOINED]
    assert [member.rank for member in gang.at(MemberStage.DEAD)] == [1]
    gang.over.set_result(GangEnd("died", 1))
    assert [member.rank for member in gang.to_end()] == [2]
    assert (gang.died, gang.notes) == ({1}, [])
    gang.die(0)
    gang.ends_members = True
    gang.die(2)
    assert gang.to_end() == []
    assert (gang.died, gang.notes) == ({0, 1}, [(0, "died afterwards, which may be the cause")])


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


async def test_members_may_be_a_round_apart() -> None:
    rounds = Rounds(2)
    first = rounds.put(0, 0, "barrier", b"")
    assert rounds.missing(0) == [1]
    second = rounds.put(1, 0, "allgather", b"0")
    assert rounds.put(0, 1, "barrier", b"") is first
    assert (first.result(), second.done()) == ([b"", b""], False)
    assert rounds.put(1, 1, "allgather", b"1").result() == second.result() == [b"0", b"1"]
    assert rounds.missing(7) == [0, 1]


async def test_members_that_have_returned() -> None:
    rounds = Rounds(3)
    assert rounds.leave(2) is None
    with pytest.raises(MismatchError, match=r"^calls barrier after rank 2 returned \(expected "):
        rounds.put(0, 0, "barrier", b"")
    rounds = Rounds(3)
    rounds.put(0, 0, "barrier", b"")
    rounds.put(0, 1, "barrier", b"")
    assert rounds.leave(1) is None  # it has given up, say
    assert str(rounds.leave(2)).startswith("returned while ranks 0-1 waited in barrier (expected ")
