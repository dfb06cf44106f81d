"""The hosts of a job: names, GPUs, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpu_mpi.errors import PlacementError
from support.mocks.inputs import GIB, gpu, one_host, plan, rank


def test_hosts_of_one_name_are_told_apart() -> None:
    inventories = [rank(i, 3, boot_id=boot, host="node") for i, boot in enumerate(["x", "y", "x"])]
    found = plan(inventories)
    assert [(h.host, h.ranks) for h in found.hosts] == [("node", (0, 2)), ("node#2", (1,))]
    assert [w.host for w in found.workers] == ["node", "node#2", "node"]


def test_one_machine_under_two_names_must_not_share_a_gpu() -> None:
    inventories = [rank(i, 2, (gpu(0),), host=host) for i, host in enumerate(["c1", "c2"])]
    with pytest.raises(PlacementError, match=r"GPU-0000\) is seen by rank 0 on c1 and by rank 1 on c2"):
        plan(inventories)
    # other boot ids: other machines
    assert len(plan([inventories[0], replace(inventories[1], boot_id="z")]).workers) == 2


def test_index_order_is_pci_index_slice_uuid() -> None:
    a = gpu(0, pci="00000000:90:00.0")
    b = gpu(1, pci="00000000:10:00.0", parent="GPU-b", slice=1, uuid="MIG-1")
    c = gpu(1, pci="00000000:10:00.0", parent="GPU-b", slice=0, uuid="MIG-2")
    found = plan(one_host((a, b, c)))
    assert [(w.name, w.device) for w in found.workers] == [
        ("0-0", "MIG-2"),
        ("0-1", "MIG-1"),
        ("0-2", "GPU-0000"),
    ]


def test_under_cgroups_every_rank_has_index_0() -> None:
    found = plan(one_host(*((gpu(0, uuid=f"GPU-{i}", pci=f"{i}"),) for i in range(3))))
    assert [(w.name, w.device) for w in found.workers] == [
        ("0-0", "GPU-0"),
        ("1-1", "GPU-1"),
        ("2-2", "GPU-2"),
    ]


def test_the_smallest_memory_of_a_hosts_ranks_counts() -> None:
    found = plan([rank(0, 2, memory=8 * GIB), rank(1, 2, memory=6 * GIB)])
    assert found.hosts[0].memory == 6 * GIB
    assert [w.memory_limit for w in found.workers] == [3 * GIB] * 2


def test_the_least_memory_and_quota_of_those_that_are_known() -> None:
    assert plan([rank(0, 1, memory=0)]).hosts[0].memory == 0
    ranks = [rank(0, 3, memory=0), rank(1, 3, memory=7, cpu_quota=2.5), rank(2, 3, memory=8, cpu_quota=1.5)]
    (host,) = plan(ranks).hosts
    assert (host.memory, host.cpu_quota) == (7, 1.5)
    assert plan([rank(0, 1)]).hosts[0].cpu_quota is None


def test_a_third_host_of_one_name_and_one_whose_name_is_taken() -> None:
    hosts = [("n", "x"), ("n#2", "y"), ("n", "z"), ("n", "w")]
    ranks = [rank(number, 4, host=host, boot_id=boot) for number, (host, boot) in enumerate(hosts)]
    assert [host.host for host in plan(ranks).hosts] == ["n", "n#2", "n#3", "n#4"]
    # the first name stays with whoever has it of its own
    assert [
        host.host
        for host in plan(
            [
                *ranks[:1],
                rank(1, 4, host="n", boot_id="v"),
                rank(2, 4, host="n#2", boot_id="y"),
                rank(3, 4, host="n"),
            ]
        ).hosts
    ] == ["n", "n#3", "n#2", "n#4"]
