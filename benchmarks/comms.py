"""One transfer at a time between two processes: TLS, UCX without security, and TLS with UCX beside it, as workers have them.

    python benchmarks/comms.py [--gpu] [--sizes 1e6 1e8 1e9] [--rounds 5] [--reps 10] [--json FILE]
    UCX_TLS=tcp python benchmarks/comms.py --hosts h1 h2    between two hosts of the test bed (ci/testbed/hosts-up 2)

Each configuration has two processes, on two GPUs where there are two, else on the same one; with --gpu what is sent is CuPy's. A
trial measures every configuration once, in an order that changes; ratios are taken within trials. The first three transfers of a
connection do not count: UCX starts with them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import default_launcher, machine, parser_for, write

TLS, UCX, BESIDE = "TLS", "UCX, open", "TLS and UCX"
WARM_UP = 3
LIMIT = 120.0
LOOPBACK = "127.0.0.1"
TESTBED = Path(__file__).resolve().parents[1] / "ci" / "testbed"


def address_of(number: int) -> str:
    """The address of host `number` of the test bed; without one that of loopback."""
    return f"10.77.0.{number}" if os.environ.get("COMMS_HOSTS") else LOOPBACK


def start(process: Any, host: str | None) -> None:
    """Start it, on this host of the test bed if there is one: its Python is entered by a script."""
    if host is None:
        process.start()
        return
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"
        python.write_text(f'#!/bin/sh\nexec "{TESTBED / "on"}" {host} "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        multiprocessing.set_executable(str(python))
        process.start()
        time.sleep(1.0)  # until the script has been read


def data_of(size: int, gpu: bool) -> Any:
    """An array of `size` bytes."""
    if gpu:
        import cupy

        return cupy.arange(size // 8, dtype="f8")
    import numpy

    return numpy.arange(size // 8, dtype="f8")


def prepare(way: str, credentials: dict[str, Any], devices: Sequence[int]) -> None:
    """Make this process what a worker of that configuration is; it computes on the first of the GPUs, if there are any."""
    import dask

    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        import cupy

        cupy.zeros(1)
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    # Its default waits for an event, which cuda_ipc does not have: with nothing else to do it sleeps for half a second.
    if way == UCX:
        os.environ.setdefault("UCXPY_PROGRESS_MODE", "polling")
    dask.config.set(credentials)
    if way == BESIDE:
        from dask_gpu_mpi.network.worker_comm import use_ucx_between_workers

        between = address_of(1) != LOOPBACK
        use_ucx_between_workers(0 if devices else 65536, loopback=not between, leads=between, warned=between)


async def serve(way: str, pipe: Any, size: int, gpu: bool) -> None:
    """Send the same array as often as the other asks for it."""
    from distributed import Security
    from distributed.comm import CommClosedError, listen
    from distributed.protocol import to_serialize

    data = data_of(size, gpu)

    async def handle(comm: Any) -> None:
        try:
            while True:
                await comm.read()
                await comm.write({"data": to_serialize(data)})
        except CommClosedError:
            pass

    arguments = {} if way == UCX else Security().get_listen_args("worker")
    async with listen(
        f"{'ucx' if way == UCX else 'tls'}://{address_of(1)}:0", handle, **arguments
    ) as listener:
        pipe.send(listener.contact_address)
        while not pipe.poll():
            await asyncio.sleep(0.05)


async def fetch(way: str, pipe: Any, address: str, reps: int, gpu: bool) -> None:
    """Ask for it again and again; the seconds of each transfer."""
    from distributed import Security
    from distributed.comm import connect

    arguments = {} if way == UCX else Security().get_connection_args("worker")
    comm = await connect(address, **arguments)
    seconds = []
    for _ in range(WARM_UP + reps):
        began = time.perf_counter()
        await comm.write({"op": "get"})
        received = await comm.read()
        if gpu:
            import cupy

            cupy.cuda.Device().synchronize()
        seconds.append(time.perf_counter() - began)
        del received
    over_ucx = way == UCX or getattr(comm, "_endpoint", None) is not None
    pipe.send((seconds[WARM_UP:], over_ucx))
    await comm.close()


def process(role: Any, way: str, credentials: dict[str, Any], devices: Sequence[int], *rest: Any) -> None:
    """The main function of both processes."""
    prepare(way, credentials, devices)
    asyncio.run(role(way, *rest))


def measure(way: str, size: int, options: Any, credentials: dict[str, Any]) -> float:
    """GB/s of one pair of processes, the median of its transfers."""
    context = multiprocessing.get_context("spawn")
    (here, there), (mine, its) = context.Pipe(), context.Pipe()
    # each sees the other's GPU as well, as dask-cuda's workers do: over NVLink UCX wants it
    first = list(range(options.gpus)) if options.gpu else []
    second = first[::-1]
    server = context.Process(
        target=process, args=(serve, way, credentials, first, there, size, options.gpu), daemon=True
    )
    start(server, options.hosts[0])
    try:
        address = here.recv() if here.poll(LIMIT) else sys.exit(f"{way}: nobody listens")
        client = context.Process(
            target=process,
            args=(fetch, way, credentials, second, its, address, options.reps, options.gpu),
            daemon=True,
        )
        start(client, options.hosts[1])
        if not mine.poll(LIMIT):
            sys.exit(f"{way}: no transfer within {LIMIT:g} s")
        seconds, over_ucx = mine.recv()
        if over_ucx != (way != TLS):
            sys.exit(f"{way}: UCX was {'' if over_ucx else 'not '}used")
        client.join(LIMIT)
        return size / statistics.median(seconds) / 1e9
    finally:
        here.send(None)
        server.join(10)
        server.kill()


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The mean, and what it is between in 95 of 100 cases (Student's t)."""
    mean = statistics.mean(ratios)
    table = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    half = (
        table.get(len(ratios), 2.1) * statistics.stdev(ratios) / len(ratios) ** 0.5
        if len(ratios) > 1
        else 0.0
    )
    return round(mean, 3), round(mean - half, 3), round(mean + half, 3)


def main() -> int:
    """Run all sizes and print a table."""
    parser = parser_for(__doc__)
    parser.add_argument("--gpu", action="store_true", help="memory of GPUs")
    parser.add_argument(
        "--gpus", type=int, choices=[1, 2], help="of how many; default: 2 where there are so many"
    )
    parser.add_argument("--hosts", nargs=2, default=[None, None], help="of the test bed")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8, 1e9], help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reps", type=int, default=10)
    options = parser.parse_args()
    if options.hosts[0]:
        os.environ["COMMS_HOSTS"] = "yes"  # for the processes
    if options.gpu and options.gpus is None:
        import pynvml

        pynvml.nvmlInit()
        options.gpus = min(2, pynvml.nvmlDeviceGetCount())
    from dask_gpu_mpi.network.credentials import make_credentials

    credentials = make_credentials()
    document: dict[str, Any] = {"benchmark": "comms", **machine(default_launcher()), "gpus": options.gpus}
    rows = {}
    for size in map(int, options.sizes):
        found: dict[str, list[float]] = {TLS: [], UCX: [], BESIDE: []}
        ways = list(found)
        for number in range(options.rounds):
            for way in ways[number % 3 :] + ways[: number % 3]:
                found[way].append(measure(way, size, options, credentials))
        over_ucx = interval([a / b for a, b in zip(found[BESIDE], found[UCX], strict=True)])
        over_tls = interval([a / b for a, b in zip(found[BESIDE], found[TLS], strict=True)])
        rows[size] = {
            "gb_per_s": {way: round(statistics.median(values), 3) for way, values in found.items()},
            "beside_over_ucx": over_ucx,
            "beside_over_tls": over_tls,
            "trials": found,
        }
        print(
            f"{size:>13,} bytes: "
            + ", ".join(f"{way} {value} GB/s" for way, value in rows[size]["gb_per_s"].items())
            + f"; over UCX {over_ucx[0]} ({over_ucx[1]} to {over_ucx[2]}), over TLS {over_tls[0]}",
            flush=True,
        )
    write(options.json, {**document, "results": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
