"""The reachability test: what rank 0 makes of it, and the ports of one rank; by messages: test_coordinator, test_relay."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.network.credentials import BACKDATED
from dask_gpu_mpi.network.reachability import Listener, Node, Reach, Tokens
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.model import Options, Transport, WorkerUcx
from dask_gpu_mpi.plan.model import HostPlan, Plan, Role
from dask_gpu_mpi.startup import reachability
from dask_gpu_mpi.startup.messages import Connect, Kind, Listen, Listening, Reached
from dask_gpu_mpi.startup.reachability import (
    Connecting,
    ReachabilityTest,
    _dashboard,
    choose_transport,
    nodes_of,
    ucx_ability,
)
from support.mocks.inputs import gpu, one_host, plan, rank, worker_plan


def listen(test: ReachabilityTest, plan: Plan, addresses: dict[int, str | None]) -> None:
    test.listen(plan.scheduler.rank, plan.scheduler.host, nodes_of(plan, addresses), addresses)


class Rank:
    """The part of one rank, and the last message that it has sent to rank 0."""

    def __init__(self, **options: Any) -> None:
        channels: Any = self
        self.sent: Any = None
        self.part = Connecting(Options(**options), channels)

    def send(self, rank: int, kind: str, payload: Any) -> None:
        assert rank == 0
        self.sent = payload

    def listen(self, wanted: Listen) -> Any:
        assert self.part.on_message(Kind.LISTEN, wanted)
        return self.sent

    def connect(self, to: Connect) -> Any:
        assert self.part.on_message(Kind.CONNECT, to)
        limit = time.monotonic() + 30
        while self.sent is None and time.monotonic() < limit:
            self.part.poll()
            time.sleep(0.01)
        return self.sent


def test_on_one_node_nobody_listens_for_workers() -> None:
    sent: list[tuple[int, str, Any]] = []
    test = ReachabilityTest(range(2), lambda *message: sent.append(message))
    worker = worker_plan("1", rank=1, host="a")
    plan = Plan("exclusive", 2, Role(0, "a"), Role(0, "a"), (HostPlan("a", (0, 1), (), 0),), (worker,))
    listen(test, plan, {0: "127.0.0.1", 1: "127.0.0.1"})
    assert [(rank, to.scheduler is None, to.workers is None) for rank, _, to in sent] == [(0, False, True)]
    assert test.on_listening(0, Listening(scheduler=5))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_listens_where_the_scheduler_and_the_workers_will() -> None:
    scheduler, worker, tokens = free_port(), free_port(), Tokens()
    rank = Rank(scheduler_port=scheduler, worker_options={"worker_port": worker})
    for _ in range(2):  # a second time, without a rank that did not respond
        assert rank.listen(Listen("127.0.0.1", tokens, tokens)) == Listening(scheduler, worker)
    rank.part.close()
    for port in (scheduler, worker):
        Listener("127.0.0.1", port, tokens).close()
    found = Rank().listen(Listen("127.0.0.1", Tokens(), None))
    assert found.scheduler >= 1024  # given by the system
    assert found.workers == 0


def test_ports_that_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank = Rank(
            scheduler_port=port,
            dashboard_address=f"127.0.0.1:{port}",
            worker_options={"worker_port": port},
        )
        in_use = "Address already in use"
        both = Listen("127.0.0.1", Tokens(), Tokens())
        assert rank.listen(both) == Listening(0, 0, in_use)
        assert rank.listen(replace(both, dashboard=True)) == Listening(0, 0, in_use, in_use)


def test_the_scheduler_and_peers_that_are_reached_or_not() -> None:
    nobody = free_port()
    peers = (Node("h2", 1, "127.0.0.1", port=nobody),)
    lost = {"Connection refused": ["h2"]}
    with socket.create_server(("127.0.0.1", 0)) as server:
        running = f"127.0.0.1:{server.getsockname()[1]}"
        assert Rank().connect(Connect(running, None, peers)) == Reached(Reach(), lost)
    refused = Rank().connect(Connect(f"127.0.0.1:{nobody}", None, peers))
    assert refused == Reached(Reach("Connection refused"), lost)
    assert Rank().connect(Connect("", Tokens())) == Reached(None)  # nobody listens in the scheduler's place


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1:8787", ("127.0.0.1", 8787)),
        (":8787", ("", 8787)),
        ("127.0.0.1:0", None),
    ],
)
def test_where_the_dashboard_would_listen(address: str, place: tuple[str, int] | None) -> None:
    assert _dashboard(Options(dashboard_address=address)) == place
    assert _dashboard(Options(dashboard_address=address, dashboard=False)) is None


def test_a_rank_that_does_not_reach_the_scheduler() -> None:
    test = ReachabilityTest(range(1), lambda *_: None)
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
    failure = ReachabilityTest(range(1), lambda *_: None).problem(
        Reached(Reach("", ahead)), encrypts=encrypts
    )
    assert (failure is not None) is fails
    if failure is not None:
        assert "the clock of this node is 3610 s behind that of the scheduler's (" in str(failure.problem)
        assert failure.exit_code == 2


# -- what workers send each other over UCX: chosen from the plan and from what the ranks can, and the line that says so


OFF, AUTO, ALL = WorkerUcx.OFF, WorkerUcx.AUTO, WorkerUcx.ALL
NO_GPUS = plan(one_host((), ()))
GPUS = plan(one_host((gpu(0),), (gpu(1),)))
ONE_GPU = plan(one_host((gpu(0),)))
MISSING = Problem("distributed-ucxx is not installed", fix="pip install it")


def able(obstacles: dict[int, Problem | None]) -> dict[int, UcxAbility]:
    return {rank: UcxAbility(problem) for rank, problem in obstacles.items()}


@pytest.mark.parametrize(
    ("wanted", "of", "obstacles", "chosen", "words"),
    [
        (AUTO, GPUS, {}, AUTO, ["TLS, and UCX for GPU memory", "not encrypted"]),
        (AUTO, GPUS, {1: MISSING}, OFF, ["No UCX: rank 1: distributed-ucxx"]),
        (AUTO, GPUS, {0: MISSING, 1: MISSING}, OFF, ["No UCX: distributed-ucxx"]),
        (AUTO, NO_GPUS, {0: MISSING, 1: MISSING}, OFF, []),
        (AUTO, ONE_GPU, {}, OFF, []),
        (AUTO, ONE_GPU, {0: MISSING}, OFF, []),
        (OFF, GPUS, {}, OFF, []),
        (ALL, NO_GPUS, {}, ALL, ["UCX for large data", "not encrypted"]),
    ],
)
def test_what_is_chosen_and_why(wanted, of, obstacles, chosen, words) -> None:  # type: ignore[no-untyped-def]
    found, line, warning, _ = choose_transport(wanted, of, able(obstacles))
    assert (found, warning) == (chosen, None)
    assert bool(str(line)) == bool(words)
    for word in words:
        assert word in str(line)


def test_a_rank_that_works_without_a_gpu_has_all_use_tls() -> None:
    mixed = plan(one_host((gpu(0),)), cpu_workers=1)
    assert choose_transport(AUTO, mixed, {}).ucx is AUTO  # its rank has one
    alone = replace(mixed, workers=tuple(replace(w, rank=1) if w.kind == "cpu" else w for w in mixed.workers))
    chosen, line, *_ = choose_transport(AUTO, alone, {})
    assert chosen is OFF
    assert "rank 1 without a GPU" in str(line)


@pytest.mark.parametrize(
    ("options", "gpus", "asked"),
    [
        (Options(worker_ucx=OFF), True, None),
        (Options(worker_ucx=AUTO), True, True),
        (Options(worker_ucx=AUTO), False, None),
        (Options(worker_ucx=AUTO, worker_class="dask_cuda.CUDAWorker"), True, True),
        (Options(worker_ucx=ALL, worker_class="distributed.Nanny"), False, False),
        (Options(worker_ucx=ALL), True, True),  # its GPUs' memory needs RMM
    ],
)
def test_what_is_missing_is_asked_where_it_matters(
    options: Options, gpus: bool, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def missing(*, device_memory: bool) -> Problem:
        calls.append(device_memory)
        return MISSING

    monkeypatch.setattr(reachability, "missing_ucx", missing)
    assert ucx_ability(options, gpus=gpus).obstacle == (None if asked is None else MISSING)
    assert calls == ([] if asked is None else [asked])


@pytest.mark.parametrize(
    ("options", "gpus", "text"),
    [
        (Options(worker_ucx=AUTO, worker_class="my.Class"), True, "worker_class"),
        (Options(worker_ucx=ALL, worker_class="distributed.Worker"), False, "run in the agent"),
    ],
)
def test_classes_of_workers_without_ucx(options: Options, gpus: bool, text: str) -> None:
    obstacle = ucx_ability(options, gpus=gpus).obstacle
    assert obstacle is not None
    assert text in obstacle.text


def test_ucx_that_is_asked_for_and_can_not_be_had_is_an_error() -> None:
    with pytest.raises(
        InputError, match="protocol 'ucx': rank 1: distributed-ucxx is not installed. Fix: pip install it"
    ):
        choose_transport(ALL, GPUS, able({1: MISSING}))


def test_one_worker_alone_has_nobody_to_exchange_data_with_unless_it_attaches() -> None:
    for wanted in (AUTO, ALL):
        assert choose_transport(wanted, ONE_GPU, {}) == Transport()
        assert choose_transport(wanted, ONE_GPU, {}, attaches=True).ucx is wanted


NO_RDMA = UcxAbility(between_nodes="no RDMA device")


def nodes(*gpus: int) -> Plan:
    """A rank on each node, with so many GPUs."""
    return plan(
        [
            rank(number, len(gpus), tuple(map(gpu, range(each))), host=f"h{number}", boot_id=f"b{number}")
            for number, each in enumerate(gpus)
        ]
    )


def test_between_nodes_ucx_takes_rdma_and_nothing_else() -> None:
    with_rdma = choose_transport(AUTO, nodes(2, 2), {})
    assert (with_rdma.ucx, with_rdma.between_nodes) == (AUTO, True)
    without = choose_transport(AUTO, nodes(2, 2), {0: NO_RDMA, 1: NO_RDMA})
    assert (without.ucx, without.between_nodes, without.warning) == (AUTO, False, None)
    assert "of a node" in str(without.line)
    assert str(without.line).endswith("Between nodes TLS alone: no RDMA device")
    one = choose_transport(AUTO, nodes(2, 2), {1: NO_RDMA})
    assert str(one.line).endswith("Between nodes TLS alone: rank 1: no RDMA device")
    # within one node nobody misses it
    assert choose_transport(AUTO, nodes(2), {0: NO_RDMA}).line == with_rdma.line


@pytest.mark.parametrize("wanted", [AUTO, ALL])
def test_nodes_with_one_worker_each_have_no_use_for_ucx_without_rdma(wanted: WorkerUcx) -> None:
    found = choose_transport(wanted, nodes(1, 1), {0: NO_RDMA, 1: NO_RDMA})
    assert found.ucx is OFF
    assert "UCX leads to no other node: no RDMA device" in str(found.line)


def test_a_port_that_the_user_opens_is_warned_of() -> None:
    found = choose_transport(AUTO, nodes(2), {0: UcxAbility(opened_by="UCX_TLS")})
    assert found.ucx is AUTO
    assert str(found.warning).startswith("UCX_TLS has UCX open a TCP port")
    assert "anyone who reaches the port can run code as you. Fix: " in str(found.warning)


def test_what_a_rank_can_do_follows_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "missing_ucx", lambda **_: None)
    monkeypatch.setattr(reachability, "obstacle_between_nodes", lambda _: "no RDMA device")
    options = Options(worker_ucx=AUTO)
    assert ucx_ability(options, gpus=True, environ={}) == NO_RDMA
    assert ucx_ability(options, gpus=True, environ={"UCX_TLS": "tcp"}) == UcxAbility(opened_by="UCX_TLS")
    switched = Options(worker_ucx=AUTO, worker_options={"enable_nvlink": True})
    assert ucx_ability(switched, gpus=True, environ={}).opened_by == "worker_options['enable_nvlink']"
