"""Which of Dask's servers listen for HTTP: those that have something to serve there.

distributed starts an HTTP server in the scheduler and in every worker, dashboard or not, and each tells every user of the node
what runs there. Whether one is wanted, its routes in Dask's configuration say: a worker has none, unless the user asks for its
server in ``worker_options``, and a scheduler without a dashboard has none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

__all__ = [
    "NO_SCHEDULER_ROUTES",
    "NO_WORKER_ROUTES",
    "asks_for_server",
    "listen_where_routes_are",
    "report_no_server",
]

NO_SCHEDULER_ROUTES: dict[str, Any] = {"distributed.scheduler.http.routes": []}
NO_WORKER_ROUTES: dict[str, Any] = {"distributed.worker.http.routes": []}


def listen_where_routes_are() -> None:
    """Have scheduler and workers of this process, and of those forked from it, start no HTTP server that has no routes.

    May be called again.
    """
    from distributed.node import ServerNode

    start = getattr(ServerNode, "start_http_server", None)
    if start is None or getattr(start, "with_routes", False):
        return

    @functools.wraps(start)
    def start_http_server(self: ServerNode, routes: list[Any], *args: Any, **kwargs: Any) -> None:
        if routes:
            start(self, routes, *args, **kwargs)

    start_http_server.with_routes = True  # type: ignore[attr-defined]
    ServerNode.start_http_server = start_http_server  # type: ignore[method-assign]


def asks_for_server(worker_options: Mapping[str, Any]) -> bool:
    """Whether the user wants an HTTP server in each worker.

    >>> [asks_for_server(each) for each in ({}, {"dashboard": False}, {"dashboard": True}, {"dashboard_address": ":0"})]
    [False, False, True, True]
    """
    return bool(worker_options.get("dashboard")) or worker_options.get("dashboard_address") is not None


def report_no_server(scheduler: Any) -> None:
    """Let clients of a scheduler without a server know its port, 0: they look it up for their links, and fail without it."""
    scheduler.services["dashboard"] = SimpleNamespace(port=0, stop=lambda: None)
