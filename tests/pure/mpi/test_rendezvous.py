"""Ranks that come together, and those that do not, on a communicator without MPI."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.plain_data import pack, unpack
from dask_gpu_mpi.errors import Problem, StartupError
from dask_gpu_mpi.mpi import rendezvous
from dask_gpu_mpi.mpi.rendezvous import _TAG as TAG
from dask_gpu_mpi.mpi.rendezvous import DEADLINE, RankKey, Rendezvous, missing_ranks
from dask_gpu_mpi.mpi.wire import DroppedMessages, KeyPair
from support.mocks.clocks import Clock
from support.mocks.mpi import Comm, install

#: Keys of ranks, which are ready before the test: rank 0's first.
KEYS = [KeyPair() for _ in range(5)]


def comm_of(
    rank: int, size: int, keys: dict[int, tuple[str, dict[int, str]]] | None = None, *, comes: bool = True
) -> Comm:
    """One rank's; what the others have sent it is there from the beginning."""
    comm = Comm(rank, size, comes=comes)
    for source, (host, states) in (keys or {}).items():
        key = RankKey(host, KEYS[source].public, states)
        comm.post(0, source, pack(key), TAG)
    if rank and comes:
        comm.post(rank, 0, pack(RankKey("h0", KEYS[0].public)), TAG)
    return comm


def sent(comm: Comm, rank: int = 0) -> list[Any]:
    """What has been sent to that rank, without the keys."""
    mails = [unpack(message.data) for _, message in comm.queues[0, rank, TAG]]
    return [[part for part in mail if not isinstance(part, bytes)] for mail in mails]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(100.0)
    install(monkeypatch)
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "neighbours", lambda pid: {0: "there", 2: "stopped"})
    monkeypatch.setattr(rendezvous, "allocated_hosts", lambda: "")
    return clock


def meeting(comm: Comm, deadline: float = 100.0, failure: Failure | None = None) -> Rendezvous:
    return Rendezvous(
        comm, f"h{comm.rank}", deadline, DEADLINE, lambda: failure, DroppedMessages(f"rank {comm.rank}")
    )


def test_all_come_and_have_keys_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = comm_of(0, 3, {1: ("h1", {}), 2: ("h2", {})})
    zero = meeting(comm, 130)
    made = zero.duplicate()
    assert (made.number, made.handler, comm.handler) == (1, "abort", "abort")
    assert zero.hosts == {0: "h0", 1: "h1", 2: "h2"}
    for rank in (1, 2):
        (data,) = [message.data for _, message in comm.queues[0, rank, TAG]]
        _, public, _ = unpack(data)
        channel = KEYS[rank].channel(public, rank, to_rank=False)
        assert zero.channels[rank].open(channel.seal(b"up")) == [b"up"]
        assert channel.open(zero.channels[rank].seal(b"down")) == [b"down"]
    comm = comm_of(1, 3)
    # a script's communicator may abort the job if a message does not fit; ours must not meanwhile
    handlers: list[str] = []
    duplicate = comm.Idup
    monkeypatch.setattr(comm, "Idup", lambda: handlers.append(comm.handler) or duplicate())
    assert meeting(comm, 130).duplicate().number == 1
    assert sent(comm) == [["h1", {}]]
    assert (handlers, comm.handler) == (["return"], "abort")


@pytest.mark.parametrize(
    ("source", "data"),
    [
        (1, b""),  # empty
        (1, pickle.dumps(("h1", {}))),
        (1, b"\x91" * 5000),  # nested
        (1, pack(["h1", b"short", {}])),
        (1, pack(["h1", bytes(32), {}])),  # of low order: gives the same secret with every key
        (1, pack(["h1", KEYS[1].public])),
        (1, bytes(rendezvous.LARGEST + 1)),
        (2, pack(["h1", KEYS[1].public, {}])),  # of no rank
        (0, pack(["h1", KEYS[1].public, {}])),
        (-5, pack(["h1", KEYS[1].public, {}])),
    ],
)
def test_what_no_rank_has_sent_is_dropped(
    source: int, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    comm = Comm(0, 2)
    comm.post(0, source, data, TAG)
    comm.post(0, 1, pack(["h1", KEYS[1].public, {}]), TAG)
    zero = meeting(comm, 130)
    assert zero.duplicate().number == 1
    assert zero.hosts == {0: "h0", 1: "h1"}
    assert zero._drops.count == 1
    assert "warning: rank 0: 1 MPI message was dropped" in capsys.readouterr().err


def test_a_rank_may_send_its_key_again() -> None:
    """The second message has the states of others."""
    comm = Comm(0, 4)
    for states in ({}, {3: "stopped"}):
        comm.post(0, 1, pack(["h1", KEYS[1].public, states]), TAG)
    zero = meeting(comm)
    with pytest.raises(StartupError, match="rank 3 on h1 is stopped"):
        zero.duplicate()
    assert zero._drops.count == 0
    assert zero.channels[1].open(KEYS[1].channel(zero._keys.public, 1, to_rank=False).seal(b"x")) == [b"x"]


@pytest.mark.parametrize(
    ("rank", "size", "messages"),
    [
        pytest.param(0, 4, [(1, 1), (1, 3)], id="forged second"),
        pytest.param(0, 4, [(1, 3), (1, 1)], id="forged first"),
        pytest.param(1, 2, [(2, 2), (0, 0), (0, 2)], id="of rank 0"),
    ],
)
def test_two_keys_of_one_rank_end_the_start(
    clock: Clock, rank: int, size: int, messages: list[tuple[int, int]]
) -> None:
    """Which one is the stranger's, nobody knows."""
    comm = Comm(rank, size)
    for source, key in messages:
        comm.post(rank, source, pack(["h1", KEYS[key].public, {}]), TAG)
    here = meeting(comm, 130)
    why = f"two different keys came from rank {messages[-1][0]}: .* Fix: find out"
    with pytest.raises(StartupError, match=why) as caught:
        here.duplicate()
    assert (caught.value.fatal, caught.value.reported) == (True, False)
    assert clock.slept == []
    assert here._drops.count == rank  # another rank than 0 hears rank 0 alone


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0.5), (1, 2.5)])
def test_until_when_a_rank_waits(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, rank: int, seconds: float
) -> None:
    """Rank 0 until those beside a missing rank have named it; the others until rank 0 has reported."""
    named: list[float] = []
    monkeypatch.setattr(rendezvous, "neighbours", lambda pid: named.append(clock.now) or {})
    with pytest.raises(StartupError):
        meeting(comm_of(rank, 2, comes=False), 107.0).duplicate()
    assert 107.0 + seconds < clock.now <= 107.0 + seconds + 0.02
    assert 107.0 < named[0] <= 107.02
    assert clock.slept[:7] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]


def test_a_rank_that_comes_late_is_none_that_is_missing(clock: Clock) -> None:
    comm = Comm(0, 2)
    late = meeting(comm, 107.0)
    sleep = clock.sleep

    def come(seconds: float) -> None:
        sleep(seconds)
        if clock.now > 107.4 and not late.channels:
            comm.post(0, 1, pack(["h1", KEYS[1].public, {}]), TAG)

    clock.sleep = come  # type: ignore[method-assign]
    assert late.duplicate().number == 1
    assert late.hosts == {0: "h0", 1: "h1"}


@pytest.mark.parametrize(
    ("comm", "message"),
    [
        (comm_of(0, 3, {1: ("h1", {})}), "no response from rank 2 of 3"),
        (Comm(1, 2), "no response from rank 0 of 2"),
    ],
)
def test_no_message_is_missing(comm: Comm, message: str) -> None:
    """MPI may have duplicated the communicator before the last message is here."""
    with pytest.raises(StartupError, match=message):
        meeting(comm).duplicate()


def test_rank_0_names_the_missing_as_others_see_them() -> None:
    with pytest.raises(StartupError) as caught:
        meeting(comm_of(0, 5, {1: ("h1", {3: "there"}), 4: ("h1", {})}, comes=False)).duplicate()
    assert str(caught.value).startswith(
        f"no response from ranks 2-3 of 5 before {DEADLINE} (rank 2 on h0 is stopped, rank 3 on h1 runs, but not in MPI); "
        "rank 0 on h0, ranks 1,4 on h1 responded. Fix: "
    )
    assert caught.value.fatal
    assert not caught.value.reported


@pytest.mark.parametrize("rank", [1, 2])
def test_others_report_where_rank_0_is_missing(rank: int) -> None:
    comm = comm_of(rank, 3, comes=False)
    with pytest.raises(StartupError) as caught:
        meeting(comm).duplicate()
    assert sent(comm) == [[f"h{rank}", {}], [f"h{rank}", {0: "there", 2: "stopped"}]]
    assert f"rank 0 of 3 before {DEADLINE} (rank 0 on h{rank} runs, but not in MPI). Fix: " in str(
        caught.value
    )
    assert caught.value.fatal
    assert caught.value.reported is (rank > 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupted(clock: Clock, rank: int) -> None:
    with pytest.raises(Exception, match="SIGTERM came") as caught:
        meeting(comm_of(rank, 2, comes=False), 130, Failure(Problem("SIGTERM came"), 143)).duplicate()
    assert caught.value.fatal  # type: ignore[attr-defined]
    assert clock.slept == [0.5] * rank  # rank 0 reports for all, if it was interrupted as well


@pytest.mark.parametrize(
    ("known", "named", "allocated"),
    [(0, 0, True), (1, 1, True), (8, 8, False), (9, 8, False)],
)
def test_many_that_are_missing(known: int, named: int, allocated: bool) -> None:
    missing = range(1, max(known, 2) + 1)
    beside = dict.fromkeys(missing[:known], ("h", "stopped"))
    text = missing_ranks(missing, 20, "the end", beside, {}, "h[0-9]")
    assert text.count(" on h is stopped") == named
    assert ("and 1 more" in text) is (known > 8)
    assert ("; the job's nodes are h[0-9]. Fix:" in text) is (allocated and known < 2)
    assert "responded" not in text
