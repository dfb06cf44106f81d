"""Standard input, output and error: open where they were closed, flushed in time; and messages that never raise.

All processes of a rank share one standard output, most of the time a pipe or a file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

__all__ = ["flush", "open_missing", "print_by_line", "say", "write"]


def open_missing() -> None:
    """Put the null device where standard input, output or error is closed (``python SCRIPT >&-``).

    Otherwise a pipe or socket of this package or of Dask gets that number, and a child process writes into it. And Python's own
    streams are None then: None has no `flush`, and `print` takes it for standard output.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest that is free, since those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def print_by_line() -> None:
    """Have this process, and all that are forked from it, print line by line into a pipe or a file, too, as on a terminal.

    So output appears at once, lines of several processes do not mix, and a process that is killed loses half a line at most.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def flush() -> None:
    """Flush standard output and error, before an exit at which Python does not (``os._exit``, ``MPI_Abort``)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a full disk; what a script or task has replaced them by
            stream.flush()


def say(text: str) -> None:
    """Write a message to standard error, since standard output is the script's; never raises."""
    write(sys.stderr, f"dask_gpu_mpi: {text}\n")


def write(stream: Any, text: str) -> None:
    """Write `text` at once, or not at all where the reader is gone.

    Not through Python's own buffer: what can't be written would stay there, and a script that succeeded would exit with code 120.
    """
    original: Any = sys.__stderr__
    with contextlib.suppress(Exception):
        if stream is not original:
            stream.write(text)
            stream.flush()
            return
        with contextlib.suppress(OSError):
            stream.flush()
        data = text.encode(stream.encoding, "backslashreplace")
        while data:
            data = data[os.write(stream.fileno(), data) :]
