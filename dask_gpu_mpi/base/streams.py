"""Standard input, output and error: that they are there, that what was printed gets out, and that our own words fail nobody.

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

    Else a pipe or socket of ours, or of Dask's, gets that number, and a child process writes into it; and Python's own streams
    are None then, which has no `flush`, and by which `print` means standard output.
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
    """Have this process, and all that are forked from it, write what is printed line by line, also into a pipe or a file.

    As on a terminal: so it is seen when it is printed, lines of several processes do not mix, and nothing but half a line is lost
    where a process is killed.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def flush() -> None:
    """Let out what is printed but not yet written, before an end that Python does not see (``os._exit``, ``MPI_Abort``)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a full disk; what a script or task has put in its place
            stream.flush()


def say(text: str) -> None:
    """Write a line of ours on standard error, since standard output is the script's; never raises."""
    write(sys.stderr, f"dask_gpu_mpi: {text}\n")


def write(stream: Any, text: str) -> None:
    """Write `text` at once, or not at all: nobody may be listening any more.

    Not through Python's own buffer: what could not be written would stay there, and end a script that succeeded with code 120.
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
