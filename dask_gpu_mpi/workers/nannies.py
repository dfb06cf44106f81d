"""The nannies of workers: what is changed of them before they start, and when they no longer restart a worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = [
    "DEATHS",
    "WINDOW",
    "closing_reason",
    "kill_at_once",
    "listen_on_tcp",
    "measure_less",
    "watch_nanny",
]

#: Deaths of a worker's processes within so many seconds after which the worker is removed, however long each process lived: one
#: that dies every 11 s gets nothing done. One that dies every half minute, or less often, may, and is always restarted.
DEATHS, WINDOW = 5, 120.0
#: Seconds between polls.
INTERVAL = 0.25
#: Seconds that Dask gives a worker's process to end when its nanny closes, unless that is called with others.
DASK_CLOSES = 5.0
#: Seconds beyond those, for the teardown of plugins.
CLOSING_SLACK = 5.0

logger = logging.getLogger("dask_gpu_mpi")


def closing_reason(nanny: Any) -> Callable[[], str]:
    """Record why a nanny closes, and let it close in time; returns a function that returns the reason.

    A nanny closes by itself when the scheduler has closed its worker, and when it can't restart it; afterwards only the reason
    differs. A plugin of the user's whose teardown hangs would keep it, and its worker would never be removed.
    """
    reasons: list[str] = []
    close = nanny.close

    async def remembering(*args: Any, **kwargs: Any) -> Any:
        reasons.append(str(kwargs.get("reason", "")))
        deadline = asyncio.timeout((kwargs.get("timeout") or DASK_CLOSES) + CLOSING_SLACK)
        try:
            # In this task: a server that closes cancels all its own tasks but the one that closes it.
            async with deadline:
                return await close(*args, **kwargs)
        except TimeoutError:
            if not deadline.expired():
                raise  # Dask's own
        logger.warning(
            "the nanny of worker %s has not closed, perhaps because of a plugin's teardown; it is closed without that",
            getattr(nanny, "name", None),
        )
        await _close_alone(nanny)
        return "OK"

    nanny.close = remembering
    return lambda: reasons[0] if reasons else ""


async def _close_alone(nanny: Any) -> None:
    """What is left of ``Nanny.close`` after the teardown of plugins."""
    from distributed.core import Server, Status

    with contextlib.suppress(Exception):
        await asyncio.wait_for(nanny.kill(timeout=CLOSING_SLACK / 2, reason="nanny-close"), CLOSING_SLACK)
    if nanny.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(nanny.pid, signal.SIGKILL)
    nanny.status = Status.closed
    await Server.close(nanny)


async def watch_nanny(
    nanny: Any,
    clock: Callable[[], float] = time.monotonic,
    *,
    on_death: Callable[[int, int | None], None] = lambda pid, code: None,
) -> str:
    """Wait until a nanny's worker has died too often, and close the nanny.

    Parameters
    ----------
    on_death : callable
        ``on_death(pid, exit_code)`` of each process that has died, the code None where it is not known.

    Returns
    -------
    str
        Why the worker is removed.
    """
    pid, asked, process = nanny.pid, _requested_ends(nanny), _process(nanny)
    deaths: deque[float] = deque(maxlen=DEATHS)
    while True:
        await asyncio.sleep(INTERVAL)
        current = nanny.pid
        if current == pid:
            continue
        code = getattr(process, "exitcode", None)
        if pid is not None and pid not in asked and not (code == 0 and _has_lifetime(nanny)):
            deaths.append(clock())
            on_death(pid, code)
        pid, process = current, _process(nanny)
        if len(deaths) == DEATHS and (seconds := deaths[-1] - deaths[0]) <= WINDOW:
            await nanny.close(reason="nanny-instantiate-too-often")
            return f"its process died {DEATHS} times within {seconds:.0f} s"


def _has_lifetime(nanny: Any) -> bool:
    """Whether its worker ends by itself after some time (Dask's ``lifetime``), in order, and is to be restarted then."""
    import dask

    configured = dask.config.get("distributed.worker.lifetime.duration", None)
    return bool(getattr(nanny, "worker_kwargs", {}).get("lifetime") or configured)


def _process(nanny: Any) -> Any:
    """Dask's object of a nanny's process, which knows its exit code when the nanny has forgotten it."""
    return getattr(getattr(nanny, "process", None), "process", None)


def _requested_ends(nanny: Any) -> set[int | None]:
    """The processes that this nanny is asked to end from now on (``client.restart()``): those count as no deaths."""
    asked: set[int | None] = set()
    kill, handlers = getattr(nanny, "kill", None), getattr(nanny, "handlers", {})
    if kill is None:  # in another version of distributed
        return asked

    async def remembering(*args: Any, **kwargs: Any) -> Any:
        asked.add(nanny.pid)
        return await kill(*args, **kwargs)

    # `Nanny.restart` calls the one, and the scheduler the other.
    nanny.kill = handlers["kill"] = remembering
    return asked


def measure_less(nanny: Any) -> None:
    """Leave out what a nanny measures of itself, which nobody reads: its event loop, and its process.

    The one is 50 wake-ups a second, 1.5 % of a core, for a warning; the other two of them, 0.1 %. What scheduler and workers
    measure stays, and the nanny continues to watch its worker's memory.
    """
    callbacks = getattr(nanny, "periodic_callbacks", {})
    for name in ("tick", "ticks", "monitor"):
        callbacks.pop(name, None)


def kill_at_once() -> None:
    """Have nannies kill a worker where Dask's send it SIGTERM: above its memory limit, and when it has not come up.

    Our workers leave SIGTERM to the rank (`boot.ignore_signals`); Dask's have no handler, and it ends them as SIGKILL does.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from distributed.process import AsyncProcess

        AsyncProcess.terminate = AsyncProcess.kill  # type: ignore[method-assign]


def listen_on_tcp(nanny: Any) -> None:
    """Have a nanny of a worker over UCX listen on TCP: it moves no data, and UCX keeps a core busy there."""
    # The worker's protocol has been settled by the nanny's constructor.
    if getattr(nanny, "_protocol", None) == "ucx":
        nanny._protocol = "tcp"
