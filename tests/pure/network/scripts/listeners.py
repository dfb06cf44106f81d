import asyncio
import contextlib
import json
import os
import socket
import time

import dask
import distributed
from distributed import Security
from distributed.comm import connect, listen

from dask_gpu_mpi.network import listeners
from dask_gpu_mpi.network.credentials import make_credentials

with dask.config.set(make_credentials()):
    security = Security()
dask.config.set({"distributed.comm.timeouts.connect": "1s"})
listeners.guard_listeners()


async def echo(comm):
    with contextlib.suppress(distributed.comm.CommClosedError):
        while True:
            await comm.write(await comm.read())


async def ask(address):
    comm = await connect(address, timeout=5, **security.get_connection_args("client"))
    await comm.write("hello")
    answer = await comm.read()
    await comm.close()
    return answer


def half_open(address):
    host, port = address.partition("://")[2].rsplit(":", 1)
    return socket.create_connection((host, int(port)))


async def is_closed(connection, seconds=5.0):
    loop, end = asyncio.get_running_loop(), time.monotonic() + seconds
    connection.setblocking(False)
    with contextlib.suppress(TimeoutError):
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.wait_for(loop.sock_recv(connection, 1000), end - time.monotonic()):
                pass
        return True
    return False


async def run(main):
    listener = await listen("tls://127.0.0.1:0", echo, **security.get_listen_args("scheduler"))
    found = await main(listener.listen_address)
    listener.stop()
    os.write(1, json.dumps(found).encode())
