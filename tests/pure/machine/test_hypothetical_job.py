"""Inventories of hypothetical allocations."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.machine.inventory import hypothetical_job


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
    assert [(gpu.index, gpu.pci) for gpu in first.gpus] == [(n, f"00000000:0{n}:00.0") for n in range(3)]
    assert second.gpus[0].uuid.startswith("GPU-00000003-")
    assert hypothetical_job(1, 1, 2, cpus_per_node=1)[0].gpus[1].cpus == (0,)
