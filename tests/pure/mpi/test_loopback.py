"""What MPI is told about the interfaces of one host, and when it is told nothing."""

from __future__ import annotations

import os

import pytest

from dask_gpu_mpi.mpi.loopback import on_loopback

ALL = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "FI_SOCKETS_IFACE": "lo"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)


def inside(environ: dict[str, str]) -> dict[str, str]:
    with on_loopback(environ):
        settings = {name: os.environ[name] for name in ALL if name in os.environ}
    assert not ALL.keys() & os.environ.keys()
    return settings


def test_for_the_time_of_the_start() -> None:
    assert inside({"UCX_LOG_LEVEL": "info", "FI_LOG_LEVEL": "info"}) == ALL
    with pytest.raises(RuntimeError), on_loopback({}):
        raise RuntimeError
    assert not ALL.keys() & os.environ.keys()


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        ("UCX_NET_DEVICES", {"FI_TCP_IFACE", "FI_SOCKETS_IFACE"}),
        ("UCX_TLS", {"FI_TCP_IFACE", "FI_SOCKETS_IFACE"}),
        ("FI_PROVIDER", {"UCX_NET_DEVICES"}),
        ("FI_TCP_IFACE", {"UCX_NET_DEVICES", "FI_SOCKETS_IFACE"}),
        ("FI_SOCKETS_IFACE", {"UCX_NET_DEVICES", "FI_TCP_IFACE"}),
    ],
)
def test_choice_of_the_users(chosen: str, left: set[str]) -> None:
    assert inside({chosen: "any"}).keys() == left
