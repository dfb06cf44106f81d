"""The way in which the script has ended, and the exit codes of all ranks; users read `docs/exit-codes.md`."""

from __future__ import annotations

import dis
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import printable, text_of
from dask_gpu_mpi.errors import DaskGpuMpiError

# A rank with the script exits with the script's code. Errors of dask_gpu_mpi have their code (`dask_gpu_mpi.errors`).

#: The cluster or the launcher was lost, a rank did not answer, or the script raised.
FAILED = 1
#: The job ended because its time was running out and it has written its checkpoint: EX_TEMPFAIL of sysexits.h, "try again
#: later". A requeue checks for it.
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
        return (error.code or 0) & 0xFF  # the system keeps eight bits
    return code_of_signal(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else FAILED


#: In words, and the exit code; None: not known here.
Outcome = tuple[str, int | None]

_noted: Outcome | None = None


class SignalExit(SystemExit):
    """Ends the script after a signal. The script may catch it, and continue."""

    #: Code of the last one, in this process.
    last: int | None = None

    def __init__(self, number: int, code: int) -> None:
        super().__init__(code)
        self.outcome: Outcome = outcome_of_signal(number, code)
        SignalExit.last = code


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


def outcome_of_signal(number: int, code: int) -> Outcome:
    """The outcome of a script that was sent a signal.

    >>> outcome_of_signal(15, 75)
    ('its time was running out (SIGTERM), and on_walltime has run', 75)
    """
    name = signal.Signals(number).name
    if code == WALLTIME:
        return f"its time was running out ({name}), and on_walltime has run", code
    return f"the job was sent {name}", code


def note(outcome: Outcome) -> None:
    """Keep the outcome of the script; the last one counts, since the script has continued after earlier ones."""
    global _noted
    _noted = outcome


def noted() -> Outcome | None:
    """The outcome that was noted last."""
    return _noted


def failure(exits: int | None = None) -> int | None:
    """The exit code of this process, which ends now, if an exception or a signal ends it; None: neither does, or with 0.

    `exits`: code of the SystemExit that the function of `execute` has raised. The script may have caught any other exception.
    """
    if exits is None:
        # Python does not set it for a SystemExit.
        uncaught = getattr(sys, "last_value", None)
        _, exits = outcome_of_error(uncaught) if uncaught is not None else _noted or ("", None)
        if exits is None and uncaught is None and _noted is not None:
            exits = SignalExit.last  # the script is unlikely to have caught it
    return exits or None


# How the main program ends while this process is part of a cluster: Python keeps no code of a SystemExit.

_plain_exit = sys.exit
#: The main program.
_main: FrameType | None = None
#: The instruction in which it called `sys.exit`, and the code.
_exit: tuple[int, int] | None = None


def _outermost() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _noting_exit(status: Any = None, /) -> NoReturn:
    """`sys.exit`, which notes its code."""
    global _exit
    try:
        _plain_exit(status)
    except SystemExit as end:
        if (main := _outermost()) is _main:
            _exit = main.f_lasti, code_of_exception(end)
        raise


def code_of_exit() -> int | None:
    """The code of the SystemExit that has ended the main program; None: none has.

    That of `sys.exit` is known. After another one, as of ``raise SystemExit(3)``, it is `FAILED`: 0 could hide a failure.
    """
    if _main is None:
        return None
    last = _main.f_code.co_code[_main.f_lasti :]
    name = dis.opname[last[0]]
    # a `finally` or ``raise`` of the main program, in which the exception goes on
    again = name in ("RERAISE", "RAISE_VARARGS") and last[1] == 0
    if _exit is not None and (again or _exit[0] == _main.f_lasti):  # else it has caught that, and continued
        return _exit[1]
    return None if name.startswith("RETURN") or _outermost() is _main else FAILED


# `sys.excepthook` while this process is part of a cluster.

#: Advice about errors of other packages that the job's setup causes, by a pattern of their text.
ADVICE = {
    r"undefined symbol: uc[mpst]_": (
        "this import needs the UCX of its packages, but MPI has loaded another one: mpi4py.MPI was imported before. Fix: "
        "`import ucxx` first of all"
    ),
    r"without a global spill manager": (
        "the workers have enable_cudf_spill, and the script has not, so it can't unpack what they send. Fix: "
        "cudf.set_option('spill', True) in the script"
    ),
}


def _with_causes(error: BaseException) -> list[BaseException]:
    """An exception and those that have led to it: a failed import may be only the reason of a connection's timeout."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or each.__context__
    return found


class ExceptHook:
    """An uncaught error of ours ends the script with its line and its exit code; the hook of before gets all others.

    `label` returns the line to print before a traceback, if any.
    """

    def __init__(self, label: Callable[[], str | None]) -> None:
        self._label = label
        self._before = sys.excepthook
        self._retired = False
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """Report the error; SystemExit after one of ours."""
        # Python sets `last_value` before it calls this. A script may call the hook for an error that it has caught.
        if getattr(sys, "last_value", None) is error:
            note(outcome_of_error(error))
        if not self._retired:
            if isinstance(error, DaskGpuMpiError) and not error.of_script:
                if not error.reported:
                    say(f"error: {error}")
                # CPython uses the code of a SystemExit from the hook (Python/pythonrun.c, _PyErr_PrintEx).
                raise SystemExit(error.exit_code)
            if (label := self._label()) is not None:
                say(label)
            texts = "\n".join(map(text_of, _with_causes(error)))
            for pattern, advice in ADVICE.items():
                if re.search(pattern, texts):
                    say(f"error: {advice}")
        self._before(kind, error, traceback)

    def retire(self) -> None:
        """Do nothing from now on; a hook of the script that calls this one stays."""
        self._retired = True
        if sys.excepthook is self:
            sys.excepthook = self._before


_installed: ExceptHook | None = None


def install(label: Callable[[], str | None]) -> None:
    """Install the hook, and the `sys.exit` that notes its code, unless they are installed."""
    global _installed, _main
    if _installed is not None and sys.excepthook is _installed:
        return
    retire()
    if threading.current_thread() is threading.main_thread():
        _main = _outermost()
    _installed = ExceptHook(label)
    sys.exit = _noting_exit


def retire() -> None:
    """Restore the hook of before `install`; `sys.exit` still notes its code, since a script may continue after its cluster."""
    global _installed
    if _installed is not None:
        _installed.retire()
        _installed = None
