"""What a cluster changes in its rank's process."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dask_gpu_mpi.base.signals import LOST, Action, is_ours
from dask_gpu_mpi.errors import ClusterLostError, InputError
from dask_gpu_mpi.job import client_end, outcome
from dask_gpu_mpi.job import start as process_hooks
from dask_gpu_mpi.job.client_end import Use


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    actions = [Action.now(number) for number in (signal.SIGTERM, LOST)]
    yield
    for action in actions:
        action.restore()
    outcome.retire()


def test_sigterm_is_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_end, "_current", None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process_hooks.prepare_process()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    signal.raise_signal(signal.SIGTERM)  # Slurm's second


def test_a_handler_of_the_script_stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process_hooks.prepare_process()
    assert not is_ours(signal.SIGTERM)


@pytest.mark.parametrize("lost", [None, "the scheduler ended"])
def test_the_signal_of_a_loss(lost: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's has no effect, as by default."""

    def end(number: int, frame: object) -> None:
        raise ClusterLostError(lost or "")

    member = SimpleNamespace(ending=SimpleNamespace(lost=lost))
    session = SimpleNamespace(member=member, use=Use.OPEN, end_script=end)
    monkeypatch.setattr(client_end, "_current", session)
    process_hooks.handle_loss()
    with pytest.raises(ClusterLostError) if lost else contextlib.nullcontext():
        signal.raise_signal(LOST)
    process_hooks.handle_loss()  # of a second cluster
    assert is_ours(LOST)


def test_the_signal_of_a_loss_that_the_script_handles() -> None:
    signal.signal(LOST, lambda *_: None)
    process_hooks.handle_loss()
    assert not is_ours(LOST)


def test_between_two_ends_nothing_is_raised() -> None:
    """The script has raised, and what reports that runs: the frame is inside the excepthook, or in `run_script`."""
    frames = []

    class Failing(InputError):
        def __str__(self) -> str:
            frames.append(sys._getframe())
            return "no"

    outcome.install(lambda: None)
    with pytest.raises(SystemExit):
        sys.excepthook(Failing, Failing("no"), None)
    assert process_hooks._script_has_ended(frames[0])
    assert not process_hooks._script_has_ended(sys._getframe())
    assert not process_hooks._script_has_ended(None)
