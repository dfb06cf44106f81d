import asyncio
import multiprocessing
import os
import signal
import sys
import time

import dask
import numpy as np
from distributed import Security
from distributed.comm import CommClosedError, connect, listen
from distributed.protocol import to_serialize

from dask_gpu_mpi.network import ucx_endpoint, worker_comm
from dask_gpu_mpi.network.credentials import make_credentials


async def echo(pipe):
    async def handle(comm):
        try:
            while True:
                await comm.write({"back": to_serialize((await comm.read())["data"])})
        except CommClosedError:
            pass

    async with listen("tls://127.0.0.1:0", handle, **Security().get_listen_args("worker")) as listener:
        pipe.send(listener.contact_address)
        while not pipe.poll():
            await asyncio.sleep(0.02)


def serve(pipe, credentials):
    dask.config.set(credentials)
    worker_comm.use_ucx_between_workers(65536, loopback=True)
    asyncio.run(echo(pipe))


async def pair():
    return await connect(ADDRESS, **Security().get_connection_args("worker"))


async def sent_back(comm, data):
    await comm.write({"data": to_serialize(data)})
    return (await comm.read())["back"]


async def exchange(over_ucx=True, size=100_000):
    comm = await pair()
    assert (await sent_back(comm, np.full(size, 7.0)) == 7).all()
    assert (comm._endpoint is not None) == over_ucx
    await comm.close()


def main(test):
    global ADDRESS, SERVER
    credentials = make_credentials()
    dask.config.set(credentials)
    worker_comm.use_ucx_between_workers(65536, loopback=True)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, credentials), daemon=True)
    server.start()
    SERVER = server.pid
    assert here.poll(60)
    ADDRESS = here.recv()
    expected = asyncio.run(asyncio.wait_for(test(), 60)) or 0
    if not expected:
        here.send(None)
    server.join(20)
    assert server.exitcode == expected, server.exitcode
