"""Rank 0 of a check, by messages that ranks would have sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.check.observations import Observations
from dask_gpu_mpi.check.report import Evidence
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.run import (
    KERNEL_MARGIN,
    LISTEN_TIMEOUT,
    OBSERVE_TIMEOUT,
    REPORT_TIMEOUT,
    CheckCoordinator,
    CheckKind,
    RankTests,
)
from dask_gpu_mpi.check.ucx import UcxOrder
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.startup.coordinator import Phase, shared_options
from dask_gpu_mpi.startup.messages import Connect, Kind, Listening
from support.mocks.preflights import gpu, observed

NETWORK = (Interface("eth0", "10.0.0.1", "10.0.0.0/8"),)
#: When MPI was started.
STARTED = 100.0


class Job:
    """A check of two ranks, each on a node of its own."""

    def __init__(self, options: Options | None = None, **more: Any) -> None:
        self.options = options or Options()
        self.sent: list[tuple[int, str, Any]] = []
        self.head = CheckCoordinator(
            {0: "h1", 1: "h2"},
            self.options,
            send=lambda *message: self.sent.append(message),
            started=STARTED,
            **{"kernel": True, "expect_gpus": None, **more},
        )

    def observed(self, rank: int, **more: Any) -> Observations:
        more = {"shared_options": shared_options(self.options), "gpus": 0, **more}
        return observed(rank, interfaces=NETWORK, **more)

    def tell(self, rank: int, kind: str, payload: Any) -> None:
        assert self.head.handle(Event(rank, kind, payload), STARTED)

    def tick(self, seconds: float) -> None:
        """Let it decide, so many seconds after the start of MPI."""
        self.head.tick(STARTED + seconds)

    def register(self, *found: Observations) -> None:
        for rank, each in enumerate(found or (self.observed(0), self.observed(1))):
            self.tell(rank, Kind.REGISTRATION, each)
        self.tick(1.0)

    def listen(self, *found: Listening) -> None:
        asked = [rank for rank, _ in self.kind(Kind.LISTEN)]
        for rank, each in zip(asked, found or (Listening(4711, 4712), Listening(0, 4713)), strict=True):
            self.tell(rank, Kind.LISTENING, each)
        self.tick(2.0)

    def test(self, *found: Reach) -> None:
        for rank, each in enumerate(found or (Reach(), Reach())):
            self.tell(rank, Kind.REACHED, each)
            self.tell(rank, CheckKind.TESTED, ((), None))
        self.tick(3.0)

    def whole(self, *found: Observations, reached: tuple[Reach, ...] = ()) -> Job:
        """From the registrations to the tests."""
        self.register(*found)
        self.listen()
        self.test(*reached)
        return self

    def kind(self, kind: str) -> list[tuple[int, Any]]:
        return [(rank, payload) for rank, sent, payload in self.sent if sent == kind]

    @property
    def evidence(self) -> Evidence:
        assert isinstance(self.head.outcome, Evidence)
        return self.head.outcome

    def errors(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(found.what, found.ranks) for found in apply_rules(self.evidence) if found.level == "error"]


def test_all_is_well() -> None:
    job = Job()
    job.tell(1, Kind.STEP, "the GPUs")
    job.whole()
    evidence = job.evidence
    assert (evidence.silent, list(evidence.observations), list(evidence.kernels)) == ((), [0, 1], [0, 1])
    assert job.errors() == []
    assert (evidence.address, evidence.listening) == ("10.0.0.1", Listening(4711, 4712))
    assert evidence.steps[1] == ("h2", "the GPUs")
    (rank, mine), (other, its) = job.kind(Kind.LISTEN)
    assert (rank, mine.scheduler.address, mine.workers.address, mine.dashboard) == (
        0,
        "10.0.0.1",
        "10.0.0.1",
        True,
    )
    assert (other, its.scheduler, its.workers.address, its.dashboard) == (1, None, "10.0.0.1", False)
    seconds = REPORT_TIMEOUT - KERNEL_MARGIN - 2.0
    assert job.kind(CheckKind.TEST) == [(rank, RankTests(seconds)) for rank in (0, 1)]
    connects = [to for _, to in job.kind(Kind.CONNECT)]
    assert connects == [
        Connect(replace(mine.scheduler, port=4711), (peer,), 5.0)
        for peer in (replace(its.workers, port=4713), replace(mine.workers, port=4712))
    ]
    assert [(node.host, node.port) for node in evidence.nodes] == [("h1", 4712), ("h2", 4713)]


def test_tests_get_half_of_the_time_to_connect() -> None:
    job = Job()
    for rank in (0, 1):
        job.tell(rank, Kind.REGISTRATION, job.observed(rank))
    job.tick(9.5)
    job.tick(9.5 + LISTEN_TIMEOUT + 0.01)
    to, _ = (order for _, order in job.kind(Kind.CONNECT))
    assert to.timeout == pytest.approx((REPORT_TIMEOUT - KERNEL_MARGIN - 9.5 - LISTEN_TIMEOUT - 0.01) / 2)


def test_gpus_that_are_expected() -> None:
    for options, errors in ((Options(), ["GPUs"]), (Options(worker_class="distributed.Nanny"), [])):
        job = Job(options, expect_gpus=2).whole()
        assert [what for what, _ in job.errors()] == errors  # without GPU workers no rank looks for GPUs


def test_ranks_of_one_node_connect_to_the_scheduler_only() -> None:
    job = Job(Options(scheduler_rank=7))  # the last
    job.register(job.observed(0), job.observed(1, host="h1", boot_id="h1"))
    job.listen(Listening(4711))
    job.test()
    assert [(rank, order.workers) for rank, order in job.kind(Kind.LISTEN)] == [(1, None)]
    assert (job.evidence.nodes, job.evidence.scheduler_rank) == ((), 1)
    assert [order.peers for _, order in job.kind(Kind.CONNECT)] == [(), ()]


@pytest.mark.parametrize(
    ("scheduler", "errors"),
    [("", [("node pairs", (1,))]), ("no route", [("network", (1,)), ("node pairs", (1,))])],
)
def test_node_that_does_not_reach_another(scheduler: str, errors: list[tuple[str, tuple[int, ...]]]) -> None:
    lost = Reach(scheduler, lost={"no answer within 5 s": ["h1"]})
    assert Job().whole(reached=(Reach(), lost)).errors() == errors


@pytest.mark.parametrize("kernel", [True, False])
def test_each_rank_runs_kernels_on_the_gpus_of_its_workers(kernel: bool) -> None:
    job = Job(kernel=kernel)
    job.whole(job.observed(0), job.observed(1, gpus=2))
    gpus = [(), ("GPU-h2-0", "GPU-h2-1") if kernel else ()]
    assert [tests.kernels for _, tests in job.kind(CheckKind.TEST)] == gpus
    assert job.evidence.kernel is kernel


def test_one_rank_of_each_node_tries_ucx_over_the_ports_of_its_first_worker() -> None:
    job = Job(Options(worker_ucx=WorkerUcx.ALL))
    found = [job.observed(rank, gpus=2) for rank in (0, 1)]
    gpus = tuple(gpu("h1", index, nics=f"mlx5_{index}:1") for index in (0, 1))
    found[0] = replace(found[0], inventory=replace(found[0].inventory, gpus=gpus))  # type: ignore[type-var]
    job.register(*found)
    job.listen()
    orders = [tests.ucx for _, tests in job.kind(CheckKind.TEST)]
    assert orders == [UcxOrder("GPU-h1-0", 1, "mlx5_0:1"), UcxOrder("GPU-h2-0", 1, "")]
    for rank in (0, 1):
        job.tell(rank, CheckKind.UCX_ADDRESS, b"address")
    assert [rank for rank, _ in job.kind(CheckKind.UCX_PEER)] == [1, 0]
    for rank in (0, 1):
        job.tell(rank, Kind.REACHED, Reach())
        job.tell(rank, CheckKind.TESTED, ((), {"": "no device"}))
    job.tick(3.0)
    assert job.evidence.ucx == {0: {"": "no device"}, 1: {"": "no device"}}


def test_rank_that_does_not_respond() -> None:
    job = Job()
    job.tell(0, Kind.REGISTRATION, job.observed(0))
    job.tell(1, Kind.STEP, "inspecting the local directory '/gone'")
    job.tick(OBSERVE_TIMEOUT)
    assert job.head.outcome is None
    job.tick(OBSERVE_TIMEOUT + 0.1)
    assert (job.evidence.silent, job.evidence.plan) == ((1,), None)
    assert job.evidence.steps[1] == ("h2", "inspecting the local directory '/gone'")
    assert job.sent == []


@pytest.mark.parametrize("lacks", [Kind.REACHED, CheckKind.TESTED])
def test_rank_that_does_not_end_its_tests(lacks: str) -> None:
    job = Job()
    job.register()
    job.listen()
    for rank in (0, 1):
        for kind, payload in ((Kind.REACHED, Reach()), (CheckKind.TESTED, ((), None))):
            if (rank, kind) != (1, lacks):
                job.tell(rank, kind, payload)
    job.tick(REPORT_TIMEOUT)
    assert job.head.outcome is None
    job.tick(REPORT_TIMEOUT + 0.1)
    assert (job.evidence.silent, list(job.evidence.kernels)) == ((1,), [0])


def test_nodes_without_a_common_network() -> None:
    job = Job(Options(interface="ib9"))
    job.register(*(job.observed(rank, wanted_interface="ib9") for rank in (0, 1)))
    assert job.kind(Kind.CONNECT) == []
    for rank in (0, 1):
        job.tell(rank, CheckKind.TESTED, ((), None))
    job.tick(3.0)
    assert "'ib9'" in str(job.evidence.network_problem)
    assert (job.evidence.address, job.evidence.listening, job.evidence.silent) == ("", None, ())
    assert ("network", ()) in job.errors()


def test_scheduler_of_a_rank_that_does_not_listen() -> None:
    job = Job(Options(scheduler_rank=1))
    job.register()
    job.tell(0, Kind.LISTENING, Listening(0, 4712))
    job.tick(1.0 + LISTEN_TIMEOUT)
    assert job.kind(Kind.CONNECT) == []
    job.tick(1.0 + LISTEN_TIMEOUT + 0.1)
    job.test(Reach(), Reach())
    assert job.evidence.listening == Listening(error="no response")
    asked = {rank: order.scheduler is not None for rank, order in job.kind(Kind.LISTEN)}
    assert asked == {0: False, 1: True}
    # to a node that does not listen nobody connects
    connects = [to for _, to in job.kind(Kind.CONNECT)]
    assert [(to.scheduler.port, [peer.host for peer in to.peers]) for to in connects] == [
        (0, []),
        (0, ["h1"]),
    ]


def test_plan_that_can_not_be_made() -> None:
    job = Job(Options(layout="exclusive")).whole()
    assert "3 MPI ranks" in str(job.evidence.plan_problem)
    # what is wrong with a rank that has no inventory is reported as its own
    blind = Job(Options(layout="exclusive"))
    blind.whole(blind.observed(0), blind.observed(1, inventory=None))
    assert (blind.evidence.plan, blind.evidence.plan_problem) == (None, None)


def test_ranks_with_different_options() -> None:
    """The start would refuse them."""
    job = Job()
    job.whole(job.observed(0), job.observed(1, shared_options=shared_options(Options(nthreads=3))))
    (found,) = [found for found in apply_rules(job.evidence) if found.level == "error"]
    assert found.what == "placement"
    assert found.found.startswith("option nthreads is None on rank 0 (h1) and 3 on rank 1 (h2)")


def test_bad_options_of_a_rank_end_the_check_at_once() -> None:
    job = Job()
    job.tell(0, Kind.REGISTRATION, job.observed(0))
    job.tell(1, Kind.FAILED, Failure.of(OptionError("--nthreads: invalid")))
    job.tick(0.5)
    assert job.head.outcome is None  # most failures are everybody's
    job.tick(1.5)
    assert isinstance(job.head.outcome, OptionError)
    assert str(job.head.outcome) == "rank 1 of 2 on h2: --nthreads: invalid"
    assert not job.head.outcome.fatal
    assert job.head.phase is Phase.REGISTER
    assert job.sent == []
