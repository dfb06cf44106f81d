"""What goes wrong before a rank has an agent, one cluster at a time, and what it changes in its process.

The start itself: tests/mpi, tests/faults/test_starts.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import pytest

from dask_gpu_mpi import connect
from dask_gpu_mpi.base.signals import LOST, is_ours
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job import session as session_module
from dask_gpu_mpi.job import start as module
from dask_gpu_mpi.job.program import run_script
from dask_gpu_mpi.job.session import Use


def test_an_agent_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, "AgentProcess", full)
    with pytest.raises(StartupError, match="not start the agent of this rank .Too many open files.. Fix: "):
        module._start_agent({})


@pytest.fixture(autouse=True)
def _handlers_and_the_hook_are_given_back(handlers: None) -> Iterator[None]:
    yield
    outcome.retire()


def test_sigterm_is_an_exit_unless_the_script_handles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_current_end", None)
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
    session = SimpleNamespace(member=member, use=Use.OPEN, end_script=lambda *got: raised.append(got[0]))
    monkeypatch.setattr(session_module, "_current_end", session)
    monkeypatch.setattr(outcome, "_noted", None)
    module.handle_loss()
    with pytest.raises(SystemExit) if lost else contextlib.nullcontext():
        signal.raise_signal(LOST)
    assert raised == [LOST] * bool(lost)
    module.handle_loss()  # of a second cluster
    assert is_ours(LOST)


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
    reporting: Any = SimpleNamespace(f_code=run_script.__code__, f_back=None)
    ended = [module._script_has_ended(frame) for frame in (frames[0], reporting, sys._getframe(), None)]
    assert ended == [True, True, False, False]


@pytest.mark.parametrize(
    ("reason", "raised"),
    [
        ("certificate has expired", "connect: the job's certificate has expired by the clock of "),
        ("unable to get local issuer certificate", "^TLS certificate does not match"),
    ],
)
def test_connect_names_a_clock_that_is_wrong(
    reason: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("TLS certificate does not match.") from ssl.SSLError(reason)

    monkeypatch.setattr(distributed, "Client", refused)
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": "tls://10.0.0.1:8786"}))
    with pytest.raises((InputError, OSError), match=raised):
        connect(file)
