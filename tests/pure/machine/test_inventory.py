"""What a rank sees, with a made-up NVML."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.cgroups import cpu_quota
from dask_gpu_mpi.machine.gpus import why_none
from dask_gpu_mpi.machine.inventory import take_inventory
from dask_gpu_mpi.machine.nvidia import visible_gpus
from support.mocks.nvml.pynvml import LOST, MISMATCH, UNKNOWN, Nvml, device


def test_a_broken_nvml_is_an_error_with_its_text() -> None:
    with pytest.raises(InputError, match="NVML text 18"):
        visible_gpus({}, Nvml(init=MISMATCH))
    nvml = Nvml(count=UNKNOWN)
    with pytest.raises(InputError, match="NVML text 999"):
        visible_gpus({}, nvml)
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_a_rank_that_sees_none_does_not_ask_nvml(value: str) -> None:
    nvml = Nvml(init=MISMATCH)
    environ = {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(environ, nvml) == ()
    assert nvml.calls == []
    inventory = take_inventory(0, 1, environ, None, pid=1, contexts=("GPU-0",))
    assert (inventory.gpus, inventory.visible, inventory.contexts) == ((), value, ())


@pytest.mark.parametrize("lost", [LOST, device(1, memory=LOST), device(1, uuid=LOST), device(1, mode=LOST)])
def test_a_lost_gpu_is_left_out_with_a_warning_where_it_was_visible(lost: Any) -> None:
    nvml = Nvml(device(0), lost, device(2))
    inventory = take_inventory(0, 1, {}, visible_gpus({}, nvml), pid=1)
    assert [gpu.index for gpu in inventory.gpus] == [0, 2]
    (warning,) = map(str, inventory.warnings)
    assert f"host {inventory.host}: GPU 1 is left out" in warning
    assert "NVML text 15" in warning
    assert [gpu.index for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": "2"}, nvml)] == [2]


@pytest.mark.parametrize(
    ("environ", "count", "source"),
    [
        ({}, 0, ""),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8, "SLURM_GPUS_ON_NODE=8"),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 8, "SLURM_GPUS_ON_NODE=8"),
        # PBS, LSF and Flux set this one only
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, "CUDA_VISIBLE_DEVICES=0,1"),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""}, 0, ""),
        ({"PBS_JOBID": "7", "DGM_PBS_GPUS": "2"}, 2, "DGM_PBS_GPUS=2"),
    ],
)
def test_gpus_that_it_should_see(environ: dict[str, str], count: int, source: str) -> None:
    promise = take_inventory(0, 1, environ, (), pid=1).promise
    assert (promise.count, promise.source) == (count, source)
    assert bool(promise.fix) == bool(count)
    assert promise.is_shared == ("DGM_PBS_GPUS" in environ)


@pytest.mark.parametrize(
    ("environ", "file", "fix"),
    [
        ({}, "", "run nvidia-smi on that node"),
        ({}, "/.dockerenv", "start the container with its GPU option"),
        ({"APPTAINER_CONTAINER": "/a.sif"}, "/dev/kfd", "these are GPUs of AMD"),
    ],
)
def test_the_likely_cause_if_none_is_visible(environ: dict[str, str], file: str, fix: str) -> None:
    assert why_none(environ, "nvidia-smi", lambda path: path == file).startswith(fix)


class HipNvml(Nvml):
    """dask-hip's pynvml: some functions are missing, and texts are bytes."""

    def __getattribute__(self, name: str) -> Any:
        if name.removeprefix("nvmlDeviceGet") in ("PciInfo", "MemoryAffinity", "ComputeMode", "MigMode"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlDeviceGetUUID(self, device: Any) -> Any:
        return super().nvmlDeviceGetUUID(device).encode()

    def nvmlDeviceGetName(self, device: Any) -> Any:
        return super().nvmlDeviceGetName(device).encode()


@pytest.mark.parametrize("visible", ["1", "GPU-1"])
def test_gpus_of_amd_with_the_pynvml_of_dask_hip(visible: str) -> None:
    (seen,) = visible_gpus({"CUDA_VISIBLE_DEVICES": visible}, HipNvml(device(0), device(1)))
    assert (seen.uuid, seen.name, seen.pci, seen.numa, seen.exclusive) == ("GPU-1", "A100", "", -1, False)


def test_cores_of_a_job_that_nothing_confines_to_them() -> None:
    found = take_inventory(1, 2, {}, (), pid=7, contexts=["GPU-0"])
    assert (found.rank, found.world_size, found.pid, found.visible) == (1, 2, 7, None)
    assert found.contexts == ("GPU-0",)
    assert found.host == socket.gethostname()
    assert found.memory > 0
    assert found.cpus
    assert take_inventory(0, 1, {"SLURM_CPUS_ON_NODE": "0"}, (), pid=1).cpu_quota == cpu_quota()
    for environ in ({"SLURM_CPUS_ON_NODE": "1"}, {"PBS_JOBID": "7", "DGM_PBS_CPUS": "1", "NCPUS": "2"}):
        assert take_inventory(0, 1, environ, (), pid=1).cpu_quota == 1
