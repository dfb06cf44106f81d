"""The reachability test: what rank 0 makes of it, and the ports of one rank; by messages: test_coordinator, test_relay."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from dask_gpu_mpi.network.credentials import BACKDATED
from dask_gpu_mpi.network.reachability import Listener, Lost, Node, Reach, Tokens
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import HostPlan, Role
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.startup.messages import Connect, Listen, Listening, Reached
from dask_gpu_mpi.startup.reachability import Connecting, ReachabilityTest, _dashboard, nodes_of
from support.mocks.inputs import worker_plan


def listen(test: ReachabilityTest, plan: Plan, addresses: dict[int, str | None]) -> None:
    test.listen(plan.scheduler.rank, plan.scheduler.host, nodes_of(plan, addresses), addresses)


def connecting(options: Options) -> Connecting:
    channels: Any = None
    return Connecting(options, channels)


def test_on_one_node_nobody_listens_for_workers() -> None:
    sent: list[tuple[int, str, Any]] = []
    test = ReachabilityTest(2, lambda *message: sent.append(message))
    worker = worker_plan("1", rank=1, host="a")
    plan = Plan("exclusive", 2, Role(0, "a"), Role(0, "a"), (HostPlan("a", (0, 1), (), 0),), (worker,))
    listen(test, plan, {0: "127.0.0.1", 1: "127.0.0.1"})
    assert [(rank, to.scheduler is None, to.workers is None) for rank, _, to in sent] == [(0, False, True)]
    assert test.on_listening(0, Listening(scheduler=5))


def result(rank: Connecting) -> Reached:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        if (found := rank.result()) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("no result")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_listens_where_the_scheduler_and_the_workers_will() -> None:
    scheduler, worker, tokens = free_port(), free_port(), Tokens()
    rank = connecting(Options(scheduler_port=scheduler, worker_options={"worker_port": worker}))
    assert rank.listen(Listen("127.0.0.1", tokens, tokens)) == Listening(scheduler, worker)
    rank.close()
    for port in (scheduler, worker):
        Listener("127.0.0.1", port, tokens).close()
    rank.close()


def test_any_port_that_is_free() -> None:
    rank = connecting(Options())
    found = rank.listen(Listen("127.0.0.1", Tokens(), None))
    assert found.scheduler >= 1024  # given by the system
    assert found.workers == 0
    rank.close()


def test_port_of_workers_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank = connecting(Options(worker_options={"worker_port": taken.getsockname()[1]}))
        assert rank.listen(Listen("127.0.0.1", None, Tokens())) == Listening(0, 0)


def test_a_scheduler_and_peers_that_are_not_reached() -> None:
    port = free_port()
    rank = connecting(Options())
    assert rank.result() is None
    rank.connect(Connect(f"127.0.0.1:{port}", None, (Node("h2", 1, "127.0.0.1", port=port),)))
    assert result(rank) == Reached(Reach("Connection refused"), (Lost("h2", "Connection refused"),))
    assert rank.result() is None


def test_peers_of_a_rank_below_a_running_scheduler() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank = connecting(Options())
        target = f"127.0.0.1:{server.getsockname()[1]}"
        rank.connect(Connect(target, None, (Node("h2", 1, "127.0.0.1", port=free_port()),)))
        assert result(rank) == Reached(Reach(), (Lost("h2", "Connection refused"),))


def test_nobody_listens_in_the_schedulers_place() -> None:
    rank = connecting(Options())
    rank.connect(Connect("", Tokens()))
    assert result(rank) == Reached(None)


def test_why_the_scheduler_and_the_dashboard_can_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank = connecting(Options(scheduler_port=port, dashboard_address=f"127.0.0.1:{port}"))
        in_use = "Address already in use"
        assert rank.listen(Listen("127.0.0.1", Tokens(), dashboard=True)) == Listening(0, 0, in_use, in_use)
        assert rank.listen(Listen("127.0.0.1", Tokens())) == Listening(0, 0, in_use)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1:8787", ("127.0.0.1", 8787)),
        (":8787", ("", 8787)),
        ("[::1]:8787", ("::1", 8787)),
        ("127.0.0.1:0", None),
        ("127.0.0.1", None),
    ],
)
def test_where_the_dashboard_would_listen(address: str, place: tuple[str, int] | None) -> None:
    assert _dashboard(Options(dashboard_address=address)) == place
    assert _dashboard(Options(dashboard_address=address, dashboard=False)) is None


def test_a_rank_that_does_not_reach_the_scheduler() -> None:
    test = ReachabilityTest(1, lambda *_: None)
    test.connect_to_running("10.0.0.1:4")
    failure = test.problem(Reached(Reach("Connection refused")), encrypts=True)
    assert failure is not None
    assert failure.exit_code == 2
    assert str(failure.problem).startswith(
        "could not reach the scheduler's host at 10.0.0.1:4 (of another job): Connection refused. Fix: "
    )
    assert test.problem(Reached(None), encrypts=True) is None


@pytest.mark.parametrize(
    ("ahead", "encrypts", "fails"),
    [
        (-BACKDATED - 10.0, True, True),
        (-BACKDATED + 10.0, True, False),
        (-BACKDATED - 10.0, False, False),
        (BACKDATED + 10.0, True, False),
    ],
)
def test_a_clock_that_is_behind_is_named(ahead: float, encrypts: bool, fails: bool) -> None:
    failure = ReachabilityTest(1, lambda *_: None).problem(Reached(Reach("", ahead)), encrypts=encrypts)
    assert (failure is not None) is fails
    if failure is not None:
        assert "the clock of this node is 3610 s behind that of the scheduler's (" in str(failure.problem)
        assert failure.exit_code == 2
