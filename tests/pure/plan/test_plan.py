"""The plan as data, as a table and in colour."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.nodes import display
from support.mocks.inputs import GIB, gpu, one_host, plan, rank


def test_json_has_the_schema_of_the_design() -> None:
    found = plan(hypothetical_job(2, 2, 2, memory_per_node=256 * GIB), cpu_workers=1)
    document = json.loads(json.dumps(found.as_json()))
    assert list(document) == ["layout", "world_size", "scheduler", "client", "hosts", "workers", "warnings"]
    assert document["client"] == {"rank": 0, "host": "h1"}
    assert document["scheduler"] == {"rank": 0, "host": "h1", "device": found.hosts[0].gpus[0].uuid}
    assert document["workers"][0] == {
        "name": "0-0",
        "rank": 0,
        "host": "h1",
        "kind": "gpu",
        "gpu_index": 0,
        "device": found.hosts[0].gpus[0].uuid,
        "nthreads": 1,
        "memory_limit": 256 * GIB // 3,
        "cpus": list(range(32)),
        "resources": {"GPU": 1.0},
        "device_memory": found.hosts[0].gpus[0].memory,
        "device_free": -1,
        "numa": None,
        "nics": "",
    }


# -- the plan as a table


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


def test_hosts_with_a_difference_have_an_entry_of_their_own() -> None:
    job = list(hypothetical_job(40, 1, 2))
    job[5] = replace(job[5], memory=job[5].memory - 4096)  # as nodes of one kind differ
    job[10] = replace(job[10], gpus=tuple(replace(gpu, processes=((9, GIB),)) for gpu in job[10].gpus))
    job[11] = replace(job[11], gpus=job[11].gpus[:1])
    job[12] = replace(job[12], memory=GIB)
    titles = [
        line.partition(":")[0] for line in plan(job).table().splitlines() if line.startswith(("host", "37"))
    ]
    assert titles == ["37 hosts h[1-10,14-40]", "host h11", "host h12", "host h13"]


def test_what_is_unknown_or_unlimited() -> None:
    lines = plan([rank(0, 1, memory=0, cpus=())]).table().splitlines()
    assert "host h1: rank 0, memory unknown, 0 GPUs" in lines
    assert lines[-1] == "  0          0  -             1  unlimited  -"


# -- the table in colour


ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def shown(found: Plan, width: int = 120) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        force_terminal=True,
        color_system="standard",
        width=width,
        highlight=False,
        _environ={},
    )
    console.print(*display(found, terminal=True), sep="\n")
    return stream.getvalue()


def test_warnings_idle_gpus_and_those_in_use_are_red() -> None:
    job = list(hypothetical_job(3, 2, 4, "per-rank"))
    job[4] = replace(job[4], gpus=tuple(replace(gpu, processes=((9, GIB),)) for gpu in job[4].gpus))
    text = shown(plan(job, layout="exclusive"))
    assert "\x1b[1;31m  without a worker: GPU 0-3 of h1\x1b[0m" in text
    assert "\x1b[1;31m  in use by others: GPU 0-1 of h3\x1b[0m" in text
    assert text.count("\x1b[1;31mwarning\x1b[0m") == 3
    assert "\x1b[1;34mscheduler\x1b[0m" in text
    assert "\x1b[32m2-0\x1b[0m" in text


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for line in ESCAPES.sub("", shown(plan(hypothetical_job(20, 1, 4)), width)).splitlines():
        assert len(line) <= width


def test_names_are_text() -> None:
    """Neither markup of Rich nor escape codes of a terminal."""
    job = one_host((), host="h[red]1\x1b[2J", warnings=(Problem("[/] \x1b]0;title\x07"),))
    text = shown(plan(job))
    assert "h[red]1\ufffd[2J" in text
    assert "\x1b" not in ESCAPES.sub("", text)
