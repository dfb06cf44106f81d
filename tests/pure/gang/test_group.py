"""Arguments that a group's operations refuse, and exceptions that are sent to the scheduler."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dask_gpu_mpi.gang.group import MAX_OBJECT, Group, packed


def no_call(*_: Any) -> Any:
    raise AssertionError("nothing is sent")


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (lambda group: group.allgather(bytes(MAX_OBJECT)), "expected 1048576 at most"),
        (lambda group: group.broadcast(1, root=2), "no rank 2"),
        *(
            (partial(Group.barrier, timeout=value), "invalid timeout")
            for value in (0, -1, math.inf, math.nan)
        ),
    ],
)
def test_what_is_refused(operation: Callable[[Group], Any], says: str) -> None:
    """What operations do: tests/mpi/scripts/group.py and gangs_that_fail.py."""
    place = {"local_rank": 0, "local_size": 1, "node_rank": 0}
    group = Group(
        0, ("h1", "h2"), no_call, threading.Event(), place=place, device=0, master=("10.0.0.1", 4000)
    )
    with pytest.raises(ValueError, match=says):
        operation(group)


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
