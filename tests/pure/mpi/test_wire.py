"""Bytes over a communicator without MPI: what strangers announce, and what never comes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dask_gpu_mpi
from dask_gpu_mpi.mpi import wire as module
from dask_gpu_mpi.mpi.wire import LARGEST, MOST_ARRIVING, DroppedMessages, Wire
from mockmpi import Comm, install

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


def test_what_has_left() -> None:
    comm = Comm(0, 2, comes=False)
    zero, _ = wire(comm)
    zero.send(1, b"a")
    assert not zero.has_sent()
    zero.leaving[0].ready = True
    assert zero.has_sent()
    assert zero.leaving == []


@pytest.mark.parametrize("claims", [11, 1 << 40, -32766])
def test_too_large_messages_are_dropped_and_not_allocated(claims: int) -> None:
    comm = Comm(0, 2)
    zero, drops = wire(comm, largest=10)
    large = comm.post(0, 1, b"", TAG, claims=claims)
    comm.post(0, 1, b"0123456789", TAG)
    assert zero.receive() == [(1, b"0123456789")]
    assert drops.count == 1
    assert large.received is False  # with Open MPI that would write beyond what is allocated


def test_what_is_announced_and_never_comes_keeps_nothing_back() -> None:
    comm = Comm(0, 2)
    zero, drops = wire(comm)
    never = comm.post(0, 1, b"", TAG, claims=LARGEST, comes=False)
    late = comm.post(0, 1, b"late", TAG, comes=False)
    comm.post(0, 1, b"now", TAG)
    assert zero.receive() == [(1, b"now")]
    late.request.ready = True
    assert zero.receive() == [(1, b"late")]
    assert zero.receive() == []
    assert not never.request.ready
    assert drops.count == 0


def test_how_much_may_be_announced_at_a_time() -> None:
    comm = Comm(0, 2)
    zero, drops = wire(comm)
    for _ in range(MOST_ARRIVING // LARGEST + 2):
        comm.post(0, 1, b"", TAG, claims=LARGEST, comes=False)
    assert zero.receive() == []
    assert drops.count == 2


def test_what_breaks_off_is_dropped() -> None:
    comm = Comm(0, 2)
    zero, drops = wire(comm)
    broken = comm.post(0, 1, b"a", TAG, comes=False)
    assert zero.receive() == []
    broken.request.ready, broken.request.error = True, comm.error()
    assert zero.receive() == []
    assert drops.count == 1


def test_one_warning_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    drops = DroppedMessages("rank 3 on h")
    drops.report()
    told = []
    for seconds in range(130):
        now[0] = 1000.0 + seconds
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
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "bsend",
    "exscan",
    "ibsend",
    "improbe",
    "irecv",
    "isend",
    "issend",
    "mprobe",
    "reduce",
    "scan",
    "scatter",
    "sendrecv",
    "ssend",
}
#: Those that have namesakes, and what communicators are called.
AMBIGUOUS, COMMUNICATORS = {"gather", "recv", "send"}, {"COMM_WORLD", "_comm", "comm", "message", "world"}


def pickling(tree: ast.AST) -> set[str]:
    """What of mpi4py's pickling methods a module uses."""
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of = {id(node): getattr(node.value, "attr", getattr(node.value, "id", "")) for node in used}
    return {
        node.attr
        for node in used
        if node.attr in PICKLING or (node.attr in AMBIGUOUS and of[id(node)] in COMMUNICATORS)
    }


def test_nothing_in_the_package_has_mpi4py_pickle() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if (names := pickling(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code", ["comm.isend(1, 2)", "self._comm.recv()", "MPI.COMM_WORLD.bcast(3)", "message.recv()"]
)
def test_what_would_be_found(code: str) -> None:
    assert pickling(ast.parse(code))
    assert not pickling(
        ast.parse(code.replace("isend", "Isend").replace("recv", "Recv").replace("bcast", "Bcast"))
    )
