"""The GPUs of a host and their health, from a mock of NVML."""

from __future__ import annotations

import sys

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.nvidia import driver_is_installed, gpu_health, list_gpus
from support.mocks.pynvml import (
    FUNCTION_NOT_FOUND,
    GIB,
    LOST,
    NO_DRIVER,
    NO_LIBRARY,
    NO_PERMISSION,
    UNKNOWN,
    Nvml,
    device,
)


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


def test_devices_of_other_jobs_do_not_count() -> None:
    found = list_gpus(Nvml(NO_PERMISSION, device(1), NO_PERMISSION, device(3)))
    assert [(gpu.uuid, gpu.index) for gpu in found] == [("GPU-1", 0), ("GPU-3", 1)]


def test_without_the_python_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(InputError, match="pip install nvidia-ml-py"):
        list_gpus()


def test_health_is_the_drivers_version_and_the_memory_errors_of_each_gpu() -> None:
    gpus = [
        Gpu("GPU-0", 0, "A100", 0),
        Gpu("MIG-a", 1, "A100 MIG 1g", 0, parent="GPU-1"),
        Gpu("GPU-2", 2, "A100", 0),
    ]
    nvml = Nvml(device(0, ecc=[7]), device(1, ecc=[0]), device(2), driver=b"580.1")
    # without ECC there is no number
    assert gpu_health(gpus, nvml) == ("580.1", {"GPU-0": 7, "MIG-a": 0})
    assert nvml.calls == ["init", "shutdown"]
    assert gpu_health(gpus[:1], Nvml(device(0, ecc=LOST), driver=FUNCTION_NOT_FOUND)) == ("", {})


def test_no_health_without_nvml() -> None:
    nvml = Nvml(device(0, ecc=[7]), driver="580.1", init=NO_DRIVER)
    assert gpu_health([Gpu("GPU-0", 0, "A100", 0)], nvml) == ("", {})
    assert nvml.calls == ["init"]


@pytest.mark.parametrize("installed", [True, False])
def test_whether_there_is_a_driver(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    def load(name: str) -> None:
        assert name == "libnvidia-ml.so.1"
        if not installed:
            raise OSError

    monkeypatch.setattr("ctypes.CDLL", load)
    assert driver_is_installed() is installed


def test_a_compute_mode_that_lets_one_process_in() -> None:
    found = list_gpus(Nvml(device(0), device(1, compute_mode=3)))
    assert [gpu.exclusive for gpu in found] == [False, True]
