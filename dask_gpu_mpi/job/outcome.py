"""The way in which the script has ended, as text and as an exit code; users read `docs/exit-codes.md`.

It is noted by the code that sees the end first: `job.program` runs the script of a command, the hook of uncaught errors
(`ExceptHook`) is called if the script itself has called `initialize`, and `job.start` handles signals. `job.session` reads it for
the report and the exit code of all ranks. A rank with the script exits with the script's code.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import printable, text_of
from dask_gpu_mpi.errors import DaskGpuMpiError

#: The cluster or the launcher was lost, a rank did not answer, or the script raised.
FAILED = 1
#: The time was running out, and the job has written its checkpoint: EX_TEMPFAIL of sysexits.h. A requeue checks for it.
WALLTIME = 75


def code_of_signal(number: int) -> int:
    """The exit code that a shell reports for a process that a signal ended.

    >>> code_of_signal(15)
    143
    """
    return 128 + number


def code_of_exception(error: BaseException) -> int:
    """The exit code of Python after an uncaught exception.

    >>> code_of_exception(ValueError()), code_of_exception(KeyboardInterrupt()), code_of_exception(SystemExit(75))
    (1, 130, 75)
    """
    if isinstance(error, DaskGpuMpiError):
        return error.exit_code
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return int(error.code or 0) & 0xFF  # the system keeps eight bits
    return code_of_signal(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else FAILED


#: In words, and the exit code; None: not known here.
Outcome = tuple[str, int | None]


class SignalExit(SystemExit):
    """Ends the script after a signal, `called`: after the callback of `on_walltime`. The script may catch it, and continue.

    >>> SignalExit(15).outcome, SignalExit(10, called=True).outcome
    (('the job was sent SIGTERM', 143), ('its time was running out (SIGUSR1), and on_walltime has run', 75))
    """

    def __init__(self, number: int, *, called: bool = False) -> None:
        name, code = signal.Signals(number).name, WALLTIME if called else code_of_signal(number)
        super().__init__(code)
        how = f"its time was running out ({name}), and on_walltime has run"
        self.outcome: Outcome = (how if called else f"the job was sent {name}", code)


def outcome_of_error(error: BaseException | None) -> Outcome:
    """The outcome of a script that raised this; None: nothing.

    >>> outcome_of_error(None), outcome_of_error(SystemExit(3)), outcome_of_error(ValueError("no such file"))
    (('the script ended', 0), ('the script called sys.exit', 3), ('ValueError: no such file', 1))
    """
    if error is None:
        return "the script ended", 0
    if isinstance(error, SignalExit):
        return error.outcome
    if isinstance(error, SystemExit):
        return "the script called sys.exit", code_of_exception(error)
    first = printable(text_of(error).strip().partition("\n")[0][:300])
    return f"{type(error).__name__}{': ' if first else ''}{first}", code_of_exception(error)


#: Written by `note`.
_noted: Outcome | None = None


def note(outcome: Outcome) -> None:
    """Keep the outcome of the script; the last one counts, since the script has continued after earlier ones."""
    global _noted
    _noted = outcome


def noted() -> Outcome | None:
    """The outcome that was noted last."""
    return _noted


def failure() -> int | None:
    """The exit code with which an exception or a signal ends this process now; None: neither does, or the code is 0.

    Python keeps no code of a SystemExit: that of `sys.exit` in a script which calls `initialize` is not known.
    """
    uncaught = getattr(sys, "last_value", None)
    _, code = outcome_of_error(uncaught) if uncaught is not None else _noted or ("", None)
    return code or None


#: Whether the error that has ended the script is being reported; written by `reporting`.
_is_reporting = False


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """The error that has ended the script is reported in this context: a signal changes neither its text nor its exit code."""
    global _is_reporting
    _is_reporting = True
    try:
        yield
    finally:
        _is_reporting = False


def is_reporting() -> bool:
    """Whether the script has ended by an error that is being reported."""
    return _is_reporting


# `sys.excepthook` while this process is part of a cluster.


class ExceptHook:
    """An uncaught error of ours ends the script with its line and its exit code; the hook of before gets all others.

    `label` returns the line to print before a traceback, if any.
    """

    def __init__(self, label: Callable[[], str | None]) -> None:
        self.label = label
        self._before = sys.excepthook
        self._retired = False
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """Report the error; SystemExit after one of ours."""
        # Python sets `last_value` before it calls this. A script may call the hook for an error that it has caught.
        if getattr(sys, "last_value", None) is error:
            note(outcome_of_error(error))
        with reporting():
            if not self._retired:
                self._report(error)
            self._before(kind, error, traceback)

    def _report(self, error: BaseException) -> None:
        if isinstance(error, DaskGpuMpiError) and not error.of_script:
            if not error.reported:
                say(f"error: {error}")
            if hasattr(sys, "ps1") or sys.flags.interactive:
                return  # the prompt goes on
            # CPython uses the code of a SystemExit from the hook (Python/pythonrun.c, _PyErr_PrintEx).
            raise SystemExit(error.exit_code)
        if (label := self.label()) is not None:
            say(label)

    def retire(self) -> None:
        """Do nothing from now on; a hook of the script that calls this one stays."""
        self._retired = True
        if sys.excepthook is self:
            sys.excepthook = self._before


#: The hook of this process; written by `install` and `retire`.
_installed: ExceptHook | None = None


def install(label: Callable[[], str | None]) -> None:
    """Install the hook, or give it this label. It is put on top again if the script has replaced it."""
    global _installed
    if _installed is None or sys.excepthook is not _installed:
        retire()
        _installed = ExceptHook(label)
    _installed.label = label


def report_uncaught() -> None:
    """Let an uncaught error of ours end this process in the same way, though it may be in no cluster."""
    if _installed is None:
        install(lambda: None)


def retire() -> None:
    """Restore the hook of before `install`."""
    global _installed
    if _installed is not None:
        _installed.retire()
        _installed = None
