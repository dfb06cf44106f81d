"""The meeting of ranks that are all in this process: who has come, what only one rank can read, and what strangers send."""

from __future__ import annotations

import pickle
import socket
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.plain_data import pack, unpack
from dask_gpu_mpi.errors import Problem, StartupError
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.startup.meeting import (
    DEADLINE,
    Channel,
    ForeignMessageError,
    Hello,
    Invitation,
    KeyPair,
    Meeting,
    listen,
)
from dask_gpu_mpi.startup.messages import Kind
from support.jobs.processes import run_python

#: Keys of ranks, which are ready before the test.
ZERO, ONE, TWO = KeyPair(), KeyPair(), KeyPair()
ETH = Interface("eth0", "10.0.0.1", "10.0.0.0/24")
INVITATION = Invitation("10.0.0.1", 4711, {"key": "-----BEGIN PRIVATE KEY-----"})


class Job:
    """The worlds of ranks, and every packet between them."""

    def __init__(self, size: int) -> None:
        self.worlds = [Rank(self, rank, size) for rank in range(size)]
        self.boxes: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.packets: list[tuple[int, bytes]] = []

    def meet(self, *ranks: int) -> list[Meeting]:
        """These ranks, else all, come; each of a host of its own."""
        hellos = [
            Hello(f"h{rank}", b"", f"b{rank}", (ETH,), "eth0" if rank == 1 else None)
            for rank in range(len(self.worlds))
        ]
        made = [Meeting(self.worlds[rank], hellos[rank]) for rank in ranks or range(len(self.worlds))]
        for meeting in (*made, *made):
            assert meeting.receive() == []
        return made


class Rank(World):
    """One of them."""

    def __init__(self, job: Job, rank: int, size: int) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.left = 0

    def send(self, rank: int, data: bytes) -> None:
        self.job.boxes[rank].append((self.rank, data))
        self.job.packets.append((rank, data))

    def receive(self) -> list[tuple[int, bytes]]:
        return self.job.boxes.pop(self.rank, [])

    def leave(self) -> None:
        self.left += 1


def test_all_come_and_each_reads_what_is_for_it() -> None:
    job = Job(3)
    zero, one, two = job.meet()
    assert zero.hosts == {0: "h0", 1: "h1", 2: "h2"}
    assert [each.missing for each in (zero, one, two)] == [[], [], []]
    assert (zero.here[1].interfaces, zero.here[1].wanted, zero.here[1].machine) == ((ETH,), "eth0", "h1b1")
    # nobody else needs the networks of rank 0
    assert (one.here[0].host, one.here[0].interfaces, one.here[0].machine) == ("h0", (), "h0")
    zero.send(1, Kind.ENTER, INVITATION)
    zero.send_all(Kind.FAIL, (Failure(Problem("no disk"), 2), True))
    assert one.receive() == [
        (0, Kind.ENTER, INVITATION),
        (0, Kind.FAIL, (Failure(Problem("no disk"), 2), True)),
    ]
    assert [kind for _, kind, _ in two.receive()] == [Kind.FAIL]
    two.send(0, Kind.ENTERED)
    one.send(0, Kind.FAILED, Failure(Problem("no memory")))
    assert zero.receive() == [
        (2, Kind.ENTERED, None),
        (1, Kind.FAILED, Failure(Problem("no memory"))),
    ]
    assert not any(b"PRIVATE" in data or b"no disk" in data for _, data in job.packets)
    assert "PRIVATE" not in repr(INVITATION)


def test_nothing_is_sent_after_the_meeting() -> None:
    job = Job(2)
    zero, one = job.meet()
    before = len(job.packets)
    for _ in range(2):
        zero.close()
    zero.send(1, Kind.CLOSE)
    one.send(0, Kind.ENTERED)
    assert (job.worlds[0].left, zero.open, zero.receive()) == (1, False, [])
    assert len(job.packets) == before + 1


def test_a_rank_that_is_alone_needs_no_keys_and_leaves_at_once() -> None:
    """Its MPI ends while the cluster starts, and not before the script."""
    program = (
        "import sys\nfrom dask_gpu_mpi.mpi.world import World\n"
        "from dask_gpu_mpi.startup.meeting import Hello, Meeting\n"
        "World.leave = lambda world: print('left')\n"
        "meeting = Meeting(World(), Hello('h', b''))\n"
        "assert (meeting.missing, meeting.hosts, meeting.open) == ([], {0: 'h'}, False)\n"
        "assert meeting.receive() == [] and meeting.close() is None\n"
        "print([each for each in ('cryptography', 'msgpack', 'mpi4py') if each in sys.modules])\n"
    )
    done = run_python(program)
    assert done.stdout == "left\n[]\n", done.stderr


def hello(key: bytes = ONE.public, host: str = "h1", states: Mapping[int, str] | None = None) -> bytes:
    return pack([Kind.HELLO, Hello(host, key, states=states or {})])


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    ("source", "data"),
    [
        (1, b""),
        (1, pickle.dumps(Bomb())),
        (1, b"\x91" * 5000),  # nested
        (1, pack([Kind.HELLO, "h1"])),
        (1, hello(b"short")),
        (1, hello(bytes(32))),  # of low order: gives the same secret with every key
        (1, pack([Kind.ENTERED, b"before its key"])),
        (1, pack([Kind.UP, None])),  # of no meeting
        (2, hello()),  # of no rank
        (0, hello()),
        (-5, hello()),
    ],
    ids=lambda value: value if isinstance(value, int) else "",  # the same in each process: keys are random
)
def test_what_no_rank_has_sent_is_dropped(
    source: int, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one warning; and what comes after it is read."""
    job = Job(2)
    job.boxes[0] += [(source, data), (source, data), (1, hello())]
    (zero,) = job.meet(0)
    assert zero.hosts == {0: "h0", 1: "h1"}
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning: rank 0 on h0: a message was dropped that no rank of this job has sent (" in line
    assert ". Fix: find out who else reaches the ports of the MPI library" in line


def test_sealed_messages_of_others_or_again_or_of_another_version_are_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job(3)
    zero, one, two = job.meet()
    two.send(0, Kind.ENTERED)
    ((_, sent),) = job.boxes[0]
    job.boxes[0] += [(1, sent), (2, sent), (1, pack([Kind.ENTERED, "text"]))]  # only as rank 2, and only once
    one.send(0, Kind.FAILED, "no failure")
    one.send(0, Kind.ENTERED)
    assert zero.receive() == [(2, Kind.ENTERED, None), (1, Kind.ENTERED, None)]
    # others hear rank 0 alone
    job.boxes[1] += [(2, sent), (2, hello(TWO.public))]
    zero.send(1, Kind.CLOSE)
    assert one.receive() == [(0, Kind.CLOSE, None)]
    assert len(capsys.readouterr().err.splitlines()) == 2  # one of each rank


@pytest.mark.parametrize(
    ("rank", "messages"),
    [(0, [(1, ONE), (1, TWO)]), (1, [(2, TWO), (0, ZERO), (0, TWO)])],
    ids=["of a rank", "of rank 0"],
)
def test_two_keys_of_one_rank_end_the_start(rank: int, messages: list[tuple[int, KeyPair]]) -> None:
    """Nobody knows which one is forged."""
    job = Job(3)
    here = Meeting(job.worlds[rank], Hello(f"h{rank}", b""))
    for source, key in messages:
        job.boxes[rank].append((source, hello(key.public)))
    with pytest.raises(
        StartupError, match=f"two different keys came from rank {messages[-1][0]}: "
    ) as caught:
        here.receive()
    assert (caught.value.fatal, caught.value.reported) == (True, False)


# -- ranks that do not come


def test_rank_0_names_the_missing_as_others_see_them() -> None:
    job = Job(6)
    zero, one, _ = job.meet(0, 1, 4)
    assert zero.missing == [2, 3, 5]
    zero.report_neighbours({2: "stopped"})
    one.report_neighbours({3: "there"})  # its key comes again with it
    assert zero.receive() == []
    assert str(zero.missing_problem("h[0-5]")).startswith(
        f"no response from ranks 2-3,5 of 6 before {DEADLINE} (rank 2 on h0 is stopped, rank 3 on h1 runs, but has not come); "
        "the job's nodes are h[0-5]; rank 0 on h0, rank 1 on h1, rank 4 on h4 responded. Fix: "
    )
    assert [rank for rank, _ in job.packets].count(4) == 1  # nobody else is told


def test_others_report_where_rank_0_is_missing() -> None:
    job = Job(3)
    (one,) = job.meet(1)
    assert one.missing == [0]
    one.report_neighbours({0: "there"})
    sent = [unpack(data)[1][-1] for rank, data in job.packets if rank == 0]
    assert sent == [{}, {0: "there"}]
    text = f"no response from rank 0 of 3 before {DEADLINE} (rank 0 on h1 runs, but has not come). Fix: "
    assert str(one.missing_problem("")).startswith(text)


def test_many_that_are_missing() -> None:
    job = Job(20)
    (zero,) = job.meet(0)
    assert "; the job's nodes are h[0-9]; rank 0 on h0 responded. Fix: " in str(
        zero.missing_problem("h[0-9]")
    )
    zero.report_neighbours(dict.fromkeys(range(1, 20), "stopped"))
    text = str(zero.missing_problem("h[0-9]"))  # whose nodes are all known
    assert (text.count(" on h0 is stopped"), "and 11 more" in text, "h[0-9]" in text) == (8, True, False)


# -- sealed messages: only the other side opens them, once and in order


def pair(rank: int = 1, keys: KeyPair = ONE) -> tuple[Channel, Channel]:
    """Rank 0's side, and the rank's."""
    return ZERO.channel(keys.public, rank, to_rank=True), keys.channel(ZERO.public, rank, to_rank=False)


def test_messages_are_opened_once_and_in_their_order() -> None:
    zero, one = pair()
    for number in range(300):
        text = b"x" * number
        assert one.open(zero.seal(text)) == text
        assert zero.open(one.seal(text)) == text
    first, second = zero.seal(b"the same"), zero.seal(b"the same")
    assert first != second
    for message, opens in ((second, False), (first, True), (first, False), (second, True)):
        if opens:
            assert one.open(message) == b"the same"
        else:
            with pytest.raises(ForeignMessageError, match="not sealed with the job's key, or repeated"):
                one.open(message)


def test_messages_of_others_or_that_are_changed_or_cut() -> None:
    zero, one = pair()
    message = zero.seal(b"message")
    parts = [message[:length] for length in range(len(message))]
    for bit in range(8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        parts.append(bytes(changed))
    another_job = KeyPair().channel(ONE.public, 1, to_rank=True)
    parts += [channel.seal(b"x") for channel in (pair(2)[0], pair(1, TWO)[0], another_job, one)]
    for part in parts:
        with pytest.raises(ForeignMessageError):
            one.open(part)
    assert one.open(message) == b"message"


@pytest.mark.parametrize("key", [b"x" * 31, b"x" * 33, bytes(32), b"\1" + bytes(31)])
def test_what_is_no_public_key(key: bytes) -> None:
    with pytest.raises(ForeignMessageError, match="no public key"):
        ZERO.channel(key, 1, to_rank=True)


# -- the hub's socket


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_hub_listens_at_one_address(address: str) -> None:
    with listen(address) as sock:
        assert sock.getsockname()[0] == address
        with socket.create_connection(sock.getsockname()[:2], timeout=10):
            pass
    with pytest.raises(OSError, match="assign"):
        listen("192.0.2.1")
