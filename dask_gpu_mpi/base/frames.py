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
#: Seconds for the other side to read.
PATIENCE = 30.0


def identity(fd: int) -> tuple[int, int] | None:
    """Device and inode of an open file; None: the descriptor is closed.

    A script may close all descriptors and open other files, which get the same numbers.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Held:
    """A descriptor that other code of this process, a user's script, may have closed; its number may be another file's then."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._identity = identity(fd)

    @property
    def is_ours(self) -> bool:
        """Whether it is still the same file, and open."""
        return self._identity is not None and identity(self.fd) == self._identity

    def close(self) -> None:
        """Close it, if it is still ours; may be called again."""
        if self.is_ours:
            os.close(self.fd)
        self.fd = -1


def wait_for_any(seconds: float, *fds: int | None) -> bool:
    """Wait until one of these descriptors is readable, `seconds` at most; None and numbers below 0 count as none."""
    poller = select.poll()
    for fd in fds:
        if fd is not None and fd >= 0:
            poller.register(fd, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def write_frame(
    fd: int, value: Any, *, dumps: Any = pickle.dumps, fds: Sequence[int] = (), patience: float = PATIENCE
) -> None:
    """Write one frame; raises a ConnectionError if the other side is closed, a TimeoutError if it stops reading.

    `dumps` is ``cloudpickle.dumps`` if the value may contain classes of the user's script. `fds`: descriptors that the other side
    of a socket gets copies of. `patience`: seconds in which the other side has to read a part.
    """
    payload = dumps(value)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    poller = select.poll()
    poller.register(fd, select.POLLOUT)

    def wait() -> None:
        if not poller.poll(1000 * patience):
            raise TimeoutError(f"the other side of the pipe reads nothing for {patience:g} s")

    if fds:
        wait()
        sock = socket.socket(fileno=fd)
        try:
            data = data[socket.send_fds(sock, [data[:1]], fds) :]
        finally:
            sock.detach()
    while data:
        wait()
        # So much fits in then; the descriptor may block or not, which Python changes with `socket.setdefaulttimeout`.
        data = data[os.write(fd, data[: select.PIPE_BUF]) :]


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
        self._held = Held(fd)
        self._is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
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
        wait = 0.0 if self._length() is not None else timeout
        while poller.poll(wait * 1000):
            if not self._held.is_ours:
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
            chunk, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:  # the other side has ended before it has read everything
            return b""
        finally:
            sock.detach()
        self.fds += fds
        return chunk

    def close(self) -> None:
        """Close the pipe; `read` returns nothing from now on. May be called again."""
        self._held.close()
        self.fd = -1

    def _length(self) -> int | None:
        """Bytes of the first frame in the buffer; None: it is not complete."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        return length if len(self._buffer) >= _LENGTH.size + length else None

    def _take(self) -> list[Any]:
        """The complete frames; one that can't be unpickled is an error of the call that begins with it."""
        frames: list[Any] = []
        while (length := self._length()) is not None:
            end = _LENGTH.size + length
            frame = bytes(self._buffer[_LENGTH.size : end])
            try:
                frames.append(pickle.loads(frame))
            except Exception:
                if frames:
                    break
                del self._buffer[:end]
                raise
            del self._buffer[:end]
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
