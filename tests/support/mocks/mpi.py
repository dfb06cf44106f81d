"""An MPI library without processes, as the module ``mpi4py.MPI``: communicators whose ranks are all in this process."""

from __future__ import annotations

import builtins
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ANY_SOURCE, BYTE, ERRORS_RETURN = -1, "BYTE", "return"


class Exception(builtins.Exception):
    pass


class Status:
    source = -1
    size = 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, datatype: str) -> int:
        assert datatype == BYTE
        return self.size


class Request:
    """Complete once `ready`; raises what went wrong."""

    def __init__(self, ready: bool) -> None:
        self.ready = ready
        self.error: Exception | None = None

    def Test(self) -> bool:
        if self.ready and self.error is not None:
            raise self.error
        return self.ready


class Message:
    def __init__(self, data: bytes, size: int, comes: bool) -> None:
        self.data, self.size = data, size
        self.received = False
        self.request = Request(comes)

    def Irecv(self, where: list[Any]) -> Request:
        buffer, datatype = where
        assert datatype == BYTE
        assert len(buffer) == self.size
        self.received = True
        buffer[: len(self.data)] = self.data
        return self.request


class Comm:
    """One rank's view of a communicator; all that have the same `queues` are of one job.

    `comes`: whether what this one sends completes. `broken`: what sending and probing raise.
    """

    def __init__(self, rank: int = 0, size: int = 1, queues: Any = None, *, comes: bool = True) -> None:
        self.rank, self.size, self.comes = rank, size, comes
        self.queues: Any = defaultdict(list) if queues is None else queues
        self.handler = "abort"
        self.broken: Exception | None = None
        #: What was sent and has not left.
        self.leaving: list[Request] = []

    def beside(self, rank: int) -> Comm:
        """The same communicator on another rank."""
        return Comm(rank, self.size, self.queues)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_errhandler(self) -> str:
        return self.handler

    def Set_errhandler(self, handler: str) -> None:
        self.handler = handler

    def Isend(self, what: list[Any], *, dest: int, tag: int) -> Request:
        data, datatype = what
        assert (datatype, self.handler) == (BYTE, ERRORS_RETURN)
        if self.broken is not None:
            raise self.broken
        self.post(dest, self.rank, bytes(data), tag)
        self.leaving.append(Request(self.comes))
        return self.leaving[-1]

    def post(
        self, rank: int, source: int, data: bytes, tag: int, *, claims: int | None = None, comes: bool = True
    ) -> Message:
        """A message to `rank` that claims to be from `source`, and of that size."""
        message = Message(data, len(data) if claims is None else claims, comes)
        self.queues[rank, tag].append((source, message))
        return message

    def Improbe(self, *, source: int, tag: int, status: Status) -> Message | None:
        assert (source, self.handler) == (ANY_SOURCE, ERRORS_RETURN)
        if self.broken is not None:
            raise self.broken
        queue = self.queues[self.rank, tag]
        if not queue:
            return None
        status.source, message = queue.pop(0)
        status.size = message.size
        found: Message = message
        return found

    def Abort(self, code: int) -> None:
        print("Abort", code, file=sys.stderr, flush=True)
        os._exit(code)


COMM_WORLD = Comm()
COMM_NULL = Comm()
initialized, finalized = True, False


def Is_initialized() -> bool:
    return initialized


def Is_finalized() -> bool:
    return finalized


def Init_thread() -> None:
    pass


def Finalize() -> None:
    print("Finalize", file=sys.stderr, flush=True)


def Get_library_version() -> str:
    return "mock"


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``from mpi4py import MPI`` import this one."""
    monkeypatch.setitem(sys.modules, "mpi4py", type("mpi4py", (), {"MPI": sys.modules[__name__]}))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys.modules[__name__])


def package(folder: Path, code: str) -> list[str]:
    """A package mpi4py with this one and with more code; the path with which another process imports it."""
    made = folder / "mpi4py"
    made.mkdir()
    (made / "__init__.py").write_text("import types\nrc = types.SimpleNamespace()\n")
    (made / "MPI.py").write_text(
        f"import os, signal, struct, sys, time\nfrom support.mocks.mpi import *\n{code}\n"
    )
    return [str(folder), *filter(None, sys.path)]
