"""The coordinator, without ranks: given messages and the time, it says what to send."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import dask.config
import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.plain_data import pack
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError, Problem, StartupError
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.reachability import MOST_PEERS, Node
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.startup.coordinator import (
    GATHER_FAILURES,
    SHARED,
    Coordinator,
    check_agreement,
    shared_options,
)
from dask_gpu_mpi.startup.messages import Cluster, Event, Kind, Registration, SchedulerSettings
from support.mocks.inputs import rank as rank_inventory

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
FAILED, SIGNAL = Failure(Problem("no disk"), 2), Failure(Problem("SIGTERM"), 143)
ADDRESS = ("tls://127.0.0.1:5", "http://localhost:8787/status?token=abc")
#: What a rank without workers that others can connect to sends.
READY: tuple[list[Any], str] = ([], "")


def registration(rank: int, size: int, host: str = "a", **changes: Any) -> Registration:
    inventory = rank_inventory(rank, size, host=host)
    interfaces = (LO, Interface("eth0", f"10.0.0.{rank}", "10.0.0.0/24"))
    return replace(Registration(host, inventory, interfaces, None, ()), **changes)


class Driver:
    """A coordinator and what it has sent; rank 0 is on host ``h0``, and so on."""

    def __init__(self, size: int, *, target: Target | None = None, **options: Any) -> None:
        self.sent: list[tuple[int, str, Any]] = []
        self.size = size
        self.coordinator = Coordinator(
            {rank: f"h{rank}" for rank in range(size)},
            Options(**options),
            Timeline("rank"),
            credentials={"key": "secret"},
            target=target,
            send=lambda rank, kind, payload: self.sent.append((rank, kind, payload)),
            deadline=100.0,
        )

    def tell(self, rank: int, kind: str, payload: Any = None, now: float = 1.0) -> None:
        assert self.coordinator.handle(Event(rank, kind, payload), now)

    def register(self, *ranks: int, apart: bool = False, **changes: Any) -> None:
        """These ranks of the job, else all, of one host or each of its own (``h0``, ``h1``, ...)."""
        for rank in ranks or range(self.size):
            host = f"h{rank}" if apart else "a"
            self.tell(rank, Kind.REGISTRATION, registration(rank, self.size, host, **changes))

    def answer(self, kind: str, payload: Any = None) -> None:
        """All ranks that are awaited give this answer."""
        for rank in self.coordinator.waiting_for:
            self.tell(rank, kind, payload)

    def outcome_at(self, now: float) -> Any:
        self.coordinator.tick(now)
        return self.coordinator.outcome

    def scheduler(self, listen: str) -> SchedulerSettings:
        """What the scheduler's rank is told."""
        assert self.coordinator.plan is not None
        return SchedulerSettings(listen, {"key": "secret"}, "", plan=self.coordinator.plan, has_script=True)

    def given(self, kind: str) -> list[Any]:
        """What was sent as this kind."""
        return [payload for _, sent, payload in self.sent if sent == kind]

    def kinds(self) -> list[tuple[int, str]]:
        return [(rank, kind) for rank, kind, _ in self.sent]


def test_the_way_to_a_cluster() -> None:
    """Progress counts the workers of ranks that are ready."""
    driver = Driver(2)
    driver.register(1)
    assert driver.sent == []
    driver.register(0)
    assert driver.sent == [(0, Kind.SCHEDULER, driver.scheduler("127.0.0.1"))]
    assert driver.coordinator.progress() == (0, 2, ["h0"])  # the scheduler's
    driver.tell(0, Kind.ADDRESS, ADDRESS)
    starts = driver.given(Kind.START)
    assert [[worker.name for worker in start.workers] for start in starts] == [[0], [1]]
    assert [(start.is_client, start.address) for start in starts] == [
        (True, ADDRESS[0]),
        (False, ADDRESS[0]),
    ]
    assert driver.coordinator.progress() == (0, 2, ["h0", "h1"])
    driver.tell(0, Kind.READY, READY)
    assert driver.coordinator.progress() == (1, 2, ["h1"])
    assert driver.coordinator.outcome is None
    driver.tell(1, Kind.READY, READY)
    up = driver.coordinator.outcome
    assert isinstance(up, Cluster)
    # only the client rank is given the plan, the credentials and the link with its token
    assert driver.sent[-1] == (1, Kind.UP, Cluster(ADDRESS[0], None))
    assert driver.kinds()[-2][1] == Kind.START
    assert (up.plan, up.config, up.dashboard) == (driver.coordinator.plan, {"key": "secret"}, ADDRESS[1])
    assert "abc" not in repr(up)


@pytest.mark.parametrize("kind", [Kind.ENTERED, Kind.START, Kind.CLIENT])
def test_what_is_not_for_it(kind: Kind) -> None:
    assert not Driver(1).coordinator.handle(Event(0, kind, None), 1.0)


@pytest.mark.parametrize(
    ("failures", "kind", "text"),
    [
        ({1: FAILED}, InputError, "rank 1 of 3 on h1: no disk"),
        (dict.fromkeys(range(3), FAILED), InputError, "no disk"),
        ({1: FAILED, 2: SIGNAL}, StartupError, "rank 1 of 3 on h1: no disk; rank 2 of 3 on h2: SIGTERM"),
    ],
)
@pytest.mark.parametrize("registered", [False, True])
def test_failures_are_gathered_for_a_while_and_are_one_report(
    failures: dict[int, Failure], kind: type, text: str, registered: bool
) -> None:
    driver = Driver(3)
    if registered:
        driver.register()
    sent = len(driver.sent)
    for rank, failure in failures.items():
        driver.tell(rank, Kind.FAILED, failure, now=5.0)
        driver.tell(rank, Kind.FAILED, Failure(Problem("another, later"), 1), now=5.5)
    assert (driver.outcome_at(5.0 + GATHER_FAILURES) is None) is (len(failures) < 3)
    error = driver.outcome_at(5.0 + GATHER_FAILURES + 0.1)
    assert isinstance(error, kind)
    assert (str(error), error.fatal) == (text, False)
    assert len(driver.sent) == sent


def test_a_failure_waits_only_for_ranks_that_have_not_responded() -> None:
    driver = Driver(3)
    driver.register(0)
    driver.tell(1, Kind.FAILED, FAILED, now=5.0)
    assert driver.outcome_at(5.0) is None
    driver.register(2)
    assert str(driver.outcome_at(5.0)) == "rank 1 of 3 on h1: no disk"


def test_a_start_without_workers_that_are_late_but_not_without_the_scheduler() -> None:
    late, lost = (Driver(2, tolerate_lost_ranks=1, scheduler_rank=rank) for rank in (0, 1))
    for driver in (late, lost):
        driver.register()
    late.tell(0, Kind.ADDRESS, ADDRESS)
    late.tell(0, Kind.READY, READY)
    assert "rank 1 not ready before" in str(late.outcome_at(100.5).plan.warnings)
    assert isinstance(lost.outcome_at(100.5), StartupError)
    absent = Driver(2, tolerate_lost_ranks=1, explicit=frozenset({"startup_timeout"}))
    absent.register(0)
    for now in (100.5, 101.0):  # the others have as much time again
        assert absent.outcome_at(now) is None
    assert len(absent.given(Kind.SCHEDULER)) == 1
    absent.tell(1, Kind.ENTERED, (1, False))  # too late
    assert absent.sent[-1] == (1, Kind.DONE, 1)


def test_a_start_without_a_node_that_is_silent_while_others_connect() -> None:
    """It waits for its answer until the deadline, and not longer; a connection that failed is an error."""
    for lost, kind in (({}, Cluster), ({"refused": ["h1"]}, InputError)):
        driver = connecting(3, tolerate_lost_ranks=1)
        driver.tell(0, Kind.REACHED, lost)
        driver.tell(2, Kind.REACHED, {})
        assert driver.outcome_at(99.0) is None
        assert isinstance(driver.outcome_at(100.5), kind)


@pytest.mark.parametrize(("come", "tolerated"), [([0], 1), ([1, 2], 2), ([0, 1], 0)])
def test_no_start_without_rank_0_or_too_many(come: list[int], tolerated: int) -> None:
    driver = Driver(3, tolerate_lost_ranks=tolerated, startup_timeout=50.0)
    driver.register(*come)
    assert isinstance(driver.outcome_at(100.5), StartupError)


def test_the_deadline_names_the_step_of_each_phase() -> None:
    """What a silent rank was at: by its own message, or by what the coordinator has told it to do."""
    driver = Driver(3)
    assert driver.coordinator.progress() == (0, None, ["h0", "h1", "h2"])
    assert driver.outcome_at(99.0) is None
    assert last_step(driver) == ("ranks 0-2 of 3 on h0, h1, h2: no response", "")
    driver = Driver(2)
    driver.tell(1, Kind.STEP, "waiting for its agent to import Dask")
    driver.tell(1, Kind.STEP, "inspecting the GPUs (NVML)")
    driver.register(0)
    assert last_step(driver) == ("rank 1 of 2 on h1: no response", "inspecting the GPUs (NVML)")
    driver = Driver(2)
    driver.register()
    assert last_step(driver) == ("rank 0 of 2 on h0: not ready", "starting the scheduler")
    for ready, late in (((), "ranks 0-1 of 2 on h0, h1"), ((0,), "rank 1 of 2 on h1")):
        driver = Driver(2)
        driver.register()
        driver.tell(0, Kind.ADDRESS, ADDRESS)
        for rank in ready:
            driver.tell(rank, Kind.READY, READY)
        assert last_step(driver) == (f"{late}: not ready", "starting its workers")
    driver = connecting(3)
    for rank in (0, 2):
        driver.tell(rank, Kind.REACHED, {})
    assert last_step(driver) == ("rank 1 of 3 on h1: not ready", "connecting to workers of other nodes")


def last_step(driver: Driver) -> tuple[str, str]:
    """The ranks that the report names, and their last step."""
    error = driver.outcome_at(100.5)
    assert error.fatal, "who does not answer can't be told to leave"
    who, _, rest = str(error).partition(" before the start-up timeout (startup_timeout)")
    return who, rest.partition(". Fix: ")[0].removeprefix("; last step: ")


def test_a_script_on_any_rank_counts_and_is_where_it_runs() -> None:
    for having, workers in (((), [1, 2]), ((1,), [2]), ((0, 1, 2), [2])):
        driver = Driver(3, layout="exclusive")
        for rank in range(3):
            driver.register(rank, has_client=rank in having)
        assert driver.coordinator.plan is not None
        assert [worker.rank for worker in driver.coordinator.plan.workers] == workers
    driver = Driver(3)
    for rank in range(3):
        driver.register(rank, has_client=rank > 0)
    words = r"rank 0 \(a\) is the client, but only ranks 1-2 got .* Fix: .*--client-rank"
    assert re.match(words, str(driver.coordinator.outcome))


@pytest.mark.parametrize("protocol", ["tcp", "tls"])
@pytest.mark.parametrize(
    ("attaches", "apart", "where"),
    [
        (True, False, "of another job"),
        (False, True, "rank 0 on h0"),
        (False, False, ""),
    ],
)
def test_ranks_connect_to_the_scheduler_first_unless_it_is_on_their_node(
    protocol: str, attaches: bool, apart: bool, where: str
) -> None:
    target = Target(f"{protocol}://10.0.0.9:5") if attaches else None
    driver = Driver(2, target=target, protocol=Protocol(protocol))
    driver.register(apart=apart)
    if not attaches:
        driver.tell(0, Kind.ADDRESS, ADDRESS)
    starts = driver.given(Kind.START)
    assert {start.scheduler for start in starts} == {where}


def crowded(size: int, **changes: Any) -> Driver:
    """A coordinator whose ranks, each on a host of its own, have all been told to start."""
    driver = Driver(size, **changes)
    driver.register(apart=True)
    driver.tell(0, Kind.ADDRESS, ADDRESS)
    return driver


def worker_address(rank: int) -> str:
    return f"tls://10.0.0.{rank}:6"


def connecting(size: int, **changes: Any) -> Driver:
    """A coordinator whose ranks, each on a host of its own, are about to connect to each other."""
    driver = crowded(size, **changes)
    for rank in range(size):
        driver.tell(rank, Kind.READY, ([], worker_address(rank)))
    return driver


@pytest.mark.parametrize("reached", [True, False])
def test_nodes_connect_to_each_other_when_all_workers_are_there(reached: bool) -> None:
    """A shuffle would wait for nodes that do not reach each other: the script does not start."""
    driver = crowded(4)
    sent = len(driver.sent)
    for rank in range(4):
        assert len(driver.sent) == sent
        driver.tell(rank, Kind.READY, ([], worker_address(rank)))
    assert driver.kinds()[sent:] == [(rank, Kind.CONNECT) for rank in range(4)]
    for rank, peers in enumerate(driver.given(Kind.CONNECT)):
        assert {*peers} == {Node(f"h{n}", n, worker_address(n)) for n in {*range(4)} - {rank}}
    lost = {} if reached else {2: {"no answer within 5 s": ["h3"]}, 3: {"no answer within 5 s": ["h2"]}}
    for rank in (0, 2, 1, 3):
        assert driver.coordinator.outcome is None
        driver.tell(rank, Kind.REACHED, lost.get(rank, {}))
    outcome = driver.coordinator.outcome
    if reached:
        assert isinstance(outcome, Cluster)
        return
    assert isinstance(outcome, InputError)
    text = "no connection between nodes: from h2 to h3 (no answer within 5 s), from h3 to h2 (no answer within 5 s) (expected"
    assert str(outcome).startswith(text)
    assert len(driver.sent) == sent + 4


def test_nodes_without_workers_do_not_matter_but_for_the_schedulers() -> None:
    driver = Driver(4, layout="exclusive")
    for rank in range(4):  # h0: the scheduler; h1: the client; h2: both workers
        driver.tell(rank, Kind.REGISTRATION, registration(rank, 4, f"h{min(rank, 2)}"))
    driver.tell(0, Kind.ADDRESS, ADDRESS)
    for rank in range(4):
        driver.tell(rank, Kind.READY, ([], worker_address(rank) if rank > 1 else ""))
    assert driver.sent[-1] == (0, Kind.CONNECT, (Node("h2", 2, worker_address(2)),))
    assert len(driver.given(Kind.CONNECT)) == 1
    driver.tell(0, Kind.REACHED, {})
    assert isinstance(driver.coordinator.outcome, Cluster)


def test_workers_whose_addresses_are_not_known_are_not_connected_to() -> None:
    """Those of a class of the user."""
    driver = crowded(2)
    for rank in range(2):
        driver.tell(rank, Kind.READY, READY)
    assert isinstance(driver.coordinator.outcome, Cluster)


def test_what_comes_after_a_failure_starts_nothing() -> None:
    driver = connecting(2)
    driver.tell(1, Kind.FAILED, FAILED)
    for rank in range(2):
        driver.tell(rank, Kind.REACHED, {})
    assert driver.coordinator.outcome is None
    driver = Driver(1)
    driver.register()
    driver.tell(0, Kind.FAILED, FAILED)
    driver.tell(0, Kind.READY, READY)
    assert driver.coordinator.outcome is None


def test_many_workers_are_given_time() -> None:
    driver = crowded(700)
    assert {len(peers) for peers in connecting(700).given(Kind.CONNECT)} == {MOST_PEERS}
    starts = driver.given(Kind.START)
    (scheduler,) = driver.given(Kind.SCHEDULER)
    for config in (scheduler.config, starts[0].config, starts[-1].config):
        assert config == {
            "key": "secret",
            "distributed.comm.timeouts.connect": "35s",
            "distributed.comm.socket-backlog": 2800,
        }
    delays = [start.delay for start in starts]
    assert delays[0] == 0.0
    assert delays == sorted(set(delays))
    assert starts[0].limit == 70.0
    with dask.config.set({"distributed.comm.timeouts.connect": "7s"}):  # the user's
        (scheduler,) = crowded(700).given(Kind.SCHEDULER)
    assert scheduler.config == {"key": "secret", "distributed.comm.socket-backlog": 2800}


def test_a_deadline_that_nobody_said_grows_with_the_workers() -> None:
    patient, strict = crowded(1200), crowded(1200, explicit=frozenset({"startup_timeout"}))
    assert isinstance(strict.outcome_at(110.0), StartupError)
    assert patient.outcome_at(110.0) is None
    assert isinstance(patient.outcome_at(122.0), StartupError)


def test_no_rank_is_sent_what_belongs_to_another_host() -> None:
    few, many = (max(len(pack(start)) for start in crowded(size).given(Kind.START)) for size in (10, 100))
    assert many < few + 50


def bare(host: str = "a", **options: Any) -> Registration:
    return Registration(host, None, (), None, shared_options(Options(**options)))


def test_every_shared_option_is_compared() -> None:
    others = {
        "layout": "exclusive", "protocol": "tcp", "worker_ucx": "yes", "scheduler": False, "scheduler_rank": 1, "client_rank": 1,
        "cpu_workers": 3, "gpus_per_worker": 2, "require_idle_gpus": True, "name": "x", "nthreads": 7,
        "default_workers": "gpu", "tolerate_lost_ranks": 1, "data_encryption": False,
    }  # fmt: skip
    assert set(others) == set(SHARED)
    check_agreement([bare(), bare("b"), bare(local_directory="/fast", log_level="debug")])
    for name, value in others.items():
        words = rf"option {re.escape(SHARED[name])} is .* on rank 0 \(a\) and {re.escape(repr(value))} on rank 1 \(b\)"
        with pytest.raises(InputError, match=words):
            check_agreement([bare(), bare("b", **{name: value})])


# -- an agent that was lost


def test_another_agent_gets_its_ranks_part_again() -> None:
    """Without the workers that have ended, and at once."""
    driver = crowded(700, cpu_workers=2)
    start = driver.given(Kind.START)[5]
    assert (len(start.workers), start.delay > 0) == (3, True)
    again = driver.coordinator.start_of(5, without=[start.workers[0].name])
    assert again == replace(start, workers=start.workers[1:], delay=0.0, scheduler="")
    assert Driver(3).coordinator.start_of(1, without=[]) is None
