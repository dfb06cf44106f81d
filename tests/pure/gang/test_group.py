"""A member of a gang: what it refuses and reports, and its variables. Whole members run in tests/mpi/test_spmd.py."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.errors import GangCancelledError
from dask_gpu_mpi.gang import group as module
from dask_gpu_mpi.gang.group import MAX_OBJECT, Group, device_of, packed, variables_of


def make_group(master: str = "10.0.0.1") -> Group:
    hosts = tuple(f"h{rank}" for rank in range(8))
    place = {"local_rank": 1, "local_size": 4, "node_rank": 1, "nodes": 2}

    def no_call(*_: Any) -> Any:
        raise AssertionError("nothing is sent")

    group = Group(5, hosts, no_call, threading.Event(), place=place, device=None, master_addr=master)
    group.master_port = 4000
    return group


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (lambda group: group.allgather(bytes(MAX_OBJECT)), "expected 1048576 at most"),
        (lambda group: group.broadcast(1, root=8), "no rank 8"),
        *((lambda group, value=value: group.barrier(timeout=value), "invalid timeout") for value in (0, -1, inf, nan)),
    ],
)  # fmt: skip
def test_what_is_refused(operation: Callable[[Group], Any], says: str) -> None:
    """What operations do: tests/mpi/scripts/group.py and gangs_that_fail.py."""
    with pytest.raises(ValueError, match=says):
        operation(make_group())


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


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), GangCancelledError("of another gang, perhaps")])
def test_every_exception_is_a_failure_but_the_end_of_the_gang(error: BaseException, over: bool) -> None:
    def function() -> None:
        raise error

    mine = make_group()
    if over:
        mine._cancelled.set()
    told: list[BaseException] = []
    assert module._run(function, mine, told.append) == (False, None)
    assert told == ([] if over and isinstance(error, GangCancelledError) else [error])


def test_a_failure_is_told_before_what_the_function_had_is_freed() -> None:
    """The end of a communicator may wait for other members, who learn of the failure by this alone."""
    order = []

    class Communicator:
        def __del__(self) -> None:
            order.append("freed")

    def function() -> None:
        communicator = Communicator()
        raise ValueError(communicator.__class__)

    module._run(function, make_group(), lambda error: order.append("told"))
    assert order == ["told", "freed"]


@pytest.mark.parametrize(
    ("functions", "initialised"),
    [
        (None, False),
        ({"is_available": lambda: False}, False),
        ({"is_available": lambda: True, "is_initialized": lambda: False}, False),
        ({}, True),  # its import has failed half way
    ],
)
def test_process_group_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any] | None, initialised: bool
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    if functions is not None:
        monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**functions))  # type: ignore[arg-type]
    assert module.torch_is_initialised() is initialised


def test_variables() -> None:
    """All of one node, and NCCL's that the user has set: tests/mpi/scripts/group.py."""
    found = variables_of(make_group("fd00::1"), 2, None)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [found[name] for name in names] == ["5", "8", "1", "4", "1", "2"]
    assert found["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:4000"
    assert "NCCL_SOCKET_IFNAME" not in found
    found = variables_of(make_group(), 2, "ib0")
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=ib0", "ib0")


@pytest.mark.parametrize(
    ("resources", "visible", "device"),
    [
        ({"GPU": 2}, "GPU-1,GPU-2", 0),
        ({"CPU": 4}, "0", None),
        ({}, "1,0", 0),
        ({"mine": 1}, "0", 0),
        ({}, "", None),
        ({}, "-1", None),
        ({"GPU": 0}, "0", None),
    ],
)
def test_device(resources: dict[str, float], visible: str, device: int | None) -> None:
    assert device_of(resources, {"CUDA_VISIBLE_DEVICES": visible}) == device
