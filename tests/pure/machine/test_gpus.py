"""The GPUs of a host, from a mock of NVML."""

from __future__ import annotations

import sys

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.gpus import Gpu, list_gpus
from mock_nvml import GIB, NO_DRIVER, NO_LIBRARY, NO_PERMISSION, UNKNOWN, Nvml, device


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
