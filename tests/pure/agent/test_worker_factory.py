"""Workers from their lines of the plan."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

import dask
import pytest
from distributed import Nanny

from dask_gpu_mpi.agent.orders import WorkerSettings
from dask_gpu_mpi.agent.worker_factory import (
    listen_on_tcp,
    make_worker,
    measure_less,
    visible_device,
    worker_class_for,
)
from dask_gpu_mpi.network import ucx
from dask_gpu_mpi.plan.model import WorkerPlan
from dask_gpu_mpi.startup.agent_settings import configuration


def test_cpu_workers_beside_gpu_workers_are_nannies() -> None:
    pytest.importorskip("dask_cuda.cuda_worker", exc_type=ImportError)
    import dask_cuda
    import distributed

    class Mine(dask_cuda.CUDAWorker):  # type: ignore[misc]
        pass

    for cls in ("auto", "dask_cuda.CUDAWorker", dask_cuda.CUDAWorker, Mine):
        assert worker_class_for("cpu", cls) is distributed.Nanny
        assert issubclass(worker_class_for("gpu", cls), dask_cuda.CUDAWorker)
    assert worker_class_for("cpu", "distributed.Worker") is distributed.Worker


@pytest.mark.parametrize("before", [None, "0,1"])
def test_the_environment_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with visible_device("GPU-x"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


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


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_only_workers_with_a_gpu_are_told_of_cuda_by_ucx(
    kind: Literal["gpu", "cpu"], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real Nanny, made where GPUs are hidden as in the agent."""
    monkeypatch.setattr(ucx, "_transports", None)
    monkeypatch.setattr(ucx, "_section", None)
    gpu = kind == "gpu"
    plan = WorkerPlan(
        name="a", rank=0, host="h", kind=kind, gpu_index=0 if gpu else None, device="GPU-x" if gpu else None,
        nthreads=1, memory_limit=0, cpus=(0,), resources={},
    )  # fmt: skip
    settings = WorkerSettings(
        "tcp://127.0.0.1:1",
        "tcp",
        "127.0.0.1",
        None,
        str(tmp_path),
        5.0,
        "distributed.Nanny",
        {},
        {"GPU-x": 1},
    )

    async def make() -> Any:
        return make_worker(plan, settings)

    with dask.config.set({"distributed-ucxx": {"create-cuda-context": True}}):
        ucx.hide_gpus({"UCX_TLS": "tcp,cuda_copy"})
        nanny = asyncio.run(make())
        assert nanny.config["distributed-ucxx"]["create-cuda-context"] is gpu
        assert nanny.env["UCX_TLS"] == ("tcp,cuda_copy" if gpu else "tcp")
        assert nanny.env["CUDA_VISIBLE_DEVICES"] == ("GPU-x" if gpu else "")


def test_a_cpu_worker_asks_nothing_of_gpus(tmp_path: Path) -> None:
    from distributed import Nanny

    options = {"config": {"probe": 1}}
    plan = WorkerPlan(
        name="a", rank=0, host="h", kind="cpu", gpu_index=None, device=None,
        nthreads=1, memory_limit=0, cpus=(0,), resources={},
    )  # fmt: skip
    settings = WorkerSettings(
        "tcp://127.0.0.1:1", "tcp", "127.0.0.1", None, str(tmp_path), 5.0, Nanny, options
    )

    async def make() -> Any:
        return make_worker(plan, settings)

    nanny = asyncio.run(make())
    # the metrics of workers would ask RMM, which initialises CUDA; those of the host are not among them
    assert nanny.worker_kwargs["metrics"] == {}
    assert nanny.config["distributed.diagnostics.nvml"] is False
    assert nanny.config["probe"] == 1


def test_agents_ask_nothing_of_nvml_and_workers_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed.diagnostics import nvml

    from dask_gpu_mpi.agent.main import _leave_gpus_alone

    monkeypatch.setattr(nvml, "NVML_STATE", nvml.NVMLState.UNINITIALIZED)
    configured = dask.config.get("distributed.diagnostics.nvml")
    _leave_gpus_alone()
    assert nvml.NVML_STATE == nvml.NVMLState.DISABLED_CONFIG
    assert nvml.device_get_count() == 0
    assert dask.config.get("distributed.diagnostics.nvml") is configured is True


@pytest.mark.parametrize("known", [None, "no function"])
def test_tls_starts_with_any_tornado(
    known: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tornado.netutil

    from dask_gpu_mpi.agent import main as agent
    from dask_gpu_mpi.options.model import Options
    from dask_gpu_mpi.options.protocols import Protocol

    if known is None:
        monkeypatch.delattr(tornado.netutil, "_client_ssl_defaults", raising=False)
    else:
        monkeypatch.setattr(tornado.netutil, "_client_ssl_defaults", known, raising=False)
    monkeypatch.setattr(agent.logs, "set_up", lambda *_, **__: None)
    with dask.config.set({}):
        options = Options(protocol=Protocol.TLS, local_directory=str(tmp_path))
        scratch = agent._configure(configuration(options, speaks=False))
    assert Path(scratch).parent == tmp_path
