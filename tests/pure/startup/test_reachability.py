"""What rank 0 makes of the reachability test; the way to it: test_coordinator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dask_gpu_mpi.network.node_pairs import Lost
from dask_gpu_mpi.plan.model import HostPlan, Role, WorkerPlan
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.startup.messages import Kind, Listening
from dask_gpu_mpi.startup.reachability import ReachabilityTest


def test_on_one_node_nobody_listens_for_workers() -> None:
    sent: list[tuple[int, str, Any]] = []
    test = ReachabilityTest(2, lambda *message: sent.append(message))
    worker = WorkerPlan("1", 1, "a", "cpu", None, None, 1, 0, (0,), {})
    plan = Plan("exclusive", 2, Role(0, "a"), Role(0, "a"), (HostPlan("a", (0, 1), (), 0),), (worker,))
    test.listen(plan, {0: "127.0.0.1", 1: "127.0.0.1"})
    assert [(rank, to.scheduler is None, to.workers is None) for rank, _, to in sent] == [(0, False, True)]
    assert test.on_listening(0, Listening(scheduler=5))


def test_of_two_ranks_of_a_node_one_listens_and_connects() -> None:
    sent: list[tuple[int, str, Any]] = []
    test = ReachabilityTest(4, lambda *message: sent.append(message))
    hosts = tuple(HostPlan(host, ranks, (), 0) for host, ranks in (("a", (0, 1)), ("b", (2, 3))))
    first = WorkerPlan("1", 1, "a", "cpu", None, None, 1, 0, (0,), {})
    workers = (first, replace(first, rank=2), replace(first, rank=3))
    plan = Plan("exclusive", 4, Role(0, "a"), Role(0, "a"), hosts, workers)
    test.listen(plan, {rank: f"10.0.0.{rank}" for rank in range(4)})
    assert [(rank, to.scheduler is None, to.workers is None) for rank, _, to in sent] == [
        (0, False, True),
        (1, True, False),
        (2, True, False),
    ]
    assert not test.on_listening(0, Listening(scheduler=5))
    assert not test.on_listening(1, Listening(workers=6))
    assert test.on_listening(2, Listening(workers=7))
    sent.clear()
    assert test.connect()
    assert [(rank, kind, [(peer.host, peer.port) for peer in to.peers]) for rank, kind, to in sent] == [
        (0, Kind.CONNECT, []),
        (1, Kind.CONNECT, [("b", 7)]),
        (2, Kind.CONNECT, [("a", 6)]),
        (3, Kind.CONNECT, []),
    ]
    assert test.failure() is None
    assert [test.on_reached(rank, ()) for rank in (0, 3)] == [False, False]
    assert not test.on_reached(2, (Lost("a", "Connection refused"),))
    assert test.on_reached(1, ())
    failure = test.failure()
    assert failure is not None
    assert failure.exit_code == 2
    assert failure.text.startswith(
        "no connection between nodes: from b to a (Connection refused) (expected: "
    )
