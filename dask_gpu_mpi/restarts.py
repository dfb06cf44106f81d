"""Watching over nannies: a worker that dies is brought back by its nanny, but one that dies at each start not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

__all__ = ["SHORT_LIFE", "SHORT_LIVES", "closing_reason", "watch_nanny"]

#: A worker process that lives for fewer seconds than this died at its start.
SHORT_LIFE = 10.0
#: So many in a row, and the nanny gives up.
SHORT_LIVES = 5
#: Seconds between looks.
INTERVAL = 0.25


def closing_reason(nanny: Any) -> Callable[[], str]:
    """Remember why a nanny closes; returns a function that tells.

    A nanny closes of itself when its worker was closed by the scheduler, and when it can't start it again; afterwards both look
    the same.
    """
    reasons: list[str] = []
    close = nanny.close

    async def remembering(*args: Any, **kwargs: Any) -> Any:
        reasons.append(str(kwargs.get("reason", "")))
        return await close(*args, **kwargs)

    nanny.close = remembering
    return lambda: reasons[0] if reasons else ""


async def watch_nanny(nanny: Any, clock: Callable[[], float] = time.monotonic) -> str:
    """Wait until a nanny's worker has died too often, and close the nanny.

    Returns
    -------
    str
        What to say about it.
    """
    pid, born, short = nanny.pid, clock(), 0
    while True:
        await asyncio.sleep(INTERVAL)
        current = nanny.pid
        if current == pid:
            if pid is not None and clock() - born > SHORT_LIFE:
                short = 0
            continue
        if pid is not None and clock() - born <= SHORT_LIFE:
            short += 1
        if current is not None:
            born = clock()
        pid = current
        if short >= SHORT_LIVES:
            await nanny.close(reason="nanny-instantiate-too-often")
            return f"its process died {short} times, each within {SHORT_LIFE:g} s of its start"
