"""Inventories of allocations that are made up."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.plan.synthetic import hypothetical_job


@pytest.mark.parametrize(
    ("shape", "words"),
    [((0, 1, 1), "nodes"), ((1, 0, 1), "ranks"), ((1, 1, -1), "gpus"), ((1, 1, 1, "x"), "visible")],
)
def test_pretended_jobs_are_checked(shape: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        hypothetical_job(*shape)


def test_pretended_ranks_see_blocks() -> None:
    assert [len(found.gpus) for found in hypothetical_job(1, 3, 4, "per-rank")] == [2, 1, 1]
    assert [found.visible for found in hypothetical_job(1, 3, 4, "per-rank")] == ["0,1", "2", "3"]
    assert len({g.uuid for found in hypothetical_job(3, 2, 2) for g in found.gpus}) == 6


@pytest.mark.parametrize(
    ("option", "least"),
    [
        ("nodes", 1), ("ranks_per_node", 1), ("gpus_per_node", 0), ("cpus_per_node", 1), ("memory_per_node", 1),
    ],
)  # fmt: skip
def test_the_least_of_each_number(option: str, least: int) -> None:
    shape = {"nodes": 2, "ranks_per_node": 2, "gpus_per_node": 2} | {option: least}
    assert hypothetical_job(**shape)
    with pytest.raises(OptionError, match=f"^--{option.replace('_', '-')}: invalid value {least - 1} "):
        hypothetical_job(**shape | {option: least - 1})


@pytest.mark.parametrize(
    ("shape", "option"),
    [
        ((100_000_000, 1, 0), "--nodes 100000000 --ranks-per-node 1: too many (expected at most 200000 in all). Fix: "),
        ((1, 200_001, 0), "--nodes 1 --ranks-per-node 200001: too many"),
        ((10**4000, 10**4000, 0), "--nodes 1000"),
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
    assert [gpu.index for gpu in second.gpus] == [0, 1, 2]
    assert [gpu.pci for gpu in first.gpus] == ["00000000:00:00.0", "00000000:01:00.0", "00000000:02:00.0"]
    assert second.gpus[0].uuid.startswith("GPU-00000003-")
    assert hypothetical_job(1, 1, 2, cpus_per_node=1)[0].gpus[1].cpus == (0,)
    assert first.gpus[0].memory == 80 * 1024**3
