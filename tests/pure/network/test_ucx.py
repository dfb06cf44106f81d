"""What UCX is told, process by process."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask
import pytest
from dask.utils import parse_bytes

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network import ucx
from dask_gpu_mpi.network.ucx import (
    SECTION,
    connection_config,
    disable_gpu_transports,
    shown_transports,
    transfer_config,
    users_config,
    without_gpu_transports,
)
from dask_gpu_mpi.workers.factory import _workers_config

PRIORITY = "distributed-ucxx.environment.sockaddr-tls-priority"


@pytest.mark.parametrize(
    ("options", "priority"),
    [
        ({}, None),
        ({"enable_nvlink": None, "rmm_pool_size": 0.5}, None),
        ({"enable_nvlink": True}, "tcp"),
        ({"enable_infiniband": False}, "tcp"),  # which switches the other two on
        ({"enable_infiniband": True, "enable_rdmacm": True}, "rdmacm"),
        ({"enable_rdmacm": True}, None),  # without InfiniBand it has no meaning
    ],
)
def test_everybody_connects_as_the_workers_do(options: dict[str, Any], priority: str | None) -> None:
    expected = {} if priority is None else {PRIORITY: priority}
    # and clients do not fetch GPU data by way of the scheduler
    assert connection_config(options) == {"distributed.client.direct-to-workers": True, **expected}


@pytest.mark.parametrize(
    ("transports", "left"),
    [
        ("all", "all"),
        ("rc,sm,cuda_copy,cuda_ipc,cuda", "rc,sm"),
        ("cuda_ipc", "tcp"),
        ("^cuda_ipc,sm", "^cuda_ipc,sm"),
        ("^sm,cuda_ipc", "^cuda_ipc,sm"),
    ],
)
def test_transports_without_a_context(transports: str, left: str) -> None:
    assert without_gpu_transports(transports) == left


@pytest.fixture
def unhidden(monkeypatch: pytest.MonkeyPatch, dask_config: None) -> None:
    """A process that has hidden nothing yet."""
    monkeypatch.setattr(ucx, "_transports", None)
    monkeypatch.setattr(ucx, "_section", None)


@pytest.mark.usefixtures("unhidden")
def test_gpu_transports_are_hidden() -> None:
    assert shown_transports() == {}
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "UCX_TLS": "tcp,cuda_copy", "UCX_LOG_LEVEL": "warn"}
    disable_gpu_transports(environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "0,1", "UCX_TLS": "tcp", "UCX_LOG_LEVEL": "warn"}
    assert shown_transports() == {"UCX_TLS": "tcp,cuda_copy"}


@pytest.mark.parametrize("section", ["distributed-ucxx", "distributed_ucxx"])  # YAML, environment
@pytest.mark.usefixtures("unhidden")
def test_a_switch_leaves_the_users_environment_of_ucx(section: str) -> None:
    dask.config.config[section] = {"environment": {"rndv-thresh": "8192"}}
    settings = connection_config({"enable_nvlink": True})
    dask.config.set(settings)
    both = {"rndv-thresh": "8192", "sockaddr-tls-priority": "tcp"}
    assert dask.config.get("distributed-ucxx.environment") == both
    # and as the client's session tells it to dask.config.refresh
    nested: dict[str, Any] = {"distributed-ucxx": {"environment": {"rndv-thresh": "8192"}}}
    ours: dict[str, Any] = {}
    dask.config.set(settings, config=ours)
    dask.config.update(nested, ours)
    assert nested["distributed-ucxx"]["environment"] == both
    # a worker is told by its switch, and keeps the rest
    config = {SECTION: dask.config.get(SECTION)}  # as CUDAWorker gives it to its nannies
    told = _workers_config(config, switched=True)
    assert told[SECTION]["environment"] == {"rndv-thresh": "8192"}
    assert dask.config.get("distributed-ucxx.environment") == both
    assert _workers_config(config, switched=False)[SECTION]["environment"] == both


@pytest.mark.parametrize("section", ["distributed-ucxx", "distributed_ucxx", "distributed.comm.ucx"])
@pytest.mark.parametrize("name", ["tls", "TLS"])
@pytest.mark.usefixtures("unhidden")
def test_dasks_configuration_asks_for_no_context_where_gpus_are_hidden(section: str, name: str) -> None:
    user = {
        "create-cuda-context": True,
        "nvlink": True,
        "cuda-copy": True,
        "environment": {name: "tcp,cuda_copy", "rndv-thresh": "8192"},
    }
    dask.config.set({section: copy.deepcopy(user)})
    disable_gpu_transports({})
    for key in ("create-cuda-context", "nvlink", "cuda-copy"):
        assert dask.config.get(f"distributed-ucxx.{key}") is False
    environment = {name: "tcp", "rndv-thresh": "8192"}
    assert dask.config.get("distributed-ucxx.environment") == environment
    with users_config():
        assert dask.config.get(section) == user
        dask.config.get(section)["nvlink"] = None
    assert dask.config.get("distributed-ucxx.environment") == environment
    assert dask.config.get("distributed-ucxx.nvlink") is False
    with users_config():
        assert dask.config.get(section)["environment"] == user["environment"]


@pytest.mark.usefixtures("unhidden")
def test_the_agent_keeps_its_own_configuration() -> None:
    with dask.config.set({"distributed-ucxx": {"environment": {"a": 1}}}):
        with users_config():
            dask.config.get("distributed-ucxx")["create-cuda-context"] = (
                True  # as dask_cuda.utils.get_ucx_config does
            )
            dask.config.set({"distributed-ucxx.nvlink": True})
        assert dask.config.get("distributed-ucxx") == {"environment": {"a": 1}}
    with users_config():
        dask.config.config["distributed-ucxx"] = {"tcp": True}
    assert dask.config.get("distributed-ucxx", None) is None


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
    (thread,) = [each for each in threading.enumerate() if each.name == "start UCX"]
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
    ignored = ucx.in_thread(fail)
    while not ignored.done():
        await asyncio.sleep(0.01)
    del ignored
    gc.collect()
    given_up = ucx.in_thread(fail)
    given_up.cancel()
    while any(each.name == "start UCX" for each in threading.enumerate()):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert complaints == []


@pytest.mark.parametrize("section", ["distributed-ucxx", "distributed.comm.ucx"])
def test_numbers_that_the_user_configured_become_texts(section: str) -> None:
    # distributed-ucxx puts them into os.environ, which takes nothing else: "str expected, not int"
    given = {"rndv_thresh": 12345, "warn-unused-env-vars": False, "tls-x": "all", "frag": 1.5}
    texts = {"rndv_thresh": "12345", "warn-unused-env-vars": "n", "tls-x": "all", "frag": "1.5"}
    with dask.config.set({f"{section}.environment": given}), dask.config.set(connection_config({})):
        assert dask.config.get(f"{section}.environment") == texts
    with (
        dask.config.set({f"{section}.environment": ["tls", "all"]}),
        pytest.raises(InputError, match=rf"{section}\.environment is .* \(expected names and values"),
    ):
        connection_config({})


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


def test_handshakes_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ucxx is imported later, by the start."""
    backend: Any = types.ModuleType("distributed_ucxx.ucxx")
    made = types.SimpleNamespace(create_endpoint=dict, create_listener=dict)
    backend.init_once = lambda: setattr(backend, "ucxx", made)
    monkeypatch.setitem(sys.modules, "distributed_ucxx.ucxx", backend)
    monkeypatch.setitem(sys.modules, "distributed_ucxx", types.ModuleType("distributed_ucxx"))
    ucx.extend_handshakes()
    backend.init_once()
    for function in (backend.ucxx.create_endpoint, backend.ucxx.create_listener):
        assert function(port=0) == {"port": 0, "connect_timeout": ucx.HANDSHAKE_TIMEOUT}


def test_hooks_that_cannot_be_installed_are_left_to_ucx() -> None:
    ucx.install_hooks()  # its library is not loaded: nothing is asked of it


def test_library_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can be: tests/pure/mpi/test_library.py."""
    package = Mock(load_library=Mock(side_effect=OSError("no such library")))
    monkeypatch.setitem(sys.modules, "libucxx", package)
    monkeypatch.setenv("UCX_WARN_UNUSED_ENV_VARS", "y")
    assert not ucx.load_library()
    package.load_library.assert_called_once_with()
    assert os.environ["UCX_WARN_UNUSED_ENV_VARS"] == "y"


@pytest.mark.parametrize("asked", [True, False])
async def test_a_descriptor_of_ucx_is_watched_only_as_long_as_ucx_is_asked(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Whether ucxx's asking is still on for this loop; the packages themselves are in tests/ucx."""
    core, contexts = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "ucxx.core", core)
    monkeypatch.setitem(sys.modules, "ucxx._lib_async.application_context", contexts)
    loop = asyncio.get_running_loop()
    with socket.socket() as watched:
        core._ctx.worker.epoll_file_descriptor = watched.fileno()
        contexts.ProgressTasks = {loop: None} if asked else {}
        loop.add_reader(watched, lambda: None)
        ucx.stop_watching_ucx()
        assert loop.remove_reader(watched) is asked
        core._ctx = None  # UCX was not started
        ucx.stop_watching_ucx()


@pytest.mark.parametrize(
    ("environ", "device", "package", "why"),
    [
        ({}, False, "libuct_cma.so", "no RDMA device"),
        ({}, True, "libuct_cma.so", "the libucx package has no InfiniBand"),
        ({}, True, "libuct_ib.so.0", ""),
        ({}, True, None, ""),  # of conda, or the system's
        ({"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}, True, "libuct_cma.so", ""),
        ({"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "false"}, True, "libuct_cma.so", "the libucx package"),
    ],
)
def test_between_nodes_ucx_needs_rdma(
    environ: dict[str, str],
    device: bool,
    package: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    text = ucx.obstacle_between_nodes(environ, str(devices / "*"))
    assert text.startswith(why) if why else not text
    (tmp_path / "cxi0").mkdir()
    text = ucx.obstacle_between_nodes(environ, str(devices / "*"))
    assert (text == "UCX has no transport for Slingshot") is not device


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
