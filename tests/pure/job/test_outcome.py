"""How a script has ended, in words and as an exit code; and the hook for uncaught errors, which is given back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError, SpmdError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.outcome import SignalExit, failure, note, noted, outcome_of_error
from support.jobs.processes import run_python


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (SystemExit(), "the script called sys.exit", 0),
        (SystemExit("text"), "the script called sys.exit", 1),
        (SystemExit(-1), "the script called sys.exit", 255),
        (KeyError("x\ny"), "KeyError: 'x\\ny'", 1),
        (ValueError("x" * 1_000), f"ValueError: {'x' * 300}", 1),
        (MemoryError(), "MemoryError", 1),
        (KeyboardInterrupt(), "KeyboardInterrupt", 130),
        (InputError("wrong"), "InputError: wrong", 2),
        (SignalExit(15), "the job was sent SIGTERM", 143),
        (SignalExit(10, called=True), "its time was running out (SIGUSR1), and on_walltime has run", 75),
    ],
    ids=ascii,
)
def test_outcome_of_an_exception(error: BaseException, text: str, code: int) -> None:
    assert outcome_of_error(error) == (text, code)


@pytest.mark.parametrize(
    ("uncaught", "notes", "code"),
    [
        (None, [], None),
        (None, [("a", 1), SignalExit(15).outcome], 143),  # what is noted last counts
        (None, [SignalExit(15, called=True).outcome, ("the script ended", 0)], None),
        (ValueError(), [("a", 3)], 1),
    ],
)
def test_whether_an_exception_ends_the_process(
    uncaught: BaseException | None,
    notes: list[outcome.Outcome],
    code: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcome, "_noted", None)
    monkeypatch.setattr(sys, "last_value", uncaught, raising=False)
    for each in notes:
        note(each)
    assert noted() == (notes[-1] if notes else None)
    assert failure() == code


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """What the hook that was there before is given."""
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    yield found
    outcome.retire()


def report(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize(
    "call", ["current_session()", "connect()", "connect('no.json', timeout=0.1)", "connect('tls://h:1')"]
)
def test_errors_of_a_process_without_a_cluster_are_one_line(call: str, tmp_path: Path) -> None:
    done = run_python(f"import dask_gpu_mpi; dask_gpu_mpi.{call}", cwd=tmp_path)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False), done.stderr
    assert done.stderr.splitlines()[-1].startswith("dask_gpu_mpi: error: ")


def test_errors_of_ours_are_one_line(seen: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.excepthook
    for _ in range(2):  # once is enough
        outcome.install(lambda: None)
    for error in (InputError("no such thing"), InputError("told already", reported=True)):
        with pytest.raises(SystemExit) as end:
            report(error)
        assert end.value.code == 2
    assert (seen, capsys.readouterr().err) == ([], "dask_gpu_mpi: error: no such thing\n")
    outcome.retire()
    assert sys.excepthook is before


def test_a_prompt_goes_on(
    seen: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    outcome.install(lambda: None)
    report(InputError("no such thing"))
    assert capsys.readouterr().err == "dask_gpu_mpi: error: no such thing\n"


@pytest.mark.parametrize(
    "error", [SpmdError("spmd: rank 0 raised ValueError()"), ImportError("no module named cudf")], ids=repr
)
def test_errors_of_others_have_their_traceback(
    error: Exception, seen: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome.install(lambda: None)
    report(error)
    assert (seen, capsys.readouterr().err) == ([error], "")
