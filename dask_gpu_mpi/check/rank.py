"""What every rank does for `check`: send rank 0 what it observes, listen, connect, run kernels, and wait for the exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.mpi.gathering import FAIL, gather
from dask_gpu_mpi.mpi.library import abort
from dask_gpu_mpi.mpi.mailbox import Mail, Mailbox
from dask_gpu_mpi.network.node_pairs import Node, connect_to_peers, listen_for_peers
from dask_gpu_mpi.network.reachability import (
    CONNECT_TIMEOUT,
    Listener,
    Tokens,
    connect_to,
    is_elsewhere,
    port_problem,
)
from dask_gpu_mpi.options.model import Options

from .kernel import run_kernels
from .observations import Observations, observe
from .report import Listening, Outcome
from .ucx import UcxOrder, UcxPeer, UcxTrial

__all__ = ["PAYLOADS", "CheckingRank", "Kind", "ListenOrder", "RankTest"]


class Kind(StrEnum):
    """Kinds of messages between the ranks of a check; a failure goes as `mpi.gathering.FAIL`."""

    #: Every rank to rank 0: ``(host, the step that it begins)``.
    STEP = "step"
    #: Every rank to rank 0: its `Observations`, or a `Failure`.
    OBSERVED = "observed"
    #: Rank 0 to the scheduler's rank and to one of each node: `ListenOrder`.
    LISTEN = "listen"
    #: These to rank 0: `Listening`.
    LISTENING = "listening"
    #: Rank 0 to all: a `RankTest`.
    TEST = "test"
    #: A rank that tries UCX to rank 0: UCX's address of the process that does; empty: it does not work there.
    UCX_ADDRESS = "UCX address"
    #: Rank 0 to such a rank: a `UcxPeer`.
    UCX_PEER = "UCX peer"
    #: Every rank to rank 0: its `Outcome`.
    TESTED = "tested"
    #: Rank 0 to all: the exit code.
    DONE = "done"


@dataclass(frozen=True)
class ListenOrder:
    """Where a rank is to listen."""

    address: str
    #: In the scheduler's place, at which port, and where the dashboard would listen; None: it is not the scheduler's rank.
    scheduler: tuple[Tokens, int, tuple[str, int] | None] | None = None
    #: In the place of workers, at one of these ports; None: another rank of the node does, or there is only one node.
    workers: tuple[Tokens, Sequence[int]] | None = None


@dataclass(frozen=True)
class RankTest:
    """What a rank is to test."""

    #: Of the scheduler; port 0: nobody listens.
    address: str
    port: int
    tokens: Tokens
    #: UUIDs of the GPUs that are to run a kernel.
    gpus: tuple[str, ...]
    #: Until the kernels must have ended.
    seconds: float
    #: Other nodes to connect to.
    peers: tuple[Node, ...] = ()
    #: None: UCX is not tried here.
    ucx: UcxOrder | None = None


#: The type of what each kind carries.
PAYLOADS: Mapping[str, Any] = {
    Kind.STEP: tuple[str, str],
    Kind.OBSERVED: Observations | Failure,
    Kind.LISTEN: ListenOrder,
    Kind.LISTENING: Listening,
    Kind.TEST: RankTest,
    Kind.UCX_ADDRESS: bytes,
    Kind.UCX_PEER: UcxPeer,
    Kind.TESTED: Outcome,
    Kind.DONE: int,
    FAIL: Failure,
}


class CheckingRank:
    """One rank of a check; `environ` is that of its process."""

    def __init__(self, mailbox: Mailbox, environ: Mapping[str, str], host: str) -> None:
        self.rank, self.size, self.host = mailbox.rank, mailbox.size, host
        #: What it does now.
        self.step = "reading its options"
        self._mailbox = mailbox
        self._environ = environ
        self._listeners: list[Listener] = []
        self._pool = ThreadPoolExecutor(1)
        self._testing: Future[Outcome] | None = None
        self._ucx: UcxTrial | None = None
        self._ucx_address_sent = False

    def observe(
        self, options: Options | InputError, library: str, problems: Sequence[tuple[str, str]]
    ) -> None:
        """Send rank 0 what this rank observes, or why its options can't be used."""
        if isinstance(options, InputError):
            self._mailbox.send(0, Kind.OBSERVED, Failure.of(options))
        else:
            observed = observe(
                self.rank, self.size, options, self._environ, library, problems, self._begin_step
            )
            self._mailbox.send(0, Kind.OBSERVED, observed)

    def _begin_step(self, step: str) -> None:
        self.step = step
        self._mailbox.send(0, Kind.STEP, (self.host, step))

    def on_mail(self, mail: Mail) -> None:
        """Do what rank 0 asks for."""
        if mail.kind == Kind.LISTEN:
            self._mailbox.send(0, Kind.LISTENING, self._listen(mail.payload))
        elif mail.kind == Kind.TEST:
            self._begin_step(
                "running a kernel on its GPUs, and connecting to the scheduler's address and to other nodes"
            )
            test: RankTest = mail.payload
            if test.ucx is not None:
                # in this thread: a child dies with the thread that has started it
                self._ucx = UcxTrial(test.ucx, self._environ, test.seconds)
            self._testing = self._pool.submit(self._test, test)
        elif mail.kind == Kind.UCX_PEER and self._ucx is not None:
            self._ucx.introduce(mail.payload)
        elif mail.kind == FAIL:
            raise mail.payload.error(reported=True)

    def poll(self) -> None:
        """Send rank 0 what it waits for, once it is there: the address of UCX, the results of the tests."""
        if (
            self._ucx is not None
            and not self._ucx_address_sent
            and (address := self._ucx.address) is not None
        ):
            self._mailbox.send(0, Kind.UCX_ADDRESS, address)
            self._ucx_address_sent = True
        if self._testing is not None and self._testing.done():
            self._mailbox.send(0, Kind.TESTED, self._testing.result())
            self._testing = None

    def _listen(self, order: ListenOrder) -> Listening:
        port = workers = 0
        error = ""
        dashboard: OSError | None = None
        if order.scheduler is not None:
            tokens, wanted, place = order.scheduler
            dashboard = port_problem(*place) if place is not None else None
            try:
                self._listeners.append(Listener(order.address, wanted, tokens))
                port = self._listeners[-1].port
            except OSError as refused:
                error = refused.strerror or str(refused)
        if order.workers is not None:
            tokens, ports = order.workers
            with contextlib.suppress(OSError):
                self._listeners.append(listen_for_peers(order.address, ports, tokens))
                workers = self._listeners[-1].port
        if dashboard is None:
            return Listening(port, error, workers=workers)
        return Listening(port, error, dashboard.strerror or str(dashboard), workers, is_elsewhere(dashboard))

    def _test(self, test: RankTest) -> Outcome:
        # In a thread, so that rank 0 can receive meanwhile; it must not use MPI.
        with ThreadPoolExecutor(2) as pool:
            kernels = pool.submit(run_kernels, test.gpus, self._environ, test.seconds)
            timeout = min(CONNECT_TIMEOUT, test.seconds / 2)
            lost = pool.submit(connect_to_peers, test.peers, timeout)
            reach = connect_to(test.address, test.port, test.tokens, timeout) if test.port else None
            ucx = self._ucx.result() if self._ucx is not None else None
            return Outcome(reach, kernels.result(), lost.result(), ucx)

    def serve(self, deadline: float) -> int:
        """Serve rank 0 until it sends the exit code.

        Raises
        ------
        DaskGpuMpiError
            What rank 0 has reported; or it has sent nothing until the deadline (``time.monotonic()``).
        """
        codes = gather(self._mailbox, Kind.DONE, [0], deadline, on_other=self.on_mail, meanwhile=self.poll)
        if codes:
            return int(codes[0])
        error = StartupError(
            "rank 0: no response; it probably hangs while it inspects its node (GPUs, local directory). Fix: leave that node out "
            "of the job",
            reported=self.rank != 1,
        )
        report_error(error)
        abort(error.exit_code)
        raise error

    def close(self) -> None:
        """Stop listening and testing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for listener in self._listeners:
            listener.close()
