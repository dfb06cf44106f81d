"""What a rank sees, with a made-up NVML."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.gpus import Gpu, list_gpus
from dask_gpu_mpi.machine.inventory import boot_id, take_inventory

GIB = 1024**3
NO_PERMISSION, NOT_FOUND, NO_DRIVER, NO_LIBRARY, FUNCTION_NOT_FOUND, LOST = 4, 6, 9, 12, 13, 15
MISMATCH, UNKNOWN = 18, 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML text {value}")
        self.value = value


class Nvml:
    """What `pynvml` has, over dicts: a device is a dict, an int in the place of a value is NVML's error code."""

    NVMLError = NVMLError

    def __init__(self, *devices: Any, init: int = 0, count: int = 0) -> None:
        self.devices, self.init, self.count = devices, init, count
        self.calls: list[str] = []

    def _get(self, device: dict[str, Any], key: str, default: Any = FUNCTION_NOT_FOUND) -> Any:
        value = device.get(key, default)
        if isinstance(value, int):
            raise NVMLError(value)
        return value

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.init:
            raise NVMLError(self.init)

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        if self.count:
            raise NVMLError(self.count)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        device = self.devices[index]
        if isinstance(device, int):
            raise NVMLError(device)
        return device

    def nvmlDeviceGetUUID(self, device: Any) -> Any:
        return self._get(device, "uuid")

    def nvmlDeviceGetName(self, device: Any) -> Any:
        return self._get(device, "name")

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:
        total, *used = self._get(device, "memory")
        return SimpleNamespace(total=total, free=total - sum(used))

    def nvmlDeviceGetPciInfo(self, device: Any) -> Any:
        return SimpleNamespace(busId=self._get(device, "pci"))

    def nvmlDeviceGetCpuAffinity(self, device: Any, words: int) -> Any:
        mask = self._get(device, "cpus")
        return [*mask, *([0] * (words - len(mask)))]

    def nvmlDeviceGetMigMode(self, device: Any) -> Any:
        return [1, 1] if "mig" in device else self._get(device, "mode")

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        return len(device["mig"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        if device["mig"][index] is None:
            raise NVMLError(NOT_FOUND)
        return device["mig"][index]

    def nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._get(device, "busy")]


def device(number: int, **more: Any) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "name": "A100", "memory": [40 * GIB, 2 * GIB], **more}


def test_all_that_a_gpu_tells() -> None:
    nvml = Nvml(
        device(
            0,
            pci=b"00000000:0a:00.0",
            cpus=[0b1011, 1],
            busy=[(77, GIB), (78, 5), (99, 100), (98, None), (97, 0)],
        )
    )
    assert list_gpus(nvml, own_pid=77) == (
        Gpu(
            "GPU-0",
            0,
            "A100",
            40 * GIB,
            cpus=(0, 1, 3, 64),
            pci="00000000:0A:00.0",
            processes=((78, 5), (99, 100), (98, None)),
            free=38 * GIB,
        ),
    )
    assert nvml.calls == ["init", "shutdown"]


def test_a_driver_that_knows_little() -> None:
    assert list_gpus(Nvml({"uuid": b"GPU-0"})) == (Gpu("GPU-0", 0, "GPU", 0),)


@pytest.mark.parametrize("code", [NO_DRIVER, NO_LIBRARY, UNKNOWN])
def test_no_nvidia_driver_is_no_gpu(code: int) -> None:
    assert list_gpus(Nvml(init=code)) == ()


def test_a_broken_nvml_is_an_error_that_names_rank_host_and_nvmls_text() -> None:
    with pytest.raises(InputError, match="rank 3 of 4 on n7: .*NVML text 18"):
        take_inventory(3, 4, {}, host="n7", nvml=Nvml(init=MISMATCH))
    nvml = Nvml(count=UNKNOWN)
    with pytest.raises(InputError, match="NVML text 999"):
        list_gpus(nvml)
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_a_rank_that_sees_none_does_not_ask_nvml(value: str) -> None:
    nvml = Nvml(init=MISMATCH)
    inventory = take_inventory(0, 1, {"CUDA_VISIBLE_DEVICES": value}, nvml=nvml)
    assert inventory.gpus == ()
    assert inventory.visible == value
    assert take_inventory(0, 1, {}, nvml=nvml, look_for_gpus=False).gpus == ()
    assert nvml.calls == []


def test_mig_instances_stand_in_for_their_parent() -> None:
    instances = [
        {"uuid": "MIG-a", "name": "A100 MIG 1g", "memory": [5 * GIB, GIB], "busy": [(1, 9)]},
        None,
        {"uuid": "MIG-c"},
    ]
    nvml = Nvml(device(0, mode=[0, 0]), device(1, pci="x", cpus=[2], mig=instances))
    assert list_gpus(nvml)[1:] == (
        Gpu(
            "MIG-a",
            1,
            "A100 MIG 1g",
            5 * GIB,
            (1,),
            "X",
            parent="GPU-1",
            slice=0,
            processes=((1, 9),),
            free=4 * GIB,
        ),
        Gpu("MIG-c", 1, "A100", 0, (1,), "X", parent="GPU-1", slice=2),
    )


@pytest.mark.parametrize("lost", [LOST, device(1, memory=LOST), device(1, uuid=LOST), device(1, mode=LOST)])
def test_a_lost_gpu_is_left_out_with_a_warning_where_it_was_visible(lost: Any) -> None:
    nvml = Nvml(device(0), lost, device(2))
    inventory = take_inventory(0, 1, {}, host="n7", nvml=nvml)
    assert [gpu.index for gpu in inventory.gpus] == [0, 2]
    (warning,) = inventory.warnings
    assert "host n7: GPU 1 is left out" in warning
    assert "NVML text 15" in warning
    assert take_inventory(0, 1, {"CUDA_VISIBLE_DEVICES": "2"}, nvml=nvml).warnings == ()


def test_devices_of_other_jobs_do_not_count() -> None:
    found = list_gpus(Nvml(NO_PERMISSION, device(1), NO_PERMISSION, device(3)))
    assert [(gpu.uuid, gpu.index) for gpu in found] == [("GPU-1", 0), ("GPU-3", 1)]


def test_visible_devices_choose_and_order() -> None:
    nvml = Nvml(*map(device, range(3)))
    inventory = take_inventory(0, 1, {"CUDA_VISIBLE_DEVICES": "2,GPU-0"}, nvml=nvml)
    assert [gpu.uuid for gpu in inventory.gpus] == ["GPU-2", "GPU-0"]
    with pytest.raises(InputError, match=r"rank 1 of 2 on n7: CUDA_VISIBLE_DEVICES='0,0'.*twice"):
        take_inventory(1, 2, {"CUDA_VISIBLE_DEVICES": "0,0"}, host="n7", nvml=nvml)


def test_the_rest() -> None:
    inventory = take_inventory(1, 2, {}, local_directory="/scratch", nvml=Nvml(init=NO_LIBRARY))
    assert (inventory.rank, inventory.world_size, inventory.pid) == (1, 2, os.getpid())
    assert inventory.host == socket.gethostname()
    assert inventory.local_directory == "/scratch"
    assert inventory.visible is None
    assert inventory.memory > 0
    assert inventory.cpus


def test_boot_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boot_id").write_text("1-2-3\n")
    assert boot_id(tmp_path / "boot_id") == "1-2-3"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="{ sec = 5 }\n"))
    assert boot_id(tmp_path / "none") == "{ sec = 5 }"

    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", fail)
    assert boot_id(tmp_path / "none") == ""


def test_without_the_python_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(InputError, match="pip install nvidia-ml-py"):
        list_gpus()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, dask_gpu_mpi.plan.planner, dask_gpu_mpi.plan.synthetic; "
        "print([m for m in ('dask', 'distributed', 'mpi4py', 'pynvml', 'numpy') if m in sys.modules])"
    )
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environ
    )
    assert found.stdout.strip() == "[]"
