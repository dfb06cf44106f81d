"""What a member does around the user's function, and its variables; whole members run in tests/mpi/test_spmd.py."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import clean_exception

from dask_gpu_mpi.errors import GangCancelledError
from dask_gpu_mpi.gang import member
from dask_gpu_mpi.gang.group import Group
from dask_gpu_mpi.gang.member import applied, device_of, variables_of
from dask_gpu_mpi.network.interfaces import list_interfaces


def group(cancelled: threading.Event, master: str = "10.0.0.1") -> Group:
    hosts = tuple(f"h{rank}" for rank in range(8))
    place = {"local_rank": 1, "local_size": 4, "node_rank": 1}
    return Group(5, hosts, lambda *_: {}, cancelled, **place, device=None, master=(master, 4000))


def test_result() -> None:
    def function(group: Group, *args: Any) -> Any:
        return group.rank, *args

    assert member._run(function, group(threading.Event()), (1, 2), pytest.fail) == (True, (5, 1, 2))


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
def test_every_exception_is_a_failure(error: BaseException) -> None:
    def function(group: Group) -> None:
        raise error

    told: list[dict[str, Any]] = []
    failed = member._run(
        function, group(threading.Event()), (), lambda error: told.append(member._as_data(error))
    )
    assert failed == (False, None)
    [failure] = told
    assert failure["exception_text"] == repr(error)
    carried = clean_exception(failure["exception"].data, failure["traceback"].data)
    assert repr(carried[1]) == repr(error)
    assert carried[2] is not None


class Mute(Exception):
    """As some libraries make them: there is no text before something else has been set."""

    def __str__(self) -> str:
        raise AttributeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("error", [Mute(), ExceptionGroup("two", [Mute(), ValueError()])])
def test_an_exception_that_has_no_text_is_a_failure_of_its_class(error: Exception) -> None:
    assert f"{type(error).__name__}" in member._as_data(error)["exception_text"]


def test_the_end_of_the_gang_is_not_this_members_failure() -> None:
    def function(group: Group) -> None:
        raise GangCancelledError("it is over")

    over, running = threading.Event(), threading.Event()
    over.set()
    assert member._run(function, group(over), (), pytest.fail) == (False, None)
    told: list[BaseException] = []
    member._run(function, group(running), (), told.append)
    assert len(told) == 1


def test_a_failure_is_told_before_what_the_function_had_is_freed() -> None:
    """The end of a communicator may wait for other members, who learn of the failure by this alone."""
    order = []

    class Communicator:
        def __del__(self) -> None:
            order.append("freed")

    def function(group: Group) -> None:
        communicator = Communicator()
        raise ValueError(communicator.__class__)

    member._run(function, group(threading.Event()), (), lambda error: order.append("told"))
    assert order == ["told", "freed"]


@pytest.mark.parametrize(
    ("functions", "initialised"),
    [
        (None, False),
        ({}, True),  # half imported
        ({"is_available": lambda: False}, False),
        ({"is_available": lambda: True, "is_initialized": lambda: False}, False),
        ({"is_available": lambda: True, "is_initialized": lambda: True}, True),
    ],
)
def test_process_group_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, Any] | None, initialised: bool
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    if functions is not None:
        monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**functions))  # type: ignore[arg-type]
    assert member.torch_is_initialised() is initialised


def test_interface_of_an_address() -> None:
    loopback = next(found for found in list_interfaces() if found.address == "127.0.0.1")
    assert member.interface_of("127.0.0.1") == loopback.name
    assert member.interface_of("203.0.113.7") is None


def variables(master: str = "10.0.0.1", interface: str | None = "ib0") -> dict[str, str]:
    return variables_of(group(threading.Event(), master), 2, interface)


def test_names_and_values() -> None:
    """Those of both nodes; all of one node's: tests/mpi/test_spmd.py."""
    found = variables()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [found[name] for name in names] == ["5", "8", "1", "4", "1", "2"]
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=ib0", "ib0")
    assert variables("fd00::1")["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:4000"
    assert "NCCL_SOCKET_IFNAME" not in variables(interface=None)


def test_they_are_there_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "of the user")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    with applied(variables()):
        assert os.environ["RANK"] == "5"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
        del os.environ["MASTER_ADDR"]
    assert dict(os.environ) == before


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
