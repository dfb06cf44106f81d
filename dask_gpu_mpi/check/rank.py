"""What every rank does for `check`: tell rank 0 what it sees, listen, connect, run kernels, and wait for the exit code."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.mpi.gathering import FAIL, TICK
from dask_gpu_mpi.mpi.library import abort
from dask_gpu_mpi.mpi.mailbox import Mail, Mailbox
from dask_gpu_mpi.network.reachability import CONNECT_TIMEOUT, Listener, Tokens, connect_to, port_problem
from dask_gpu_mpi.options.model import Options

from .kernel import run_kernels
from .observations import Facts, take_facts
from .report import Listening, Outcome

__all__ = ["CheckingRank", "Kind", "RankTest"]


class Kind(StrEnum):
    """Kinds of messages between the ranks of a check; a failure goes as `mpi.gathering.FAIL`."""

    #: Every rank to rank 0: ``(host, what it is at)``.
    DOING = "doing"
    #: Every rank to rank 0: its `Facts`, or a `Failure`.
    FACTS = "facts"
    #: Rank 0 to the scheduler's rank: ``(address, port, tokens, where the dashboard would listen)``.
    LISTEN = "listen"
    #: The scheduler's rank to rank 0: `Listening`.
    LISTENING = "listening"
    #: Rank 0 to all: a `RankTest`.
    TEST = "test"
    #: Every rank to rank 0: its `Outcome`.
    TESTED = "tested"
    #: Rank 0 to all: the exit code.
    DONE = "done"


@dataclass(frozen=True)
class RankTest:
    """What a rank is to test."""

    address: str
    port: int
    tokens: Tokens
    gpus: tuple[str, ...]
    seconds: float


class CheckingRank:
    """What every rank does."""

    def __init__(self, mailbox: Mailbox, environ: Mapping[str, str], host: str) -> None:
        self.rank, self.size, self.host = mailbox.rank, mailbox.size, host
        #: What it is at.
        self.doing = "its options"
        self._mailbox = mailbox
        self._environ = environ
        self._listener: Listener | None = None
        self._pool = ThreadPoolExecutor(1)
        self._testing: Future[Outcome] | None = None

    def look(self, options: Options | InputError, library: str, problems: Iterable[tuple[str, str]]) -> None:
        """Tell rank 0 what this rank sees."""
        answer: Facts | Failure
        if isinstance(options, InputError):
            answer = Failure.of(options)
        else:
            answer = take_facts(
                self._mailbox.rank,
                self._mailbox.size,
                options,
                self._environ,
                library,
                problems=tuple(problems),
                tell=self._doing,
            )
        self._mailbox.send(0, Kind.FACTS, answer)

    def _doing(self, what: str) -> None:
        self.doing = what
        self._mailbox.send(0, Kind.DOING, (self.host, what))

    def on_mail(self, mail: Mail) -> int | None:
        """Do what rank 0 says; the exit code once it is known."""
        if mail.kind == Kind.LISTEN:
            self._mailbox.send(0, Kind.LISTENING, self._listen(*mail.payload))
        elif mail.kind == Kind.TEST:
            self._doing("its GPUs with a kernel, and connected to the scheduler's address")
            self._testing = self._pool.submit(self._test, mail.payload)
        elif mail.kind == FAIL:
            raise mail.payload.error(reported=True)
        elif mail.kind == Kind.DONE:
            return int(mail.payload)
        return None

    def poll(self) -> None:
        """Tell rank 0 once the tests are over."""
        if self._testing is not None and self._testing.done():
            self._mailbox.send(0, Kind.TESTED, self._testing.result())
            self._testing = None

    def _listen(
        self, address: str, port: int, tokens: Tokens, dashboard: tuple[str, int] | None
    ) -> Listening:
        blocked = port_problem(*dashboard) if dashboard is not None else ""
        try:
            self._listener = Listener(address, port, tokens)
        except OSError as error:
            return Listening(error=error.strerror or str(error), dashboard=blocked)
        return Listening(self._listener.port, dashboard=blocked)

    def _test(self, test: RankTest) -> Outcome:
        # In a thread, so that rank 0 can hear the others meanwhile; MPI is left alone here.
        with ThreadPoolExecutor(1) as pool:
            kernels = pool.submit(run_kernels, test.gpus, self._environ, test.seconds)
            timeout = min(CONNECT_TIMEOUT, test.seconds / 2)
            reach = connect_to(test.address, test.port, test.tokens, timeout) if test.port else None
            return Outcome(reach, kernels.result())

    def until_told(self, deadline: float) -> int:
        """Serve rank 0 until it says how it ended."""
        while time.monotonic() < deadline:
            for mail in self._mailbox.receive():
                if (code := self.on_mail(mail)) is not None:
                    return code
            self.poll()
            time.sleep(TICK)
        error = StartupError(
            "rank 0 did not answer: it hangs while it looks at its host (GPUs, local directory); leave that host out",
            reported=self._mailbox.rank != 1,
        )
        report_error(error)
        abort(error.exit_code)
        raise error

    def close(self) -> None:
        """Leave nothing behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._listener is not None:
            self._listener.close()
