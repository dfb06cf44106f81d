"""What MPI is told about the interfaces of one host, and when it is told nothing."""

from __future__ import annotations

import os

import dask
import pytest

from dask_gpu_mpi.mpi import openmpi
from dask_gpu_mpi.mpi.openmpi import closed_to_others, ucx_left_open

ANYWHERE = {"UCX_TLS": "^sysv", "UCX_HANDLE_ERRORS": "none"}
LOOPBACK = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "FI_SOCKETS_IFACE": "lo"}
OF_UCX = "MPICH Version: 5.0.2\nMPICH Device:       ch4:ucx ofi\n"
ALL = ANYWHERE | LOOPBACK | {"UCX_TLS": "^sysv,tcp"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(openmpi, "_ucx_is_loaded", lambda: False)


def inside(environ: dict[str, str], *, one_host: bool = True) -> dict[str, str]:
    with closed_to_others(environ, one_host=one_host):
        settings = {name: os.environ[name] for name in ALL if name in os.environ}
    assert not ALL.keys() & os.environ.keys()
    return settings


def test_for_the_time_of_the_start() -> None:
    assert inside({"UCX_LOG_LEVEL": "info", "FI_LOG_LEVEL": "info"}) == ALL
    with pytest.raises(RuntimeError), closed_to_others({}, one_host=True):
        raise RuntimeError
    assert not ALL.keys() & os.environ.keys()


@pytest.mark.parametrize(
    ("chosen", "left_alone"),
    [
        ("UCX_NET_DEVICES", {"UCX_NET_DEVICES"}),
        ("UCX_TLS", {"UCX_TLS"}),
        ("UCX_HANDLE_ERRORS", {"UCX_HANDLE_ERRORS"}),
        ("FI_PROVIDER", {"FI_TCP_IFACE", "FI_SOCKETS_IFACE"}),
        ("FI_TCP_IFACE", {"FI_TCP_IFACE"}),
        ("FI_SOCKETS_IFACE", {"FI_SOCKETS_IFACE"}),
    ],
)
def test_choice_of_the_users(chosen: str, left_alone: set[str]) -> None:
    assert inside({chosen: "all"}).keys() == ALL.keys() - left_alone


@pytest.mark.parametrize("transports", ["tcp", "tcp,self", "tcp,self,xpmem", "^sm", "^posix,sysv"])
def test_ranks_that_have_tcp_alone_keep_their_network(transports: str) -> None:
    """By loopback they would not find each other."""
    assert "UCX_NET_DEVICES" not in inside({"UCX_TLS": transports})
    assert "anyone on this network" in ucx_left_open({"UCX_TLS": transports}, OF_UCX)


@pytest.mark.parametrize("transports", ["all", "^ib", "tcp,self,sm", "self,posix,tcp", "^sysv"])
def test_ranks_with_shared_memory_have_loopback(transports: str) -> None:
    assert inside({"UCX_TLS": transports})["UCX_NET_DEVICES"] == "lo"
    assert "anyone on this node" in ucx_left_open({"UCX_TLS": transports}, OF_UCX)


def test_on_several_hosts_they_talk_by_tcp() -> None:
    assert inside({}, one_host=False) == ANYWHERE
    assert inside({"UCX_TLS": "all"}, one_host=False) == {"UCX_HANDLE_ERRORS": "none"}


def test_ucx_that_is_loaded_is_told_no_more_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would print a warning of a variable that nobody uses."""
    monkeypatch.setattr(openmpi, "_ucx_is_loaded", lambda: True)
    assert inside({}) == {name: value for name, value in ALL.items() if name != "UCX_HANDLE_ERRORS"}


@pytest.mark.parametrize(
    ("value", "is_open"),
    [
        ("all", True),
        ("^ib", True),
        ("tcp,self,sm", True),
        ("^tcp", False),
        ("^sysv,tcp", False),
        ("sm,self", False),
        (None, False),
    ],
)
def test_warning_of_a_choice_that_leaves_a_port(value: str | None, is_open: bool) -> None:
    environ = {} if value is None else {"UCX_TLS": value}
    with dask.config.set({"distributed-ucxx.environment.tls": "tcp"}):  # that is Dask's, not MPI's
        warning = ucx_left_open(environ, OF_UCX)
    assert bool(warning) == is_open
    if is_open:
        assert f"UCX_TLS={value}" in warning
        assert (
            "anyone on this node who reaches it can read and write the memory of the ranks. Fix: " in warning
        )
    # no other library listens by UCX for it
    assert ucx_left_open(environ, "Open MPI v5.0.11") == ucx_left_open(environ, "MPICH Device: ch4:ofi") == ""
