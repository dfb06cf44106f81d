"""Frames over a pipe or a socket: the messages between a rank and its agent.

A frame is a length (8 bytes, little endian) and a pickle of that length. Both ends of the pipe are processes of this package, one
the child of the other, and no other process can open the pipe, so pickle is safe here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

_LENGTH = struct.Struct("<Q")


def identity(fd: int) -> tuple[int, int] | None:
    """Device and inode of an open file; None: the descriptor is closed.

    A script may close all descriptors and open other files, which get the same numbers.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def write_frame(fd: int, value: Any, *, dumps: Any = pickle.dumps, fds: Sequence[int] = ()) -> None:
    """Write one frame to a blocking file descriptor; raises a ConnectionError if the other side is closed.

    `dumps` is ``cloudpickle.dumps`` if the value may contain classes of the user's script. `fds`: descriptors that the other side
    of a socket gets copies of.
    """
    payload = dumps(value)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    if fds:
        sock = socket.socket(fileno=fd)
        try:
            data = data[socket.send_fds(sock, [data[:1]], fds) :]
        finally:
            sock.detach()
    while data:
        data = data[os.write(fd, data) :]


def read_frame(fd: int, timeout: float) -> Any:
    """One frame, and no byte of the next; None if none begins within `timeout` seconds, or the other side has ended."""
    if not select.select([fd], [], [], timeout)[0]:
        return None
    header = _read(fd, _LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    payload = _read(fd, length)
    return pickle.loads(payload) if len(payload) == length else None


def _read(fd: int, size: int) -> bytes:
    """So many bytes; fewer at the end of the pipe."""
    data = b""
    while len(data) < size and (chunk := os.read(fd, size - len(data))):
        data += chunk
    return data


class FrameReader:
    """Reads frames from a pipe, and blocks at most as long as its caller allows."""

    def __init__(self, fd: int) -> None:
        #: -1: closed.
        self.fd = fd
        #: The other side has closed its end, as it does when it dies.
        self.eof = False
        #: This side is closed, by other code of this process.
        self.taken = False
        self._identity = identity(fd)
        self._is_socket = fd >= 0 and stat.S_ISSOCK(os.fstat(fd).st_mode)
        self._buffer = bytearray()
        #: Descriptors that have come with frames.
        self.fds: list[int] = []

    def read(self, timeout: float) -> list[Any]:
        """The complete frames, after a wait of at most `timeout` seconds for the first byte."""
        if self.eof or self.fd < 0:
            time.sleep(max(0.0, timeout))
            return []
        # select() fails in a script with 1,024 open files
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        wait = timeout
        while poller.poll(wait * 1000):
            if identity(self.fd) != self._identity:
                self.eof = self.taken = True
                break
            chunk = self._receive()
            if not chunk:
                self.eof = True
                break
            self._buffer += chunk
            wait = 0.0
        return self._take()

    def _receive(self) -> bytes:
        """Bytes that have come; none at the end."""
        if not self._is_socket:
            return os.read(self.fd, 1 << 16)
        sock = socket.socket(fileno=self.fd)
        try:
            chunk, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4)
        except ConnectionError:  # the other side has ended before it has read everything
            return b""
        finally:
            sock.detach()
        for fd in fds:
            os.set_inheritable(fd, False)
        self.fds += fds
        return chunk

    def close(self) -> None:
        """Close the pipe; `read` returns nothing from now on. May be called again."""
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
            del self._buffer[:end]  # first: a frame that can't be unpickled is not read again
            frames.append(pickle.loads(frame))
        return frames


def wait_until_read(fds: Iterable[int], seconds: float) -> None:
    """Wait until pipes have been read to the end, `seconds` at most; other descriptors are ignored."""
    import fcntl  # these two only here, since all ranks and agents import this module
    import termios

    deadline = time.monotonic() + seconds
    for fd in fds:
        with contextlib.suppress(OSError):  # a descriptor that is closed
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                continue
            while any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
                time.sleep(0.002)
