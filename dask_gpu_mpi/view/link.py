"""The one connection of `top`: to the scheduler, which has all figures. No client, so the job does not notice it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

from dask_gpu_mpi.base.text import printable
from dask_gpu_mpi.errors import ClusterLostError, InputError
from dask_gpu_mpi.network.credentials import clock_problem
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.view.job_watch import FACTS_OPERATION
from dask_gpu_mpi.view.snapshot import Snapshot, snapshot_of, with_rates

__all__ = ["Link", "NoAnswerError"]

#: Seconds for each answer, and of these for the connection: while it is refused, distributed tries it again until then.
TIMEOUT, CONNECT_TIMEOUT = 10.0, 5.0
#: Nothing that the scheduler sends is unpickled: plain data is all that is asked for.
PLAIN = ("msgpack",)


class NoAnswerError(ClusterLostError):
    """A scheduler that has answered before does not now: it is busy, or can't be reached. Another sample may succeed."""


class Link:
    """Asks a scheduler.

    Parameters
    ----------
    target : Target
        The cluster; without a configuration of its own, Dask's says how to connect.
    """

    def __init__(self, target: Target) -> None:
        import dask
        from distributed import Security

        self._address = target.address
        # UCX reads it later, and once.
        dask.config.set(target.config)
        self._connection = Security().get_connection_args("client")
        self._comm: Any = None
        #: Whether the scheduler is one of ours; None: not known yet.
        self._ours: bool | None = None
        self._last: Snapshot | None = None

    async def sample(self) -> Snapshot:
        """A snapshot, with the rates since the last one.

        Raises
        ------
        NoAnswerError
            The scheduler has answered before, and does not within `TIMEOUT`.
        ClusterLostError
            It refuses the connection or has closed it, or never answered.
        InputError
            Its certificate is not valid by this node's clock.
        """
        try:
            async with asyncio.timeout(TIMEOUT):
                identity = await self._ask("identity", n_workers=-1)
                if not isinstance(identity, dict) or "workers" not in identity:
                    raise ValueError("its answer is not a scheduler's")
                # A scheduler of others' logs a warning where it is asked what it does not know: so only once.
                job = await self._ask(FACTS_OPERATION) if self._ours is not False else None
            self._ours = isinstance(job, dict) and "status" not in job
            snapshot = snapshot_of(identity, job if self._ours else None, time.time())
        except Exception as error:
            self.close()  # an answer may still come, and not be the next one's
            raise self._lost(error) from error
        self._last = with_rates(snapshot, self._last)
        return self._last

    async def _ask(self, operation: str, **arguments: Any) -> Any:
        """The scheduler's answer. Not by distributed's `rpc`, which unpickles the exceptions in answers."""
        from distributed.comm.core import connect

        with _without_pickle():
            if self._comm is None or self._comm.closed():
                self._comm = await connect(
                    self._address, timeout=CONNECT_TIMEOUT, deserialize=False, **self._connection
                )
            await self._comm.write({"op": operation, "reply": True, **arguments}, serializers=PLAIN)
            return await self._comm.read(deserializers=PLAIN)

    def close(self) -> None:
        """Close the connection."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def _lost(self, error: Exception) -> ClusterLostError | InputError:
        if problem := clock_problem(f"{error} {error.__cause__}"):
            return InputError(f"top: {problem}")
        timed_out = any(isinstance(cause, TimeoutError) for cause in _causes(error))
        if self._last is not None and timed_out:
            return NoAnswerError(
                f"top: no response from the scheduler at {self._address} within {TIMEOUT:g} s: it is busy, or its node can't be "
                "reached any more. Fix: try again"
            )
        if self._last is not None:
            return ClusterLostError(f"top: the scheduler at {self._address} is gone: the cluster has ended")
        text = "no response" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        reason = printable(text[:200])
        return ClusterLostError(
            f"top: the scheduler at {self._address} can't be reached ({reason}). Fix: run it where the cluster's network "
            "can be reached, such as in the allocation, and only while the cluster runs"
        )


@contextlib.contextmanager
def _without_pickle() -> Iterator[None]:
    """Have distributed unpickle nothing: it does with what says that it is pickled, whatever deserializers are allowed."""
    from distributed.protocol import core

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("pickled data, which is not taken")

    protocol: Any = core
    before = protocol.pickle
    protocol.pickle = types.SimpleNamespace(**{**vars(before), "loads": refuse})
    try:
        yield
    finally:
        protocol.pickle = before


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
