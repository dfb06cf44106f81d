"""A connection of two workers in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
from distributed import Security
from distributed.comm import CommClosedError, connect, listen
from distributed.protocol import to_serialize


async def echo(comm: Any) -> None:
    """Answer with what was sent, or with an array of so many bytes."""
    with contextlib.suppress(CommClosedError):
        while True:
            message = await comm.read()
            size = message.get("size")
            back = message["data"] if size is None else np.full(size, 7, "u1")
            await comm.write({"back": to_serialize(back)})


@contextlib.asynccontextmanager
async def pair(serve: Callable[[Any], Coroutine[Any, Any, None]] = echo) -> AsyncIterator[Any]:
    """The end that has made the connection; the other one's part is awaited."""
    security = Security()
    served: list[asyncio.Task[None]] = []

    async def handle(comm: Any) -> None:
        served.append(asyncio.create_task(serve(comm)))

    async with listen("tls://127.0.0.1:0", handle, **security.get_listen_args("worker")) as listener:
        comm = await connect(listener.contact_address, **security.get_connection_args("worker"))
        yield comm
        comm.abort()
        for error in await asyncio.gather(*served, return_exceptions=True):
            if error is not None and not isinstance(error, CommClosedError):
                raise error


async def there_and_back(comm: Any, data: Any) -> Any:
    await comm.write({"data": to_serialize(data)})
    return (await comm.read())["back"]
