"""What is changed of Dask's nannies before they start."""

from __future__ import annotations

import asyncio

import pytest
from distributed import Nanny

from dask_gpu_mpi.workers.nannies import listen_on_tcp, measure_less


def test_a_server_that_measures_less_runs_and_keeps_its_other_callbacks() -> None:
    from distributed.core import Server

    async def look() -> tuple[set[str], list[bool]]:
        server = Server({})
        before = set(server.periodic_callbacks)
        measure_less(server)
        await server
        server.start_periodic_callbacks()
        running = [callback.is_running() for callback in server.periodic_callbacks.values()]
        gone = before - set(server.periodic_callbacks)
        await server.close()
        return gone, running

    gone, running = asyncio.run(look())
    assert gone == {"tick", "ticks", "monitor"}
    assert running == [True]


def test_a_nanny_goes_on_looking_at_its_worker() -> None:
    nanny = Nanny("tcp://127.0.0.1:1", host="127.0.0.1", nthreads=1, memory_limit="1 GiB")
    measure_less(nanny)
    assert "memory_monitor" in nanny.periodic_callbacks


@pytest.mark.parametrize(("protocol", "listens"), [("ucx", "tcp"), ("tls", "tls"), ("tcp", "tcp")])
def test_nannies_of_workers_over_ucx_listen_on_tcp(protocol: str, listens: str) -> None:
    nanny = Nanny(f"{protocol}://127.0.0.1:1", protocol=protocol, host="127.0.0.1", nthreads=1)
    listen_on_tcp(nanny)
    assert nanny._protocol == listens
    assert nanny.worker_kwargs["protocol"] == protocol
