"""Who hears that the job's time is running out, and what it ends with."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.signal_actions import Action
from dask_gpu_mpi.cluster import process_hooks
from dask_gpu_mpi.cluster import session as session_module
from dask_gpu_mpi.cluster.ending import Ending
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.script import exit_codes


def make_session(monkeypatch: pytest.MonkeyPatch) -> session_module.Session:
    """A session of a cluster that is not there."""
    monkeypatch.setattr(session_module, "_current", None)
    cluster = SimpleNamespace(plan=object(), address="tls://nowhere", dashboard=None, config={})
    joined = SimpleNamespace(cluster=cluster, environ={}, options=SimpleNamespace(walltime_signal="USR2"))
    member: Any = SimpleNamespace(joined=joined, busy=False, ending=Ending())
    return session_module.Session(member, 0.0, process_hooks.on_signal)


@pytest.fixture
def signals() -> Iterator[None]:
    """What SIGTERM and SIGUSR2 do is as it was afterwards."""
    actions = [Action.now(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    yield
    for action in actions:
        action.restore()


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_handler_that_was_there_comes_second_and_does_not_choose_the_code(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[Any] = []

    def own(number: int, _: Any) -> None:
        calls.append(number)
        raise SystemExit(0)

    signal.signal(number, own)
    make_session(monkeypatch).on_walltime(lambda: calls.append("callback"))
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(number)
    assert ended.value.code == exit_codes.WALLTIME
    assert calls == ["callback", number]
    signal.raise_signal(number)  # Slurm's second
    assert len(calls) == 2


@pytest.mark.usefixtures("signals")
def test_another_thread_can_not_replace_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(monkeypatch)
    errors: list[InputError] = []

    def call() -> None:
        try:
            session.on_walltime(print)
        except InputError as error:
            errors.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=call, name="mine")
        thread.start()
        thread.join()

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    in_a_thread()
    assert "called in the thread 'mine', while SIGTERM has another handler" in str(errors[0])
    session.on_walltime(print)
    in_a_thread()
    assert len(errors) == 1
