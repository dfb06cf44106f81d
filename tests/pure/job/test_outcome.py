"""How a script has ended, in words and as an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.outcome import SignalExit, failure, note, noted, outcome_of_error, outcome_of_signal


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ("the script ended", 0)),
        (SystemExit(), ("the script called sys.exit", 0)),
        (SystemExit("text"), ("the script called sys.exit", 1)),
        (KeyError("x\ny"), ("KeyError: 'x\\ny'", 1)),
        (ValueError("first\nsecond"), ("ValueError: first", 1)),
        (ValueError("x" * 1_000), (f"ValueError: {'x' * 300}", 1)),
        (KeyboardInterrupt(), ("KeyboardInterrupt", 130)),
        (InputError("wrong"), ("InputError: wrong", 2)),
    ],
)
def test_of_what_it_raised(error: BaseException | None, expected: tuple[str, int]) -> None:
    assert outcome_of_error(error) == expected


def test_of_signals() -> None:
    assert outcome_of_signal(15, 143) == ("the job was sent SIGTERM", 143)
    assert outcome_of_signal(10, 75)[0].startswith("its time was running out (SIGUSR1)")
    end = SignalExit(15, 143)
    assert (end.code, outcome_of_error(end)) == (143, ("the job was sent SIGTERM", 143))


def test_the_last_that_is_noted_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "_noted", None)
    assert noted() is None
    note(("a", 1))
    note(("b", 2))
    assert noted() == ("b", 2)


@pytest.mark.parametrize(
    ("exits", "uncaught", "signalled", "code"),
    [
        (None, None, False, None),
        (None, None, True, 143),
        (None, ValueError(), False, 1),
        (7, None, False, 7),
        (0, None, False, None),
    ],
)
def test_whether_an_exception_ends_the_process(
    exits: int | None,
    uncaught: BaseException | None,
    signalled: bool,
    code: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcome, "_noted", outcome_of_signal(15, 143) if signalled else None)
    monkeypatch.setattr(sys, "last_value", uncaught, raising=False)
    assert failure(exits) == code


def test_the_code_of_a_signal_where_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a job that has to be aborted: a requeue tests for 75."""
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setattr(outcome.SignalExit, "last", None)
    note((outcome.SignalExit(15, 75).outcome[0], None))
    assert failure() == 75
    note(("the script ended", 0))
    assert failure() is None
    monkeypatch.setattr(outcome, "_noted", None)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit(75)", 75),
        (
            "def main():\n    try:\n        sys.exit('text')\n    finally:\n        print('finally')\nmain()",
            1,
        ),
        ("sys.exit()", 0),
        ("try:\n    sys.exit(75)\nexcept SystemExit:\n    pass", None),
        ("def main():\n    try:\n        sys.exit(75)\n    except SystemExit:\n        pass\nmain()", None),
        ("thread = threading.Thread(target=sys.exit, args=(75,))\nthread.start()\nthread.join()", None),
        ("outcome.retire()\nsys.exit(75)", None),
        ("", None),
    ],
)
def test_code_of_the_exit_that_ends_the_script(script: str, code: int | None) -> None:
    """It is known when Python ends, though Python keeps nothing of it; and one that the script has caught does not count."""
    head = """
import atexit, sys, threading
from dask_gpu_mpi.job import outcome
outcome.install(lambda: None)
atexit.register(lambda: print("code", outcome.code_of_exit()))
"""
    done = subprocess.run([sys.executable, "-c", head + script], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == f"code {code}"
    assert "outcome.py" not in done.stderr
