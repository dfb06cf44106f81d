"""`spmd`: run one function on many workers at the same time, on all or on none; the client's side."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.errors import ClusterLostError, InputError, SpmdError, SpmdTimeoutError
from dask_gpu_mpi.gang.gang import Candidate, Member
from dask_gpu_mpi.gang.group import MOST_SECONDS, State, is_number, no_result, one_line

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["spmd"]

#: Seconds until a gang must have started, where neither `timeout` nor `start_timeout` is given.
START_TIMEOUT = 300.0
#: Whether a thread is in a call.
_thread = threading.local()
#: Dask's tasks of members come before all others.
PRIORITY = 1_000_000


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
        Its first argument is a `Group`: its rank, the other members, and what they can tell each other.
    *args : object
        For `fn`; Dask's futures arrive as their results.
    workers : collection, optional
        Names or addresses of workers. Default: all with a GPU, and where there are none, all. Those that were lost within the
        last minute are waited for.
    timeout : float, optional
        Seconds from the start on all workers until the results are here. Default: no limit.
    start_timeout : float, optional
        Seconds until all members have started: they wait for workers that are not there, for other gangs on the same workers,
        and for a thread that ordinary tasks have. Default: `timeout`, and without that 300.
    grace : float
        Seconds after a failure in which the other members may return by themselves; then their processes are restarted.

    Returns
    -------
    list
        What `fn` has returned, in rank order. A future of it where the client is asynchronous.

    Raises
    ------
    SpmdError
        A member has raised an exception, which is the ``__cause__``, or its worker has died. The first counts.
    SpmdTimeoutError
        A timeout has passed; also a TimeoutError.
    InputError
        A value can't be used, or a chosen worker has no nanny.
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
        if value is not None and not (is_number(value) and 0 < value <= MOST_SECONDS):
            raise InputError(
                f"spmd: {name}: invalid value {value!r}",
                expected=f"seconds above 0, at most {MOST_SECONDS}, or None",
            )
    if not (is_number(grace) and 0 <= grace <= MOST_SECONDS):
        raise InputError(
            f"spmd: grace: invalid value {grace!r}", expected=f"seconds, 0 or more, at most {MOST_SECONDS}"
        )
    if workers is not None and (
        isinstance(workers, (str, bytes)) or not isinstance(workers, Collection) or not workers
    ):
        raise InputError(
            f"spmd: workers: invalid value {workers!r}", expected="a list of names or addresses, or None"
        )
    names = None if workers is None else [str(worker) for worker in workers]
    if names is not None and len(set(names)) < len(names):
        raise InputError(
            f"spmd: workers: {workers!r} has a worker twice", expected="each once: a worker is one rank"
        )
    if not callable(fn):
        raise InputError(f"spmd: fn: invalid value {fn!r}", expected="a function")
    limits = {
        "workers": names,
        "timeout": timeout,
        "start_timeout": start_timeout or timeout or START_TIMEOUT,
        "grace": grace,
    }
    call = _Call(client, fn, args, limits)
    if client.asynchronous:
        return client.sync(call.run)
    if getattr(
        _thread, "calls", False
    ):  # in a signal's handler: the other one can't go on before this one ends
        raise InputError(
            "spmd: another call of this thread has not ended",
            expected="one at a time in a thread",
            fix="write a checkpoint in the function itself, or call it in another thread",
        )
    _thread.calls = True
    try:
        return client.sync(call.run)
    except BaseException:
        call.abandon()  # a signal's handler may have raised it into the wait, and the call itself goes on
        raise
    finally:
        _thread.calls = False


@dataclass
class _Call:
    """One call of `spmd`, in the client's event loop."""

    client: Any
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    limits: dict[str, Any]

    def __post_init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._running: asyncio.Task[Any] | None = None
        self._abandoned = False

    def abandon(self) -> None:
        """End the gang, unless it is over: nobody waits for its results. From another thread than the event loop's."""
        self._abandoned = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.client.loop.add_callback(self._cancel)

    def _cancel(self) -> None:
        # once: a second time would end what tells the scheduler. Dask's `sync` does it after a KeyboardInterrupt.
        if self._running is not None and not self._running.cancelling():
            self._running.cancel()

    async def run(self) -> list[Any]:
        from dask_gpu_mpi.gang.scheduler_plugin import Gangs

        self._running = asyncio.current_task()
        if self._abandoned:
            raise asyncio.CancelledError
        try:
            await self.client.register_plugin(Gangs())
            try:
                opened = await self._scheduler("open", client=self.client.id, **self.limits)
                if opened["state"] == State.REFUSED:
                    raise InputError(f"spmd: {opened['why']}")
                if opened["state"] == State.OVER:
                    raise _error(opened)
                results = await self._results(_members(opened))
            except BaseException as error:
                # the client's failure, or that which it was told of: the first counts
                why = f"cancelled by its client: {type(error).__name__}"
                await self._scheduler("fail", kind="client", text=why, rank=None, error=None)
                if isinstance(error, Exception):
                    closed = await self._scheduler("close_gang")
                    for note in closed["notes"]:
                        error.add_note(note)
                    if isinstance(error, SpmdError):
                        error.died = tuple(closed["died"])
                raise
            await self._scheduler("close_gang")
            return results
        except OSError as error:
            if isinstance(error, SpmdError):
                raise
            raise ClusterLostError(f"spmd: the connection to the scheduler is lost: {error}") from error

    async def _results(self, members: Sequence[Member]) -> list[Any]:
        """The results of all members; raises an SpmdError where one fails."""
        # may raise: what can't be pickled
        futures = [self._submit(member, len(members)) for member in members]
        watching = asyncio.ensure_future(self._scheduler("watch"))
        # not `Client.gather`, which leaves tasks behind when it is cancelled
        fetching = [asyncio.ensure_future(_result(future)) for future in futures]
        all_fetched = asyncio.gather(*fetching)
        try:
            await asyncio.wait({watching, all_fetched}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                failed = [task.exception() if task.done() else None for task in fetching]
                if any(failed):
                    await self._report(failed)
                else:
                    results = all_fetched.result()
                    # A member that has failed tells the scheduler first; the answer of `watch` may still be on its way.
                    if not any(isinstance(each, str) and each == no_result(self._name) for each in results):
                        return results
            raise _error(await watching)
        finally:
            watching.cancel()
            all_fetched.cancel()
            await asyncio.gather(watching, *fetching, all_fetched, return_exceptions=True)
            await self.client.cancel(futures, asynchronous=True)

    def _submit(self, member: Member, size: int) -> Any:
        from dask_gpu_mpi.gang.member import run_member

        return self.client.submit(
            run_member,
            self._name,
            member,
            size,
            self.limits["start_timeout"],
            self.fn,
            *self.args,
            key=f"spmd-{getattr(self.fn, '__name__', 'function')}-{self._name}-{member.rank}",
            workers=[member.worker.address],
            allow_other_workers=False,
            priority=PRIORITY,
            retries=0,
            pure=False,
        )

    async def _report(self, failed: Sequence[BaseException | None]) -> None:
        """Dask could not run a task, or not send its result: tell the scheduler, which may know of an earlier failure."""
        from distributed.core import error_message

        rank, error = next((rank, error) for rank, error in enumerate(failed) if error is not None)
        message = error_message(error)
        kept = {key: message[key] for key in ("exception", "traceback")}
        text = f"failed in Dask: {type(error).__name__}: {one_line(str(error))}"
        await self._scheduler("fail", kind="raised", text=text, rank=rank, error=kept)

    async def _scheduler(self, what: str, **content: Any) -> Any:
        if (scheduler := self.client.scheduler) is None:
            raise ClusterLostError("spmd: its client was closed", expected="close() when spmd has returned")
        return await getattr(scheduler, f"gang_{what}")(gang=self._name, **content)


async def _result(future: Any) -> Any:
    """The result; if this is cancelled, the fetching goes on: others of the client's results may be in the same request."""

    async def fetch() -> Any:
        return await future

    fetching = asyncio.ensure_future(fetch())
    fetching.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # nobody asks for it any more, perhaps
    return await asyncio.shield(fetching)


def _members(opened: dict[str, Any]) -> list[Member]:
    pairs = zip(opened["members"], opened["places"], strict=True)
    return [
        Member(rank, Candidate(name, address, ""), *place)
        for rank, ((name, address), place) in enumerate(pairs)
    ]


def _error(answer: dict[str, Any]) -> SpmdError:
    """The error that an answer of the scheduler stands for."""
    from distributed.core import clean_exception

    if answer.get("rank") is None:
        cls = SpmdTimeoutError if answer.get("kind") == "timeout" else SpmdError
        return cls(f"spmd: {answer['why']}")
    worker, host = answer["worker"], answer["host"]
    error = SpmdError(
        f"spmd: rank {answer['rank']} (worker {worker} on {host}) {answer['text']}",
        rank=answer["rank"],
        worker=worker,
        host=host,
    )
    if answer.get("error"):
        _, cause, traceback = clean_exception(answer["error"]["exception"], answer["error"]["traceback"])
        error.__cause__ = None if cause is None else cause.with_traceback(traceback)
    return error
