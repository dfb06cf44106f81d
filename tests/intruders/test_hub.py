"""The hub alone, without a job: strangers are not heard, and who has the job's certificate is, so that the attacks are some."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.agent.hub import Hub
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.startup.messages import Event, Kind
from support.intruders import attacks

pytestmark = pytest.mark.timeout(120)


class Served:
    """A hub of three ranks that listens in a thread of this process, and what came to it."""

    def __init__(self) -> None:
        self.config = make_credentials()
        self.events: list[Event] = []
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.target: dict[str, Any] = {
            "name": "hub",
            "kind": "comm",
            "role": "hub",
            "host": "127.0.0.1",
            "port": self.sock.getsockname()[1],
        }
        self.up = threading.Event()
        self.over = threading.Event()

    async def serve(self) -> None:
        hub = Hub(3, lambda *_: None, self.events.append, lambda *_: None)
        await hub.serve(self.sock, self.config)
        self.up.set()
        while not self.over.is_set():
            await asyncio.sleep(0.02)
        await hub.close(1.0)


@pytest.fixture
def hub() -> Iterator[Served]:
    served = Served()
    thread = threading.Thread(target=lambda: asyncio.run(served.serve()))
    thread.start()
    assert served.up.wait(10)
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join, 10)
        stack.callback(served.over.set)
        yield served


@pytest.mark.parametrize(
    "attack",
    [
        "plain TCP",
        "TLS without a certificate",
        "a self-made authority",
        "another job's certificate",
        "pickle and msgpack bombs",
        "garbage of every length",
        "closed at once",
        "a byte a second",
    ],
)
def test_strangers_are_not_heard(hub: Served, tmp_path: Path, attack: str) -> None:
    another = attacks.key_and_certificates(make_credentials())
    order = {"marker": str(tmp_path / "marker"), "another_job": another}
    assert attacks.ATTACKS[attack](hub.target, order).startswith("out")
    assert hub.events == []
    assert not (tmp_path / "marker").exists()


def test_who_has_the_certificate_is_heard(
    hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is unpickled even so; who sends anything but a message is hung up on."""
    monkeypatch.setattr(attacks, "WAITS", 0.3)
    key, certificate, _ = attacks.key_and_certificates(hub.config)
    order = {"marker": str(tmp_path / "marker")}
    assert attacks.by_tls(hub.target, order, key, certificate) == "in: silent"
    assert {(event.source, event.kind) for event in hub.events} == {(1, Kind.ENTERED), (1, Kind.GONE)}
    assert not (tmp_path / "marker").exists()
    assert "Traceback" not in caplog.text
