"""The messages of ranks that are all in this process: what strangers send is dropped, and the next message is read."""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dask_gpu_mpi.base.plain_data import PlainDataError, pack
from dask_gpu_mpi.mpi import mailbox as module
from dask_gpu_mpi.mpi import rendezvous
from dask_gpu_mpi.mpi.mailbox import _TAG as TAG
from dask_gpu_mpi.mpi.mailbox import Event, Mailbox
from dask_gpu_mpi.mpi.wire import KeyPair
from support.jobs.processes import run_python
from support.mocks.mpi import Comm, install

PAYLOADS = {"text": str, "steps": list[int], "nothing": None}


@pytest.fixture(autouse=True)
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(module.atexit, "register", lambda call: None)
    monkeypatch.setattr(module, "before_finalize", lambda call: None)


def mailboxes(size: int) -> list[Mailbox]:
    """As many ranks that have met."""
    first = Comm(0, size)
    made: dict[int, Mailbox] = {}

    def meet(rank: int) -> None:
        made[rank] = Mailbox(first.beside(rank), f"h{rank}", time.monotonic() + 30, PAYLOADS)
        made[rank]._thread = threading.main_thread().ident or 0

    at_once(*(functools.partial(meet, rank) for rank in range(size)))
    return [made[rank] for rank in range(size)]


def at_once(*calls: Callable[[], object]) -> None:
    """Each in its own thread."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mailboxes may call MPI in all threads."""
    monkeypatch.setattr(Mailbox, "_may_call", lambda box: box._comm is not None)


def inject(to: Mailbox, source: int, data: bytes) -> None:
    """What a stranger sends, as that rank, on our communicator."""
    to._comm.post(to.rank, source, data, TAG)


def test_messages_to_rank_0_and_from_it() -> None:
    zero, one, two = mailboxes(3)
    assert zero.hosts == {0: "h0", 1: "h1", 2: "h2"}
    one.send(0, "text", "a")
    two.send(0, "steps", [1, 2])
    one.send(0, "nothing")
    zero.send(0, "text", "to itself")
    assert sorted(zero.receive()) == [
        (0, "text", "to itself"),
        (1, "nothing", None),
        (1, "text", "a"),
        (2, "steps", [1, 2]),
    ]
    zero.send_all("text", "all")
    assert [box.receive() for box in (zero, one, two)] == [[], *[[Event(0, "text", "all")]] * 2]
    assert [box._drops.count for box in (zero, one, two)] == [0, 0, 0]


def test_what_is_not_of_the_kinds_type_is_not_sent() -> None:
    zero, one = mailboxes(2)
    with pytest.raises(PlainDataError):
        one.send(0, "text", 3)
    for rank in (0, 1):
        with pytest.raises(PlainDataError, match="unknown kind 'unknown'"):
            one.send(rank, "unknown", 3)
    assert one.receive() == []
    assert zero.receive() == []


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def test_what_no_rank_has_sent_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    zero, one, two = mailboxes(3)
    for data in (b"", pickle.dumps(("text", Bomb())), pack(["text", "plain"]), *map(bytes, range(1, 100))):
        inject(zero, 1, data)
    inject(zero, 1, KeyPair().channel(KeyPair().public, 1, to_rank=False).seal(pack(["text", "another key"])))
    two.send(0, "text", "of rank 2")
    (_, sent) = zero._comm.queues[1, 0, TAG].pop()
    for source in (-2, 0, 1, 3, 2, 2):  # only as rank 2, and only once
        inject(zero, source, sent.data)
    one.send(0, "text", "a")
    assert zero.receive() == [Event(2, "text", "of rank 2"), Event(1, "text", "a")]
    assert zero._drops.count == 102 + 1 + 5
    err = capsys.readouterr().err
    assert err.count("warning: rank 0 on h0: 108 MPI messages were dropped") == 1
    assert zero.receive() == []
    assert zero._drops.count == 108


def test_other_ranks_hear_rank_0_alone() -> None:
    zero, one, two = mailboxes(3)
    two.send(0, "text", "a")
    inject(one, 2, zero._comm.queues[1, 0, TAG][0][1].data)
    inject(one, 0, b"x" * 50)
    zero.send(1, "text", "b")
    assert one.receive() == [Event(0, "text", "b")]
    assert one._drops.count == 2


@pytest.mark.parametrize("message", [["unknown", None], ["text", 3], ["text"], "text", [["text"], 1], {}])
def test_a_rank_of_another_version(message: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Sealed, but nothing that this version sends: dropped as well, and what comes after it is read."""
    zero, one = mailboxes(2)
    inject(zero, 1, one._channels[0].seal(pack(message)))
    one.send(0, "text", "a")
    assert zero.receive() == [Event(1, "text", "a")]
    assert zero._drops.count == 1
    assert "malformed" in capsys.readouterr().err


def test_a_world_of_one_rank_needs_no_keys() -> None:
    program = (
        "import sys\nfrom types import SimpleNamespace\nfrom dask_gpu_mpi.mpi.mailbox import Mailbox\n"
        "comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1)\n"
        "box = Mailbox(comm, 'h', 0.0, {'text': str})\n"
        "box.send(0, 'text', 'a')\nbox.send_all('text', 'b')\nassert len(box.receive()) == 1 and box.flush(1)\n"
        "box.close()\n"
        "found = [each for each in ('cryptography', 'msgpack', 'mpi4py') if each in sys.modules]\n"
        "assert found == [], found\n"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("any_thread")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("others_end", [False, True])
def test_a_rank_that_has_failed_waits_for_the_ends_of_the_others(
    rank: int,
    failed: bool,
    others_end: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    aborts: list[int] = []
    monkeypatch.setattr(module, "abort", aborts.append)
    for name in ("FAILED_TIMEOUT", "LAST_MESSAGES_TIMEOUT", "ANSWER_TIMEOUT", "FAILED_GRACE"):
        monkeypatch.setattr(module, name, 0.1)
    boxes = mailboxes(2)
    one, other = boxes[rank], boxes[1 - rank]
    if failed:
        one.failure = lambda: 7
    ends = [one, other] if others_end else [one]
    at_once(*(functools.partial(box.close, 0.1) for box in ends))
    assert aborts == ([7] if failed and not others_end else [])
    assert capsys.readouterr().err.count(f"rank {rank} of 2 has failed (exit code 7)") == len(aborts)


@pytest.mark.usefixtures("any_thread")
def test_what_a_late_rank_has_sent_besides_its_key_is_received_at_the_end() -> None:
    """MPICH complains of it in MPI_Finalize."""
    zero, one = mailboxes(2)
    late = zero._first_wire._comm.post(0, 1, b"the states of others", rendezvous._TAG)  # type: ignore[union-attr]
    at_once(functools.partial(one.close, 10.0), functools.partial(zero.close, 10.0))
    assert late.received


@pytest.mark.usefixtures("any_thread")
def test_two_threads_do_not_seal_at_once() -> None:
    """Two messages with one number: the second would be dropped."""
    zero, one = mailboxes(2)
    channel = one._channels[0]
    seal, inside, most = channel.seal, 0, 0

    def slow(data: bytes) -> bytes:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)  # lets another thread run
        inside -= 1
        return seal(data)

    channel.seal = slow  # type: ignore[method-assign]
    at_once(*[lambda: [one.send(0, "text", "a") for _ in range(20)]] * 3)
    assert len(zero.receive()) == 60
    assert most == 1


def test_a_lost_rank_is_sent_nothing_until_it_is_heard_of() -> None:
    zero, one, two = mailboxes(3)
    zero.lost = {2}
    zero.send_all("text", "a")
    one.send(0, "text", "b")
    assert [mail.payload for mail in (*one.receive(), *two.receive(), *zero.receive())] == ["a", "b"]
    two.send(0, "text", "c")
    assert zero.receive()[0].payload == "c"
    zero.send_all("text", "d")
    assert [mail.payload for mail in (*one.receive(), *two.receive())] == ["d", "d"]


@pytest.mark.parametrize("tolerates", [False, True])
def test_mpi_is_not_finalized_without_a_rank_that_may_be_lost(
    tolerates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(module, "do_not_finalize", lambda: calls.append(True))
    zero, *_ = mailboxes(3)
    zero.tolerates_loss = tolerates
    zero.close(0.1)
    assert calls == [True] * tolerates


@pytest.mark.usefixtures("any_thread")
@pytest.mark.parametrize("agree", [True, False])
def test_the_communicator_is_freed_where_all_agree(agree: bool) -> None:
    zero, one = mailboxes(2)
    comms = [zero._comm, one._comm]
    at_once(
        functools.partial(zero.free, 10.0, 0.0, agrees=True),
        functools.partial(one.free, 0.0, 10.0, agrees=agree),
    )
    assert [comm.freed for comm in comms] == [agree, agree]
