"""The client's part of gangs: `spmd` runs one function on many workers at the same time, on all or on none."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.text import one_line
from dask_gpu_mpi.errors import ClusterLostError, InputError, SpmdError, SpmdTimeoutError
from dask_gpu_mpi.gang.group import MOST_SECONDS, Call, Reply, is_number, no_result, packed, run_member

if TYPE_CHECKING:
    from distributed import Client

#: Seconds until a gang must have started, if neither `timeout` nor `start_timeout` is given.
START_TIMEOUT = 300.0
#: Of the tasks of members, which run before all others.
PRIORITY = 1_000_000
#: Whether a thread is in a call.
_thread = threading.local()


def spmd(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    workers: Collection[Any] | None = None,
    timeout: float | None = None,
    start_timeout: float | None = None,
    grace: float = 5.0,
) -> Any:
    """Run ``fn(group, *args)`` at the same time on every chosen worker, on all or on none.

    Parameters
    ----------
    client : distributed.Client
        Of a cluster of this package, or of any with nannies and this package installed.
    fn : callable
        Its first argument is a `Group`, with its rank, the other members, and operations among them.
    *args : object
        For `fn`; Dask's futures arrive as their results.
    workers : collection, optional
        Names or addresses of workers. Default: all with a GPU or, if there are none, all. In a job of this package,
        workers that were lost within the last minute are waited for.
    timeout : float, optional
        Seconds from the start on all workers until all results have arrived. Default: no limit.
    start_timeout : float, optional
        Seconds until all members have started: they wait for missing workers, for other gangs on the same workers, and for
        threads that run ordinary tasks. Default: `timeout` or, without it, 300.
    grace : float
        Seconds after a failure in which the other members may return by themselves; then their processes are restarted.

    Returns
    -------
    list
        The results of `fn`, in rank order; an awaitable if the client is asynchronous.

    Raises
    ------
    SpmdError
        A member has raised an exception, which is the ``__cause__``, or its worker has died. The first failure counts.
    SpmdTimeoutError
        A timeout has passed; also a TimeoutError.
    InputError
        A value is invalid, or a chosen worker has no nanny.
    ClusterLostError
        The scheduler is gone.

    Examples
    --------
    >>> def train(group, epochs):  # doctest: +SKIP
    ...     import torch
    ...
    ...     torch.cuda.set_device(group.device)
    ...     torch.distributed.init_process_group("nccl")
    ...     ...
    >>> losses = dask_gpu_mpi.spmd(client, train, 10)  # doctest: +SKIP
    """
    for name, value in (("timeout", timeout), ("start_timeout", start_timeout)):
        above_0 = is_number(value) and 0 < value <= MOST_SECONDS  # type: ignore[operator]
        _check(name, value, value is None or above_0, f"seconds above 0, at most {MOST_SECONDS}, or None")
    good = is_number(grace) and 0 <= grace <= MOST_SECONDS
    _check("grace", grace, good, f"seconds, 0 or more, at most {MOST_SECONDS}")
    good = isinstance(workers, Collection) and not isinstance(workers, (str, bytes)) and len(workers) > 0
    _check("workers", workers, workers is None or good, "a list of names or addresses, or None")
    _check("fn", fn, callable(fn), "a function")
    names = None if workers is None else [str(worker) for worker in workers]
    _check("workers", workers, not names or len(set(names)) == len(names), "each worker once: it is one rank")
    limits = {
        "workers": names,
        "timeout": timeout,
        "start_timeout": start_timeout or timeout or START_TIMEOUT,
        "grace": grace,
    }
    call = _Run(client, fn, args, limits)
    if client.asynchronous:
        return client.sync(call.run)
    # in a signal's handler, for which the other call waits
    if getattr(_thread, "calls", False):
        raise InputError(
            "spmd: another call of this thread has not ended",
            expected="one at a time in a thread",
            fix="write a checkpoint in the function itself, or call it in another thread",
        )
    _thread.calls = True
    try:
        return client.sync(call.run)
    except BaseException:
        call.abandon()  # if a signal's handler has raised it, the call itself continues in the event loop
        raise
    finally:
        _thread.calls = False


def _check(name: str, value: object, good: bool, expected: str) -> None:
    """Raise an InputError for an argument that is not good."""
    if not good:
        raise InputError(f"spmd: {name}: invalid value {value!r}", expected=expected)


class _Run:
    """One call of `spmd`, in the client's event loop."""

    def __init__(
        self, client: Any, fn: Callable[..., Any], args: tuple[Any, ...], limits: dict[str, Any]
    ) -> None:
        self.client = client
        self.fn = fn
        self.args = args
        self.limits = limits
        self._name = uuid.uuid4().hex
        self._running: asyncio.Task[Any] | None = None
        self._abandoned = False

    def abandon(self) -> None:
        """End the gang, whose results are no longer needed, unless it is over; in another thread than the event loop's."""
        self._abandoned = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.client.loop.add_callback(self._cancel)

    def _cancel(self) -> None:
        # Once: a second time would cancel the message to the scheduler. Dask's `sync` cancels after a KeyboardInterrupt.
        if self._running is not None and not self._running.cancelling():
            self._running.cancel()

    async def run(self) -> list[Any]:
        from dask_gpu_mpi.gang.scheduler_plugin import Gangs

        self._running = asyncio.current_task()
        if self._abandoned:
            raise asyncio.CancelledError
        try:
            await self.client.register_plugin(Gangs())
            return await self._run_gang()
        except SpmdError:  # one of a timeout is an OSError, too
            raise
        except OSError as error:
            raise ClusterLostError(f"spmd: the connection to the scheduler is lost: {error}") from error

    async def _run_gang(self) -> list[Any]:
        try:
            opened = await self._scheduler(Call.OPEN, client=self.client.id, **self.limits)
            if opened["state"] == Reply.REFUSED:
                raise InputError(f"spmd: {opened['why']}")
            if opened["state"] == Reply.OVER:
                raise _error(opened)
            results = await self._results(opened["workers"])
        except BaseException as error:
            # ignored if the error is the scheduler's: the first failure counts
            await self._scheduler(Call.FAIL, text=f"cancelled by its client: {type(error).__name__}")
            if isinstance(error, Exception):
                closed = await self._scheduler(Call.CLOSE)
                for note in closed["notes"]:
                    error.add_note(note)
                if isinstance(error, SpmdError):
                    error.died = tuple(closed["died"])
            raise
        await self._scheduler(Call.CLOSE)
        return results

    async def _results(self, workers: Sequence[str]) -> list[Any]:
        """The results of all members; raises an SpmdError if one fails."""
        # raises if an object can't be pickled
        futures = [self._submit(rank, worker) for rank, worker in enumerate(workers)]
        watching = asyncio.ensure_future(self._scheduler(Call.WATCH))
        # not `Client.gather`, which leaves tasks behind when it is cancelled
        fetching = [asyncio.ensure_future(_result(future)) for future in futures]
        all_fetched = asyncio.gather(*fetching)
        try:
            await asyncio.wait({watching, all_fetched}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                ended = ((rank, task.exception()) for rank, task in enumerate(fetching) if task.done())
                rank, error = next((each for each in ended if each[1] is not None), (None, None))
                if error is not None:
                    # Dask could not run a task or send its result; the scheduler may know of an earlier failure
                    text = f"failed in Dask: {type(error).__name__}: {one_line(error)}"
                    await self._scheduler(Call.FAIL, text=text, rank=rank, error=packed(error)[1])
                else:
                    results = all_fetched.result()
                    # A member that has failed reports that first; the answer of WATCH may still be on its way.
                    if not any(isinstance(each, str) and each == no_result(self._name) for each in results):
                        return results
            raise _error(await watching)
        finally:
            watching.cancel()
            all_fetched.cancel()
            await asyncio.gather(watching, *fetching, all_fetched, return_exceptions=True)
            await self.client.cancel(futures, asynchronous=True)

    def _submit(self, rank: int, worker: str) -> Any:
        return self.client.submit(
            run_member,
            self._name,
            rank,
            self.limits["start_timeout"],
            self.fn,
            *self.args,
            key=f"spmd-{getattr(self.fn, '__name__', 'function')}-{self._name}-{rank}",
            workers=[worker],
            allow_other_workers=False,
            priority=PRIORITY,
            retries=0,
            pure=False,
        )

    async def _scheduler(self, operation: Call, **content: Any) -> Any:
        if (scheduler := self.client.scheduler) is None:
            raise ClusterLostError("spmd: its client was closed", expected="close() when spmd has returned")
        return await getattr(scheduler, operation)(gang=self._name, **content)


async def _result(future: Any) -> Any:
    """The result. If this is cancelled, the fetching goes on, since the same request may fetch other results of the client."""

    async def fetch() -> Any:
        return await future

    fetching = asyncio.ensure_future(fetch())
    # without a warning of asyncio if nobody waits for it any more
    fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(fetching)


def _error(answer: dict[str, Any]) -> SpmdError:
    """The error for an answer of the scheduler."""
    cls = SpmdTimeoutError if answer.get("late") else SpmdError
    error = cls(
        f"spmd: {answer['why']}",
        rank=answer.get("rank"),
        worker=answer.get("worker"),
        host=answer.get("host"),
    )
    if carried := answer.get("error"):
        try:
            error.__cause__ = pickle.loads(carried)
        except Exception:  # its class may be in a module that the worker alone has
            error.__cause__ = Exception(answer["why"])
    return error
