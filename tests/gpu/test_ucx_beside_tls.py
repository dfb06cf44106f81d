"""Two processes as workers with TLS and UCX beside it, on one GPU or two: memory of GPUs goes over UCX, and nothing else."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from pathlib import Path
from typing import Any

from dask_gpu_mpi.network.credentials import make_credentials
from support.jobs.clusters import COMMAND, facts, scratch_of
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.jobs.ucx import needs_ucx

pytestmark = needs_ucx


def prepare(credentials: dict[str, Any], devices: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    import cupy
    import dask

    from dask_gpu_mpi.network.worker_comm import use_ucx_between_workers

    cupy.zeros(1)
    dask.config.set(credentials)
    use_ucx_between_workers(0, loopback=True)


def serve(pipe: Any, credentials: dict[str, Any], devices: str) -> None:
    prepare(credentials, devices)

    async def main() -> None:
        import cupy
        from distributed import Security
        from distributed.comm import CommClosedError, listen
        from distributed.protocol import to_serialize

        async def handle(comm: Any) -> None:
            try:
                while True:
                    size = (await comm.read())["size"]
                    on_device, on_host = cupy.arange(size), bytearray(size)
                    await comm.write({"device": to_serialize(on_device), "host": to_serialize(on_host)})
            except CommClosedError:
                pass

        async with listen("tls://127.0.0.1:0", handle, **Security().get_listen_args("worker")) as listener:
            pipe.send(listener.contact_address)
            while not pipe.poll():
                await asyncio.sleep(0.05)

    asyncio.run(main())


def fetch(pipe: Any, credentials: dict[str, Any], devices: str, address: str) -> None:
    prepare(credentials, devices)

    async def main() -> None:
        import cupy
        from distributed import Security
        from distributed.comm import connect

        comm = await connect(address, **Security().get_connection_args("worker"))
        for size in (0, 1, 1000, 10_000_000):
            before = comm.stream._total_read_index if hasattr(comm.stream, "_total_read_index") else None
            await comm.write({"size": size})
            received = await comm.read()
            assert received["device"].__class__ is cupy.ndarray
            assert bool((received["device"] == cupy.arange(size)).all())
            assert received["host"] == bytearray(size)
            if (
                before is not None and size > 1000
            ):  # the host's bytes came over TLS, the eightfold of the GPU's did not
                assert comm.stream._total_read_index - before < 2 * size
        pipe.send(comm._endpoint is not None)
        await comm.close()

    asyncio.run(main())


def test_memory_of_gpus_goes_over_ucx(gpus: Any) -> None:
    credentials = make_credentials()
    context = multiprocessing.get_context("spawn")
    (here, there), (mine, its) = context.Pipe(), context.Pipe()
    # each sees the other's GPU as well, as dask-cuda's workers do: over NVLink UCX wants it
    first = list(dict.fromkeys((gpus.uuids[0], gpus.uuids[-1])))
    server = context.Process(target=serve, args=(there, credentials, ",".join(first)))
    server.start()
    try:
        assert here.poll(60)
        client = context.Process(target=fetch, args=(its, credentials, ",".join(first[::-1]), here.recv()))
        client.start()
        client.join(90)
        assert client.exitcode == 0
        assert mine.recv() is True
        here.send(None)
        server.join(20)
        assert server.exitcode == 0
    finally:
        server.kill()
    gpus.check_idle()


#: Waits until UCX has started in each worker, which it does a moment after it, and only then looks at its sockets.
PORTS = script("gpu/scripts/ports.py")


def test_workers_of_a_default_job_listen_on_their_own_ports_alone(
    gpus: Any, mpirun: Mpi, tmp_path: Path
) -> None:
    """UCX opens none, nor does that of a worker that is made again."""
    script = tmp_path / "script.py"
    script.write_text(PORTS)
    done = mpirun.run([*COMMAND, str(script)], 1, timeout=200).check()
    told = facts(done)
    before, after = told["before"], told["after"]
    assert len(before) == len(after) == len(gpus.uuids)
    assert not {each["pid"] for each in before} & {each["pid"] for each in after}
    for each in (*before, *after):
        assert each["own"] == 1
        assert each["ucx"]
        assert each["others"] == []
    assert scratch_of(mpirun.jobs[-1]) == []
    gpus.check_idle()
