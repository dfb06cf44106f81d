"""How the script has ended, as far as its process can tell: Python does not keep the code of a ``sys.exit()``."""

from __future__ import annotations

import signal
import sys

from dask_gpu_mpi.base.printable import printable, text_of

from . import exit_codes

__all__ = ["Outcome", "SignalExit", "failure", "note", "noted", "of_error", "of_signal"]

#: In words, and the exit code; None: not known here.
Outcome = tuple[str, int | None]

_noted: Outcome | None = None


class SignalExit(SystemExit):
    """Ends the script after a signal. The script may catch it, and go on."""

    #: Code of the last one, in this process.
    last: int | None = None

    def __init__(self, number: int, code: int) -> None:
        super().__init__(code)
        self.outcome: Outcome = of_signal(number, code)
        SignalExit.last = code


def of_error(error: BaseException | None) -> Outcome:
    """What has become of a script that raised this, or nothing.

    >>> of_error(None), of_error(SystemExit(3)), of_error(ValueError("no such file"))
    (('the script ended', 0), ('the script called sys.exit', 3), ('ValueError: no such file', 1))
    """
    if error is None:
        return "the script ended", 0
    if isinstance(error, SignalExit):
        return error.outcome
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return "the script called sys.exit", (error.code or 0) & 0xFF  # as the system has it
        return "the script called sys.exit", exit_codes.FAILED
    first = printable(text_of(error).strip().partition("\n")[0][:300])
    return f"{type(error).__name__}{': ' if first else ''}{first}", exit_codes.of_exception(error)


def of_signal(number: int, code: int) -> Outcome:
    """What has become of a script that was sent a signal.

    >>> of_signal(15, 75)
    ('its time was running out (SIGTERM), and on_walltime has run', 75)
    """
    name = signal.Signals(number).name
    if code == exit_codes.WALLTIME:
        return f"its time was running out ({name}), and on_walltime has run", code
    return f"the job was sent {name}", code


def note(outcome: Outcome) -> None:
    """Keep how the script has ended; what is noted last counts: before that, it has gone on."""
    global _noted
    _noted = outcome


def noted() -> Outcome | None:
    """What has been noted."""
    return _noted


def failure(exits: int | None = None) -> int | None:
    """The exit code of this process, which ends now, where an exception or a signal ends it; None: neither does, or with 0.

    Parameters
    ----------
    exits : int, optional
        Code of the SystemExit that the function of `execute` has raised. Any other exception the script may have caught since.
    """
    if exits is None:
        # Python does not set it for a SystemExit.
        uncaught = getattr(sys, "last_value", None)
        _, exits = of_error(uncaught) if uncaught is not None else _noted or ("", None)
        if exits is None and uncaught is None and _noted is not None:
            exits = SignalExit.last  # which the script has caught, perhaps, but hardly
    return exits or None
