"""The bookkeeping of one gang: it starts with its last member, its first failure counts, and it knows who still runs."""

from __future__ import annotations

import asyncio

import pytest

from dask_gpu_mpi.gang.gang import (
    Candidate,
    FailureKind,
    Gang,
    GangFailure,
    MismatchError,
    Stage,
    rank_members,
)

WORKERS = [Candidate(str(i), f"tls://10.0.0.{i}:1", f"10.0.0.{i}") for i in range(3)]


def made() -> Gang:
    gang = Gang("g", "client", 5.0)
    gang.assign(rank_members(WORKERS))
    return gang


def test_it_starts_with_its_last_member() -> None:
    async def run() -> None:
        gang = made()
        assert gang.hosts == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
        for rank in (2, 0):
            gang.join(rank, f"h{rank}")
            assert not gang.started.done()
        gang.join(1, "h1")
        assert gang.started.done()
        assert gang.hosts == ["h0", "h1", "h2"]
        assert gang.rank_of("tls://10.0.0.1:1") == 1
        assert gang.rank_of("tls://10.0.0.9:1") is None

    asyncio.run(run())


def test_the_first_failure_counts() -> None:
    async def run() -> None:
        gang = made()
        assert gang.fail(GangFailure(FailureKind.RAISED, "first", 1))
        assert not gang.fail(GangFailure(FailureKind.DIED, "second", 2))
        assert gang.over.result().text == "first"

    asyncio.run(run())


def test_deaths_after_the_first_failure() -> None:
    async def run() -> None:
        gang = made()
        gang.die(0)
        gang.fail(GangFailure(FailureKind.DIED, "died", 0))
        assert (gang.died, gang.notes) == ({0}, [])
        gang.die(1)
        gang.ends_members = True
        gang.die(2)
        assert (gang.died, gang.notes) == ({0, 1}, [(1, "died afterwards, which may be the cause")])

    asyncio.run(run())


def test_who_runs_until_when() -> None:
    async def run() -> None:
        gang = made()
        for rank in range(3):
            gang.join(rank, "h")
        gang.leave(0)
        gang.die(1)
        gang.leave(1)  # the answer to its call comes after its death
        assert [member.rank for member in gang.at(Stage.JOINED)] == [2]
        assert [member.rank for member in gang.at(Stage.DEAD)] == [1]
        assert gang.stages == [Stage.LEFT, Stage.DEAD, Stage.JOINED]
        gang.fail(GangFailure(FailureKind.DIED, "died", 1))
        assert [member.rank for member in gang.to_end()] == [2]
        gang.leave(2)
        assert gang.to_end() == []

    asyncio.run(run())


def test_rounds() -> None:
    async def run() -> None:
        gang = made()
        first = gang.put(0, 0, "barrier", b"0")
        assert gang.put(0, 1, "barrier", b"1") is first
        assert gang.rounds.missing(0) == [2]
        assert not first.done()
        with pytest.raises(MismatchError):
            gang.put(0, 2, "allgather", b"")
        assert gang.put(0, 2, "barrier", b"2").result() == [b"0", b"1", b"2"]

    asyncio.run(run())
