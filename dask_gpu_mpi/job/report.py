"""The report of a job, on the client rank: asks the scheduler for its record, and writes the file while the cluster ends.

All of it happens in one thread, which starts with the session. At the end of the interpreter no other can start, and asyncio
can't even look up an address, since it does that in a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import RECORD_OPERATION
from dask_gpu_mpi.job.outcome import Outcome
from dask_gpu_mpi.startup.bringup import Joined
from dask_gpu_mpi.view.report_data import ReportedJob, assemble
from dask_gpu_mpi.view.report_page import is_page, write_report

#: Seconds for the scheduler to answer at the end, and to connect to it.
ASKING, CONNECTING = 3.0, 10.0
#: Seconds between fetches while the script runs: a scheduler that is lost takes no more with it.
REFRESHING = 60.0
#: Seconds after the start when what makes the page is imported: the start is over then, and the end need not wait for it.
PREPARING = 5.0
#: Seconds for the connection to end: what is done at that moment, a report that is still being written, say, is not waited for.
CLOSING = 1.0
#: Seconds for a report to be made and written, beyond which the job ends without it.
WRITING = 30.0


class Reporter:
    """Gathers and writes.

    `warnings`: those that the user has been given. `started`, `ready`: when this process began to work on the cluster, and when
    the cluster was up, in seconds since the epoch.
    """

    def __init__(
        self, joined: Joined, security: Any, warnings: Sequence[str], *, started: float, ready: float
    ) -> None:
        self._joined = joined
        self._security = security
        self._warnings = tuple(warnings)
        self._started = started
        self._ready = ready
        self._comm: Any = None
        self._connecting: asyncio.Future[None] | None = None
        self._record: Mapping[str, Any] | None = None
        #: Whether the scheduler has answered when it was asked last; and whether that was before it was shut down.
        self._answered = self._was_last = False
        self._writing: concurrent.futures.Future[None] | None = None
        self._asking = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dask_gpu_mpi report", daemon=True)
        self._thread.start()
        self._submit(self._connected)
        if joined.options.report is not None:
            self._submit(self._refresh)
            if is_page(joined.options.report):
                self._loop.call_soon_threadsafe(self._loop.call_later, PREPARING, _prepare)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()  # it has three descriptors

    def _submit(
        self, function: Callable[..., Coroutine[Any, Any, Any]], *details: Any
    ) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(function(*details), self._loop)

    async def _connect(self) -> None:
        from distributed.comm.core import connect

        address = self._joined.cluster.address
        arguments = {} if self._security is None else self._security.get_connection_args("client")
        self._comm = await connect(address, timeout=CONNECTING, **arguments)

    async def _connected(self) -> Any:
        """The connection; a new one where there is none any more."""
        if self._comm is None or self._comm.closed():
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.ensure_future(self._connect())
            # who gives up to wait for it does not end it: the next one needs it
            await asyncio.shield(self._connecting)
        return self._comm

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESHING)
            with contextlib.suppress(Exception):  # what prevents it now may not at the end, and is told then
                async with asyncio.timeout(REFRESHING):
                    await self._ask()

    async def _ask(self) -> None:
        async with self._asking:  # on one connection an answer belongs to the question before it
            await self._ask_alone()

    async def _ask_alone(self) -> None:
        from distributed.core import send_recv

        if self._was_last and (self._comm is None or self._comm.closed()):
            return  # it has been shut down, and nothing has happened since it was asked
        comm = await self._connected()
        try:
            record = await send_recv(comm, op=RECORD_OPERATION)
        except BaseException:
            self._comm = None  # an answer that comes late would be taken for the next one
            comm.abort()
            raise
        if (
            isinstance(record, Mapping) and "series" in record
        ):  # else the cluster's scheduler is another job's
            self._record = record

    def fetch(self, timeout: float = ASKING, *, last: bool = False) -> bool:
        """Ask the scheduler for its record; where it does not answer in time, the one that was fetched last is kept.

        `last`: the scheduler is about to be shut down. Returns whether it has answered.
        """
        asking = self._submit(self._ask)
        try:
            asking.result(timeout)
            self._answered = True
        except Exception:
            asking.cancel()
            self._answered = False
        self._was_last = self._answered and (last or self._was_last)
        return self._answered

    def begin(self, path: str, outcome: Outcome, *, fetch: bool, lost: bool = False) -> None:
        """Begin to make the report and to write it; `fetch`: ask the scheduler before; `lost`: there is none any more."""
        if lost:
            self._answered = False
        if fetch and not self.fetch():
            has = (
                "has nothing of its work"
                if self._record is None
                else f"tells of its work until {_clock(self._record)}"
            )
            say(
                f"warning: the scheduler did not answer within {ASKING:g} s at the end; the report {has}. Fix: let the script "
                "end when the scheduler has no work left"
            )
        self._writing = self._submit(self._write, path, self._job(outcome))

    async def _write(self, path: str, job: ReportedJob) -> None:
        write_report(path, assemble(job, self._record))

    def _job(self, outcome: Outcome) -> ReportedJob:
        joined = self._joined
        assert joined.cluster.plan is not None  # the client rank is given it
        steps = joined.cluster.steps
        begins = [step.start for step in steps.get(joined.channels.rank, ())]
        return ReportedJob(
            plan=joined.cluster.plan,
            options=joined.options,
            began=min([self._started, *begins]),
            ready=self._ready,
            ended=time.time(),
            how=outcome[0],
            exit_code=outcome[1],
            warnings=self._warnings,
            transport=joined.cluster.transport,
            hosts=joined.cluster.hosts,
            steps=steps,
            answered=self._answered,
        )

    def finish(self) -> None:
        """Wait until it is written; a failure is a warning, since the job is worth more than its report.

        Raises nothing.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            self.wait(writing)
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            say(
                f"warning: the report could not be written: {reason}. Fix: another file or format by --report"
            )

    def wait(self, writing: concurrent.futures.Future[None]) -> None:
        """Wait until it is written; raises why it is not."""
        try:
            writing.result(WRITING)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"not within {WRITING:g} s") from None

    def write_now(self, path: str, outcome: Outcome, *, ask: bool) -> None:
        """Write the report, and raise what prevents it; `ask`: there is a scheduler to be asked."""
        if self._loop.is_closed():  # the cluster has ended, and the script continues
            write_report(path, assemble(self._job(outcome), self._record))
            return
        if ask and not self.fetch(CONNECTING):
            self._submit(self._connected)  # for the end: that can't start a thread to look up an address
            raise TimeoutError(
                f"session.report: the scheduler did not answer within {CONNECTING:g} s, and {path!r} was not written. Fix: call "
                "it again when the scheduler has less work"
            )
        self.wait(self._submit(self._write, path, self._job(outcome)))

    def close(self) -> None:
        """End the connection, and the thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._close)
        self._thread.join(CLOSING)

    def _close(self) -> None:
        if self._comm is not None:
            self._comm.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)  # when what was cancelled has ended


def _prepare() -> None:
    """Import what makes the page; not in the reporter's thread, where an answer of the scheduler would wait for it."""
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and no thread can start
        threading.Thread(target=_import_page, name="dask_gpu_mpi report page", daemon=True).start()


def _import_page() -> None:
    with contextlib.suppress(Exception):  # told when the report is made
        importlib.import_module("dask_gpu_mpi.view.report_figures")


def _clock(record: Mapping[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record["until"]))
