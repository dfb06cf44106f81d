"""Dask's listeners as a job has them; what strangers do to a whole job: tests/intruders."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import dask
import pytest
from distributed import Security
from distributed.comm import listen
from distributed.comm.registry import backends

from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.listeners import TLSBackend
from support.mocks.comms import echo, pair, there_and_back


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(backends, "tls", TLSBackend())
    with dask.config.set({**make_credentials(), "distributed.comm.timeouts.connect": "1s"}):
        yield


async def test_half_open_and_slow_connections_end_at_the_deadline() -> None:
    async with listen("tls://127.0.0.1:0", echo, **Security().get_listen_args("worker")) as listener:
        host, port = listener.contact_address.removeprefix("tls://").split(":")
        strangers = [await asyncio.open_connection(host, port) for _ in range(50)]
        _, slow = strangers[0]
        for byte in b"\x16\x03\x01":  # the first bytes of a record
            slow.write(bytes([byte]))
            await asyncio.sleep(0.2)
        async with asyncio.timeout(10):
            for reader, _ in strangers:
                with contextlib.suppress(
                    ConnectionError
                ):  # a busy machine may need until the deadline to write three bytes
                    assert await reader.read() == b""
        for _, writer in strangers:
            writer.close()
    async with pair() as comm:
        assert await there_and_back(comm, "hello") == "hello"


async def test_tls_makes_no_tickets_for_sessions_that_nobody_resumes() -> None:
    """A third of the time that the scheduler takes for a handshake."""
    async with pair() as comm:
        await there_and_back(comm, "hello")
        assert not comm.stream.socket.session.has_ticket
