"""An MPI library without processes: communicators whose ranks are all in this one, for tests of messages."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

__all__ = ["Comm", "Error", "install"]


class Error(Exception):
    """`MPI.Exception`."""


class Status:
    source = -1
    size = 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, datatype: str) -> int:
        assert datatype == "BYTE"
        return self.size


class Request:
    """Complete once `ready`; raises what went wrong."""

    def __init__(self, ready: bool = True, error: Error | None = None) -> None:
        self.ready, self.error = ready, error

    def Test(self) -> bool:
        if self.ready and self.error is not None:
            raise self.error
        return self.ready


class Message:
    def __init__(self, data: bytes, size: int, comes: bool) -> None:
        self.data, self.size, self.comes = data, size, comes
        self.received = False
        self.request = Request()
        #: What receiving it raises.
        self.error: Error | None = None

    def Irecv(self, where: list[Any]) -> Request:
        buffer, datatype = where
        assert datatype == "BYTE"
        assert len(buffer) >= self.size
        if self.error is not None:
            raise self.error
        self.received = True
        self.request = Request(ready=self.comes)
        buffer[: len(self.data)] = self.data
        return self.request


class Comm:
    """One rank's view of a communicator; all that have the same `queues` are of one job.

    `comes`: Whether what takes all ranks, and what this one sends, completes.
    `broken`: What sending and probing raise.
    """

    def __init__(
        self, rank: int, size: int, queues: Any = None, *, number: int = 0, comes: bool = True
    ) -> None:
        self.rank, self.size, self.number, self.comes = rank, size, number, comes
        self.queues: Any = defaultdict(list) if queues is None else queues
        self.handler = "abort"
        self.freed = False
        self.broken: Error | None = None

    def beside(self, rank: int) -> Comm:
        """The same communicator on another rank."""
        return Comm(rank, self.size, self.queues, number=self.number)

    def error(self) -> Error:
        """What a receive may raise."""
        return Error("connection reset")

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_errhandler(self) -> str:
        return self.handler

    def Set_errhandler(self, handler: str) -> None:
        self.handler = handler

    def Idup(self) -> tuple[Comm, Request]:
        return Comm(self.rank, self.size, self.queues, number=self.number + 1), Request(self.comes)

    def Free(self) -> None:
        self.freed = True

    def Isend(self, what: list[Any], *, dest: int, tag: int) -> Request:
        data, datatype = what
        assert datatype == "BYTE"
        if self.broken is not None:
            raise self.broken
        self.post(dest, self.rank, bytes(data), tag)
        return Request(self.comes)

    def post(
        self, rank: int, source: int, data: bytes, tag: int, *, claims: int | None = None, comes: bool = True
    ) -> Message:
        """A message to `rank` that claims to be from `source`, and of that size."""
        message = Message(data, len(data) if claims is None else claims, comes)
        self.queues[self.number, rank, tag].append((source, message))
        return message

    def Improbe(self, *, source: int, tag: int, status: Status) -> Message | None:
        assert source == -1  # any
        if self.broken is not None:
            raise self.broken
        queue = self.queues[self.number, self.rank, tag]
        if not queue:
            return None
        status.source, message = queue.pop(0)
        status.size = message.size
        found: Message = message
        return found


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``from mpi4py import MPI`` import this one."""
    mpi = SimpleNamespace(
        ANY_SOURCE=-1,
        BYTE="BYTE",
        ERRORS_RETURN="return",
        Exception=Error,
        Status=Status,
        THREAD_MULTIPLE=3,
        Get_library_version=lambda: "mock",
        Is_finalized=lambda: False,
        Query_thread=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))  # type: ignore[arg-type]
