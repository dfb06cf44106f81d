"""The mailbox of a rank, without MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask_gpu_mpi.base.plain_data import from_plain, pack, unpack
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.startup import messages

__all__ = ["MockMailbox"]


class MockMailbox:
    """The mailbox of one rank, without MPI: what it sends to itself arrives, `on_send` answers for the others."""

    def __init__(self, rank: int = 0, size: int = 2, payloads: Mapping[str, Any] = messages.PAYLOADS) -> None:
        self.rank, self.size = rank, size
        self.hosts = {number: f"h{number + 1}" for number in range(size)}
        self.payloads = payloads
        #: What it receives next.
        self.mails: list[Event] = []
        #: (rank, kind, payload); rank -1: all.
        self.sent: list[tuple[int, str, Any]] = []
        self.on_send: Callable[[int, str, Any], None] = lambda rank, kind, payload: None

    def receive(self) -> list[Event]:
        mails, self.mails = self.mails, []
        return mails

    def _check(self, kind: str, payload: Any) -> None:
        """Whether the payload is one that can be sent as this kind."""
        data = pack(payload)
        assert pack(from_plain(self.payloads[kind], unpack(data))) == data

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self._check(kind, payload)
        self.sent.append((rank, kind, payload))
        if rank == self.rank:
            self.mails.append(Event(rank, kind, payload))
        else:
            self.on_send(rank, kind, payload)

    def send_all(self, kind: str, payload: Any = None) -> None:
        self._check(kind, payload)
        self.sent.append((-1, kind, payload))

    def flush(self, timeout: float) -> bool:
        return True
