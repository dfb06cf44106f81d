"""When the job ends, as each batch system tells it, and who hears of it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.signal_actions import Action
from dask_gpu_mpi.cluster import api as entry
from dask_gpu_mpi.cluster import session as session_module
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.mpi.batch import EXIT_CODE, end_time

NOW = 1_000_000.0


def ask(answers: dict[str, str]) -> object:
    def asked(command: Sequence[str]) -> str:
        return answers.get(command[0], "")

    return asked


def qstat(limit: str, used: str | None) -> str:
    job: dict[str, object] = {"Resource_List": {"walltime": limit}}
    if used is not None:
        job["resources_used"] = {"walltime": used}
    return json.dumps({"Jobs": {"7.server": job}})


@pytest.mark.parametrize(
    ("environ", "answers", "expected"),
    [
        ({}, {}, None),
        ({"SLURM_JOB_END_TIME": "1000060"}, {}, 1_000_060.0),
        ({"SLURM_JOB_END_TIME": "Unknown"}, {}, None),
        ({"PBS_JOBID": "7.server"}, {"qstat": qstat("01:00:00", "00:10:00")}, NOW + 3000),
        ({"PBS_JOBID": "7.server"}, {"qstat": qstat("90", None)}, NOW + 90),
        ({"PBS_JOBID": "7.server"}, {"qstat": "qstat: Unknown Job Id"}, None),
        ({"PBS_JOBID": "7.server"}, {}, None),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "42.5\n"}, NOW + 42.5),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "0\n"}, None),
    ],
)
def test_the_end(environ: dict[str, str], answers: dict[str, str], expected: float | None) -> None:
    assert end_time(environ, now=lambda: NOW, ask=ask(answers)) == expected  # type: ignore[arg-type]


def test_a_command_that_is_not_there_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert end_time({"PBS_JOBID": "7.server"}) is None


def make_session(monkeypatch: pytest.MonkeyPatch) -> session_module.Session:
    """A session of a cluster that is not there."""
    monkeypatch.setattr(session_module, "_current", None)
    go = SimpleNamespace(plan=object(), address="tls://nowhere", dashboard=None, config={})
    joined = SimpleNamespace(go=go, environ={}, options=SimpleNamespace(walltime_signal="USR2"))
    member: Any = SimpleNamespace(joined=joined, busy=False, lost=None)
    return session_module.Session(member, 0.0, entry._on_term)


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
    assert ended.value.code == EXIT_CODE
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
