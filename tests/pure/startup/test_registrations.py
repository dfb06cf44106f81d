"""Whether all ranks have the same options, and something to run where the client is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.channels import Event
from dask_gpu_mpi.startup.messages import Kind, Registration
from dask_gpu_mpi.startup.registrations import (
    GATHER_FAILURES,
    SHARED,
    FailureCoordinator,
    check_agreement,
    check_client,
    shared_options,
)


def registration(host: str = "a", failure: Failure | None = None, **options: Any) -> Registration:
    return Registration(host, None, (), None, shared_options(Options(**options)), failure)


def test_every_shared_option_is_compared() -> None:
    others = {
        "layout": "exclusive", "protocol": "tcp", "worker_ucx": "yes", "scheduler": False, "scheduler_rank": 1, "client_rank": 1,
        "cpu_workers": 3, "gpus_per_worker": 2, "require_idle_gpus": True, "name": "x", "nthreads": 7,
        "default_workers": "gpu",
    }  # fmt: skip
    assert set(others) == set(SHARED)
    check_agreement([registration(), registration("b")])
    for name, value in others.items():
        words = rf"option {re.escape(SHARED[name])} is .* on rank 0 \(a\) and {re.escape(repr(value))} on rank 1 \(b\)"
        with pytest.raises(InputError, match=words):
            check_agreement([registration(), registration("b", **{name: value})])


def test_options_of_one_rank_alone_may_differ() -> None:
    check_agreement([registration(), registration(local_directory="/fast", log_level="debug")])


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
    assert coordinator.handle(Event(0, Kind.REGISTRATION, registration("a", Failure("bad", 2))), 5.0)
    assert coordinator.progress() == (0, None, ["", "c"])
    coordinator.tick(5.0 + GATHER_FAILURES)
    assert coordinator.outcome is None
    assert coordinator.handle(Event(1, Kind.FAILED, Failure("SIGTERM", 143)), 5.5)
    coordinator.tick(5.0 + GATHER_FAILURES + 0.1)
    assert str(coordinator.outcome) == "rank 0 of 3 on a: bad; rank 1 of 3: SIGTERM"
    assert isinstance(coordinator.outcome, StartupError)
    assert not coordinator.outcome.fatal


def test_nobody_is_waited_for_when_all_have_failed() -> None:
    coordinator = FailureCoordinator(2, deadline=100.0)
    for rank in (0, 1):
        coordinator.handle(Event(rank, Kind.REGISTRATION, registration("a", Failure("bad", 2))), 5.0)
    coordinator.tick(5.0)
    assert str(coordinator.outcome) == "bad"
    assert isinstance(coordinator.outcome, InputError)


def test_the_first_failure_of_a_rank_counts() -> None:
    coordinator = FailureCoordinator(1, deadline=100.0)
    coordinator.handle(Event(0, Kind.REGISTRATION, registration("a", Failure("bad", 2))), 1.0)
    coordinator.handle(Event(0, Kind.FAILED, Failure("SIGTERM", 143)), 1.0)
    coordinator.tick(1.0)
    assert str(coordinator.outcome) == "bad"


@pytest.mark.parametrize("kind", [Kind.READY, Kind.CLUSTER_UP, Kind.FAIL, "prepared"])
def test_what_is_not_for_it(kind: str) -> None:
    assert not FailureCoordinator(1, deadline=1.0).handle(Event(0, kind, None), 0.0)
    assert not FailureCoordinator(1, deadline=1.0).handle(Event(None, Kind.FAILED, None), 0.0)
