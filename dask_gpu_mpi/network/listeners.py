"""Which ports of Dask's processes listen, and for how long a stranger may use one: changes of distributed for every process.

- A TLS connection has a deadline for its handshake. Dask's own keeps a half-open connection forever.
- An HTTP server without routes in Dask's configuration does not start. Distributed starts one in the scheduler and in every
  worker, with or without a dashboard, and each shows every user of the node what runs there. So a worker has none, unless the
  user requests it in ``worker_options``, and a scheduler without a dashboard has none.

The agent calls `guard_listeners` before it forks the processes of scheduler and workers. The routes are taken out of Dask's
configuration by the agent for its workers (`NO_WORKER_ROUTES`), and by the scheduler's process (`NO_SCHEDULER_ROUTES`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.comm import tcp
from distributed.comm.registry import backends
from distributed.node import ServerNode


def guard_listeners() -> None:
    """Change distributed in this process, and in all that are forked from it. May be called again."""
    backends["tls"] = TLSBackend()
    ServerNode.start_http_server = _start_http_server_for_routes  # type: ignore[method-assign]


class TLSListener(tcp.TLSListener):
    """Distributed's, with the deadline of the other side (``comm.timeouts.connect``) for the handshake of TLS."""

    def __init__(self, *args: Any, ssl_context: ssl.SSLContext | None = None, **kwargs: Any) -> None:
        if ssl_context is not None:  # otherwise distributed raises an error
            # No process of a job resumes a session. To make the two tickets for that is a third of a handshake's CPU time.
            ssl_context.num_tickets = 0
        super().__init__(*args, ssl_context=ssl_context, **kwargs)

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        seconds = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"), default="seconds")
        timer = asyncio.get_running_loop().call_later(seconds, stream.close)
        try:
            return await super()._prepare_stream(stream, address)
        finally:
            timer.cancel()


class TLSBackend(tcp.TLSBackend):
    """Distributed's, with our listener."""

    def get_listener(self, *args: Any, **kwargs: Any) -> TLSListener:
        """Called by distributed."""
        return TLSListener(*args, **kwargs)


# HTTP servers without routes.

NO_SCHEDULER_ROUTES: dict[str, Any] = {"distributed.scheduler.http.routes": []}
NO_WORKER_ROUTES: dict[str, Any] = {"distributed.worker.http.routes": []}
#: Distributed's, before `guard_listeners`.
_start_http_server = ServerNode.start_http_server


def _start_http_server_for_routes(self: ServerNode, routes: list[Any], *args: Any, **kwargs: Any) -> None:
    if routes:
        _start_http_server(self, routes, *args, **kwargs)


def requests_http_server(worker_options: Mapping[str, Any]) -> bool:
    """Whether the user requests an HTTP server in each worker.

    >>> each = ({}, {"dashboard": False}, {"dashboard": True}, {"dashboard_address": ":0"})
    >>> [*map(requests_http_server, each)]
    [False, False, True, True]
    """
    return bool(worker_options.get("dashboard")) or worker_options.get("dashboard_address") is not None


def report_no_server(scheduler: Any) -> None:
    """Set the port of a scheduler without an HTTP server to 0: clients need one for their links, and fail without it."""
    scheduler.services["dashboard"] = SimpleNamespace(port=0, stop=lambda: None)
