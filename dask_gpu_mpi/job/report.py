"""The report of a job, on the client rank: requests the scheduler's record, and writes the file while the cluster ends.

`ScriptCluster` (`job.session`) has a `Reporter` if the user wants a report or a summary. All of it is done in one thread, which
starts with the session. At the end of the interpreter no other can start, and asyncio can't even resolve an address, since it
does that in a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import shlex
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import psutil
from distributed import rpc

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import RECORD_OPERATION
from dask_gpu_mpi.job.entering import Joined
from dask_gpu_mpi.job.outcome import Outcome
from dask_gpu_mpi.sites.batch import batch_job
from dask_gpu_mpi.view.report_data import ReportedJob, assemble, is_page, write_report
from dask_gpu_mpi.view.report_summary import printed

#: Seconds for the scheduler to answer at the end, and to connect to it.
ASKING, CONNECTING = 3.0, 10.0
#: Seconds after which an answer counts as lost, and the next request is sent.
LATEST = 60.0
#: Seconds between fetches while the script runs: with a lost scheduler, only the time since the last fetch is lost.
REFRESHING = 60.0
#: Seconds after the start at which the modules of the page are imported, so that the end need not wait for them.
PREPARING = 5.0
#: Seconds for the connection to end; a report that is still being written is not awaited longer.
CLOSING = 1.0
#: Seconds to make and write a report, after which the job ends without it.
WRITING = 30.0


class Reporter:
    """Collects the data of the report, and writes it.

    `warnings`: those that were printed. `started`, `ready`: of this process and of the cluster, in seconds since the epoch.
    """

    def __init__(
        self, joined: Joined, security: Any, warnings: Sequence[str], *, started: float, ready: float
    ) -> None:
        self._joined = joined
        self._warnings = tuple(warnings)
        self._started = started
        self._program = shlex.join(map(str, sys.argv))  # the script may change it
        self._ready = ready
        address = joined.cluster.address
        arguments = {} if security is None else security.get_connection_args("client")
        self._scheduler: Any = rpc(address, timeout=CONNECTING, connection_args=arguments)
        self._record: Mapping[str, Any] | None = None
        #: Whether the scheduler has answered the last request.
        self._answered = False
        #: Whether it has answered the request before its shutdown: there will be no other record.
        self._complete = False
        self._writing: concurrent.futures.Future[list[str]] | None = None
        self._one_request = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dask_gpu_mpi report", daemon=True)
        self._thread.start()
        if joined.options.recorded:
            self._submit(self._refresh())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()  # frees three descriptors

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _refresh(self) -> None:
        """Connect, import the modules of the page, and request the record from time to time."""
        with contextlib.suppress(Exception):  # an error that lasts is reported at the end
            await self._request()
        await asyncio.sleep(PREPARING)
        if is_page(self._joined.options.report or ""):
            # Not in a thread of asyncio's, which Python would wait for at its end.
            threading.Thread(target=_import_page, name="dask_gpu_mpi import of Bokeh", daemon=True).start()
        while True:
            with contextlib.suppress(Exception):
                await self._request()
            await asyncio.sleep(REFRESHING)

    async def _request(self) -> None:
        """Request the scheduler's record; a request whose answer is late is not repeated until it comes, or is too late."""
        async with self._one_request:
            # The shutdown may not have happened: the script may have interrupted it.
            if self._complete and all(comm.closed() for comm in self._scheduler.comms):
                return
            async with asyncio.timeout(LATEST):
                record = await getattr(self._scheduler, RECORD_OPERATION)()
            if isinstance(record, Mapping) and "series" in record:  # else it is another job's scheduler
                self._record = record

    def fetch(self, timeout: float = ASKING, *, last: bool = False) -> bool:
        """Request the scheduler's record, and return whether it has answered in time; otherwise the last record is kept.

        `last`: the scheduler is about to be shut down.
        """
        try:
            self._submit(self._request()).result(timeout)
            self._answered = True
        except Exception:
            self._answered = False
        self._complete |= self._answered and last
        return self._answered

    def begin(self, path: str | None, outcome: Outcome, *, fetch: bool, lost: bool = False) -> None:
        """Begin to make the report, and to write it if there is a path.

        `fetch`: request the scheduler's record before; `lost`: the scheduler is lost.
        """
        if lost:
            self._answered = False
        if fetch and not self.fetch():
            has = "has nothing of its work"
            if self._record is not None:
                until = time.strftime("%H:%M:%S", time.localtime(self._record["until"]))
                has = f"has its work until {until}"
            say(
                f"warning: the scheduler did not answer within {ASKING:g} s at the end; the report {has}. Fix: let the script "
                "end when the scheduler has no work left"
            )
        summary = self._joined.options.summary
        self._writing = self._submit(self._write(path, self._job(outcome), summary))

    async def _write(self, path: str | None, job: ReportedJob, summary: bool) -> list[str]:
        """Write the file, if there is a path, and return the lines to print: those of the summary, if it is requested."""
        data = assemble(job, self._record)
        if path is not None:
            write_report(path, data)
        return printed(data) if summary else []

    def _job(self, outcome: Outcome) -> ReportedJob:
        joined = self._joined
        assert joined.cluster.plan is not None  # the client rank is given it
        steps = joined.cluster.steps
        begins = [step.start for step in steps.get(joined.rank, ())]
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
            program=self._program,
            user=psutil.Process().username(),  # or the number, in a container without a name for it
            batch_job=batch_job(joined.environ),
        )

    def finish(self) -> None:
        """Wait until it is written; a failure is only a warning."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            for line in self.wait(writing):
                say(line)
        except Exception as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            say(
                f"warning: the report could not be written: {reason}. Fix: another file or format by --report"
            )

    def wait(self, writing: concurrent.futures.Future[list[str]]) -> list[str]:
        """Wait until it is written, or raise the error; returns the lines to print."""
        try:
            return writing.result(WRITING)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"not within {WRITING:g} s") from None

    def write_now(self, path: str, outcome: Outcome, *, ask: bool) -> None:
        """Write the report, or raise the error; `ask`: there is a scheduler with a newer record."""
        if self._loop.is_closed():  # the cluster has ended, and the script continues
            write_report(path, assemble(self._job(outcome), self._record))
            return
        if ask and not self.fetch(CONNECTING):
            raise TimeoutError(
                f"session.report: the scheduler did not answer within {CONNECTING:g} s, and {path!r} was not written. Fix: call "
                "it again when the scheduler has less work"
            )
        self.wait(self._submit(self._write(path, self._job(outcome), False)))

    def close(self) -> None:
        """End the connection, and the thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._close)
        self._thread.join(CLOSING)

    def _close(self) -> None:
        for comm in self._scheduler.comms:
            comm.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)  # after the end of the cancelled tasks


def _import_page() -> None:
    with contextlib.suppress(Exception):  # reported when the report is made
        importlib.import_module("dask_gpu_mpi.view.report_page")
