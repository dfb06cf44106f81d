"""Which components of Open MPI stay out of ``MPI_Init``, and when they are left alone."""

from __future__ import annotations

import os
from pathlib import Path

import dask
import pytest

from dask_gpu_mpi.mpi import openmpi
from dask_gpu_mpi.mpi.openmpi import (
    closed_to_others,
    fewer_components,
    left_open,
    missing,
    ucx_left_open,
    ucx_missing,
)

FILE = "openmpi-mca-params.conf"
VARIABLE = "OMPI_MCA_btl"
DANGER = "anyone on this node who reaches it can read and write the memory of the ranks. Fix: "
UCX = {"OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_pml": "^ucx", "OMPI_MCA_osc": "^ucx"}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An Open MPI below `tmp_path`, with a configuration that says nothing."""
    file = tmp_path / "prefix" / "lib" / "libmpi.so.40"
    monkeypatch.setattr(openmpi, "_library_of", lambda module: file)
    monkeypatch.setattr(openmpi, "NETWORKS", ())
    for name in UCX:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    conf = tmp_path / "prefix" / "etc" / FILE
    conf.parent.mkdir(parents=True)
    conf.write_text("# btl = self,tcp\nbtl_tcp_if_include = ib0\n mtl=^ofi\n")
    return file


def used(environ: dict[str, str], *, beside_ucx: bool = False, one_host: bool = False) -> dict[str, str]:
    """The settings while MPI starts; afterwards they are what they were."""
    before = {name: os.environ.get(name) for name in UCX}
    with fewer_components(environ, "module", beside_ucx=beside_ucx, one_host=one_host):
        inside = {name: os.environ[name] for name in UCX if name in os.environ}
    assert {name: os.environ.get(name) for name in UCX} == before
    return inside


@pytest.mark.parametrize(
    ("chosen", "beside_ucx", "one_host", "btl"),
    [
        ({}, False, False, "^ofi"),
        ({}, True, False, "^ofi,uct"),
        ({}, False, True, "^ofi,tcp"),
        ({}, True, True, "^ofi,uct,tcp"),
        # a choice of components is kept, also one in files that are not read
        ({"btl": "self,tcp"}, False, False, None),
        ({"btl": "self,tcp"}, False, True, None),
        ({"btl_ofi_provider_include": "x"}, False, False, None),
        ({"opal_common_ofi_provider_include": "x"}, False, False, None),
        ({"mca_base_param_files": "x"}, False, True, None),
        ({"mca_param_files": "x"}, False, False, None),
        ({"mca_base_override_param_file": "x"}, False, False, None),
        # other parameters say nothing about them; of TCP itself they have no effect without it
        ({"btl_tcp_if_include": "ib0"}, False, False, "^ofi"),
        ({"btl_ofi_mode": "1", "btl_tcp_if_include": "ib0"}, False, True, "^tcp"),
        # a list of what is left out, as many sites set it, is made longer
        ({"btl": "^openib"}, False, True, "^openib,tcp"),
        ({"btl": "^openib", "mca_base_param_files": "x"}, False, True, "^openib,tcp"),
        ({"btl": "^tcp,openib"}, False, True, None),
        ({"btl": "^openib"}, False, False, None),
    ],
)
def test_components_that_stay_out(
    library: Path, chosen: dict[str, str], beside_ucx: bool, one_host: bool, btl: str | None
) -> None:
    environ = {f"OMPI_MCA_{name}": value for name, value in chosen.items()}
    assert used(environ, beside_ucx=beside_ucx, one_host=one_host).get(VARIABLE) == btl


def test_beside_another_ucx_nothing_starts_it(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"HOME": str(tmp_path)}
    assert used(environ, beside_ucx=True) == UCX
    # a choice about UCX is one for both frameworks that would use it
    for name in ("pml", "osc", "pml_ucx_tls", "opal_common_ucx_devices", "osc_ucx_priority"):
        assert used(environ | {f"OMPI_MCA_{name}": "any"}, beside_ucx=True) == {VARIABLE: "^ofi,uct"}
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("pml = ob1\n")
    assert used(environ, beside_ucx=True) == {VARIABLE: "^ofi,uct"}
    monkeypatch.setenv(VARIABLE, "^openib")  # which is restored
    assert used({VARIABLE: "^openib"}, one_host=True) == {VARIABLE: "^openib,tcp"}


@pytest.mark.parametrize(
    ("value", "in_variable", "in_file"),
    [
        ("^openib", False, True),
        ("^openib,tcp", False, False),
        ("self,vader,tcp", True, True),
        ("self,vader", False, False),
    ],
)
def test_warning_of_a_choice_that_leaves_a_port(
    library: Path, tmp_path: Path, value: str, in_variable: bool, in_file: bool
) -> None:
    environ = {"HOME": str(tmp_path)}
    assert left_open(environ, "module") == ""

    def told(environ: dict[str, str], setting: str) -> bool:
        warning = left_open(environ, "module")
        if warning:
            assert f"{setting} " in warning
            assert DANGER in warning
        return bool(warning)

    assert told(environ | {VARIABLE: value}, f"{VARIABLE}={value}") == in_variable
    conf = library.parents[1] / "etc" / FILE
    conf.write_text(f"mtl = ^ofi\nbtl = {value}  \n")
    assert told(environ, f"btl = {value} in {conf}") == in_file
    assert told(environ | {VARIABLE: "^openib"}, "") is False  # the variable counts, not the file
    override = conf.with_name("openmpi-mca-params-override.conf")
    conf.rename(override)
    assert told(environ | {VARIABLE: "^openib"}, f"btl = {value} in {override}") == in_file
    assert (f"and no btl in {override}" in left_open(environ, "module")) == in_file
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("--mca btl self,tcp\n")
    assert told(environ, f"btl = {value} in {override}") == in_file


@pytest.mark.parametrize(
    ("chosen", "setting"),
    [(None, "^tcp"), ("^openib", "^openib,tcp"), ("^tcp", None), ("self,vader", None)],
)
def test_setting_that_closes_the_port(
    library: Path, tmp_path: Path, chosen: str | None, setting: str | None
) -> None:
    """For a script that has started MPI itself. Files that are not read may have opened it."""
    environ = {"HOME": str(tmp_path)} | ({} if chosen is None else {VARIABLE: chosen})
    assert missing(environ, "module") == (f"{VARIABLE}={setting}" if setting else "")
    warning = left_open({**environ, "OMPI_MCA_mca_base_param_files": "x"}, "module")
    assert ("OMPI_MCA_mca_base_param_files=x " in warning) is (chosen is None)


def test_another_library_is_left_alone(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmpi, "_library_of", lambda module: None)
    assert left_open({VARIABLE: "self,tcp"}, "module") == missing({}, "module") == ""
    assert used({}) == {}


def test_network_that_the_component_may_drive(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmpi, "NETWORKS", (f"{tmp_path}/infiniband/*",))
    (tmp_path / "infiniband").mkdir()
    assert used({}) == {VARIABLE: "^ofi"}  # the folder is there, and empty, in many a container
    (tmp_path / "infiniband" / "mlx5_0").mkdir()
    assert used({}) == {}
    assert used({}, one_host=True) == {VARIABLE: "^tcp"}


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("home/.openmpi/mca-params.conf", "  btl =self,vader,tcp"),
        ("prefix/etc/openmpi-mca-params.conf", "-mca btl self,tcp"),
        ("prefix/etc/openmpi-mca-params-override.conf", "btl_ofi_mode = 2"),
        ("moved/etc/openmpi-mca-params.conf", "btl = self"),  # OPAL_PREFIX
        ("moved/openmpi-mca-params.conf", "btl = self"),  # OPAL_SYSCONFDIR
    ],
)
def test_choice_in_a_file(library: Path, tmp_path: Path, where: str, line: str) -> None:
    environ = {"HOME": str(tmp_path / "home")} | dict.fromkeys(
        ("OPAL_PREFIX", "OPAL_SYSCONFDIR"), str(tmp_path / "moved")
    )
    assert used(environ) == {VARIABLE: "^ofi"}
    file = tmp_path / where
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# of this site\n{line}\n")
    assert used(environ) == {}


def test_system_configuration_is_asked_where_the_installation_has_none(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = tmp_path / FILE
    system.write_text("btl = ^uct,openib,ofi\n")
    real = openmpi.glob.glob
    monkeypatch.setattr(
        openmpi.glob, "glob", lambda pattern: [str(system)] if pattern.startswith("/etc") else real(pattern)
    )
    environ = {"HOME": str(tmp_path)}
    assert used(environ) == {VARIABLE: "^ofi"}  # it is another installation's
    (library.parents[1] / "etc" / FILE).unlink()
    assert used(environ) == {}


def test_what_is_no_library() -> None:
    import markupsafe._speedups

    assert openmpi._library_of("/nowhere/MPI.so") is None
    assert openmpi._library_of(markupsafe._speedups.__file__) is None


# -- what MPI is told about the interfaces of one host, and when it is told nothing


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
    reached = "node" if by_memory else "network"
    assert f"anyone on this {reached}" in ucx_left_open({"UCX_TLS": transports}, OF_UCX)


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
def test_warning_of_a_choice_of_ucx_that_leaves_a_port(value: str | None, is_open: bool) -> None:
    environ = {} if value is None else {"UCX_TLS": value}
    with dask.config.set({"distributed-ucxx.environment.tls": "tcp"}):  # that is Dask's, not MPI's
        warning = ucx_left_open(environ, OF_UCX)
    assert bool(warning) == is_open
    if is_open:
        assert f"UCX_TLS={value}" in warning
        assert DANGER in warning
    # for a script that has started MPI itself
    assert ucx_missing(environ, OF_UCX) == ("" if value else "UCX_TLS=^sysv,tcp")
    # no other library listens by UCX for it
    assert ucx_left_open(environ, "Open MPI v5.0.11") == ucx_left_open(environ, "MPICH Device: ch4:ofi") == ""
