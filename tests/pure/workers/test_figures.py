"""What a worker sends besides distributed's metrics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.workers import plugins
from dask_gpu_mpi.workers.plugins import Figures, spilled_from_device


def measured(worker: Any, plugin: Figures) -> dict[str, Any]:
    return asyncio.run(plugin.measure(worker))


def worker(*totals: int, **more: Any) -> Any:
    log = [{"total": total} for total in totals]
    return SimpleNamespace(transfer_incoming_log=log, transfer_outgoing_bytes_total=5, data={}, **more)


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


def test_device_memory_that_is_kept_in_host_memory() -> None:
    host = SimpleNamespace(
        weights={"a": 5, "b": 7, "c": 9}, d={"a": DeviceSerialized(), "b": "", "c": DeviceSerialized()}
    )
    data = SimpleNamespace(host_buffer=SimpleNamespace(fast=host))
    assert spilled_from_device(data) == 14
    assert spilled_from_device({}) is None
    assert spilled_from_device(SimpleNamespace(host_buffer={})) is None  # no limit of host memory


def test_dask_cudas_file_has_what_is_read(tmp_path: Any) -> None:
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
    plugin, told = Figures(["GPU-1"]), []
    for now in (10.0, 12.0, 14.0, 16.0, 21.9, 22.0):  # noqa: B007
        told.append(plugin._of_gpu("GPU-1"))
    assert [each[:-2] for each in told] == [[50, 1, 2, 300.0, 60, 0, 7.0]] * 6
    # no rate at first, and none over a reset of the counter
    assert [each[-1] for each in told] == [None, 2000.0, None, None, None, None]
    # what takes long is left out at the worker's start, and then repeated for 10 s
    assert asked == [("GPU-1", each) for each in (False, True, False, False, False, True)]
    assert [each[-2] for each in told] == [None, 12.0, 12.0, 12.0, 12.0, 22.0]


def test_gpus_come_with_the_heartbeat_and_a_worker_without_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins.nvml, "device_get_count", lambda: 2)
    monkeypatch.setattr(plugins, "device_figures", lambda device, throughput: [int(device[-1])] + [None] * 8)
    assert [gpu[0] for gpu in measured(worker(), Figures(["GPU-1", "GPU-2"]))["gpus"]] == [1, 2]
    assert "gpus" not in measured(worker(), Figures(()))
    monkeypatch.setattr(plugins.nvml, "device_get_count", lambda: 0)  # NVML is switched off
    assert "gpus" not in measured(worker(), Figures(["GPU-1"]))
