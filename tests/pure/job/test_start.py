"""A rank before it enters the job, one cluster at a time, and what it changes in its process.

The start itself: tests/mpi, tests/faults/test_starts.py.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import distributed
import pytest

from dask_gpu_mpi import connect
from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.signals import LOST, is_ours
from dask_gpu_mpi.base.timeouts import WITHOUT_OPTIONS
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job import session as session_module
from dask_gpu_mpi.job import start as module
from dask_gpu_mpi.job.child_processes import RANK_PID
from dask_gpu_mpi.job.session import State
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.options.model import Options
from support.mocks.inputs import plan_of, worker_plan
from support.mocks.launchers import SAMPLES


@pytest.fixture(autouse=True)
def _handlers_and_the_hook_are_given_back(handlers: None) -> Iterator[None]:
    yield
    outcome.retire()


class Rank:
    """A rank whose agent and world are made up, and that enters the job at once, with this outcome."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Any = 0) -> None:
        self.outcome = outcome
        #: What it enters with, and the world of that.
        self.environ: Any = None
        self.seconds = 0.0
        self.options: Options | None = None
        self.failure: Failure | None = None
        self.world: Any = None
        self.agents: list[Any] = []
        #: Worlds behind a child process or `launch`, and whether that may be a fork.
        self.children: list[World] = []
        self.forks = False
        monkeypatch.setattr(module, "_member", None)
        monkeypatch.setattr(module, "_has_met", False)
        monkeypatch.setattr(module, "AgentProcess", self.agent)
        monkeypatch.setattr(module, "begin_agent", lambda agent, options, environ: agent)
        monkeypatch.setattr("dask_gpu_mpi.job.entering.Entering", self.entering)
        monkeypatch.setattr("dask_gpu_mpi.mpi.world.world_of", self.world_of)
        monkeypatch.setattr("dask_gpu_mpi.mpi.world.own_world", self.own_world)
        for name in (RANK_PID, *(name for sample in SAMPLES.values() for name in sample)):
            monkeypatch.delenv(name, raising=False)  # given back afterwards
            monkeypatch.setenv(name, "x")
            monkeypatch.delenv(name)

    def agent(self, environ: Any) -> Any:
        made = Mock(environ=environ)
        self.agents.append(made)
        return made

    def world_of(self, environ: Any, path: Any, *, forks: bool) -> World:
        assert self.agents == []  # whose socket a fork would have
        self.forks = forks
        self.children.append(World())
        return self.children[-1]

    def own_world(self, comm: Any, environ: Any, host: str, *, starts: bool) -> Any:
        return comm or ("own" if starts or sys.modules.get("mpi4py.MPI") is LOADED else None)

    def entering(self, *given: Any) -> Any:
        environ, _, _, deadline, world, options, agent, failure, check = given
        self.environ, self.options, self.failure = environ, options, failure
        self.seconds = deadline - time.monotonic()
        self.world = world()
        assert (agent is None) is (failure is not None)
        if failure is not None:
            raise failure.error(reported=False)
        check(0)
        return SimpleNamespace(run=lambda: self.outcome)


#: The module ``mpi4py.MPI`` of a script that has imported it; other tests of this process may have imported the real one.
LOADED: Any = object()
CPUS = Options(worker_class="distributed.Nanny", startup_timeout=20.0)


def test_the_start_up_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan_of(worker_plan())
    rank = Rank(monkeypatch, made)
    collects: list[bool] = []

    def read_options() -> Options:
        collects.append(gc.isenabled())
        return CPUS

    assert module.plan_of_allocation(read_options) is made
    assert [*collects, gc.isenabled()] == [False, True]
    ((agent,), (child,)) = rank.agents, rank.children
    assert rank.forks
    rank.agents.clear()
    assert rank.world is child
    (configuration,) = agent.configure.call_args.args
    assert (configuration.options, configuration.plan_only) == (CPUS, True)
    assert rank.seconds == pytest.approx(20.0, abs=5.0)
    rank.outcome = 0  # on another rank
    assert module.plan_of_allocation(lambda: CPUS) is None


@pytest.mark.parametrize("path", ["", None])
def test_a_process_without_a_path_of_python(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", path)
    with pytest.raises(InputError, match=r"sys\.executable is .*set sys\.executable before initialize"):
        module.plan_of_allocation(lambda: CPUS)


@pytest.mark.parametrize("where", ["options", "agent", "another agent"])
def test_what_goes_wrong_before_a_rank_enters_is_its_failure(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent is ended, and it has a minute to meet the others, since its own limit may be unknown."""

    def fails(*_: Any) -> Any:
        if where != "options":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        raise InputError("no such option")

    rank = Rank(monkeypatch)
    if where == "agent":
        monkeypatch.setattr(module, "AgentProcess", fails)
    elif where == "another agent":  # since Dask's configuration sets variables of it
        monkeypatch.setattr(module, "begin_agent", fails)
    with pytest.raises(InputError if where == "options" else StartupError) as caught:
        module.plan_of_allocation(fails if where == "options" else lambda: CPUS)
    assert rank.failure is not None
    assert str(caught.value) == str(rank.failure.problem)
    assert [agent.close.called for agent in rank.agents] == [True] * (where != "agent")
    assert rank.seconds == pytest.approx(WITHOUT_OPTIONS, abs=5.0)
    if where != "options":
        assert "could not start the agent of this rank (Too many open files). Fix: " in str(caught.value)


@pytest.mark.parametrize("mpi", ["child", "comm", "goes on", "imported"])
def test_the_launchers_variables_are_gone_unless_the_script_is_an_mpi_process(
    mpi: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI of the script, or of its children, would join the job as this rank; the job's variables stay."""
    rank = Rank(
        monkeypatch,
        SimpleNamespace(rank=1, host="h", is_client=False, environ={}, world=World(), agent=None, line=None),
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", LOADED)
    if mpi != "imported":
        monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    variables = SAMPLES["srun"] | {"PMI_FD": "9"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    comm: Any = "the user's" if mpi == "comm" else None
    member, session = module.start(lambda: CPUS, comm=comm, leave_open=mpi == "goes on")
    member.signals.give_back()
    assert session is None
    assert len(rank.children) == (mpi == "child")
    assert not rank.forks  # the user's code has run here
    assert rank.world == {"child": rank.children and rank.children[0], "comm": comm}.get(mpi, "own")
    assert rank.environ.items() >= variables.items()
    assert ("PMI_FD" in os.environ) is ("SLURM_PROCID" in os.environ) is (mpi != "child")
    assert os.environ["SLURM_JOB_ID"] == "7"
    with pytest.raises(InputError, match="called a second time in this job"):
        module.start(lambda: CPUS)


def test_the_scripts_rank_checks_its_report_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    with pytest.raises(InputError, match="report"):
        module.start(lambda: replace(CPUS, report="report.pdf"))
    assert [agent.close.called for agent in rank.agents] == [True]


def test_sigterm_is_an_exit_unless_the_script_handles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_script_cluster", None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module.prepare_process()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    signal.raise_signal(signal.SIGTERM)  # Slurm's second
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(LOST, lambda *_: None)
    module.prepare_process()
    module.handle_loss()
    assert not is_ours(signal.SIGTERM)
    assert not is_ours(LOST)


@pytest.mark.parametrize("lost", [None, "the scheduler ended"])
def test_the_signal_of_a_loss(lost: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's has no effect, as by default."""
    raised: list[int] = []
    member = SimpleNamespace(ending=SimpleNamespace(lost=lost))
    session = SimpleNamespace(member=member, state=State.OPEN, interrupt=lambda *got: raised.append(got[0]))
    monkeypatch.setattr(session_module, "_script_cluster", session)
    monkeypatch.setattr(outcome, "_noted", None)
    module.handle_loss()
    with pytest.raises(SystemExit) if lost else contextlib.nullcontext():
        signal.raise_signal(LOST)
    assert raised == [LOST] * bool(lost)
    module.handle_loss()  # of a second cluster
    assert is_ours(LOST)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("where", ["hook", "run_script"])
def test_a_signal_while_the_error_of_the_script_is_reported(where: str) -> None:
    """The script has ended by it, with its exit code."""

    class Failing(Exception):
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGTERM)
            return "no"

    module.prepare_process()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module.handle_signal(signal.SIGTERM)
    if where == "hook":
        sys.excepthook(Failing, Failing("no"), None)
    else:
        with outcome.reporting():
            str(Failing())
    assert not outcome.is_reporting()
    module.handle_signal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("reason", "raised"),
    [
        ("certificate has expired", "connect: the job's certificate has expired by the clock of "),
        (
            "unable to get local issuer certificate",
            "^connect: no answer from tls://10.0.0.1:8786, .*TLS certificate does not match",
        ),
    ],
)
def test_connect_names_a_clock_that_is_wrong(
    reason: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("TLS certificate does not match.") from ssl.SSLError(reason)

    monkeypatch.setattr(distributed, "Client", refused)
    file = tmp_path / "scheduler.json"
    config = {"distributed.comm.tls.ca-file": "PEM"}
    file.write_text(json.dumps({"address": "tls://10.0.0.1:8786", "dask-gpu-mpi": {"config": config}}))
    with pytest.raises((InputError, OSError), match=raised):
        connect(file)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_connect_waits_for_the_file_unless_that_would_block_the_clients_loop(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(
        "dask_gpu_mpi.network.scheduler_file.wait_for_scheduler_file", lambda *given: waits.append(given)
    )
    with pytest.raises(InputError):
        connect("/nowhere/scheduler.json", timeout=5, asynchronous=asynchronous)
    assert waits == [("/nowhere/scheduler.json", 5)] * (not asynchronous)


def test_a_second_try_after_a_start_that_has_failed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher lets its ranks meet once."""
    monkeypatch.setattr(module, "_has_met", True)
    for name, value in (SAMPLES["srun"] | {"PMI_FD": "9"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="called again after a start that has failed"):
        module.start(lambda: CPUS)
