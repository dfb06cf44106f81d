"""UCX of a worker's process, with a mock of ucxx: it starts once, reports failures, and makes progress where that is awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import dask
import pytest

from dask_gpu_mpi.network import ucx_endpoint
from dask_gpu_mpi.network.ucx_endpoint import Endpoint, Ucx, UcxError


class Library:
    """The mock: counts what is asked of it."""

    def __init__(self) -> None:
        self.progressed = self.imports = self.starts = 0
        self.environ: dict[str, str] = {}
        self.fails: Exception | None = None
        self.progress_fails: Exception | None = None
        self.alive = True
        self.waits = 3  # turns of the event loop until a message is there
        self.features: Any = None
        self.module = Mock(Feature=SimpleNamespace(TAG="tag", WAKEUP="wakeup"), UCXContext=self.make_context)

    def imported(self) -> None:
        self.imports += 1

    def init_once(self) -> None:
        self.starts += 1
        self.environ = dict(os.environ)
        self.module.UCXContext({})
        if self.fails is not None:
            raise self.fails

    def make_context(self, config: Any, feature_flags: Any = "all") -> None:
        self.features = feature_flags

    def progress(self) -> None:
        self.progressed += 1
        if self.progress_fails is not None:
            raise self.progress_fails

    async def create(self, address: Any) -> Peer:
        if address == b"nowhere":
            raise RuntimeError("Destination is unreachable")
        return Peer(self)


class Peer:
    def __init__(self, library: Library) -> None:
        self.library = library
        self.aborted = 0

    @property
    def alive(self) -> bool:
        return self.library.alive

    async def send(self, buffer: Any, *, tag: Any, force_tag: bool) -> None:
        turns = 0
        while turns < self.library.waits:
            turns += 1
            await asyncio.sleep(0)
        if self.library.fails is not None:
            raise self.library.fails

    recv = send

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    worker = SimpleNamespace(progress=library.progress, epoll_file_descriptor=0)
    ucxx = Mock(
        get_ucx_address_from_buffer=lambda address: address,
        create_endpoint_from_worker_address=library.create,
    )
    ucxx.get_worker_address().tobytes.return_value = b"here"
    ucxx.core._get_ctx.return_value = SimpleNamespace(progress_mode="blocking", worker=worker)
    backend = Mock(init_once=library.init_once)
    modules = {
        "ucxx._lib": Mock(libucxx=library.module), "ucxx": ucxx, "ucxx.types": Mock(Tag=int),
        "distributed_ucxx": Mock(ucxx=backend), "distributed_ucxx.ucxx": backend,
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ucx_endpoint, "_import", library.imported)
    for name, value in {
        "_start": None,
        "_loop": None,
        "loopback": False,
        "leads": False,
        "warned": False,
    }.items():
        monkeypatch.setattr(Ucx, name, value)
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)
    return library


async def connected() -> Endpoint:
    ucx = await Ucx.begin()
    return await ucx.connect(b"there", send_tag=1, receive_tag=2)


@pytest.mark.parametrize("fails", [False, True])
async def test_it_starts_once_and_what_fails_is_told_each_time(library: Library, fails: bool) -> None:
    library.fails = RuntimeError("no device") if fails else None
    for _ in range(2):
        with pytest.raises(UcxError, match="RuntimeError: no device") if fails else contextlib.nullcontext():
            first, second = await asyncio.gather(Ucx.begin(), Ucx.begin())
            assert first is second
            assert first.address == b"here"
    assert (library.imports, library.starts) == (1, 1)


async def test_it_serves_no_active_messages(library: Library) -> None:
    """Which read any address for a peer. A context that a task makes for itself has all features."""
    await Ucx.begin()
    assert library.features == ("tag", "wakeup")
    library.module.UCXContext({})
    assert library.features == "all"


CLOSED = {"UCX_TLS": "^sysv,tcp", "UCX_NET_DEVICES": "lo"}
NEAR = {"UCX_TLS": "^sysv,tcp", "UCX_NET_DEVICES": "mlx5_1:1"}
DEVICES, TLS = "distributed-ucxx.environment.net-devices", "distributed-ucxx.environment.tls"


@pytest.mark.parametrize(
    ("given", "environ", "settings", "added"),
    [
        ({"loopback": True}, {}, {}, CLOSED),
        ({}, {}, {}, CLOSED),  # between nodes TLS alone
        ({"leads": True}, {}, {}, {"UCX_TLS": "^sysv,tcp"}),  # RDMA
        # what the user has chosen stays, and what TCP is left listens on loopback where that is enough
        ({"loopback": True}, {"UCX_TLS": "tcp"}, {}, {"UCX_NET_DEVICES": "lo"}),
        ({"leads": True}, {"UCX_TLS": "tcp"}, {}, {}),
        ({"loopback": True}, {"UCX_TLS": "sm,cuda"}, {}, {"UCX_NET_DEVICES": "lo"}),
        ({"loopback": True}, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "ib0"}, {}, {}),
        ({"loopback": True}, {}, {TLS: "tcp,sm"}, {"UCX_NET_DEVICES": "lo"}),
        ({"loopback": True}, {}, {"distributed.comm.ucx.environment.tls": "self"}, {"UCX_NET_DEVICES": "lo"}),
        ({"loopback": True}, {}, {"distributed-ucxx.nvlink": True}, {"UCX_NET_DEVICES": "lo"}),
        # a site's devices for MPI
        ({"loopback": True}, {"UCX_NET_DEVICES": "mlx5_0:1"}, {}, CLOSED),
        ({"leads": True}, {"UCX_NET_DEVICES": "mlx5_0:1"}, {}, {"UCX_TLS": "^sysv,tcp"}),
        ({}, {"UCX_POSIX_ERROR_HANDLING": "n"}, {}, {**CLOSED, "UCX_POSIX_ERROR_HANDLING": "n"}),
        # the devices near the GPU, unless the user has chosen, no data leaves the node, or it is TCP
        ({"leads": True, "devices": "mlx5_1:1"}, {}, {}, NEAR),
        ({"devices": "mlx5_1:1"}, {}, {}, CLOSED),
        ({"leads": True, "devices": "mlx5_1:1"}, {"UCX_NET_DEVICES": "mlx5_0:1"}, {}, {"UCX_TLS": "^sysv,tcp"}),
        ({"leads": True, "devices": "mlx5_1:1"}, {}, {DEVICES: "mlx5_7:1"}, {"UCX_TLS": "^sysv,tcp"}),
        ({"leads": True, "devices": "mlx5_1:1"}, {"UCX_TLS": "rc"}, {}, {"UCX_NET_DEVICES": "mlx5_1:1"}),
        ({"leads": True, "devices": "mlx5_1:1"}, {"UCX_TLS": "tcp,cuda"}, {}, {}),
    ],
)  # fmt: skip
async def test_it_opens_no_port_unless_the_user_has_chosen(
    library: Library, monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any], environ: dict[str, str], settings: dict[str, Any], added: dict[str, str],
) -> None:  # fmt: skip
    for name, value in given.items():
        monkeypatch.setattr(Ucx, name, value)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with dask.config.set(settings):
        await Ucx.begin()
    found = {name: value for name, value in library.environ.items() if name.startswith("UCX_")}
    assert found == {"UCX_POSIX_ERROR_HANDLING": "y", **environ, **added}
    # what tasks start is not told
    assert {name: value for name, value in os.environ.items() if name.startswith("UCX_")} == environ


@pytest.mark.parametrize("warned", [False, True])
async def test_a_port_that_nobody_has_warned_of_is_a_warning(
    library: Library, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever has set UCX up: a preload, a configuration of the nanny's."""
    monkeypatch.setattr(Ucx, "warned", warned)
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        library.module.UCXContext = lambda config, feature_flags: opened.listen()
        await Ucx.begin()
        port = opened.getsockname()[1]
    text = capsys.readouterr().err
    assert (f"UCX of a worker has opened 127.0.0.1:{port} without authentication" in text) == (not warned)


async def test_progress_that_fails_ends_what_waits_for_it_and_goes_on(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_endpoint, "TICK", 0.01)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    endpoint = await connected()
    with pytest.raises(UcxError, match="Destination is unreachable"):
        await endpoint.ucx.connect(b"nowhere", send_tag=1, receive_tag=2)
    library.waits, library.progress_fails = 1_000_000, RuntimeError("device lost")
    with pytest.raises(UcxError, match="device lost"):
        await endpoint.receive(bytearray(1))
    before = library.progressed
    while library.progressed < before + 3:
        await asyncio.sleep(0.01)


async def test_progress_goes_on_for_a_moment_after_a_transfer(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been sent may still be in UCX's buffers. Idle workers: tests/ucx."""
    monkeypatch.setattr(ucx_endpoint, "TICK", 60.0)
    endpoint = await connected()
    await endpoint.send(b"x")
    sent = library.progressed
    while library.progressed == sent:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("fails", [RuntimeError("reset"), None], ids=["an error", "closed meanwhile"])
async def test_a_transfer_that_fails(library: Library, fails: Exception | None) -> None:
    endpoint = await connected()
    library.fails, library.alive = fails, fails is not None
    with pytest.raises(UcxError, match="reset" if fails else "closed"):
        await endpoint.receive(bytearray(1))
    endpoint.abort()
    endpoint.abort()
    assert endpoint._endpoint.aborted == 1
    with pytest.raises(UcxError):
        await endpoint.send(b"x")


async def test_an_endpoint_is_closed_once_nothing_is_under_way(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is told at once; UCX keeps the buffer, and its own end, until it has done with them."""
    endpoint = await connected()
    library.waits = 1_000_000_000
    receiving = asyncio.create_task(endpoint.receive(bytearray(1)))
    cancelled = asyncio.create_task(endpoint.receive(bytearray(1)))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    endpoint.abort()
    with pytest.raises(UcxError, match="closed"):
        await receiving
    assert len(endpoint._tasks) == 2
    assert endpoint._endpoint.aborted == 0
    library.waits = 0  # it comes
    while not endpoint._endpoint.aborted:
        await asyncio.sleep(0.01)
    assert not endpoint._tasks
    # what never comes is waited for only so long
    library.waits = 1_000_000_000
    other = await connected()
    sending = asyncio.create_task(other.send(b"x"))
    await asyncio.sleep(0.01)
    monkeypatch.setattr(ucx_endpoint, "ABORT_AFTER", 0.1)
    other.abort()
    while not other._endpoint.aborted:
        await asyncio.sleep(0.01)
    assert len(other._tasks) == 1
    await asyncio.gather(sending, return_exceptions=True)
    library.waits = 0


@pytest.mark.parametrize("turns", [1, 2])  # before its first step, and in its middle
async def test_a_transfer_that_the_end_of_the_loop_breaks_off_keeps_no_exception(
    library: Library, turns: int
) -> None:
    """Its frames have the buffer: Python 3.11 crashes if the garbage collector finds it in use there."""
    library.waits = 10**9
    endpoint = await connected()
    sending = asyncio.create_task(endpoint.send(b"data"))
    for _ in range(turns):
        await asyncio.sleep(0)
    (transfer,) = endpoint._tasks
    transfer.cancel()  # as asyncio.run does
    with pytest.raises(UcxError, match="the event loop ends"):
        await asyncio.wait_for(sending, 10)
    assert transfer.cancelled() or transfer.exception() is None
    assert endpoint.ucx._pending == 0
