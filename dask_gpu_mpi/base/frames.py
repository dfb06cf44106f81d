"""Frames over a pipe: how a rank and its agent talk.

A frame is a length (8 bytes, little endian) and a pickle of that length. Both ends of the pipe are our own processes,
one the child of the other, so pickle is safe here; nobody else can open the pipe. And what is still unread in pipes of others.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import stat
import struct
import time
from collections.abc import Iterable
from typing import Any

__all__ = ["FrameReader", "identity", "wait_until_read", "write_frame"]

_LENGTH = struct.Struct("<Q")


def identity(fd: int) -> tuple[int, int] | None:
    """What tells an open file from all others; None where the number belongs to none.

    A script may close all descriptors, and open files of its own, which get these numbers.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def write_frame(fd: int, value: Any, *, dumps: Any = pickle.dumps) -> None:
    """Write one frame, all of it.

    Parameters
    ----------
    fd : int
        A blocking file descriptor.
    value : object
        What to send.
    dumps : callable
        ``pickle.dumps``, or ``cloudpickle.dumps`` where the value may hold classes of the user's script.

    Raises
    ------
    BrokenPipeError
        When the other side is gone.
    """
    payload = dumps(value)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


class FrameReader:
    """Takes frames off a pipe without ever blocking longer than it was told to.

    Attributes
    ----------
    eof : bool
        True once the other side has closed its end, which is also how its death shows.
    taken : bool
        True once it was this side: somebody has closed what is read here.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.eof = self.taken = False
        self._identity = identity(fd)
        self._buffer = bytearray()

    def read(self, timeout: float = 0.0) -> list[Any]:
        """The frames that are complete after waiting at most `timeout` seconds for the first byte."""
        if self.eof or self.fd < 0:
            if timeout > 0:
                time.sleep(timeout)
            return []
        # poll() and not select(): a script with 1,024 open files would break select()
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        wait = timeout
        while poller.poll(wait * 1000):
            if identity(self.fd) != self._identity:
                self.eof = self.taken = True
                break
            chunk = os.read(self.fd, 1 << 16)
            if not chunk:
                self.eof = True
                break
            self._buffer += chunk
            wait = 0.0
        return self._take()

    def close(self) -> None:
        """Close the pipe; nothing is read any more. May be called again."""
        if self.fd >= 0 and identity(self.fd) == self._identity:
            os.close(self.fd)
        self.fd = -1

    def _take(self) -> list[Any]:
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]  # first: a frame that can't be read is not met again
            frames.append(pickle.loads(frame))
        return frames


def wait_until_read(fds: Iterable[int], seconds: float) -> None:
    """Wait until what was written to these descriptors has been read, where they are pipes; `seconds` at most."""
    import fcntl  # these two only here: all ranks and agents import this module
    import termios

    deadline = time.monotonic() + seconds
    for fd in fds:
        with contextlib.suppress(OSError):  # closed
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                continue
            while any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
                time.sleep(0.002)
