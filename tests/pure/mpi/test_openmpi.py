"""Which components of Open MPI stay out of ``MPI_Init``, and when they are left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dask_gpu_mpi.mpi import library as mpi_library
from dask_gpu_mpi.mpi.library import closed_to_others, fewer_components

VARIABLE = "OMPI_MCA_btl"


@pytest.fixture(autouse=True)
def open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is Open MPI, on a machine without a network for libfabric."""
    monkeypatch.setattr(mpi_library, "_is_open_mpi", lambda module: True)
    monkeypatch.setattr(mpi_library, "NETWORKS", ())
    monkeypatch.setenv(VARIABLE, "")  # so that it is undone
    monkeypatch.delenv(VARIABLE)


def used(environ: dict[str, str], *, one_host: bool = False) -> tuple[str | None, str | None]:
    """The settings of btl and mtl while MPI starts; afterwards they are what they were."""
    names = (VARIABLE, "OMPI_MCA_mtl")
    before = [os.environ.get(name) for name in names]
    with fewer_components(environ, "module", one_host=one_host):
        btl, mtl = (os.environ.get(name) for name in names)
    assert [os.environ.get(name) for name in names] == before
    return btl, mtl


@pytest.mark.parametrize(
    ("chosen", "one_host", "settings"),
    [
        ({}, False, ("^ofi", "^ofi")),
        ({}, True, ("^ofi,tcp", "^ofi")),
        # a choice of components is kept
        ({"btl": "self,tcp"}, False, (None, "^ofi")),
        ({"btl": "self,tcp"}, True, (None, "^ofi")),
        ({"btl_ofi_provider_include": "x"}, False, (None, "^ofi")),
        ({"opal_common_ofi_provider_include": "x"}, False, (None, None)),
        ({"mtl": "ofi"}, False, ("^ofi", None)),
        ({"pml": "cm"}, False, ("^ofi", None)),  # it is nothing without an mtl
        ({"mtl_ofi_provider_include": "x"}, False, ("^ofi", None)),
        # other parameters say nothing about them; of TCP itself they have no effect without it
        ({"btl_tcp_if_include": "ib0"}, False, ("^ofi", "^ofi")),
        ({"btl_ofi_mode": "1", "btl_tcp_if_include": "ib0"}, True, ("^tcp", "^ofi")),
        # a list of what is left out, as many sites set it, is made longer
        ({"btl": "^openib"}, True, ("^openib,tcp", "^ofi")),
        ({"btl": "^tcp,openib"}, True, (None, "^ofi")),
        ({"btl": "^openib"}, False, (None, "^ofi")),
    ],
)
def test_components_that_stay_out(
    chosen: dict[str, str], one_host: bool, settings: tuple[str | None, str | None]
) -> None:
    environ = {f"OMPI_MCA_{name}": value for name, value in chosen.items()}
    assert used(environ, one_host=one_host) == settings


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "_is_open_mpi", lambda module: False)
    monkeypatch.setenv(VARIABLE, "^openib")
    assert used({VARIABLE: "^openib"}, one_host=True) == ("^openib", None)


def test_network_that_the_component_may_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "NETWORKS", (f"{tmp_path}/infiniband/*",))
    (tmp_path / "infiniband").mkdir()
    assert used({}) == ("^ofi", "^ofi")  # the folder is there, and empty, in many a container
    (tmp_path / "infiniband" / "mlx5_0").mkdir()
    assert used({}) == (None, None)
    assert used({}, one_host=True) == ("^tcp", None)


def test_what_is_not_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    import markupsafe._speedups

    monkeypatch.undo()
    assert not mpi_library._is_open_mpi("/nowhere/MPI.so")
    assert not mpi_library._is_open_mpi(markupsafe._speedups.__file__)


# -- what MPI is told about the interfaces of one host, and when it is told nothing


ANYWHERE = {"UCX_TLS": "^sysv", "UCX_HANDLE_ERRORS": "none"}
LOOPBACK = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "FI_SOCKETS_IFACE": "lo"}
ALL = ANYWHERE | LOOPBACK | {"UCX_TLS": "^sysv,tcp"}
#: Between nodes UCX would warn of each stranger.
SEVERAL = ANYWHERE | {"UCX_LOG_LEVEL": "error"}
NAMES = ALL | SEVERAL


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(mpi_library, "_ucx_is_loaded", lambda: False)


def inside(environ: dict[str, str], *, one_host: bool = True) -> dict[str, str]:
    with closed_to_others(environ, one_host=one_host):
        settings = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert not NAMES.keys() & os.environ.keys()
    return settings


@pytest.mark.parametrize(
    ("chosen", "left_alone"),
    [
        ("UCX_LOG_LEVEL", set()),
        ("FI_LOG_LEVEL", set()),
        ("UCX_NET_DEVICES", {"UCX_NET_DEVICES"}),
        ("UCX_TLS", {"UCX_TLS"}),
        ("UCX_HANDLE_ERRORS", {"UCX_HANDLE_ERRORS"}),
        ("FI_PROVIDER", {"FI_TCP_IFACE", "FI_SOCKETS_IFACE"}),
        ("FI_TCP_IFACE", {"FI_TCP_IFACE"}),
        ("FI_SOCKETS_IFACE", {"FI_SOCKETS_IFACE"}),
    ],
)
def test_settings_of_one_host_but_for_the_users_choice(chosen: str, left_alone: set[str]) -> None:
    expected = {name: value for name, value in ALL.items() if name not in left_alone}
    assert inside({chosen: "all"}) == expected


@pytest.mark.parametrize(
    ("transports", "by_memory"),
    [
        *((value, False) for value in ("tcp", "tcp,self,xpmem", "^sm", "^posix,sysv")),
        *((value, True) for value in ("all", "^ib", "tcp,self,sm", "^sysv")),
    ],
)
def test_ranks_that_have_tcp_alone_keep_their_network(transports: str, by_memory: bool) -> None:
    """By loopback they would not find each other."""
    assert (inside({"UCX_TLS": transports}).get("UCX_NET_DEVICES") == "lo") is by_memory


def test_on_several_hosts_they_talk_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX that is loaded would print a warning of a variable that nobody uses."""
    assert inside({}, one_host=False) == SEVERAL
    assert "UCX_TLS" not in inside({"UCX_TLS": "all"}, one_host=False)
    monkeypatch.setattr(mpi_library, "_ucx_is_loaded", lambda: True)
    assert inside({}) == {name: value for name, value in ALL.items() if name != "UCX_HANDLE_ERRORS"}
