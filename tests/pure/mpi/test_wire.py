"""Bytes over a communicator without MPI: what strangers announce, and what never comes."""

from __future__ import annotations

import ast
import gc
import weakref
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import dask_gpu_mpi
from dask_gpu_mpi.mpi import wire as module
from dask_gpu_mpi.mpi.wire import (
    ARRIVAL_TIMEOUT,
    LARGEST,
    MOST_ARRIVING,
    MOST_OF_A_RANK,
    Channel,
    DroppedMessages,
    ForeignMessageError,
    KeyPair,
    Wire,
)
from support.jobs.processes import run_python
from support.mocks.clocks import Clock
from support.mocks.mpi import Comm, Error, Message, install

TAG = 5
PACKAGE = Path(dask_gpu_mpi.__file__).parent


@pytest.fixture(autouse=True)
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def wire(comm: Comm, largest: int = LARGEST) -> tuple[Wire, DroppedMessages]:
    drops = DroppedMessages("rank 0 on h")
    return Wire(comm, TAG, drops, largest=largest), drops


def test_all_that_is_here_is_received_in_order() -> None:
    comm = Comm(0, 3)
    zero, drops = wire(comm)
    for rank, data in ((1, b"a"), (2, b""), (1, bytes(100_000))):
        wire(comm.beside(rank))[0].send(0, data)
    assert zero.receive() == [(1, b"a"), (2, b""), (1, bytes(100_000))]
    assert zero.receive() == []
    assert drops.count == 0


@pytest.mark.parametrize("claims", [11, 1 << 40, -32766])
def test_too_large_messages_are_dropped_and_not_allocated(claims: int) -> None:
    comm = Comm(0, 2)
    zero, drops = wire(comm, largest=10)
    large = comm.post(0, 1, b"", TAG, claims=claims)
    comm.post(0, 1, b"0123456789", TAG)
    assert zero.receive() == [(1, b"0123456789")]
    assert drops.count == 1
    assert large.received is False  # with Open MPI that would write beyond what is allocated


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(module, "time", clock)
    return clock


def announce(comm: Comm, *sources: int) -> list[Message]:
    """As many messages of the largest size, none of which comes."""
    return [comm.post(0, source, b"", TAG, claims=LARGEST, comes=False) for source in sources]


def test_what_is_too_much_at_a_time_is_received_later(clock: Clock) -> None:
    comm = Comm(0, 9)
    zero, drops = wire(comm)
    sources = [1 + number // 2 for number in range(MOST_ARRIVING // LARGEST)]
    first = announce(comm, *sources)
    comm.post(0, 8, b"of a rank", TAG)
    assert zero.receive() == []
    assert all(each.received for each in first)
    first[0].request.ready = True
    assert [source for source, _ in zero.receive()] == [1, 8]
    assert zero.receive() == []
    assert drops.count == 0


def test_what_one_rank_announces_keeps_no_other_back(clock: Clock) -> None:
    comm = Comm(0, 3)
    zero, drops = wire(comm)
    announced = announce(comm, *[1] * (MOST_OF_A_RANK // LARGEST + 1))
    comm.post(0, 2, b"of a rank", TAG)
    assert zero.receive() == [(2, b"of a rank")]
    assert [each.received for each in announced] == [True] * (MOST_OF_A_RANK // LARGEST) + [False]
    assert drops.count == 0


def test_what_does_not_come_in_time_keeps_nothing_back(clock: Clock) -> None:
    comm = Comm(0, 2)
    zero, drops = wire(comm)
    never = announce(comm, *[1] * (MOST_OF_A_RANK // LARGEST))
    comm.post(0, 1, b"of a rank", TAG)
    assert zero.receive() == []
    clock.now += ARRIVAL_TIMEOUT
    assert zero.receive() == []
    clock.now += 1
    assert zero.receive() == [(1, b"of a rank")]
    never[0].request.ready = True  # late
    assert [source for source, _ in zero.receive()] == [1]
    assert drops.count == 0


class Tracked(bytearray):
    """One that shows whether it is still there."""


def test_what_mpi_may_still_use_outlives_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of a message that was announced come whenever its sender likes, also after the communicator's end."""
    monkeypatch.setattr(module, "bytearray", Tracked, raising=False)
    buffers: list[weakref.ref[Any]] = []
    requests: list[weakref.ref[Any]] = []
    for comes in (False, True):
        comm = Comm(0, 2, comes=comes)
        zero, _ = wire(comm)
        message = comm.post(0, 1, b"a", TAG, comes=comes)
        receive = message.Irecv
        message.Irecv = lambda where, receive=receive: buffers.append(weakref.ref(where[0])) or receive(where)  # type: ignore
        zero.receive()
        zero.send(1, b"a")
        requests.append(weakref.ref(zero.leaving[0]))
        zero.has_sent()
        del zero
    gc.collect()
    assert [buffer() for buffer in buffers] == [b"a", None]
    assert [request() is None for request in requests] == [False, True]


def test_what_is_kept_stays_at_the_end_of_python() -> None:
    """``MPI_Finalize`` comes after the modules are gone."""
    program = (
        "from dask_gpu_mpi.mpi import wire\n"
        "class Kept:\n    def __del__(self): print('freed', flush=True)\n"
        "wire._WIRES.append(Kept())\n"
    )
    done = run_python(program)
    assert (done.returncode, done.stdout) == (0, "")


def test_errors_of_mpi_are_counted_and_raise_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    comm = Comm(0, 2, comes=False)
    zero, drops = wire(comm)
    for _ in range(2):
        zero.send(1, b"a")
    zero.leaving[0].ready, zero.leaving[0].error = True, comm.error()
    assert not zero.has_sent()  # the other one is still on its way
    assert len(zero.leaving) == 1
    comm.post(0, 1, b"a", TAG).error = comm.error()
    comm.post(0, 1, b"b", TAG)
    assert zero.receive() == [(1, b"b")]
    comm.broken = comm.error()
    assert zero.receive() == []
    zero.send(1, b"b")
    zero.leaving[0].ready = True
    assert zero.has_sent()
    assert (drops.count, drops.errors) == (0, 5)  # a poll probes twice
    comm.broken = None
    broken = comm.post(0, 1, b"a", TAG, comes=False)
    assert zero.receive() == []
    broken.request.ready, broken.request.error = True, comm.error()
    assert zero.receive() == []
    assert (drops.count, drops.errors) == (1, 5)
    drops.report()
    assert (
        capsys.readouterr().err.count(
            "rank 0 on h: 5 MPI calls failed (the last: sending: connection reset). Fix: "
        )
        == 1
    )


def test_one_warning_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    drops = DroppedMessages("rank 3 on h")
    drops.report()
    told = []
    for seconds in range(130):
        clock.now = 1000.0 + seconds
        drops.add(f"{seconds}")
        drops.report()
        told += capsys.readouterr().err.splitlines()
    assert [line.partition(" dropped")[0].partition("warning: ")[2] for line in told] == [
        "rank 3 on h: 1 MPI message was",
        "rank 3 on h: 61 MPI messages were",
        "rank 3 on h: 121 MPI messages were",
    ]
    assert drops.count == 130


#: mpi4py's methods that pickle what they send, or unpickle what arrives, of which there are no others of the same name.
PICKLING = {
    "allgather", "allreduce", "alltoall", "bcast", "bsend", "exscan", "ibsend", "improbe", "irecv", "isend", "issend", "mprobe",
    "reduce", "scan", "scatter", "sendrecv", "ssend",
}  # fmt: skip
#: Those that have namesakes, and what communicators are called.
AMBIGUOUS, COMMUNICATORS = {"gather", "recv", "send"}, {"COMM_WORLD", "_comm", "comm", "message", "world"}


def test_nothing_in_the_package_has_mpi4py_pickle() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name == "report_figures.py":  # bokeh's scatter
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                of = getattr(node.value, "attr", getattr(node.value, "id", ""))
                place = f"{path}:{node.lineno}"
                assert node.attr not in PICKLING, place
                assert node.attr not in AMBIGUOUS or of not in COMMUNICATORS, place


def test_a_library_that_survives_dead_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """It fails until the death is acknowledged; what is sent to the dead does not leave, and its memory stays MPI's."""
    comm = Comm(0, 3, comes=False)
    zero, drops = wire(comm)
    acknowledged: list[int] = []
    comm.Ack_failed = lambda: acknowledged.append(1)  # type: ignore[attr-defined]
    zero.send(2, b"a")
    sent = weakref.ref(zero.leaving[0])
    comm.broken = Error("MPI_ERR_PROC_FAILED: Process Failure")
    assert zero.receive() == []
    zero.send(1, b"b")
    drops.report()
    assert (acknowledged, drops.errors, capsys.readouterr().err) == ([1] * len(acknowledged), 0, "")
    assert acknowledged
    assert not zero.has_sent()
    zero.give_up_sending()
    assert zero.has_sent()
    gc.collect()
    assert sent() is not None


# -- sealed messages: only the other side opens them, once and in order


ZERO, ONE, TWO = KeyPair(), KeyPair(), KeyPair()


def pair(rank: int = 1, keys: KeyPair = ONE) -> tuple[Channel, Channel]:
    """Rank 0's side, and the rank's."""
    return ZERO.channel(keys.public, rank, to_rank=True), keys.channel(ZERO.public, rank, to_rank=False)


def test_both_directions_and_nothing_of_it_is_to_be_seen() -> None:
    zero, one = pair()
    for number in range(300):
        text = b"x" * number
        assert one.open(zero.seal(text)) == [text]
        assert zero.open(bytearray(one.seal(text))) == [text]
    first, second = zero.seal(b"-----BEGIN PRIVATE KEY-----"), zero.seal(b"-----BEGIN PRIVATE KEY-----")
    assert b"PRIVATE" not in first
    assert first[8:] != second[8:]


def test_a_repeated_message_is_refused() -> None:
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


def test_a_message_that_is_changed_or_cut() -> None:
    zero, one = pair()
    message = zero.seal(b"message")
    parts = [message[:length] for length in range(len(message))]
    for bit in range(8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        parts.append(bytes(changed))
    for part in parts:
        with pytest.raises(ForeignMessageError):
            one.open(part)
    assert one.open(message) == [b"message"]


@pytest.mark.parametrize("key", [b"", b"x" * 31, b"x" * 33, bytes(32), b"\1" + bytes(31)])
def test_what_is_no_public_key(key: bytes) -> None:
    with pytest.raises(ForeignMessageError, match="no public key"):
        ZERO.channel(key, 1, to_rank=True)
