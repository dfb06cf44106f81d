"""Dask's listeners with a deadline for handshakes, and no HTTP server without routes.

Dask's own keep a half-open connection forever. The agent installs these before it forks, so that scheduler, nannies and workers
have them.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.comm import tcp
from distributed.comm.registry import backends
from distributed.node import ServerNode


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


#: Distributed's, which starts one for servers without routes, too, and every user of the node could reach it.
_start_http_server = ServerNode.start_http_server


def _start_http_server_for_routes(self: ServerNode, routes: list[Any], *args: Any, **kwargs: Any) -> None:
    if routes:
        _start_http_server(self, routes, *args, **kwargs)


def guard_listeners() -> None:
    """Install these listeners in this process, and in all that are forked from it. May be called again."""
    backends["tls"] = TLSBackend()
    listen_where_routes_are()


def listen_where_routes_are() -> None:
    """Start no HTTP server without routes, in this process and those forked from it."""
    ServerNode.start_http_server = _start_http_server_for_routes  # type: ignore[method-assign]
