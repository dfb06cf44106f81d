"""Inventories of allocations that are made up."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from dask_gpu_mpi.base.sizes import parse_bytes
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.plan.synthetic import NODE_MEMORY, hypothetical_job


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


def test_there_is_one_default_of_a_nodes_memory() -> None:
    assert {rank.memory for rank in hypothetical_job(2, 1, 0)} == {NODE_MEMORY}
    option = next(option for option in cli.commands["plan"].params if option.name == "memory_per_node")
    assert option.help.endswith("[default: 512GiB]")  # what users have been told
    assert parse_bytes("512GiB") == NODE_MEMORY
    assert "512.00 GiB, 0 GPUs" in CliRunner().invoke(cli, ["plan", "--nodes", "1"]).output
