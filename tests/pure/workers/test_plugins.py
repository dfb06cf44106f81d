"""What runs inside a worker's process: the note on the exception of a failed task, its log file, and what it sends."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.protocol import pickle

from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.workers import plugins
from dask_gpu_mpi.workers.factory import _plugins_of_all
from dask_gpu_mpi.workers.plugins import (
    BeforeWorker,
    Figures,
    ImportsOfScript,
    InWorker,
    KeylessDump,
    Label,
    TransferSizes,
    spilled_from_device,
)
from support.mocks.inputs import worker_plan


def failed(error: Any, start: str = "executing", finish: str = "error", gpu_fix: str = "") -> Any:
    """The exception of a task that goes from one state to another in a worker with a label."""
    data = pickle.dumps(error) if isinstance(error, BaseException) else error
    task = SimpleNamespace(exception=SimpleNamespace(data=data))
    label = Label("[raised by worker 0]", gpu_fix)
    label.setup(SimpleNamespace(state=SimpleNamespace(tasks={"key": task})))  # type: ignore[arg-type]
    label.transition("key", start, finish)
    return task.exception.data


def test_the_exception_of_a_failed_task_has_the_note() -> None:
    error = pickle.loads(failed(ValueError("x")))
    assert repr(error) == "ValueError('x')"
    assert error.__notes__ == ["[raised by worker 0]"]
    for start, finish in (("executing", "memory"), ("memory", "error"), ("error", "released")):
        assert not hasattr(pickle.loads(failed(ValueError("x"), start, finish)), "__notes__")
    assert failed(b"no pickle") == b"no pickle"


@pytest.mark.parametrize(
    "text",
    [
        "cudaErrorNoDevice: no CUDA-capable device is detected",  # CuPy, RMM
        "[CUresult.CUDA_ERROR_NO_DEVICE] Call to cuInit results in CUDA_ERROR_NO_DEVICE",  # numba
        "No CUDA GPUs are available",  # PyTorch
    ],
)
def test_a_worker_without_a_gpu_notes_what_to_do_where_cuda_finds_none(text: str) -> None:
    label = "[raised by worker 0]"
    assert pickle.loads(failed(RuntimeError(text), gpu_fix="Fix: x")).__notes__ == [label, "Fix: x"]
    assert pickle.loads(failed(RuntimeError(text))).__notes__ == [label]
    assert pickle.loads(failed(RuntimeError("other"), gpu_fix="Fix: x")).__notes__ == [label]


@pytest.mark.parametrize(
    ("device", "place", "file"),
    [
        ("GPU-0123456789abcdef", "rank 0 on host h, GPU GPU-0123456789abcdef]", "worker-0-1-h-GPU-01234567"),
        (None, "rank 0 on host h]", "worker-0-1-h"),
    ],
)
def test_the_worker_and_its_gpu_in_notes_and_in_the_name_of_its_log(
    device: str | None, place: str, file: str
) -> None:
    *_, label, logs = _plugins_of_all(worker_plan("0-1", device), Options(log_directory="/logs"))
    assert isinstance(label, Label)
    assert label.text == f"[raised by worker 0-1, {place}"
    assert ("--default-workers gpu" in label.gpu_fix) is (device is None)
    assert isinstance(logs, InWorker)
    assert logs.arguments == ("/logs", file)


def test_a_dump_has_no_key_and_all_the_rest() -> None:
    def dumped(state: Any, **kwargs: Any) -> Any:
        worker: Any = SimpleNamespace(handlers={"dump_state": lambda *, exclude=(): state})
        KeylessDump().setup(worker)
        return worker.handlers["dump_state"](**kwargs)

    key = "-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----\n"
    config = {"distributed": {"comm": {"tls": {"worker": {"cert": "c", "key": key}}}}, "preload": [1]}
    found = dumped({"config": config, "tasks": {"a": 1}}, exclude=())
    assert "PRIVATE KEY" not in str(found)
    assert found["config"]["distributed"]["comm"]["tls"]["worker"]["cert"] == "c"
    assert found["config"]["preload"] == [1]
    assert found["tasks"] == {"a": 1}
    assert "PRIVATE KEY" in str(config)  # the configuration itself is the worker's
    assert dumped({"tasks": {}}, exclude=("config",)) == {"tasks": {}}


async def test_a_worker_offers_ucx_from_when_its_process_has_received_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its `Worker` is made, which listens before it sets its plugins up."""
    from distributed.comm import registry

    from dask_gpu_mpi.network.ucx_endpoint import Ucx
    from dask_gpu_mpi.network.worker_comm import WorkerComm

    monkeypatch.setattr(WorkerComm, "host_frames", 0)
    monkeypatch.setattr(WorkerComm, "offers_ucx", False)
    for name in ("loopback", "leads", "warned", "devices"):
        monkeypatch.setattr(Ucx, name, False)
    before = registry.get_backend("tls")
    monkeypatch.setitem(registry.backends, "tls", before)
    ways = {"loopback": True, "leads": False, "warned": True, "devices": "mlx5_0:1"}
    sent = pickle.dumps(BeforeWorker(plugins.offer_ucx, 1000, system=None, **ways))
    assert registry.backends["tls"] is before  # the nanny's process, which makes it, offers nothing
    pickle.loads(sent)
    assert registry.backends["tls"] is before  # nor does a client that asks a worker for its plugins
    named = SimpleNamespace(name="Dask Worker process (from Nanny)")
    monkeypatch.setattr(plugins, "current_process", lambda: named)
    pickle.loads(sent)
    assert registry.backends["tls"] is not before
    assert (WorkerComm.host_frames, Ucx.loopback, Ucx.leads, Ucx.warned) == (1000, True, False, True)

    begun: list[bool] = []
    monkeypatch.setattr(Ucx, "begin", lambda: begun.append(True))
    monkeypatch.setattr(plugins, "START_UCX_AFTER", 0.05)
    InWorker(plugins.start_ucx_later).setup(SimpleNamespace())  # type: ignore[arg-type]
    assert begun == []  # not while the cluster starts
    while not begun:
        await asyncio.sleep(0.01)


def test_each_transfer_has_its_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(*starts: float) -> Any:
        """One that waited for transfers that began at these times."""
        transfers = [{"action": "transfer", "start": at, "source": "a"} for at in starts]
        return SimpleNamespace(startstops=transfers)

    log: deque[Any] = deque()
    tasks = {"x": task(1.0, 2.0), "y": task(3.0)}
    plugin = TransferSizes()
    plugin.setup(SimpleNamespace(transfer_incoming_log=log, state=SimpleNamespace(tasks=tasks)))  # type: ignore[arg-type]
    log += [{"who": "a", "start": start, "total": int(start * 10)} for start in (1.0, 2.0)]
    plugin.transition("x", "executing", "released")
    plugin.transition("gone", "executing", "memory")
    assert "nbytes" not in tasks["x"].startstops[0]
    plugin.transition("x", "executing", "memory")
    log.append({"who": "a", "start": 3.0, "total": 30})
    plugin.transition("y", "executing", "error")
    plugin.transition("x", "executing", "memory")  # once more, as after a cancelled one
    assert [each["nbytes"] for name in tasks for each in tasks[name].startstops] == [10, 20, 30]
    # what no task claims is forgotten
    monkeypatch.setattr(TransferSizes, "MOST", 10)
    log += [{"who": "a", "start": float(n), "total": 1} for n in range(100, 200)]
    tasks["z"] = task(-1.0)
    plugin.transition("z", "executing", "memory")
    assert len(plugin._sizes) == 10


@pytest.mark.parametrize("tasks", [{}, {"key": "a task"}])
async def test_a_worker_imports_before_its_first_task_only(
    tasks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task whose thread imports a part of a library failed if the event loop's thread imported the library: KeyError."""
    imported: list[str] = []
    monkeypatch.setattr(plugins, "import_module", imported.append)
    monkeypatch.setattr(plugins.gc, "freeze", lambda: imported.append("frozen"))
    monkeypatch.setattr(plugins, "IMPORT_AFTER", 0.0)
    status = SimpleNamespace(name="init")
    worker: Any = SimpleNamespace(status=status, state=SimpleNamespace(tasks=tasks))
    plugin = ImportsOfScript(["cudf", "cupy"])
    plugin.setup(worker)
    for _ in range(5):
        await asyncio.sleep(0)
    assert imported == []
    status.name = "running"
    await plugin._task
    assert imported == ([] if tasks else ["cudf", "cupy", "frozen"])


def test_a_range_lasts_from_the_start_of_a_task_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[Any] = []
    nvtx = SimpleNamespace(
        start_range=lambda message, domain: (ranges.append(message), message)[1],
        end_range=lambda message: ranges.append(f"end {message}"),
    )
    monkeypatch.setattr(plugins, "import_module", lambda _: nvtx)
    plugin = plugins.TaskRanges()
    plugin.setup(SimpleNamespace())  # type: ignore[arg-type]
    for step in (
        "ready executing long-running error",
        "executing cancelled resumed memory",  # it was wanted again meanwhile
        "waiting released",
    ):
        states = step.split()
        for start, finish in zip(["released", *states], states, strict=False):
            plugin.transition(f"{states[0]}-1", start, finish)
    assert ranges == ["ready", "end ready", "executing", "end executing"]


def test_a_new_process_is_prepared_before_its_worker_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    done = set()
    steps = {"print_by_line", "ignore_signals", "die_with_parent", "guard_listeners", "set_up"}
    for name in steps:
        monkeypatch.setattr(plugins, name, lambda *_, name=name, **__: done.add(name))
    named = SimpleNamespace(name=f"{plugins.WORKER_PROCESS} (from Nanny)")
    monkeypatch.setattr(plugins, "current_process", lambda: named)
    monkeypatch.setenv("PYTHONSAFEPATH", plugins.SAFE_PATH)
    sent = pickle.dumps(BeforeWorker(plugins.prepare_new_process, "info", "/scratch", quiet_stream=True))
    pickle.loads(sent)
    assert done == steps
    assert "PYTHONSAFEPATH" not in os.environ
    os.environ["PYTHONSAFEPATH"] = "1"  # the user's
    pickle.loads(sent)
    assert os.environ["PYTHONSAFEPATH"] == "1"


# -- what a worker sends besides distributed's metrics


def measured(worker: Any, plugin: Figures) -> dict[str, Any]:
    return asyncio.run(plugin.measure(worker))


def worker(*totals: int) -> Any:
    log = [{"total": total} for total in totals]
    return SimpleNamespace(transfer_incoming_log=log, transfer_outgoing_bytes_total=5, data={})


def test_what_was_received_is_counted_once() -> None:
    one, plugin = worker(1, 2), Figures(())
    assert measured(one, plugin)["received"] == 3
    assert measured(one, plugin)["received"] == 3
    assert measured(one, plugin)["spilled"] is None
    one.data = SimpleNamespace(spilled_total=0)
    assert measured(one, plugin).keys() == {"time", "sent", "received"}  # distributed knows what it spills
    one.transfer_incoming_log += [{"total": 10}, {"total": 20}]
    told = measured(one, plugin)
    assert (told["received"], told["sent"]) == (33, 5)
    # of a short log the oldest are gone
    one.transfer_incoming_log[:] = [{"total": 100}]
    assert measured(one, plugin)["received"] == 133


class DeviceSerialized:
    pass


def test_device_memory_that_is_kept_in_host_memory(tmp_path: Any) -> None:
    kept = {"a": DeviceSerialized(), "b": "", "c": DeviceSerialized()}
    host = SimpleNamespace(weights={"a": 5, "b": 7, "c": 9}, d=kept)
    assert spilled_from_device(SimpleNamespace(host_buffer=SimpleNamespace(fast=host))) == 14
    assert spilled_from_device({}) is None
    assert spilled_from_device(SimpleNamespace(host_buffer={})) is None  # no limit of host memory
    # as dask-cuda has it
    module = pytest.importorskip("dask_cuda.device_host_file")
    data = module.DeviceHostFile(str(tmp_path), device_memory_limit=1000, memory_limit=10_000)
    data["x"] = b"host"
    assert spilled_from_device(data) == 0
    assert module.DeviceSerialized.__name__ == DeviceSerialized.__name__


def test_figures_of_its_gpus_and_bytes_over_nvlink_as_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    links, asked = iter([1000, 5000, 3000, None, None, None]), []
    now = 10.0

    def figures(device: str, *, throughput: bool) -> list[float | None]:
        asked.append((device, throughput))
        return [50, 1, 2, 300.0, 60, 0, 7.0, now if throughput else None, next(links)]

    monkeypatch.setattr(plugins.nvml, "device_get_count", lambda: 2)
    monkeypatch.setattr(plugins, "device_figures", figures)
    monkeypatch.setattr(plugins.time, "monotonic", lambda: now)
    gpu, told = plugins._GpuFigures("GPU-1"), []
    for now in (10.0, 12.0, 14.0, 16.0, 21.9, 22.0):  # noqa: B007
        told.append(gpu.measure())
    assert [each[:-2] for each in told] == [[50, 1, 2, 300.0, 60, 0, 7.0]] * 6
    # no rate at first, and none over a reset of the counter
    assert [each[-1] for each in told] == [None, 2000.0, None, None, None, None]
    # what takes long is left out at the worker's start, and then repeated for 10 s
    assert asked == [("GPU-1", each) for each in (False, True, False, False, False, True)]
    assert [each[-2] for each in told] == [None, 12.0, 12.0, 12.0, 12.0, 22.0]


def test_gpus_come_with_the_heartbeat_if_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.nvml, "device_get_count", lambda: 2)
    monkeypatch.setattr(plugins, "device_figures", lambda device, throughput: [int(device[-1])] + [None] * 8)
    assert [gpu[0] for gpu in measured(worker(), Figures(["GPU-1", "GPU-2"]))["gpus"]] == [1, 2]
    assert "gpus" not in measured(worker(), Figures(()))
    monkeypatch.setattr(plugins.nvml, "device_get_count", lambda: 0)  # NVML is switched off
    assert "gpus" not in measured(worker(), Figures(["GPU-1"]))
