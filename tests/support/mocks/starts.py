"""The start of one rank, without its process: the signals that it has had, and its deadline."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.startup.start_context import StartContext

__all__ = ["start_context"]


def start_context(*, seconds: float = 30.0, signal: int | None = None, **environ: str) -> StartContext:
    """A start on host ``h`` that has so many seconds left; `signal` has come."""
    now = time.monotonic()
    signals: Any = SimpleNamespace(got=None if signal is None else (signal, now))
    return StartContext(environ, None, True, now, now + seconds, signals, Timeline("rank"), "h")
