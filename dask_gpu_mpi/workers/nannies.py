"""What is changed of Dask's nannies before they start."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

__all__ = ["kill_at_once", "listen_on_tcp", "measure_less"]


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
    with suppress(ImportError, AttributeError):
        from distributed.process import AsyncProcess

        AsyncProcess.terminate = AsyncProcess.kill  # type: ignore[method-assign]


def listen_on_tcp(nanny: Any) -> None:
    """Have a nanny of a worker over UCX listen on TCP: it moves no data, and UCX keeps a core busy there."""
    # The worker's protocol has been settled by the nanny's constructor.
    if getattr(nanny, "_protocol", None) == "ucx":
        nanny._protocol = "tcp"
