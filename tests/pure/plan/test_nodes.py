"""The plan as data, as a table, in colour, and as a picture, which is read as XML."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.inventory import Inventory, hypothetical_job
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.nodes import MOST_NODES, MOST_WARNINGS, display, extent, svg, text
from support import ROOT
from support.mocks.inputs import GIB, gpu, one_host, plan, rank


def in_use(rank: Inventory) -> Inventory:
    """The rank, whose GPUs another process uses."""
    return replace(rank, gpus=tuple(replace(gpu, processes=((9, 5 * GIB),)) for gpu in rank.gpus))


def test_json_has_the_schema_of_the_design() -> None:
    found = plan(hypothetical_job(2, 2, 2, memory_per_node=256 * GIB), cpu_workers=1)
    document = json.loads(json.dumps(found.as_json()))
    assert list(document) == ["layout", "world_size", "scheduler", "client", "hosts", "workers", "warnings"]
    assert document["client"] == {"rank": 0, "host": "h1"}
    assert document["scheduler"] == {"rank": 0, "host": "h1", "device": found.hosts[0].gpus[0].uuid}
    assert document["workers"][0] == {
        "name": "0-0", "rank": 0, "host": "h1", "kind": "gpu", "gpu_index": 0, "device": found.hosts[0].gpus[0].uuid,
        "nthreads": 1, "memory_limit": 256 * GIB // 3, "cpus": [*range(32)], "resources": {"GPU": 1.0},
        "device_memory": found.hosts[0].gpus[0].memory, "device_free": -1, "numa": None, "nics": "",
    }  # fmt: skip


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
    lines = plan([rank(0, 1, memory=0, cpus=())]).table().splitlines()
    assert "host h1: rank 0, memory unknown, 0 GPUs" in lines
    assert lines[-1] == "  0          0  -             1  unlimited  -"


def test_the_table_of_many_hosts_tells_like_ones_together() -> None:
    job = hypothetical_job(64, 2, 4, memory_per_node=256 * GIB)
    table = plan(job, layout="exclusive", memory_limit=0).table()
    assert "host h1: ranks 0-1, 256.00 GiB, 4 GPUs\n  no worker\n" in table
    assert "63 hosts h[2-64]: ranks 2-127; on each 256.00 GiB, 4 GPUs" in table
    assert "  3-3 .. 127-3  3 .. 127  3 GPU         1  unlimited  32-63" in table
    assert len(table.splitlines()) < 15
    assert "h1: " in plan(hypothetical_job(16, 1, 1)).table()


def test_hosts_with_a_difference_have_an_entry_of_their_own() -> None:
    job = list(hypothetical_job(40, 1, 2))
    job[5] = replace(job[5], memory=job[5].memory - 4096)  # as nodes of one kind differ
    job[10] = in_use(job[10])
    job[11] = replace(job[11], gpus=job[11].gpus[:1])
    job[12] = replace(job[12], memory=GIB)
    lines = [line for line in plan(job).table().splitlines() if line.startswith(("host", "37"))]
    titles = [line.partition(":")[0] for line in lines]
    assert titles == ["37 hosts h[1-10,14-40]", "host h11", "host h12", "host h13"]


# -- the table in colour


ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def shown(found: Plan, width: int = 120) -> str:
    stream = io.StringIO()
    terminal = {"force_terminal": True, "color_system": "standard", "highlight": False, "_environ": {}}
    Console(file=stream, width=width, **terminal).print(*display(found, terminal=True), sep="\n")
    return stream.getvalue()


def test_warnings_idle_gpus_and_those_in_use_are_red() -> None:
    job = list(hypothetical_job(3, 2, 4, "per-rank"))
    text = shown(plan([*job[:4], in_use(job[4]), *job[5:]], layout="exclusive"))
    assert "\x1b[1;31m  without a worker: GPU 0-3 of h1\x1b[0m" in text
    assert "\x1b[1;31m  in use by others: GPU 0-1 of h3\x1b[0m" in text
    assert text.count("\x1b[1;31mwarning\x1b[0m") == 3
    assert "\x1b[1;34mscheduler\x1b[0m" in text
    assert "\x1b[32m2-0\x1b[0m" in text


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = ESCAPES.sub("", shown(plan(hypothetical_job(20, 1, 4)), width)).splitlines()
    assert max(map(len, lines)) <= width


def test_names_in_the_table_are_text() -> None:
    """Neither markup of Rich nor escape codes of a terminal."""
    job = one_host((), host="h[red]1\x1b[2J", warnings=(Problem("[/] \x1b]0;title\x07"),))
    text = shown(plan(job))
    assert "h[red]1\ufffd[2J" in text
    assert "\x1b" not in ESCAPES.sub("", text)


# -- the picture

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "h1</text><script>alert('1')</script>&\x1b[31m\udcff\"]]>"


class Picture:
    def __init__(self, found: Plan) -> None:
        self.text = svg(found)
        self.root = ElementTree.fromstring(self.text)
        self.texts = ["".join(text.itertext()) for text in self.root.iter(f"{SVG}text")]
        self.kinds = Counter(rectangle.get("class", "") for rectangle in self.root.iter(f"{SVG}rect"))


def test_the_pictures_of_the_docs_are_current() -> None:
    pictures = {
        "plan": plan(hypothetical_job(3, 2, 4, "per-rank"), layout="exclusive"),
        "plan-good": plan(hypothetical_job(2, 1, 4)),
    }
    for name, found in pictures.items():
        assert (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8") == svg(found)


def test_of_many_nodes_those_with_a_role_or_a_problem_are_drawn() -> None:
    job = list(hypothetical_job(256, 1, 2))
    job[100] = in_use(job[100])
    job[110] = replace(job[110], gpus=())
    job[120] = replace(job[120], warnings=(Problem("host h121: GPU 1 is left out", hosts=("h121",)),))
    job[130] = replace(job[130], world_size=256, absent=True)
    picture = Picture(plan(job, client_rank=255))
    titles = [text for text in picture.texts if re.fullmatch(r"h[0-9]+", text)]
    assert titles == [*(f"h{n}" for n in range(1, 12)), "h101", "h111", "h121", "h131", "h256"]
    assert len(titles) == MOST_NODES
    assert picture.kinds["node red"] == 4
    assert {"no worker: rank 110", "see warning 1", "5 GiB used by others"} <= {*picture.texts}
    assert any(text.startswith("240 more nodes: h[") for text in picture.texts)
    assert len(picture.text) < 60_000


def test_of_many_cpu_workers_and_warnings_the_others_are_counted() -> None:
    found = plan([rank(number, 20) for number in range(20)])
    texts = Picture(replace(found, warnings=tuple(Problem(f"no {n}") for n in range(40)))).texts
    assert [text for text in texts if text.startswith("worker ")] == [f"worker {n}" for n in range(8)]
    assert "12 more CPU workers" in texts
    assert f"{MOST_WARNINGS}. no {MOST_WARNINGS - 1}" in texts
    assert "28 more warnings; the table has them all" in texts


def test_a_text_of_the_picture_is_not_wider_than_its_place() -> None:
    shown = text(0, 0, "x" * 100, limit=extent(10, ""))
    assert re.findall(">(.*)<", shown) == ["x" * 9 + "…"]


def test_names_in_the_picture_are_text() -> None:
    """Of hosts and GPUs, in the warnings, and in what is shown for who points at it."""
    left_out = Problem(f"host {HOSTILE}: GPU 1 is left out", hosts=(HOSTILE,))
    picture = Picture(plan(one_host((), host=HOSTILE, warnings=(left_out,))))
    tags = {element.tag.removeprefix(SVG) for element in picture.root.iter()}
    assert tags == {"svg", "title", "style", "g", "rect", "text"}
    assert "\x1b" not in picture.text
    picture.text.encode()
    assert any(text.startswith("h1</t") for text in picture.texts)
