"""What a session changes in Dask's `Client`, and does with the clients that the script leaves."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.network.dashboard_link import link_template

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "abandon_clients",
    "client_with_link",
    "close_clients",
    "has_lost_client",
    "shut_down_once",
    "silence_dask",
]

#: Called before the cluster is shut down by a client of this process.
_before_shutdown: Callable[[], None] = lambda: None  # noqa: E731


def silence_dask() -> list[logging.Logger]:
    """Disable Dask's loggers, and return them: what its clients complain about once the cluster is over is no news."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("distributed.")]
    loggers = [logging.getLogger(name) for name in ("distributed", *names)]
    silenced = [logger for logger in loggers if not logger.disabled]
    for logger in silenced:
        logger.disabled = True
    return silenced


def _clients() -> list[Any]:
    """All of this process; without importing Dask where the script has not."""
    module = sys.modules.get("distributed.client")
    return [] if module is None else list(getattr(module.Client, "_instances", ()))


def close_clients(address: str) -> None:
    """Close the script's clients of this cluster while the scheduler is still there to answer."""
    for client in _clients():
        with contextlib.suppress(Exception):
            if (
                not client.asynchronous
                and client.status == "running"
                and client.scheduler is not None
                and client.scheduler.address == address
            ):
                client.close(timeout=1)


def has_lost_client() -> bool:
    """Whether a client has lost its scheduler, and seeks it."""
    return any(client.status == "connecting" for client in _clients())


def abandon_clients(address: str) -> None:
    """Mark clients that could not be closed as closed.

    ``Client.__del__`` closes what is not, and waits for it for ever once the interpreter ends and its event loop is gone. Such
    are those whose ``shutdown()`` or ``close()`` has failed half way.
    """
    for client in _clients():
        with contextlib.suppress(Exception):
            ours = client.scheduler is not None and client.scheduler.address == address
            if client.status == "closing" or (ours and client.status != "closed"):
                client.status = "closed"


def shut_down_once(before: Callable[[], None] = lambda: None) -> None:
    """Let ``Client.shutdown()`` do nothing on a client that is closed, instead of failing with errors from its inside.

    A script that ends its cluster twice, by this and by `Session.close`, is right. Before a cluster is shut down, `before` is
    called.
    """
    global _before_shutdown
    from distributed import Client

    _before_shutdown = before
    shutdown = Client.shutdown
    if getattr(shutdown, "once", False):
        return

    @functools.wraps(shutdown)
    def once(self: Client) -> Any:
        if self.status == "closed" and not self.asynchronous:
            return None
        _before_shutdown()
        return shutdown(self)

    once.once = True  # type: ignore[attr-defined]
    Client.shutdown = once  # type: ignore[method-assign]


def client_with_link(link: str | None) -> type[Client]:
    """Dask's ``Client``, whose ``dashboard_link`` is this one, whatever other clients there are; None: as Dask makes it."""
    import dask
    from distributed import Client

    if link is None:
        return Client
    known = link

    class ClientWithLink(Client):
        """Dask's, which knows the token of its dashboard."""

        @property
        def dashboard_link(self) -> Any:
            """Link to the dashboard, with its token."""
            template: str = dask.config.get("distributed.dashboard.link")
            with dask.config.set({"distributed.dashboard.link": link_template(known, template)}):
                return super().dashboard_link

    return ClientWithLink
