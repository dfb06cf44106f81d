"""The reachability test: what rank 0 makes of it, and the ports of one rank; by messages: test_coordinator, agent/test_part."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.network.credentials import BACKDATED
from dask_gpu_mpi.network.reachability import Listener, Node, Reach, listener_token
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.startup import reachability
from dask_gpu_mpi.startup.messages import Connect, Kind, Listen, Listening
from dask_gpu_mpi.startup.reachability import (
    Connecting,
    ReachabilityTest,
    choose_transport,
    ucx_ability,
)
from support.jobs.clusters import until
from support.mocks.inputs import gpu, one_host, plan, rank


class Rank:
    """The part of one rank, and the last message that it has sent to the hub."""

    def __init__(self, **options: Any) -> None:
        self.sent: Any = None
        self.part = Connecting(Options(**options), self.send)

    def send(self, kind: Kind, payload: Any) -> None:
        assert kind == (Kind.LISTENING if isinstance(payload, Listening) else Kind.REACHED)
        self.sent = payload

    def answer(self, order: Listen | Connect) -> Any:
        if isinstance(order, Listen):
            self.part.listen(order)
        else:
            self.part.connect(order)
        until(lambda: self.sent is not None)
        return self.sent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_listens_where_the_scheduler_and_the_workers_will() -> None:
    scheduler, worker, token = free_port(), free_port(), listener_token()
    rank = Rank(scheduler_port=scheduler, worker_options={"worker_port": worker})
    for _ in range(2):  # a second time, without a rank that did not respond
        node = Node("h1", 0, "127.0.0.1", token)
        assert rank.answer(Listen(node, node)) == Listening(scheduler, worker)
    rank.part.close_scheduler()
    Listener("127.0.0.1", scheduler, token).close()
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", worker, token)
    rank.part.close()
    Listener("127.0.0.1", worker, token).close()
    found = Rank().answer(Listen(Node("h1", 0, "127.0.0.1")))
    assert found.scheduler >= 1024  # given by the system
    assert found.workers == 0


def test_ports_that_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank = Rank(scheduler_port=port, worker_options={"worker_port": port})
        node = Node("h1", 0, "127.0.0.1")
        assert rank.answer(Listen(node, node)) == Listening(0, 0)


def test_a_running_scheduler_is_reached_and_a_node_is_not() -> None:
    """In the place of a scheduler that does not listen nothing is looked for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        running = Node("", -1, "127.0.0.1", "", server.getsockname()[1])
        peers = (Node("h2", 1, "127.0.0.1", port=free_port()),)
        for scheduler in (running, Node("h1", 0, "127.0.0.1")):
            lost = {"Connection refused": ["h2"]}
            assert Rank().answer(Connect(scheduler, peers)) == Reach(lost=lost)
    refused = Rank().answer(Connect(Node("", -1, "127.0.0.1", "", free_port())))
    assert refused == Reach("Connection refused")


def problem(reached: Reach, *, encrypts: bool = True) -> tuple[int, str] | None:
    """What the rank that sends this is told: exit code and text."""
    test = ReachabilityTest(range(1), lambda *_: None)
    test.connect_to_running("10.0.0.1:4")
    failure = test.problem(reached, encrypts=encrypts)
    return None if failure is None else (failure.exit_code, str(failure.problem).partition(". Fix: ")[0])


def test_a_rank_that_does_not_reach_the_scheduler() -> None:
    text = "could not reach the scheduler's host at 10.0.0.1:4 (of another job): Connection refused"
    assert problem(Reach("Connection refused")) == (2, text)
    assert problem(Reach()) is None


def test_a_clock_that_is_behind_is_named() -> None:
    behind = Reach("", -BACKDATED - 10.0)
    found = problem(behind)
    assert found is not None
    assert found[0] == 2
    assert found[1].startswith("the clock of this node is 3610 s behind that of the scheduler's (")
    assert problem(behind, encrypts=False) is None
    for ahead in (-BACKDATED + 10.0, BACKDATED + 10.0):
        assert problem(Reach("", ahead)) is None


# -- what workers send each other over UCX: chosen from the plan and from what the ranks can, and the line that says so


OFF, AUTO, ALL = WorkerUcx.OFF, WorkerUcx.AUTO, WorkerUcx.ALL
NO_GPUS = plan(one_host((), ()))
GPUS = plan(one_host((gpu(0),), (gpu(1),)))
ONE_GPU = plan(one_host((gpu(0),)))
MISSING = Problem("distributed-ucxx is not installed", fix="pip install it")


NO_RDMA = UcxAbility(between_nodes="no RDMA device")
CAN_NOT = UcxAbility(MISSING)


def nodes(*gpus: int) -> Plan:
    """A rank on each node, with so many GPUs."""
    return plan(
        [
            rank(number, len(gpus), tuple(map(gpu, range(each))), host=f"h{number}", boot_id=f"b{number}")
            for number, each in enumerate(gpus)
        ]
    )


MIXED = plan(one_host((gpu(0),)), cpu_workers=1)
APART = replace(MIXED, workers=tuple(replace(w, rank=int(w.kind == "cpu")) for w in MIXED.workers))


@pytest.mark.parametrize(
    ("wanted", "of", "abilities", "chosen", "words"),
    [
        (AUTO, GPUS, {}, AUTO, "TLS, and UCX for GPU memory between workers (authenticated, not encrypted)"),
        (AUTO, GPUS, {1: CAN_NOT}, OFF, "No UCX: rank 1: distributed-ucxx"),
        (AUTO, GPUS, {0: CAN_NOT, 1: CAN_NOT}, OFF, "No UCX: distributed-ucxx"),
        (AUTO, NO_GPUS, {0: CAN_NOT, 1: CAN_NOT}, OFF, ""),
        (AUTO, ONE_GPU, {}, OFF, ""),
        (ALL, ONE_GPU, {}, OFF, ""),
        (AUTO, ONE_GPU, {0: CAN_NOT}, OFF, ""),
        (OFF, GPUS, {}, OFF, ""),
        (ALL, NO_GPUS, {}, ALL, "TLS, and UCX for large data between workers (authenticated, not encrypted)"),
        # a rank that works without a GPU has all use TLS
        (AUTO, MIXED, {}, AUTO, "UCX for GPU memory"),
        (AUTO, APART, {}, OFF, "rank 1 without a GPU"),
        # between nodes UCX takes RDMA and nothing else, which nobody misses within one
        (AUTO, nodes(2, 2), {}, AUTO, "between workers (authenticated, not encrypted)"),
        (AUTO, nodes(2), {0: NO_RDMA}, AUTO, "between workers (authenticated, not encrypted)"),
        (AUTO, nodes(2, 2), {0: NO_RDMA, 1: NO_RDMA}, AUTO, "Between nodes TLS alone: no RDMA device"),
        (AUTO, nodes(2, 2), {1: NO_RDMA}, AUTO, "Between nodes TLS alone: rank 1: no RDMA device"),
        (AUTO, nodes(1, 1), {0: NO_RDMA, 1: NO_RDMA}, OFF, "UCX leads to no other node: no RDMA device"),
        (ALL, nodes(1, 1), {0: NO_RDMA, 1: NO_RDMA}, OFF, "UCX leads to no other node: no RDMA device"),
    ],
)
def test_what_is_chosen_and_why(wanted, of, abilities, chosen, words) -> None:  # type: ignore[no-untyped-def]
    found, line, warning, between_nodes = choose_transport(wanted, of, abilities)
    assert (found, warning) == (chosen, None)
    assert between_nodes is (NO_RDMA not in abilities.values()) or chosen is OFF
    assert bool(str(line)) == bool(words)
    assert words in str(line)


@pytest.mark.parametrize(
    ("wanted", "worker_class", "gpus", "expected"),
    [
        (OFF, "auto", True, ""),
        (AUTO, "auto", False, ""),
        (AUTO, "auto", True, "asked for GPUs"),
        (AUTO, "dask_cuda.CUDAWorker", True, "asked for GPUs"),
        (AUTO, "my.Class", True, "worker_class is not dask_cuda.CUDAWorker"),
        (ALL, "distributed.Nanny", False, "asked without GPUs"),
        (ALL, "distributed.Worker", False, "run in the agent"),
        (ALL, "auto", True, "asked for GPUs"),  # their memory needs RMM
    ],
)
def test_what_keeps_a_rank_from_ucx_is_asked_where_it_matters(
    wanted: WorkerUcx, worker_class: str, gpus: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*, device_memory: bool) -> Problem:
        return Problem("asked for GPUs" if device_memory else "asked without GPUs")

    monkeypatch.setattr(reachability, "missing_ucx", missing)
    obstacle = ucx_ability(Options(worker_ucx=wanted, worker_class=worker_class), gpus=gpus).obstacle
    text = "" if obstacle is None else obstacle.text
    assert expected in text
    assert bool(expected) == bool(text)


def test_ucx_that_is_asked_for_and_can_not_be_had_is_an_error() -> None:
    words = "protocol 'ucx': rank 1: distributed-ucxx is not installed. Fix: pip install it"
    with pytest.raises(InputError, match=words):
        choose_transport(ALL, GPUS, {1: CAN_NOT})


def test_a_port_that_the_user_opens_is_warned_of() -> None:
    """Workers that attach have others to exchange data with, even one alone."""
    for found in (
        choose_transport(AUTO, nodes(2), {0: UcxAbility(opened_by="UCX_TLS")}),
        choose_transport(ALL, ONE_GPU, {0: UcxAbility(opened_by="UCX_TLS")}, attaches=True),
    ):
        assert found.ucx is not OFF
        assert "UCX_TLS has UCX open a TCP port" in str(found.warning)


def test_what_a_rank_can_do_follows_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "missing_ucx", lambda **_: None)
    monkeypatch.setattr(reachability, "obstacle_between_nodes", lambda _: "no RDMA device")
    options = Options(worker_ucx=AUTO)
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert ucx_ability(options, gpus=True) == NO_RDMA
    switched = Options(worker_ucx=AUTO, worker_options={"enable_nvlink": True})
    assert ucx_ability(switched, gpus=True).opened_by == "worker_options['enable_nvlink']"
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert ucx_ability(options, gpus=True) == UcxAbility(opened_by="UCX_TLS")
