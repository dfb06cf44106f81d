"""The start up to the plan, as `plan` has it; with MPI: tests/mpi/test_main_job.py, tests/faults/test_starts.py."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.errors import InputError, LauncherError, OptionError, Problem, StartupError
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.mpi.mailbox import Mail
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from dask_gpu_mpi.startup import bringup, inspection, start_context
from dask_gpu_mpi.startup.bringup import Preparation, make_job, plan_of_allocation, prepare_job
from dask_gpu_mpi.startup.coordinator import Job, shared_options
from dask_gpu_mpi.startup.messages import PAYLOADS, Kind, Registration
from support.mocks.preflights import MockMailbox, gpu, observed

CPUS = Options(worker_class="distributed.Nanny", startup_timeout=20.0)


def inventory(rank: int, **more: Any) -> Inventory:
    found = observed(0, gpus=0).inventory
    assert found is not None
    return replace(found, rank=rank, host=f"h{rank}", boot_id=f"h{rank}", **more)


def registration(rank: int, failure: Failure | None = None, **more: Any) -> Registration:
    found = None if failure else inventory(rank, **more)
    return Registration(f"h{rank}", found, (), None, shared_options(CPUS), failure)


class Look:
    """What the process that asks NVML answers."""

    def __init__(self) -> None:
        self.answer: Any = (gpu("h", 0),)
        self.seconds: list[float] = []
        self.closed = False

    def gpus(self, seconds: float) -> Any:
        self.seconds.append(seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


class Process:
    """What `plan` finds in its process: MPI, its launcher, and NVML."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.mailbox: Any = MockMailbox(rank, payloads=PAYLOADS)
        self.look = Look()
        self.wrong: LauncherError | None = None
        self.deadlines: list[float] = []
        self.codes: list[int] = []
        mpi = SimpleNamespace(COMM_WORLD=None, Get_library_version=lambda: "Open MPI")
        monkeypatch.setattr(bringup, "load_mpi", lambda *_: mpi)
        monkeypatch.setattr(start_context, "load_mpi", lambda *_: mpi)
        monkeypatch.setattr(start_context, "Mailbox", self._mailbox)
        monkeypatch.setattr(start_context, "abort", self.codes.append)
        monkeypatch.setattr(bringup.launcher_check, "cross_check", self._cross_check)
        monkeypatch.setattr(bringup, "start_own_look", lambda: self.look)

    def _mailbox(self, world: Any, host: str, deadline: float, payloads: Any, **_: Any) -> Any:
        assert self.mailbox.payloads == payloads
        self.deadlines.append(deadline - time.monotonic())
        return self.mailbox

    def _cross_check(self, *_: Any, **__: Any) -> None:
        if self.wrong is not None:
            raise self.wrong

    def sent(self, kind: str) -> list[tuple[int, Any]]:
        return [(rank, payload) for rank, sent, payload in self.mailbox.sent if sent == kind]


def test_rank_0_plans_from_all_inventories(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.mailbox.mails.append(Mail(1, Kind.REGISTRATION, registration(1)))
    made = plan_of_allocation(CPUS)
    assert made is not None
    assert [(worker.rank, worker.host) for worker in made.workers] == [(0, socket.gethostname()), (1, "h1")]
    assert process.sent(Kind.DONE) == [(1, 0)]
    assert process.look.seconds == []  # nobody looks for GPUs
    assert 15 < process.deadlines[0] <= 20


@pytest.mark.parametrize("options", [CPUS, Options()])
def test_only_ranks_with_gpu_workers_look_for_gpus(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    process = Process(monkeypatch)
    process.mailbox.size = 1
    asked: list[Any] = []

    def take_inventory(*_: Any, look_for_gpus: bool, seen: Any, **__: Any) -> Inventory:
        asked.append((look_for_gpus, seen))
        return inventory(0, world_size=1)

    monkeypatch.setattr(inspection, "take_inventory", take_inventory)
    plan_of_allocation(options)
    assert asked == [(False, None) if options is CPUS else (True, (gpu("h", 0),))]


def test_other_ranks_wait_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, rank=1)
    process.mailbox.on_send = lambda *_: process.mailbox.mails.append(Mail(0, Kind.DONE, 0))
    assert plan_of_allocation(Options(startup_timeout=20.0)) is None
    ((to, sent),) = process.sent(Kind.REGISTRATION)
    found = sent.inventory
    assert (to, sent.host, found.rank, found.world_size) == (0, socket.gethostname(), 1, 2)
    assert [one.uuid for one in found.gpus] == ["GPU-h-0"]
    assert process.look.closed


def test_failures_of_ranks_are_one_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = Process(monkeypatch)
    process.mailbox.mails.append(Mail(1, Kind.REGISTRATION, registration(1, Failure(Problem("no GPU"), 2))))
    with pytest.raises(InputError, match="^rank 1 of 2 on h1: no GPU$") as caught:
        plan_of_allocation(CPUS)
    assert caught.value.reported
    assert capsys.readouterr().err == "dask_gpu_mpi: error: rank 1 of 2 on h1: no GPU\n"
    assert process.sent(Kind.FAIL) == [(-1, Failure(Problem("no GPU", where="rank 1 of 2 on h1"), 2))]
    assert process.sent(Kind.DONE) == []


def refuse(options: Options) -> None:
    if options.worker_options:
        raise OptionError("no_such")


@pytest.mark.parametrize(
    "options", [OptionError("--nthreads: invalid"), replace(CPUS, worker_options={"no_such": 1})]
)
def test_options_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch, options: Options | InputError) -> None:
    process = Process(monkeypatch, rank=1)
    process.mailbox.on_send = lambda *sent: process.mailbox.mails.append(Mail(0, Kind.FAIL, sent[2].failure))
    with pytest.raises(OptionError) as caught:
        plan_of_allocation(options, check=refuse)
    assert caught.value.reported
    assert process.look.seconds == []
    if isinstance(options, InputError):
        assert 59 < process.deadlines[0] <= 60


def test_launcher_that_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.wrong = LauncherError("rank 0 of 4 on h0: singleton")
    process.mailbox.size = 1
    with pytest.raises(LauncherError, match="singleton"):
        plan_of_allocation(CPUS)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (StartupError("NVML failed"), "NVML failed"),
        (InputError("no such GPU"), "no such GPU"),
    ],
)
def test_gpus_that_can_not_be_had(monkeypatch: pytest.MonkeyPatch, answer: Exception, says: str) -> None:
    process = Process(monkeypatch)
    process.look.answer = answer
    process.mailbox.size = 1
    with pytest.raises(
        (InputError, StartupError), match=f"^rank 0 of 1 on {socket.gethostname()}: {says}"
    ) as caught:
        plan_of_allocation(Options())
    assert isinstance(caught.value, type(answer))
    assert process.look.closed


def test_nvml_is_asked_however_little_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.mailbox.size = 1
    process.look.answer = StartupError("NVML failed")
    with pytest.raises(StartupError):
        plan_of_allocation(Options(startup_timeout=1.0))
    assert len(process.look.seconds) == 1


def test_rank_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.mailbox.size = 4
    process.mailbox.mails.append(Mail(1, Kind.REGISTRATION, registration(1)))
    process.mailbox.hosts = {2: "h2"}
    with pytest.raises(StartupError, match="^ranks 2-3 of 4 on h2: no response before the start-up timeout"):
        plan_of_allocation(replace(CPUS, startup_timeout=0.3))
    assert process.codes == [1]  # a rank that is stopped can't be sent the report


def test_rank_0_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    Process(monkeypatch, rank=1)
    hasty = partial(bringup.StartContext, patience=start_context.Patience(others=0.2))
    monkeypatch.setattr(bringup, "StartContext", hasty)
    begun = time.monotonic()
    with pytest.raises(StartupError, match="^rank 0: no response before the start-up timeout"):
        plan_of_allocation(replace(CPUS, startup_timeout=0.1))
    assert time.monotonic() - begun >= 0.3


def test_ranks_with_different_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the start would: its plan is that of rank 0's options."""
    process = Process(monkeypatch)
    process.mailbox.mails.append(Mail(1, Kind.REGISTRATION, registration(1)))
    with pytest.raises(InputError, match="option nthreads is 3 on rank 0 .* and None on rank 1"):
        plan_of_allocation(replace(CPUS, nthreads=3))


# -- from options to what the coordinator needs


def job(prepared: dict[str, Any] | None = None, **options: Any) -> Job:
    preparation = Preparation(frozenset({"a.key"}), prepared)
    return make_job(Options(**options), preparation, Timeline("rank"))


@pytest.mark.parametrize(
    ("options", "has"),
    [
        ({"protocol": Protocol.TLS}, True),
        ({"protocol": Protocol.TCP}, False),
        ({"protocol": Protocol.TLS, "scheduler": False}, False),
    ],
)
def test_only_a_scheduler_with_tls_needs_credentials(options: dict[str, Any], has: bool) -> None:
    prepared = prepare_job(Options(**options), {})
    assert (prepared.credentials is not None) is has
    assert "distributed.comm.tls" not in repr(prepared)


def test_a_cluster_of_our_own() -> None:
    made = job({"key": "secret"}, protocol=Protocol.TLS, cpu_workers=1, name="n")
    assert made.credentials() == {"key": "secret"}
    assert (made.protocol, made.target, made.configured) == ("tls", None, {"a.key"})
    plan = made.plan(hypothetical_job(1, 2, 0), True, {})
    assert all(str(worker.name).startswith("n-") for worker in plan.workers)


def test_ucx_needs_no_credentials() -> None:
    assert "key" not in job(protocol=Protocol.UCX).credentials()
    assert job(protocol=Protocol.TCP).credentials() == {}


def test_only_a_deadline_that_nobody_set_may_grow() -> None:
    assert job().patient
    assert not job(startup_timeout=60.0, explicit=frozenset({"startup_timeout"})).patient


def test_workers_that_attach_have_names_of_their_own() -> None:
    made = job(scheduler=False, scheduler_address="tcp://10.0.0.9:5", protocol=Protocol.TCP)
    assert made.target is not None
    assert made.target.address == "tcp://10.0.0.9:5"
    plan = made.plan(hypothetical_job(1, 1, 0), True, {})
    assert all(str(worker.name).startswith("join-") for worker in plan.workers)


def test_what_can_not_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        job(scheduler=False, scheduler_file=str(tmp_path / "none.json"))
