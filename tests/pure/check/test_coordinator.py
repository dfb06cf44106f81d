"""Rank 0 of a check, by messages that other ranks would have sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.check import coordinator
from dask_gpu_mpi.check.coordinator import CheckCoordinator, _dashboard
from dask_gpu_mpi.check.rank import CheckingRank, Kind, RankTest
from dask_gpu_mpi.check.report import Listening, Outcome, Report
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, OptionError
from dask_gpu_mpi.mpi.gathering import FAIL
from dask_gpu_mpi.mpi.mailbox import Mail
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.node_pairs import Lost
from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.options.model import Options
from preflights import MockMailbox, observed

NETWORK = (Interface("eth0", "10.0.0.1", "10.0.0.0/8"),)


class Job:
    """A check of two ranks, of which rank 1 answers as it should, unless its answer is changed."""

    def __init__(self, options: Options | InputError, **more: Any) -> None:
        self.mailbox: Any = MockMailbox()
        self.mailbox.on_send = self.answer
        self.rank = CheckingRank(self.mailbox, {}, "h1")
        self.rank._test = lambda test: Outcome(Reach())  # type: ignore[method-assign]
        self.rank._listen = lambda order: Listening(4711, workers=4712)  # type: ignore[method-assign]
        self.mine = observed(0, gpus=0, interfaces=NETWORK)
        self.other = observed(1, gpus=0, interfaces=NETWORK)
        self.outcome: Outcome | None = Outcome(Reach())
        #: Of the other rank; None: it does not answer.
        self.listening: Listening | None = Listening(workers=4713)
        mine = {"kernel": True, "expect_gpus": None, "has_client": True, "started": time.monotonic(), **more}
        self.head = CheckCoordinator(self.mailbox, self.rank, options, **mine)
        self.reports: list[Report] = []

    def start(self) -> None:
        # The other rank is first.
        self.mailbox.mails += [Mail(1, Kind.STEP, ("h2", "the GPUs")), Mail(1, Kind.OBSERVED, self.other)]
        self.mailbox.send(0, Kind.OBSERVED, self.mine)

    def answer(self, rank: int, kind: str, payload: Any) -> None:
        if kind == Kind.TEST and self.outcome is not None:
            self.mailbox.mails.append(Mail(rank, Kind.TESTED, self.outcome))
        if kind == Kind.LISTEN and self.listening is not None:
            self.mailbox.mails.append(Mail(rank, Kind.LISTENING, self.listening))

    def run(self) -> int:
        return self.head.run(self.reports.append)

    @property
    def report(self) -> Report:
        (report,) = self.reports
        return report

    def sent(self, kind: str) -> list[tuple[int, Any]]:
        return [(rank, payload) for rank, sent, payload in self.mailbox.sent if sent == kind]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Job] = []

    def make(options: Options | InputError | None = None, **more: Any) -> Job:
        made.append(Job(options or Options(), **more))
        return made[-1]

    def aborted(code: int) -> None:
        raise SystemExit(100 + code)

    monkeypatch.setattr(coordinator, "abort", aborted)
    yield make
    for job in made:
        job.rank.close()


def test_all_is_well(jobs: Any) -> None:
    job = jobs()
    job.start()
    assert job.run() == 0
    evidence = job.report.evidence
    assert (job.report.level, evidence.silent, list(evidence.observations), list(evidence.tests)) == (
        "ok",
        (),
        [0, 1],
        [0, 1],
    )
    assert (evidence.address, evidence.listening, evidence.port) == (
        "10.0.0.1",
        Listening(4711, workers=4712),
        0,
    )
    assert [worker.kind for worker in evidence.plan.workers] == ["cpu", "cpu"]
    assert evidence.steps[1] == ("h2", "the GPUs")
    assert job.sent(Kind.DONE) == [(-1, 0)]
    assert 0 <= job.report.seconds < 10
    (rank, mine), (other, its) = job.sent(Kind.LISTEN)
    assert (rank, mine.address, mine.scheduler[1:]) == (0, "10.0.0.1", (0, ("127.0.0.1", 8787)))
    assert (other, its.address, its.scheduler) == (1, "10.0.0.1", None)
    assert [list(one.workers[1]) for one in (mine, its)] == [[0], [0]]
    tests: list[tuple[int, RankTest]] = job.sent(Kind.TEST)
    assert [(rank, test.address, test.port, test.gpus) for rank, test in tests] == [
        (0, "10.0.0.1", 4711, ()), (1, "10.0.0.1", 4711, ()),
    ]  # fmt: skip
    assert 10 < tests[0][1].seconds <= 13.5
    assert [[(peer.host, peer.port) for peer in test.peers] for _, test in tests] == [
        [("h2", 4713)],
        [("h1", 4712)],
    ]
    assert [(node.host, node.port) for node in evidence.nodes] == [("h1", 4712), ("h2", 4713)]
    assert tests[0][1].peers[0].tokens == its.workers[0]


def test_red_report_is_the_exit_code_of_all(jobs: Any) -> None:
    job = jobs(expect_gpus=2)
    job.start()
    assert job.run() == 1
    assert job.sent(Kind.DONE) == [(-1, 1)]
    cpus = jobs(Options(worker_class="distributed.Nanny"), expect_gpus=2)
    cpus.start()
    assert cpus.run() == 0  # without GPU workers no rank looks for GPUs


def test_ranks_of_one_node_connect_to_the_scheduler_only(jobs: Any) -> None:
    job = jobs(Options(scheduler_rank=1, worker_options={"worker_port": "4000:4001"}))
    job.other = replace(job.other, host="h1", boot_id="h1")
    job.listening = Listening(4711)
    job.start()
    assert job.run() == 0
    assert [(rank, order.workers) for rank, order in job.sent(Kind.LISTEN)] == [(1, None)]
    assert job.report.evidence.nodes == ()
    assert [test.peers for _, test in job.sent(Kind.TEST)] == [(), ()]


def test_workers_listen_on_ports_that_the_user_has_chosen(jobs: Any) -> None:
    job = jobs(Options(worker_options={"worker_port": "4000:4001"}))
    job.start()
    job.run()
    assert [list(order.workers[1]) for _, order in job.sent(Kind.LISTEN)] == [[4000, 4001]] * 2


def test_node_that_does_not_reach_another(jobs: Any) -> None:
    job = jobs()
    job.outcome = Outcome(Reach(), lost=(Lost("h1", "no answer within 5 s"),))
    job.start()
    assert job.run() == 1
    (found,) = [one for one in job.report.findings if one.level == "error"]
    assert (found.what, found.ranks, found.hosts) == ("node pairs", (1,), ("h2",))


def test_port_and_rank_of_the_scheduler(jobs: Any) -> None:
    job = jobs(Options(scheduler_port=8786, scheduler_rank=7))
    job.start()
    job.run()
    assert (job.report.evidence.port, job.report.evidence.scheduler_rank) == (8786, 1)


@pytest.mark.parametrize("kernel", [True, False])
def test_each_rank_runs_kernels_on_the_gpus_of_its_workers(jobs: Any, kernel: bool) -> None:
    job = jobs(kernel=kernel)
    job.other = observed(1, gpus=2, interfaces=NETWORK)
    job.start()
    job.run()
    assert [test.gpus for _, test in job.sent(Kind.TEST)] == [(), ("GPU-h2-0", "GPU-h2-1") if kernel else ()]
    assert job.report.evidence.kernel is kernel


def test_rank_that_does_not_respond(jobs: Any) -> None:
    job = jobs(started=time.monotonic() - coordinator.OBSERVE_TIMEOUT + 0.2)
    job.mailbox.send(0, Kind.OBSERVED, observed(0))
    with pytest.raises(SystemExit, match="101"):
        job.run()
    assert (job.report.evidence.silent, job.report.evidence.plan) == ((1,), None)
    assert job.sent(Kind.TEST) == job.sent(Kind.DONE) == []


def test_rank_that_does_not_end_its_tests(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "REPORT_TIMEOUT", 1.0)
    job = jobs()
    job.outcome = None
    job.start()
    with pytest.raises(SystemExit, match="101"):
        job.run()
    assert (job.report.evidence.silent, list(job.report.evidence.tests)) == ((1,), [0])


def test_nodes_without_a_common_network(jobs: Any) -> None:
    job = jobs(Options(interface="ib9"))
    job.mine, job.other = (replace(one, interface="ib9") for one in (job.mine, job.other))
    job.start()
    assert job.run() == 1
    evidence = job.report.evidence
    assert "'ib9'" in evidence.network_problem
    assert (evidence.address, evidence.listening) == ("", None)
    assert [test.port for _, test in job.sent(Kind.TEST)] == [0, 0]


def test_scheduler_of_a_rank_that_does_not_listen(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "LISTEN_TIMEOUT", 0.1)
    job = jobs(Options(scheduler_rank=1))
    job.listening = None
    job.start()
    assert job.run() == 1
    assert job.report.evidence.listening == Listening(error="no response")
    assert [(rank, order.scheduler is None) for rank, order in job.sent(Kind.LISTEN)] == [
        (0, True),
        (1, False),
    ]
    # to a node that does not listen nobody connects
    assert [[peer.host for peer in test.peers] for _, test in job.sent(Kind.TEST)] == [[], ["h1"]]


def test_plan_that_can_not_be_made(jobs: Any) -> None:
    job = jobs(Options(layout="exclusive"))
    job.start()
    assert job.run() == 1
    assert "3 MPI ranks" in job.report.evidence.plan_problem
    # what is wrong with a rank that has no inventory is reported as its own
    blind = jobs(Options(layout="exclusive"))
    blind.other = replace(blind.other, inventory=None)
    blind.start()
    blind.run()
    assert (blind.report.evidence.plan, blind.report.evidence.plan_problem) == (None, "")


def test_layout_exclusive_without_a_script(jobs: Any) -> None:
    job = jobs(Options(layout="exclusive"), has_client=False)
    job.start()
    assert job.run() == 0
    assert [worker.rank for worker in job.report.evidence.plan.workers] == [1]


@pytest.mark.parametrize("mine", [True, False])
def test_bad_options_of_a_rank_end_the_check_at_once(
    jobs: Any, mine: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OptionError("--nthreads: invalid")
    job = jobs(error if mine else None)
    job.other = Failure.of(error)
    job.start()
    if mine:
        job.mailbox.mails.pop()
        job.rank.observe(error, "", ())
    with pytest.raises(OptionError, match="--nthreads: invalid$") as caught:
        job.run()
    assert job.reports == []
    assert caught.value.reported
    text = "--nthreads: invalid" if mine else "rank 1 of 2 on h2: --nthreads: invalid"
    assert capsys.readouterr().err == f"dask_gpu_mpi: error: {text}\n"
    assert job.sent(FAIL) == [(-1, Failure(text, 2))]
    assert isinstance(caught.value, DaskGpuMpiError)


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
