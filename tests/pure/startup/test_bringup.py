"""The start of a rank up to the plan, as `plan` has it; with MPI: tests/mpi/test_main_job.py, tests/faults/test_starts.py."""

from __future__ import annotations

import itertools
import socket
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest

from dask_gpu_mpi.errors import (
    InputError,
    OptionError,
    Problem,
    StartupError,
)
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from dask_gpu_mpi.startup import bringup, start_context
from dask_gpu_mpi.startup.bringup import await_agent, inspect, make_coordinator, plan_of_allocation
from dask_gpu_mpi.startup.coordinator import shared_options
from dask_gpu_mpi.startup.messages import PAYLOADS, Kind, Registration
from dask_gpu_mpi.startup.start_context import StartContext
from support.mocks.inputs import rank as rank_inventory
from support.mocks.mailboxes import MockMailbox
from support.mocks.starts import start_context as context

CPUS = Options(worker_class="distributed.Nanny", startup_timeout=20.0)


class Process:
    """What `plan` finds in its process: MPI, and a process that asks NVML, which has this answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0, answer: Any = ()) -> None:
        self.mailbox: Any = MockMailbox(rank, payloads=PAYLOADS)
        self.deadlines: list[float] = []
        self.look = Mock(gpus=Mock(side_effect=itertools.repeat(answer)))
        mpi = SimpleNamespace(COMM_WORLD=None)
        monkeypatch.setattr(bringup, "_cross_check", lambda *_: None)
        monkeypatch.setattr(start_context, "load_mpi", lambda *_: mpi)
        monkeypatch.setattr(start_context, "Mailbox", self._mailbox)
        monkeypatch.setattr(bringup, "start_own_look", lambda: self.look)

    def _mailbox(self, world: Any, host: str, deadline: float, payloads: Any, **_: Any) -> Any:
        assert self.mailbox.payloads == payloads
        self.deadlines.append(deadline - time.monotonic())
        return self.mailbox


def test_rank_0_plans_from_all_inventories(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    other = rank_inventory(1, 2, host="h1", boot_id="h1")
    registration = Registration("h1", other, (), None, shared_options(CPUS))
    process.mailbox.mails.append(Event(1, Kind.REGISTRATION, registration))
    made = plan_of_allocation(CPUS)
    assert made is not None
    assert [(worker.rank, worker.host) for worker in made.workers] == [(0, socket.gethostname()), (1, "h1")]
    assert process.mailbox.sent[-1] == (1, Kind.DONE, 0)
    assert process.look.mock_calls == []  # nobody looks for GPUs
    assert 15 < process.deadlines[0] <= 20


@pytest.mark.parametrize("options", [OptionError("--nthreads: invalid"), CPUS])
def test_options_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch, options: Options | InputError) -> None:
    """They can't be read, or an agent would refuse them: the one report has all of that."""

    def refuse(options: Options) -> None:
        raise OptionError("no_such")

    process = Process(monkeypatch, rank=1)
    process.mailbox.on_send = lambda *sent: process.mailbox.mails.append(Event(0, Kind.FAIL, sent[2]))
    with pytest.raises(OptionError) as caught:
        plan_of_allocation(options, check=refuse)
    assert caught.value.reported
    assert process.look.mock_calls == []
    limit = 60 if isinstance(options, InputError) else 20
    assert limit - 1 < process.deadlines[0] <= limit


@pytest.mark.parametrize("error", [StartupError("NVML failed"), InputError("no such GPU")])
def test_gpus_that_do_not_work(monkeypatch: pytest.MonkeyPatch, error: InputError | StartupError) -> None:
    """NVML is asked however little time is left."""
    process = Process(monkeypatch, answer=error)
    process.mailbox.size, process.mailbox.hosts = 1, {0: "h"}
    said = f"rank 0 of 1 on {socket.gethostname()}: {error.problem.found}"
    with pytest.raises(type(error), match=said):
        plan_of_allocation(Options(startup_timeout=1.0))
    assert process.look.mock_calls == [call.gpus(ANY), call.close()]


# -- from options to what the coordinator needs


@pytest.mark.parametrize("protocol", Protocol)
def test_only_a_scheduler_with_tls_needs_credentials(protocol: Protocol) -> None:
    """A job that attaches, and its names: tests/mpi/test_joining.py."""
    sent: list[Any] = []
    channels: Any = SimpleNamespace(
        mailbox=SimpleNamespace(hosts={0: "h"}), send=lambda *message: sent.append(message)
    )
    coordinator = make_coordinator(Options(protocol=protocol), context(), channels)
    (found,) = hypothetical_job(1, 1, 0)
    interfaces = (Interface("lo", "127.0.0.1", "127.0.0.0/8"),)
    coordinator.handle(Event(0, Kind.REGISTRATION, Registration("h", found, interfaces, None, ())), 1.0)
    ((_, kind, settings),) = sent
    assert kind == Kind.SCHEDULER
    assert ("distributed.comm.tls.ca-file" in settings.config) is (protocol is Protocol.TLS)


# -- what a rank waits for before it takes its inventory


def agent_of(*batches: list[tuple[Any, ...]], gpus: Any = (), looks: bool = True) -> Any:
    """One batch of answers for each look."""
    left = list(batches)
    made = SimpleNamespace(batches=left, lost=False, looks=looks, exit_text=lambda: "exit code 9")
    made.events = lambda timeout: left.pop(0) if left else []
    made.look = SimpleNamespace(gpus=Mock(side_effect=itertools.repeat(gpus)))  # raised, if it is an error
    return made


def test_the_agent_is_waited_for() -> None:
    agent = agent_of([], [("early", 1)], [("prepared", "/scratch")], [("later",)])
    assert await_agent(agent, context()) == "/scratch"
    assert agent.batches == [[("later",)]]
    agent = agent_of([("failed", Problem("no such class"), 2, "OptionError")])
    with pytest.raises(OptionError, match="no such class") as caught:
        await_agent(agent, context())
    assert not caught.value.reported


def test_an_agent_that_ends_or_hangs_and_a_signal() -> None:
    agent = agent_of()
    with pytest.raises(StartupError, match="did not finish its imports"):
        await_agent(agent, context(seconds=0.05))
    with pytest.raises(StartupError, match="SIGINT came while the cluster started"):
        await_agent(agent, context(signal=2))
    agent.lost = True
    with pytest.raises(StartupError, match=r"ended before it was ready \(exit code 9\)"):
        await_agent(agent, context())


def take(around: StartContext, gpus: Any = (), **options: Any) -> Any:
    channels: Any = SimpleNamespace(rank=1, size=2, begin_step=lambda step: None)
    agent = agent_of([("prepared", "/scratch")], gpus=gpus, looks="worker_class" not in options)
    return inspect(Options(**options), agent, around, channels)


def test_nvml_that_fails_or_hangs_is_reported_before_the_deadline() -> None:
    with pytest.raises(InputError, match="^rank 1 of 2 on h: no such GPU$"):
        take(context(), InputError("no such GPU"))
    with pytest.raises(StartupError, match="^rank 1 of 2 on h: NVML"):
        take(context(seconds=1.0), None, startup_timeout=20.0)
    with pytest.raises(StartupError, match="SIGTERM"):
        take(context(signal=15), None)


def test_scratch_that_everyone_may_replace_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringup, "exposed_folder", lambda path: f"/shared of {path}")
    warning = str(take(context(), worker_class="distributed.Nanny").warnings[0])
    assert "host h: every user of the node may replace the workers' files in '/shared of /'" in warning
    assert ". Fix: chmod +t /shared of /, or " in warning
