import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import ssl
import sys
import time

import dask
import distributed
from distributed import Security
from distributed.comm import connect, listen

from dask_gpu_mpi.network import listeners
from dask_gpu_mpi.network.credentials import make_credentials

lines = []


class Lines(logging.Handler):
    def emit(self, record):
        lines.append(self.format(record))


for name in ("", "distributed", "tornado", "tornado.application", "asyncio"):
    logging.getLogger(name).handlers = [Lines()]
    logging.getLogger(name).setLevel("ERROR" if name == "tornado" else "WARNING")
    logging.getLogger(name).propagate = False

protocol = sys.argv[1]
credentials = make_credentials(**json.loads(sys.argv[2]))
with dask.config.set(credentials if protocol == "tls" else {}):
    security = Security()
dask.config.set({"distributed.comm.timeouts.connect": "1s"})
listeners.PERIOD = 0.2
accepts = 0
accept = listeners.PatientSocket.accept


def counted(self):
    global accepts
    accepts += 1
    return accept(self)


listeners.PatientSocket.accept = counted
listeners.DASK_HANDSHAKE = 1.0
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


def half_open(address, data=b""):
    host, port = address.partition("://")[2].rsplit(":", 1)
    made = socket.create_connection((host, int(port)))
    made.sendall(data)
    return made


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
    listener = await listen(f"{protocol}://127.0.0.1:0", echo, **security.get_listen_args("scheduler"))
    found = await main(listener.listen_address)
    await asyncio.sleep(0.5)  # for the tallies
    listener.stop()
    os.write(1, json.dumps({"found": found, "lines": lines}).encode())
