"""The logs of the agent and of all processes forked from it.

Dask's loggers keep their handlers, which are changed once, before the fork, so that every child has them:

- While the job ends they are silent, unless the level is info or debug: a worker that loses its scheduler then is not a fault.
- The last lines of each process are kept in a file of the scratch directory, for the report if it fails.
- With a log directory, a file for the scheduler, and for each rank and worker, replaces standard error.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import socket
from collections import deque
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.files import open_to_append
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import InputError

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
#: The loggers to which distributed gives a handler (`distributed.config`), the root, and asyncio.
_NAMES = (
    "", "distributed", "distributed.client", "distributed.gc", "tornado", "tornado.application", "bokeh", "asyncio",
)  # fmt: skip
#: For files: independent of the locale, and able to write names of files that are not UTF-8.
_ANY_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}
#: Of each process's last output: the records that are kept, and the lines of these that are reported; characters of a record.
_LINES, _RECORD = 5, 1 << 14
#: Shared with every process forked from here: a one means that the job is ending, and that a full disk was reported.
_ending, _full_reported = mmap.mmap(-1, 1), mmap.mmap(-1, 1)


#: Of messages with tracebacks that the process logs, or the agent reports, in another way: a worker whose heartbeat fails has
#: lost its scheduler and closes next; a worker that closes by itself closes the queue that one of its threads reads; the error of
#: a worker that does not start goes to its nanny, and if it has no address yet, it can't log that it closes. Above the memory
#: limit a nanny sends SIGTERM, which our workers leave to the rank, and at its next look, a tenth of a second later, SIGKILL.
_REPEATED = (
    "during heartbeat",
    "Worker process died unexpectedly",
    "Failed to initialize worker",
    "Failed to log closing event",
    "Failed to start worker",
    "Worker failed to connect",
    "is slow to ",
)


def _is_of_interest(record: logging.LogRecord) -> bool:
    # Other objects than texts may raise when they are made a text, and the error would reach the caller.
    if isinstance(record.msg, str) and any(text in record.msg for text in _REPEATED):
        return False
    return not _ending[0]


class _FullDisk(logging.Filter):
    """Replaces the traceback of a worker that can't spill, which Dask repeats every ten seconds, by one line for each rank."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not (isinstance(error, OSError) and str(record.msg).startswith("Spill to disk failed")):
            return True
        if not _full_reported[0]:
            _full_reported[0] = 1
            say(
                f"warning: a worker on {socket.gethostname()} can't spill to {self._directory} ({error.strerror}). Its data stay "
                "in memory, and it is paused when that is full. Fix: a local_directory (--local-directory) with more space, "
                "smaller chunks, or more memory"
            )
        return False


class _LastOutput(logging.Handler):
    """Keeps the last records of this process in a file, for `last_output` in another process: each record rewrites the file."""

    def __init__(self, directory: str) -> None:
        super().__init__(logging.WARNING)
        self._directory = directory
        #: Id of the process that has opened the file: a fork opens another one.
        self._pid = 0
        self._file: Any = None
        self._last: deque[str] = deque(maxlen=_LINES)
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[-_RECORD:] + "\n"
        except Exception:  # a malformed call of a library: logging reports it, and the caller continues
            self.handleError(record)
            return
        with contextlib.suppress(OSError, ValueError):
            if self._pid != os.getpid():
                self._pid, self._file = os.getpid(), None  # also if the directory is gone, or full
                self._last.clear()
                path = _output_file(self._directory, self._pid)
                self._file = open(path, "a", buffering=1, **_ANY_TEXT)  # noqa: SIM115
            if self._file is not None:
                self._last.append(text)
                self._file.truncate(0)
                self._file.write("".join(self._last))


def set_up(level: str, scratch: str, *, quiet_stream: bool) -> None:
    """Set the level of Dask's loggers and change the handlers, before the fork; `quiet_stream`: nothing on standard error."""
    for name in ("distributed", "distributed.client"):
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("distributed.spill").addFilter(_FullDisk(os.path.dirname(scratch)))
    last = _LastOutput(scratch)
    for name in _NAMES:
        logger = logging.getLogger(name)
        if quiet_stream and name:
            logger.handlers = [h for h in logger.handlers if not isinstance(h, logging.StreamHandler)]
        if level not in ("debug", "info"):
            for handler in logger.handlers:
                handler.addFilter(_is_of_interest)
        if logger.handlers or quiet_stream or name == "distributed":
            logger.addHandler(last)


def set_ending() -> None:
    """Silence this process and all forked from it: the job is ending."""
    _ending[0] = True


def last_output(scratch: str, pid: int) -> str:
    """The last lines that a process logged (warnings and errors), or nothing."""
    with contextlib.suppress(OSError):
        text = Path(_output_file(scratch, pid)).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LINES:])
    return ""


def log_to_file(directory: str, name: str) -> None:
    """Log to a file of this name in the user's log directory from now on; an InputError if it can't be written."""
    path = os.path.join(directory, re.sub(r"[^\w.+-]", "_", name) + ".log")
    try:
        file = open(open_to_append(path), "a", **_ANY_TEXT)  # noqa: SIM115
    except OSError as error:
        raise InputError(
            f"the log file {path!r} can't be written on {socket.gethostname()} ({error.strerror})",
            fix="another directory by log_directory (--log-directory)",
        ) from None
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter(_FORMAT))
    if logging.getLogger("distributed").level > logging.INFO:
        handler.addFilter(_is_of_interest)
    for each in _NAMES:
        logger = logging.getLogger(each)
        if each in ("", "distributed") or not logger.propagate:
            logger.addHandler(handler)


def _output_file(directory: str, pid: int) -> str:
    return os.path.join(directory, f"last-output-{pid}")
