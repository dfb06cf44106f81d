"""A group's operations: what they send, what they make of the answers, and what they refuse."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from dask_gpu_mpi.errors import GangCancelledError
from dask_gpu_mpi.gang.group import MAX_OBJECT, Call, Group, Reply, packed


class Scheduler:
    """Answers as one that has the parts of all others."""

    def __init__(self, *others: Any, answer: dict[str, Any] | None = None) -> None:
        self.others = [pickle.dumps(other) for other in others]
        self.answer = answer
        self.asked: list[tuple[str, int, str]] = []

    def __call__(self, name: str, timeout: float, content: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((name, content["number"], content["operation"]))
        assert content["timeout"] == timeout
        return self.answer or {"state": Reply.GOOD, "parts": [content["part"], *self.others]}


def group(scheduler: Scheduler, rank: int = 0) -> Group:
    place = {"local_rank": 0, "local_size": 1, "node_rank": 0, "device": 0}
    return Group(rank, ("h1", "h2"), scheduler, threading.Event(), **place, master=("10.0.0.1", 4000))


def test_operations_are_numbered() -> None:
    scheduler = Scheduler("theirs")
    mine = group(scheduler)
    mine.barrier()
    assert mine.allgather("mine") == ["mine", "theirs"]
    assert mine.broadcast("mine") == "mine"
    assert mine.broadcast("mine", root=1) == "theirs"
    assert scheduler.asked == [
        (Call.EXCHANGE, 0, "barrier"),
        (Call.EXCHANGE, 1, "allgather"),
        (Call.EXCHANGE, 2, "broadcast from rank 0"),
        (Call.EXCHANGE, 3, "broadcast from rank 1"),
    ]
    assert (
        mine.broadcast(threading.Lock(), root=1) == "theirs"
    )  # what others than the root give is not pickled


def test_the_end_of_the_gang() -> None:
    mine = group(Scheduler(answer={"state": Reply.OVER, "why": "rank 1 raised ValueError()"}))
    assert not mine.cancelled
    with pytest.raises(GangCancelledError, match=r"^barrier: the gang is cancelled: rank 1 raised"):
        mine.barrier()
    assert mine.cancelled


def test_what_is_refused() -> None:
    scheduler = Scheduler()
    mine = group(scheduler)
    with pytest.raises(ValueError, match="expected 1048576 at most"):
        mine.allgather(bytes(1 << 20))
    with pytest.raises(ValueError, match="no rank 2"):
        mine.broadcast(1, root=2)
    for timeout in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="invalid timeout"):
            mine.barrier(timeout=timeout)
    assert scheduler.asked == []


class Mute(Exception):
    """As some libraries make them: there is no text before something else has been set."""

    def __str__(self) -> str:
        raise AttributeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "levels", "text", "carried"),
    [
        (Mute(), 0, "Mute", Mute),
        (ExceptionGroup("two", [Mute(), ValueError()]), 0, "ExceptionGroup", ExceptionGroup),
        (ValueError(threading.Lock()), 0, "ValueError(<unlocked ", Exception),
        (ValueError(bytes(MAX_OBJECT)), 0, "ValueError(b'", Exception),
        (ValueError("from too deep for pickle"), 700, "ValueError('from too deep for pickle')", Exception),
    ],
)
def test_an_exception_without_a_text_or_that_can_not_be_sent(
    error: Exception, levels: int, text: str, carried: type
) -> None:
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise error

    try:
        deep(levels)
    except Exception as raised:
        found, data = packed(raised)
    assert found.startswith(text)
    loaded = pickle.loads(data)
    assert type(loaded) is carried
    assert (loaded.__traceback__ is None) is (levels > 0)
    assert carried is not Exception or text in str(loaded)
