"""What a member does around the user's function, and its variables; whole members run in tests/mpi/test_spmd.py."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.errors import GangCancelledError
from dask_gpu_mpi.gang import member
from dask_gpu_mpi.gang.group import Group
from dask_gpu_mpi.gang.member import device_of, variables_of


def group(master: str) -> Group:
    hosts = tuple(f"h{rank}" for rank in range(8))
    place = {"local_rank": 1, "local_size": 4, "node_rank": 1}
    return Group(5, hosts, lambda *_: {}, threading.Event(), place=place, device=None, master=(master, 4000))


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), GangCancelledError("of another gang, perhaps")])
def test_every_exception_is_a_failure_but_the_end_of_the_gang(error: BaseException, over: bool) -> None:
    def function(_: Group) -> None:
        raise error

    mine = group("10.0.0.1")
    if over:
        mine._cancelled.set()
    told: list[BaseException] = []
    assert member._run(function, mine, (), told.append) == (False, None)
    assert told == ([] if over and isinstance(error, GangCancelledError) else [error])


def test_a_failure_is_told_before_what_the_function_had_is_freed() -> None:
    """The end of a communicator may wait for other members, who learn of the failure by this alone."""
    order = []

    class Communicator:
        def __del__(self) -> None:
            order.append("freed")

    def function(group: Group) -> None:
        communicator = Communicator()
        raise ValueError(communicator.__class__)

    member._run(function, group("10.0.0.1"), (), lambda error: order.append("told"))
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
    assert member.torch_is_initialised() is initialised


def test_variables() -> None:
    """All of one node, and NCCL's that the user has set: tests/mpi/scripts/group.py."""
    found = variables_of(group("fd00::1"), 2, None)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [found[name] for name in names] == ["5", "8", "1", "4", "1", "2"]
    assert found["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:4000"
    assert "NCCL_SOCKET_IFNAME" not in found
    found = variables_of(group("10.0.0.1"), 2, "ib0")
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
