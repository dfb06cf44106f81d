"""The plan as a table."""

from __future__ import annotations

from dask_gpu_mpi.plan.synthetic import hypothetical_job
from support.mocks.inputs import GIB, gpu, one_host, plan, rank


def test_table() -> None:
    found = plan(
        one_host((gpu(0, uuid="GPU-12345678-9abc"), gpu(1, processes=((999, 5),))), host="n1"), cpu_workers=1
    )
    assert found.table().splitlines() == [
        "layout shared: 1 rank on 1 host, 3 workers",
        "scheduler: rank 0 on n1; client: rank 0 on n1",
        "",
        "host n1: rank 0, 64.00 GiB, 2 GPUs",
        "  worker   rank  device               threads     memory  cores",
        "  0-0         0  0 A100 GPU-12345678        1  21.33 GiB  0-1",
        "  0-1         0  1 A100 GPU-0001            1  21.33 GiB  0-1",
        "  0-cpu-0     0  -                          2  21.33 GiB  0-1",
        "",
        "warning: host n1: GPU 1 (GPU-0001) has 5 bytes (5 B) in use by other processes",
    ]


def test_the_table_of_many_hosts_tells_like_ones_together() -> None:
    table = plan(
        hypothetical_job(64, 2, 4, memory_per_node=256 * GIB), layout="exclusive", memory_limit=0
    ).table()
    assert "host h1: ranks 0-1, 256.00 GiB, 4 GPUs\n  no worker\n" in table
    assert "63 hosts h[2-64]: ranks 2-127; on each 256.00 GiB, 4 GPUs" in table
    assert "  3-3 .. 127-3  3 .. 127  3 GPU         1  unlimited  32-63" in table
    assert len(table.splitlines()) < 15
    assert "h1: " in plan(hypothetical_job(16, 1, 1)).table()


def test_what_is_unknown_or_unlimited() -> None:
    lines = plan([rank(0, 1, memory=0, cpus=())]).table().splitlines()
    assert "host h1: rank 0, memory unknown, 0 GPUs" in lines
    assert lines[-1] == "  0          0  -             1  unlimited  -"
