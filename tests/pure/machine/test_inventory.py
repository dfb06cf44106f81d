"""What a rank sees, with a made-up NVML; the inventories of a hypothetical allocation."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, OptionError
from dask_gpu_mpi.machine import inventory, why_none
from dask_gpu_mpi.machine.cgroups import cpu_quota
from dask_gpu_mpi.machine.inventory import hypothetical_job, take_inventory
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
    ("environ", "is_told"),
    [
        ({"SLURM_JOB_ID": "7"}, True),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": ""}, False),
        ({"SLURM_JOB_ID": "7", "DGM_EXPECT_GPUS": "0"}, False),  # the job script of a job without GPUs
        ({}, False),
    ],
)
def test_job_that_has_not_requested_the_gpus_of_its_node(
    environ: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory.os.path, "isdir", lambda path: path == inventory.DRIVER)
    promise = take_inventory(0, 1, environ, (), pid=1).promise
    assert (promise.count, promise.source) == (0, "the node has GPUs of NVIDIA" if is_told else "")
    assert ("from the batch system" in promise.fix) == is_told


@pytest.mark.parametrize(
    ("environ", "file", "fix"),
    [
        ({}, "", "run nvidia-smi on that node"),
        ({"SINGULARITY_CONTAINER": "/a.sif"}, "", "start the container with its GPU option"),
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


# -- a hypothetical allocation


def test_ranks_see_blocks() -> None:
    assert [found.visible for found in hypothetical_job(1, 3, 4, "per-rank")] == ["0,1", "2", "3"]
    assert [len(found.gpus) for found in hypothetical_job(1, 3, 4, "per-rank")] == [2, 1, 1]
    assert len({g.uuid for found in hypothetical_job(3, 2, 2) for g in found.gpus}) == 6


@pytest.mark.parametrize(
    ("shape", "option"),
    [
        ((100_000_000, 1, 0), "--nodes 100000000 --ranks-per-node 1: too many (expected at most 200000 in all). Fix: "),
        ((1, 200_001, 0), "--nodes 1 --ranks-per-node 200001: too many"),
        ((2, 1, 100_001), "--nodes 2 --gpus-per-node 100001: too many"),
        ((1, 1, 0, "all", 10**12), "--nodes 1 --cpus-per-node 1000000000000: too many (expected at most 20000000 in all)"),
    ],
)  # fmt: skip
def test_the_most_of_all_nodes(shape: Any, option: str) -> None:
    with pytest.raises(OptionError, match="^" + re.escape(option)):
        hypothetical_job(*shape)


def test_a_node_is_two_numa_nodes() -> None:
    first, second = hypothetical_job(2, 1, 3, cpus_per_node=5, memory_per_node=7)
    assert (first.host, second.host, second.rank, second.world_size) == ("h1", "h2", 1, 2)
    assert (first.cpus, first.memory) == ((0, 1, 2, 3, 4), 7)
    assert [gpu.cpus for gpu in first.gpus] == [(0, 1, 2), (0, 1, 2), (3, 4)]
    assert {(gpu.numa, gpu.slice, gpu.free) for gpu in first.gpus} == {
        (-1, -1, -1)
    }  # unknown, and no MIG instance
    assert [(gpu.index, gpu.pci) for gpu in first.gpus] == [(n, f"00000000:0{n}:00.0") for n in range(3)]
    assert second.gpus[0].uuid.startswith("GPU-00000003-")
    assert hypothetical_job(1, 1, 2, cpus_per_node=1)[0].gpus[1].cpus == (0,)
