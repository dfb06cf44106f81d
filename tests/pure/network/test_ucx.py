"""What UCX is told, process by process."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import dask
import pytest
from dask.utils import parse_bytes

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network import ucx
from dask_gpu_mpi.network.ucx import configured_numbers, transfer_config


def test_a_ucx_that_hangs_holds_up_no_end() -> None:
    go_on, was_there = threading.Event(), threading.Event()

    def hang() -> None:
        was_there.set()
        go_on.wait(30)

    async def main() -> None:
        future = ucx.in_thread(hang)
        while not was_there.is_set():
            await asyncio.sleep(0.01)
        assert not future.done()

    # The loop is closed while the thread is still there; when that ends, it finds nobody to tell, and does not mind.
    asyncio.run(main())
    (thread,) = [each for each in threading.enumerate() if each.name == "may hang"]
    assert thread.is_alive()
    assert thread.daemon  # the interpreter does not wait for it either
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()


async def test_a_ucx_that_fails_is_told_to_who_waits_for_it() -> None:
    complaints: list[Any] = []

    def fail() -> None:
        raise RuntimeError("no device")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with pytest.raises(RuntimeError, match="no device"):
        await ucx.in_thread(fail)
    ucx.in_thread(fail).cancel()  # nobody waits
    ucx.in_thread(fail)
    while any(each.name == "may hang" for each in threading.enumerate()):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("section", ["distributed-ucxx", "distributed.comm.ucx"])
def test_numbers_that_the_user_configured_become_texts(section: str) -> None:
    # distributed-ucxx puts them into os.environ, which takes nothing else: "str expected, not int"
    given = {"rndv_thresh": 12345, "warn-unused-env-vars": False, "tls-x": "all", "frag": 1.5}
    texts = {"rndv_thresh": "12345", "warn-unused-env-vars": "n", "tls-x": "all", "frag": "1.5"}
    with dask.config.set({f"{section}.environment": given}), dask.config.set(configured_numbers()):
        assert dask.config.get(f"{section}.environment") == texts
    with (
        dask.config.set({f"{section}.environment": ["tls", "all"]}),
        pytest.raises(InputError, match=rf"{section}\.environment is .* \(expected names and values"),
    ):
        configured_numbers()


def test_workers_ask_for_more_at_a_time_unless_the_user_has_said_how_much() -> None:
    import distributed  # noqa: F401  its defaults are no configuration of the user's

    key = "distributed.worker.transfer.message-bytes-limit"
    assert dask.config.get(key) == "50MB"
    assert parse_bytes(transfer_config()[key]) == 2_000_000_000
    with dask.config.set({key: "123 MB"}):
        assert transfer_config() == {}


def test_ucxx_imported_early_leaves_to_the_user_what_the_user_configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # what the real one does on import, for those that are not set
    names = ("UCX_RNDV_THRESH", "UCX_RNDV_FRAG_MEM_TYPE", "UCX_MAX_RNDV_RAILS")
    text = f"import os\nfor name in {names}:\n    os.environ.setdefault(name, 'its own')\n"
    (tmp_path / "ucxx.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(os, "environ", {"UCX_MAX_RNDV_RAILS": "the environment's"})
    with dask.config.set({"distributed-ucxx.environment": {"rndv-thresh": "12345", "max-rndv-rails": "2"}}):
        ucx.import_ucx()
    del sys.modules["ucxx"]
    # distributed-ucxx takes its configuration where the environment has nothing
    assert {name: os.environ.get(name) for name in names} == {
        "UCX_RNDV_THRESH": None,
        "UCX_RNDV_FRAG_MEM_TYPE": "its own",
        "UCX_MAX_RNDV_RAILS": "the environment's",
    }


SYSTEM = "1.20.0 {}/lib"


@pytest.mark.parametrize(
    ("environ", "device", "package", "answer", "kinds", "why"),
    [
        ({}, False, "libuct_cma.so", SYSTEM, "ib cuda", "no RDMA device"),
        ({}, True, "libuct_ib.so.0", SYSTEM, "ib cuda", ""),
        ({}, True, None, SYSTEM, "ib cuda", ""),  # of conda, or the system's
        ({ucx.PREFERS_SYSTEM: "true"}, True, "libuct_cma.so", "", "", ""),
        ({ucx.PREFERS_SYSTEM: "false"}, True, "libuct_cma.so", SYSTEM, "ib cuda", "the libucx package has no InfiniBand ("),
        ({}, True, "libuct_cma.so", SYSTEM, "ib cuda", "taken"),
        ({}, True, "libuct_cma.so", "", "", "the libucx package has no InfiniBand, and the system has no UCX"),
        ({}, True, "libuct_cma.so", SYSTEM, "cuda", "has no ib. Fix: load your site's module of UCX"),
        ({}, True, "libuct_cma.so", SYSTEM, "ib", "/lib has no cuda."),
        ({}, True, "libuct_cma.so", "1.13.1 {}/lib", "ib cuda", "does not suit UCXX (expected <1.22,>=1.19.0)"),
        ({}, True, "libuct_cma.so", "1.22.0 {}/lib", "ib cuda", "the UCX 1.22.0 in"),
    ],
)  # fmt: skip
def test_between_nodes_ucx_needs_rdma(
    environ: dict[str, str], device: bool, package: str | None, answer: str, kinds: str, why: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where the package's UCX has none, one of the system is taken that can do all that workers need."""
    devices = tmp_path / "infiniband"
    devices.mkdir()
    monkeypatch.setattr(ucx, "SLINGSHOT", f"{tmp_path}/cxi*")
    if device:
        (devices / "mlx5_0").touch()
    found = None
    if package is not None:
        folder = tmp_path / "libucx" / "lib" / "ucx"
        folder.mkdir(parents=True)
        (folder / package).touch()
        found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "libucx")])
    (tmp_path / "lib" / "ucx").mkdir(parents=True)
    for kind in kinds.split():
        (tmp_path / "lib" / "ucx" / f"libuct_{kind}.so.0").touch()
    asks = f"print({answer.format(tmp_path)!r})" if answer else "import ctypes; ctypes.CDLL('libnone.so')"
    monkeypatch.setattr(ucx, "ASKS_SYSTEM", asks)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    needs = {"libucxx-cu13": ["librmm-cu13==26.10.*", "libucx-cu13<1.22,>=1.19.0"]}
    monkeypatch.setattr("importlib.metadata.requires", needs.get)
    reason, taken = ucx.way_between_nodes(environ, device_memory=True, devices=str(devices / "*"))
    if why == "taken":
        assert (reason, taken) == ("", f"UCX 1.20.0 in {tmp_path}/lib")
    else:
        assert why in reason if why else not reason
        assert not taken
    (tmp_path / "cxi0").mkdir()
    reason, _ = ucx.way_between_nodes(environ, device_memory=True, devices=str(devices / "*"))
    assert (reason == "UCX has no transport for Slingshot") is not device


@pytest.mark.parametrize(
    ("value", "port"),
    [
        ("all", True), ("tcp", True), ("sm,tcp,cuda_ipc", True), ("", True), ("t*,sm", True), ("^sysv", True), ("^cuda", True),
        ("^sysv,tcp", False), ("sm,cuda", False), ("rc,cuda_ipc", False), ("self", False),
    ],
)  # fmt: skip
def test_a_list_of_transports_with_tcp_opens_a_port(value: str, port: bool) -> None:
    assert ucx.opened_by({"UCX_TLS": value}) == ("UCX_TLS" if port else "")
    with dask.config.set({"distributed-ucxx.environment.tls": value}):
        assert ucx.opened_by({}) == ("distributed-ucxx.environment.tls" if port else "")
        assert ucx.opened_by({"UCX_TLS": "sm"}) == ""  # which wins


def test_a_switch_opens_a_port() -> None:
    assert ucx.opened_by({}) == ""
    assert ucx.opened_by({}, {"enable_nvlink": None, "rmm_pool_size": 0.5}) == ""
    assert ucx.opened_by({}, {"enable_infiniband": False}) == "worker_options['enable_infiniband']"
    assert ucx.opened_by({}, dict.fromkeys(ucx.SWITCHES, False)) == ""  # nothing is left that it could use
    assert ucx.opened_by({"UCX_TLS": "sm"}, {"env": {"UCX_TLS": "tcp"}}) == "worker_options['env']['UCX_TLS']"
    with dask.config.set({"distributed.comm.ucx.nvlink": True}):
        assert ucx.opened_by({}) == "distributed.comm.ucx.nvlink"


def test_the_section_of_the_configuration_that_counts() -> None:
    """As distributed-ucxx reads it: the older one only if the newer has none, and of two spellings the last."""
    old, new = "distributed.comm.ucx.environment", "distributed-ucxx.environment"
    with dask.config.set({f"{old}.tls": "tcp"}):
        assert ucx.opened_by({}) == f"{old}.tls"
        with dask.config.set({f"{new}.rndv-thresh": "1"}):
            assert ucx.opened_by({}) == ""
            assert ucx.configured_environment() == ("distributed-ucxx", {"RNDV_THRESH": "1"})
    with dask.config.set({new: {"tls": "sm", "TLS": "tcp"}}):
        assert ucx.opened_by({}) == f"{new}.tls"
