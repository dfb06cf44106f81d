from __future__ import annotations

from click.testing import CliRunner

from dask_gpu_mpi.base.sizes import parse_bytes
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.plan.synthetic import NODE_MEMORY, pretend


def test_there_is_one_default_of_a_nodes_memory() -> None:
    assert {rank.memory for rank in pretend(2, 1, 0)} == {NODE_MEMORY}
    option = next(option for option in cli.commands["plan"].params if option.name == "memory_per_node")
    assert option.help.endswith("[default: 512GiB]")  # what users have been told
    assert parse_bytes("512GiB") == NODE_MEMORY
    assert "512.00 GiB, 0 GPUs" in CliRunner().invoke(cli, ["plan", "--nodes", "1"]).output
