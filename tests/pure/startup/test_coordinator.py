"""The coordinator, without ranks: given messages and the time, it says what to send."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import InputError, Problem, StartupError, WorldTooSmallException
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.reachability import MOST_AT_START, Lost, Reach
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.startup.coordinator import (
    GATHER_FAILURES,
    SHARED,
    Coordinator,
    FailureCoordinator,
    Job,
    check_agreement,
    check_client,
    shared_options,
)
from dask_gpu_mpi.startup.messages import Cluster, Event, Kind, Listening, Reached, Registration, Start
from dask_gpu_mpi.view.job_facts import JobFacts, facts_of
from support.mocks.inputs import gpu

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
SHAPE = (("layout", "shared"),)
REACHED = Reached(Reach())


def registration(rank: int, size: int, host: str = "a", **changes: Any) -> Registration:
    inventory = Inventory(
        rank=rank,
        world_size=size,
        host=host,
        boot_id="b",
        pid=100 + rank,
        cpus=(0, 1),
        memory=1 << 30,
        gpus=(),
        visible=None,
    )
    interfaces = (LO, Interface("eth0", f"10.0.0.{rank}", "10.0.0.0/24"))
    return Registration(
        **{
            "host": host,
            "inventory": inventory,
            "interfaces": interfaces,
            "wanted_interface": None,
            "shared_options": SHAPE,
            **changes,
        }
    )


class Driver:
    """A coordinator and what it has sent."""

    def __init__(self, size: int, **changes: Any) -> None:
        self.sent: list[tuple[int, str, Any]] = []
        self.size = size
        layout = changes.pop("layout", "shared")
        job = Job(
            changes.pop("protocol", "tls"),
            lambda inventories, has_client, device_options: make_plan(
                inventories, Options(layout=layout), has_client=has_client, device_options=device_options
            ),
            lambda: {"key": "secret"},
            **changes,
        )
        self.coordinator = Coordinator(
            size,
            job,
            send=lambda rank, kind, payload: self.sent.append((rank, kind, payload)),
            deadline=100.0,
        )

    def tell(self, rank: int, kind: str, payload: Any = None, now: float = 1.0) -> None:
        assert self.coordinator.handle(Event(rank, kind, payload), now)

    def register(self, *, apart: bool = False, **changes: Any) -> None:
        """All ranks of the job, of one host or each of its own (``h0``, ``h1``, ...)."""
        for rank in range(self.size):
            host = f"h{rank}" if apart else "a"
            self.tell(rank, Kind.REGISTRATION, registration(rank, self.size, host, **changes))

    @property
    def facts(self) -> JobFacts:
        """What the scheduler is to be told of the plan."""
        assert self.coordinator.plan is not None
        return facts_of(self.coordinator.plan)

    def kinds(self) -> list[tuple[int, str]]:
        return [(rank, kind) for rank, kind, _ in self.sent]


def test_the_way_to_a_cluster() -> None:
    driver = Driver(2)
    driver.tell(1, Kind.REGISTRATION, registration(1, 2))
    assert driver.sent == []
    driver.tell(0, Kind.REGISTRATION, registration(0, 2))
    assert driver.sent == [(0, Kind.SCHEDULER, ("127.0.0.1", {"key": "secret"}, "", driver.facts))]
    driver.tell(0, Kind.ADDRESS, ("tls://127.0.0.1:5", "http://localhost:8787/status?token=abc"))
    starts = [payload for _, kind, payload in driver.sent if kind == Kind.START]
    assert [[worker.name for worker in start.workers] for start in starts] == [[0], [1]]
    assert [start.is_client for start in starts] == [True, False]
    assert all(isinstance(start, Start) and start.address == "tls://127.0.0.1:5" for start in starts)
    driver.tell(0, Kind.READY)
    assert driver.coordinator.waiting_for == [1]
    assert driver.coordinator.outcome is None
    driver.tell(1, Kind.READY)
    assert isinstance(driver.coordinator.outcome, Cluster)
    assert [each for each in driver.kinds() if each[1] == Kind.CLUSTER_UP] == [(1, Kind.CLUSTER_UP)]
    # only the client rank is given the plan, the credentials and the link with its token
    assert driver.sent[-1][2].plan is None
    assert driver.sent[-1][2].config == {}
    assert driver.sent[-1][2].dashboard is None
    assert driver.coordinator.outcome.dashboard == "http://localhost:8787/status?token=abc"
    assert "abc" not in repr(driver.coordinator.outcome)


@pytest.mark.parametrize(("gpus", "device"), [((0, 1), "GPU-0000"), ((), "")])
def test_the_device_of_the_scheduler(gpus: tuple[int, ...], device: str) -> None:
    """It unpickles graphs, and those of cuDF hold objects of a GPU."""
    driver = Driver(1)
    found = registration(0, 1)
    assert found.inventory is not None
    driver.tell(
        0, Kind.REGISTRATION, replace(found, inventory=replace(found.inventory, gpus=tuple(map(gpu, gpus))))
    )
    ((rank, kind, (_, _, sent, _)),) = driver.sent
    assert (rank, kind, sent) == (0, Kind.SCHEDULER, device)


@pytest.mark.parametrize("event", [Event(None, "ready", []), Event(0, Kind.START, None)])
def test_words_of_the_agent_and_of_the_coordinator_are_not_for_it(event: Event) -> None:
    assert not Driver(1).coordinator.handle(event, 1.0)


def test_one_rank_fails_and_is_named() -> None:
    driver = Driver(3)
    driver.tell(0, Kind.REGISTRATION, registration(0, 3))
    driver.tell(
        1, Kind.REGISTRATION, registration(1, 3, "b", inventory=None, failure=Failure(Problem("no disk"), 2))
    )
    driver.tell(2, Kind.REGISTRATION, registration(2, 3))
    driver.coordinator.tick(1.5)
    assert driver.coordinator.outcome is None, "others may have something to say as well"
    driver.coordinator.tick(2.5)
    error = driver.coordinator.outcome
    assert isinstance(error, InputError)
    assert str(error) == "rank 1 of 3 on b: no disk"
    assert driver.sent == []


def test_what_all_say_is_said_once() -> None:
    driver = Driver(2)
    driver.register(inventory=None, failure=Failure(Problem("unknown option"), 2))
    driver.coordinator.tick(1.0)
    assert str(driver.coordinator.outcome) == "unknown option"


def test_a_late_failure_is_a_start_up_error() -> None:
    driver = Driver(2)
    driver.register()
    driver.tell(0, Kind.ADDRESS, ("tls://127.0.0.1:5", None))
    driver.tell(0, Kind.READY)
    driver.tell(1, Kind.FAILED, Failure(Problem("worker 1 did not start"), 1))
    driver.coordinator.tick(9.0)
    error = driver.coordinator.outcome
    assert isinstance(error, StartupError)
    assert error.exit_code == 1
    assert "rank 1 of 2 on a: worker 1 did not start" in str(error)


def test_the_deadline_names_who_is_missing() -> None:
    driver = Driver(3)
    driver.tell(0, Kind.REGISTRATION, registration(0, 3))
    driver.tell(2, Kind.REGISTRATION, registration(2, 3, "b"))
    driver.coordinator.tick(99.0)
    assert driver.coordinator.outcome is None
    driver.coordinator.tick(100.5)
    error = driver.coordinator.outcome
    assert isinstance(error, StartupError)
    assert error.fatal, "who does not answer can't be told to leave"
    assert str(error).startswith("rank 1 of 3: no response before the start-up timeout")


def test_a_start_without_a_rank_that_has_not_responded() -> None:
    driver = Driver(3, tolerated=1, timeout=50.0)
    driver.tell(0, Kind.REGISTRATION, registration(0, 3))
    driver.tell(2, Kind.REGISTRATION, registration(2, 3, "b"))
    driver.coordinator.tick(100.5)
    assert driver.coordinator.outcome is None
    assert driver.coordinator.deadline == 150.5
    assert (1, Kind.DONE, 1) in driver.sent
    driver.sent.clear()
    driver.tell(1, Kind.REGISTRATION, registration(1, 3, failure=Failure(Problem("too late"), 2)))
    for rank in driver.coordinator.waiting_for:
        driver.tell(rank, Kind.LISTENING, Listening(5, 6))
    for rank in driver.coordinator.waiting_for:
        driver.tell(rank, Kind.REACHED, REACHED)
    driver.tell(0, Kind.ADDRESS, ("tls://10.0.0.0:5", None))
    for rank in driver.coordinator.waiting_for:
        driver.tell(rank, Kind.READY)
    cluster = driver.coordinator.outcome
    assert isinstance(cluster, Cluster)
    assert cluster.absent == (1,)
    assert {rank for rank, _, _ in driver.sent} == {0, 2}
    assert cluster.plan is not None
    assert [worker.rank for worker in cluster.plan.workers] == [0, 2]
    assert "rank 1 of 3 on ? has not responded within 50 s" in str(cluster.plan.warnings[0])


def test_a_start_without_a_rank_that_hangs_after_it_has_registered() -> None:
    driver = Driver(3, tolerated=1, timeout=50.0)
    for rank in range(3):
        driver.tell(rank, Kind.REGISTRATION, registration(rank, 3, "abc"[rank]))
    for rank in (0, 2):
        driver.tell(rank, Kind.LISTENING, Listening(5, 6))
    driver.coordinator.tick(100.5)
    driver.tell(1, Kind.LISTENING, Listening(5, 6))  # too late
    assert driver.coordinator.waiting_for == [0, 2]
    for kind, payload in ((Kind.LISTENING, Listening(5, 6)), (Kind.REACHED, REACHED)):
        for rank in (0, 2):
            driver.tell(rank, kind, payload)
    driver.tell(0, Kind.ADDRESS, ("tls://10.0.0.0:5", None))
    for rank in (0, 2):
        driver.tell(rank, Kind.READY)
    assert isinstance(driver.coordinator.outcome, Cluster)
    assert driver.coordinator.outcome.absent == (1,)


def test_a_start_without_a_rank_whose_workers_are_late() -> None:
    driver = Driver(2, tolerated=1)
    for rank in (0, 1):
        driver.tell(rank, Kind.REGISTRATION, registration(rank, 2))
    driver.tell(0, Kind.ADDRESS, ("tls://127.0.0.1:5", None))
    driver.tell(0, Kind.READY)
    driver.coordinator.tick(100.5)
    cluster = driver.coordinator.outcome
    assert isinstance(cluster, Cluster)
    assert cluster.plan is not None
    assert "rank 1 not ready before the start-up timeout" in str(cluster.plan.warnings[-1])
    assert len(cluster.plan.workers) == 2
    assert driver.sent[-1][:2] == (1, Kind.CLUSTER_UP)


@pytest.mark.parametrize(("come", "tolerated"), [([0], 1), ([1, 2], 2), ([0, 1], 0)])
def test_no_start_without_rank_0_or_too_many(come: list[int], tolerated: int) -> None:
    driver = Driver(3, tolerated=tolerated, timeout=50.0)
    for rank in come:
        driver.tell(rank, Kind.REGISTRATION, registration(rank, 3))
    driver.coordinator.tick(100.5)
    assert isinstance(driver.coordinator.outcome, StartupError)


def test_the_deadline_names_who_has_not_started_workers() -> None:
    driver = Driver(2)
    for rank in (0, 1):
        driver.tell(rank, Kind.REGISTRATION, registration(rank, 2, "ab"[rank]))
    driver.tell(0, Kind.ADDRESS, ("tls://127.0.0.1:5", None))
    driver.tell(0, Kind.READY)
    assert driver.coordinator.progress() == (1, 2, ["b"])
    driver.coordinator.tick(100.5)
    assert (
        "rank 1 of 2 on b: not ready before the start-up timeout (startup_timeout); last step: starting its workers. Fix:"
        in str(driver.coordinator.outcome)
    )


@pytest.mark.parametrize("size", [1, 2])
def test_the_deadline_names_them_all_where_nobody_has(size: int) -> None:
    driver = Driver(size)
    for rank in range(size):
        driver.tell(rank, Kind.REGISTRATION, registration(rank, size, "ab"[rank]))
    driver.tell(0, Kind.ADDRESS, ("tls://127.0.0.1:5", None))
    driver.coordinator.tick(100.5)
    whom = "rank 0 of 1 on a" if size == 1 else "ranks 0-1 of 2 on a, b"
    assert str(driver.coordinator.outcome).startswith(f"{whom}: not ready before the start-up timeout")


def last_step(driver: Driver) -> str:
    driver.coordinator.tick(100.5)
    return str(driver.coordinator.outcome)


def test_the_deadline_says_at_which_step_a_silent_rank_is() -> None:
    driver = Driver(2)
    driver.tell(1, Kind.STEP, "waiting for its agent to import Dask")
    driver.tell(1, Kind.STEP, "inspecting the GPUs (NVML)")
    driver.tell(0, Kind.REGISTRATION, registration(0, 2))
    assert last_step(driver).startswith(
        "rank 1 of 2: no response before the start-up timeout (startup_timeout); last step: inspecting the GPUs (NVML). Fix: "
    )


def test_the_last_step_of_a_rank_that_waits_in_the_reachability_test() -> None:
    driver = Driver(2)
    driver.register(apart=True)
    driver.tell(0, Kind.LISTENING, Listening(5, 6))
    text = "rank 1 of 2 on h1: not ready before the start-up timeout (startup_timeout); last step: listening for the other"
    assert last_step(driver).startswith(text)
    driver = proving(3)
    for rank in (0, 2):
        driver.tell(rank, Kind.REACHED, REACHED)
    text = "rank 1 of 3 on h1: not ready before the start-up timeout (startup_timeout); last step: connecting to the scheduler"
    assert last_step(driver).startswith(text)


def test_while_the_scheduler_starts_no_other_rank_is_named() -> None:
    driver = Driver(2)
    driver.register()
    text = "rank 0 of 2 on a: not ready before the start-up timeout (startup_timeout); last step: starting the scheduler. Fix: "
    assert last_step(driver).startswith(text)


def test_options_must_agree() -> None:
    driver = Driver(2)
    driver.tell(0, Kind.REGISTRATION, registration(0, 2))
    driver.tell(1, Kind.REGISTRATION, registration(1, 2, shared_options=(("layout", "exclusive"),)))
    with pytest.raises(
        InputError, match=r"layout is 'shared' on rank 0 \(a\) and 'exclusive' on rank 1 \(a\)"
    ):
        raise driver.coordinator.outcome  # type: ignore[misc]


def test_a_world_too_small_is_what_dask_mpi_users_catch() -> None:
    import dask_mpi

    driver = Driver(2, layout="exclusive")
    driver.register()
    assert isinstance(driver.coordinator.outcome, WorldTooSmallException)
    assert isinstance(driver.coordinator.outcome, dask_mpi.WorldTooSmallException)


def test_a_script_on_any_rank_counts_and_is_where_it_runs() -> None:
    for having, workers in (((), [1, 2]), ((1,), [2]), ((0, 1, 2), [2])):
        driver = Driver(3, layout="exclusive")
        for rank in range(3):
            driver.tell(rank, Kind.REGISTRATION, registration(rank, 3, has_client=rank in having))
        assert [worker.rank for worker in driver.coordinator.plan.workers] == workers  # type: ignore[union-attr]
    driver = Driver(2)
    for rank in (0, 1):
        driver.tell(rank, Kind.REGISTRATION, registration(rank, 2, has_client=rank == 1))
    with pytest.raises(
        InputError, match=r"rank 0 \(a\) is the client, but only rank 1 got .* Fix: .*--client-rank"
    ):
        raise driver.coordinator.outcome  # type: ignore[misc]


def test_joining_starts_no_scheduler() -> None:
    driver = Driver(1, target=Target("tls://10.0.0.9:5", {"key": "theirs"}))
    driver.register()
    assert driver.kinds() == [(0, Kind.START)]
    assert driver.sent[0][2].config == {"key": "theirs"}
    assert driver.sent[0][2].listen is None


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_a_running_scheduler_is_connected_to_first_if_its_protocol_allows_that(protocol: str) -> None:
    driver = Driver(1, target=Target(f"{protocol}://10.0.0.9:5"))
    driver.register()
    (sent,) = driver.sent
    assert sent[1] == (Kind.CONNECT if protocol == "tcp" else Kind.START)
    assert protocol != "tcp" or sent[2].scheduler == "10.0.0.9:5"


def test_a_report_is_bounded() -> None:
    driver = Driver(20)
    for rank in range(20):
        driver.tell(
            rank,
            Kind.REGISTRATION,
            registration(rank, 20, inventory=None, failure=Failure(Problem(f"disk {rank} is full"), 1)),
        )
    driver.coordinator.tick(1.0)
    text = str(driver.coordinator.outcome)
    assert "disk 5 is full; and 14 more failures" in text
    assert "disk 6" not in text


def crowded(size: int, **changes: Any) -> Driver:
    """A coordinator whose ranks have all been told to start."""
    driver = Driver(size, **changes)
    driver.register(apart=True)
    for rank in range(size):
        driver.tell(rank, Kind.LISTENING, Listening(5 if rank == 0 else 0, 6))
    for rank in range(size):
        driver.tell(rank, Kind.REACHED, REACHED)
    driver.tell(0, Kind.ADDRESS, ("tls://127.0.0.1:5", None))
    return driver


def proving(size: int) -> Driver:
    """A coordinator whose ranks, each on a host of its own, are about to connect to the scheduler's host."""
    driver = Driver(size)
    driver.register(apart=True)
    listens = [payload for _, _, payload in driver.sent]
    assert driver.kinds() == [(rank, Kind.LISTEN) for rank in range(size)]
    assert [listen.address for listen in listens] == [f"10.0.0.{rank}" for rank in range(size)]
    assert [listen.scheduler is not None for listen in listens] == [rank == 0 for rank in range(size)]
    for rank in range(size):
        assert len(driver.sent) == size, "all listen before any connects"
        driver.tell(rank, Kind.LISTENING, Listening(5 if rank == 0 else 0, 6))
    proofs = driver.sent[size:]
    assert [(rank, kind) for rank, kind, _ in proofs] == [(rank, Kind.CONNECT) for rank in range(size)]
    for rank, _, to in proofs:
        assert (to.scheduler, to.tokens) == ("10.0.0.0:5", listens[0].scheduler)
        peers = {(peer.host, peer.rank, peer.address, peer.port, peer.tokens) for peer in to.peers}
        assert peers == {
            (f"h{other}", other, f"10.0.0.{other}", 6, listens[other].workers)
            for other in range(size)
            if other != rank
        }
    return driver


def test_the_scheduler_starts_when_all_reach_its_host() -> None:
    driver = proving(3)
    for rank in (2, 0):
        driver.tell(rank, Kind.REACHED, REACHED)
    assert driver.kinds()[-1] == (2, Kind.CONNECT)
    driver.tell(1, Kind.REACHED, REACHED)
    assert driver.sent[-1] == (0, Kind.SCHEDULER, ("10.0.0.0", {"key": "secret"}, "", driver.facts))


def test_nodes_that_do_not_reach_each_other_are_named() -> None:
    """A shuffle would wait for them: nothing is started."""
    driver = proving(4)
    sent = len(driver.sent)
    driver.tell(0, Kind.REACHED, REACHED)
    driver.tell(2, Kind.REACHED, Reached(Reach(), (Lost("h3", "no answer within 5 s"),)))
    driver.tell(1, Kind.REACHED, REACHED)
    assert driver.coordinator.outcome is None
    driver.tell(3, Kind.REACHED, Reached(Reach(), (Lost("h2", "no answer within 5 s"),)))
    error = driver.coordinator.outcome
    assert isinstance(error, InputError)
    text = "no connection between nodes: from h2 to h3 (no answer within 5 s), from h3 to h2 (no answer within 5 s) (expected"
    assert str(error).startswith(text)
    assert "Fix: " in str(error)
    assert len(driver.sent) == sent


def test_nodes_without_workers_do_not_matter_but_for_the_schedulers() -> None:
    driver = Driver(4, layout="exclusive")
    for rank in range(4):  # h0: the scheduler; h1: the client; h2: both workers
        driver.tell(rank, Kind.REGISTRATION, registration(rank, 4, f"h{min(rank, 2)}"))
    listens = {rank: payload for rank, _, payload in driver.sent}
    assert {rank: listen.workers is not None for rank, listen in listens.items()} == {0: True, 2: True}
    for rank in (2, 0):
        driver.tell(rank, Kind.LISTENING, Listening(5, 6))
    connects = [payload for _, kind, payload in driver.sent if kind == Kind.CONNECT]
    assert [[peer.host for peer in to.peers] for to in connects] == [["h2"], [], ["h0"], []]


def test_a_node_that_can_not_listen_is_for_its_workers_to_report() -> None:
    driver = Driver(3)
    driver.register(apart=True)
    for rank in range(3):
        driver.tell(rank, Kind.LISTENING, Listening(5, 0 if rank == 1 else 6))
    connects = [payload for _, kind, payload in driver.sent if kind == Kind.CONNECT]
    assert [[peer.host for peer in to.peers] for to in connects] == [["h2"], ["h2", "h0"], ["h0"]]


def test_of_many_nodes_each_connects_to_some() -> None:
    driver = crowded(200)
    connects = [payload for _, kind, payload in driver.sent if kind == Kind.CONNECT]
    assert {len(to.peers) for to in connects} == {MOST_AT_START}


def test_all_that_do_not_reach_it_are_named() -> None:
    """Some are told at once that there is no way, others wait in vain for seconds."""
    driver = proving(4)
    driver.tell(0, Kind.REACHED, REACHED)
    driver.tell(1, Kind.REACHED, Reached(Reach("no way")), now=1.0)
    driver.tell(2, Kind.REACHED, REACHED)
    driver.coordinator.tick(6.0)
    assert driver.coordinator.outcome is None
    driver.tell(3, Kind.REACHED, Reached(Reach("no way")), now=6.1)
    driver.coordinator.tick(6.2)
    error = driver.coordinator.outcome
    assert isinstance(error, InputError)
    where = "ranks 1,3 of 4 on h1, h3: could not reach the scheduler's host at 10.0.0.0:5 (rank 0 on h0): no way. Fix: "
    assert str(error).startswith(where)
    assert not any(kind in (Kind.SCHEDULER, Kind.START) for _, kind, _ in driver.sent)


def test_a_rank_that_says_nothing_of_its_connection_is_not_waited_for() -> None:
    """Twice the timeout of a connection, and a second."""
    driver = proving(2)
    driver.tell(1, Kind.FAILED, Failure(Problem("no way"), 2), now=1.0)
    driver.coordinator.tick(12.0)
    assert driver.coordinator.outcome is None
    driver.coordinator.tick(12.1)
    assert isinstance(driver.coordinator.outcome, InputError)


def test_once_all_reach_it_failures_are_gathered_for_a_second() -> None:
    driver = proving(2)
    for rank in (0, 1):
        driver.tell(rank, Kind.REACHED, REACHED)
    driver.tell(1, Kind.FAILED, Failure(Problem("no disk"), 2), now=10.0)
    driver.coordinator.tick(11.0)
    assert driver.coordinator.outcome is None
    driver.coordinator.tick(11.1)
    assert isinstance(driver.coordinator.outcome, InputError)


def test_a_failure_stops_the_start() -> None:
    """What comes in afterwards starts nothing more."""
    driver = proving(2)
    driver.tell(0, Kind.FAILED, Failure(Problem("no disk"), 2))
    sent = len(driver.sent)
    for rank in (0, 1):
        driver.tell(rank, Kind.REACHED, REACHED)
    assert len(driver.sent) == sent
    driver = Driver(1)
    driver.register()
    driver.tell(0, Kind.FAILED, Failure(Problem("no disk"), 2))
    driver.tell(0, Kind.READY)
    assert driver.coordinator.outcome is None


def test_progress_counts_workers_of_ranks_that_are_ready() -> None:
    driver = Driver(2)
    assert driver.coordinator.progress() == (0, None, ["", ""])
    driver.register()
    assert driver.coordinator.progress() == (0, 2, ["a"])  # the scheduler's
    driver.tell(0, Kind.ADDRESS, ("tls://127.0.0.1:5", None))
    assert driver.coordinator.progress() == (0, 2, ["a", "a"])
    driver.tell(1, Kind.READY)
    assert driver.coordinator.progress() == (1, 2, ["a"])


def test_a_port_that_is_taken_is_the_schedulers_to_tell() -> None:
    driver = Driver(2)
    driver.register(apart=True)
    for rank in range(2):
        driver.tell(rank, Kind.LISTENING, Listening(0, 6))
    assert driver.kinds()[-1] == (0, Kind.SCHEDULER)


def test_nobody_connects_on_one_host() -> None:
    driver = Driver(2)
    driver.register()
    assert driver.kinds() == [(0, Kind.SCHEDULER)]


def test_many_workers_are_given_time() -> None:
    driver = crowded(700, patient=True)
    (scheduler,) = [payload for _, kind, payload in driver.sent if kind == Kind.SCHEDULER]
    starts = [payload for _, kind, payload in driver.sent if kind == Kind.START]
    for config in (scheduler[1], starts[0].config, starts[-1].config):
        assert config == {
            "key": "secret",
            "distributed.comm.timeouts.connect": "35s",
            "distributed.comm.socket-backlog": 2800,
        }
    delays = [start.delay for start in starts]
    assert delays[0] == 0.0
    assert delays == sorted(set(delays))
    assert starts[0].limit == 70.0


def test_a_deadline_that_nobody_said_grows_with_the_workers() -> None:
    patient, strict = crowded(1200, patient=True), crowded(1200)
    for driver in (patient, strict):
        driver.coordinator.tick(110.0)
    assert patient.coordinator.outcome is None
    assert isinstance(strict.coordinator.outcome, StartupError)
    patient.coordinator.tick(122.0)
    assert isinstance(patient.coordinator.outcome, StartupError)


def test_no_rank_is_sent_what_belongs_to_another_host() -> None:
    import pickle

    sizes = []
    for size in (10, 100):
        driver = crowded(size)
        starts = [payload for _, kind, payload in driver.sent if kind == Kind.START]
        sizes.append(max(len(pickle.dumps(start)) for start in starts))
    assert sizes[1] < sizes[0] + 50


def bare(host: str = "a", failure: Failure | None = None, **options: Any) -> Registration:
    return Registration(host, None, (), None, shared_options(Options(**options)), failure)


def test_every_shared_option_is_compared() -> None:
    others = {
        "layout": "exclusive", "protocol": "tcp", "worker_ucx": "yes", "scheduler": False, "scheduler_rank": 1, "client_rank": 1,
        "cpu_workers": 3, "gpus_per_worker": 2, "require_idle_gpus": True, "name": "x", "nthreads": 7,
        "default_workers": "gpu", "tolerate_lost_ranks": 1,
    }  # fmt: skip
    assert set(others) == set(SHARED)
    check_agreement([bare(), bare("b")])
    for name, value in others.items():
        words = rf"option {re.escape(SHARED[name])} is .* on rank 0 \(a\) and {re.escape(repr(value))} on rank 1 \(b\)"
        with pytest.raises(InputError, match=words):
            check_agreement([bare(), bare("b", **{name: value})])


def test_options_of_one_rank_alone_may_differ() -> None:
    check_agreement([bare(), bare(local_directory="/fast", log_level="debug")])


@pytest.mark.parametrize(("having", "client"), [((), 0), ((0,), 0), ((0, 1), 1)])
def test_the_client_has_what_to_run(having: tuple[int, ...], client: int) -> None:
    check_client(
        [Registration("a", None, (), None, (), has_client=rank in having) for rank in (0, 1)], client
    )


def test_a_client_without_a_script_is_refused() -> None:
    found = [Registration("a", None, (), None, (), has_client=rank > 0) for rank in range(3)]
    with pytest.raises(InputError, match=r"rank 0 \(a\) is the client, but only ranks 1-2 got"):
        check_client(found, 0)


def test_failures_are_gathered_for_a_while() -> None:
    coordinator = FailureCoordinator(3, deadline=100.0, hosts={2: "c"})
    assert coordinator.waiting_for == [0, 1, 2]
    assert coordinator.handle(Event(0, Kind.REGISTRATION, bare("a", Failure(Problem("bad"), 2))), 5.0)
    assert coordinator.progress() == (0, None, ["", "c"])
    coordinator.tick(5.0 + GATHER_FAILURES)
    assert coordinator.outcome is None
    assert coordinator.handle(Event(1, Kind.FAILED, Failure(Problem("SIGTERM"), 143)), 5.5)
    coordinator.tick(5.0 + GATHER_FAILURES + 0.1)
    assert str(coordinator.outcome) == "rank 0 of 3 on a: bad; rank 1 of 3: SIGTERM"
    assert isinstance(coordinator.outcome, StartupError)
    assert not coordinator.outcome.fatal


def test_nobody_is_waited_for_when_all_have_failed() -> None:
    coordinator = FailureCoordinator(2, deadline=100.0)
    for rank in (0, 1):
        coordinator.handle(Event(rank, Kind.REGISTRATION, bare("a", Failure(Problem("bad"), 2))), 5.0)
    coordinator.tick(5.0)
    assert str(coordinator.outcome) == "bad"
    assert isinstance(coordinator.outcome, InputError)


def test_the_first_failure_of_a_rank_counts() -> None:
    coordinator = FailureCoordinator(1, deadline=100.0)
    coordinator.handle(Event(0, Kind.REGISTRATION, bare("a", Failure(Problem("bad"), 2))), 1.0)
    coordinator.handle(Event(0, Kind.FAILED, Failure(Problem("SIGTERM"), 143)), 1.0)
    coordinator.tick(1.0)
    assert str(coordinator.outcome) == "bad"


@pytest.mark.parametrize("kind", [Kind.READY, Kind.CLUSTER_UP, Kind.FAIL, "prepared"])
def test_what_is_not_for_a_rank_0_that_has_failed(kind: str) -> None:
    assert not FailureCoordinator(1, deadline=1.0).handle(Event(0, kind, None), 0.0)
    assert not FailureCoordinator(1, deadline=1.0).handle(Event(None, Kind.FAILED, None), 0.0)
