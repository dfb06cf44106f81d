"""The picture of a plan, read as XML."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.nodes import MOST_NODES, MOST_WARNINGS, svg
from support import ROOT
from support.mocks.inputs import GIB, one_host, plan, rank

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "h1</text><script>alert('1')</script>&\x1b[31m\udcff\"]]>"


class Picture:
    def __init__(self, found: Plan) -> None:
        self.text = svg(found)
        self.root = ElementTree.fromstring(self.text)
        self.texts = ["".join(text.itertext()) for text in self.root.iter(f"{SVG}text")]
        kinds = Counter(rectangle.get("class", "") for rectangle in self.root.iter(f"{SVG}rect"))
        self.kinds = kinds


def test_many_warnings_are_counted() -> None:
    found = replace(plan(hypothetical_job(1, 1, 1)), warnings=tuple(Problem(f"no {n}") for n in range(40)))
    picture = Picture(found)
    assert f"{MOST_WARNINGS}. no {MOST_WARNINGS - 1}" in picture.texts
    assert "28 more warnings; the table has them all" in picture.texts


def test_of_many_nodes_those_with_a_role_or_a_problem_are_drawn() -> None:
    job = list(hypothetical_job(256, 1, 2))
    job[100] = replace(job[100], gpus=tuple(replace(gpu, processes=((9, 5 * GIB),)) for gpu in job[100].gpus))
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


def test_of_many_cpu_workers_of_a_node_the_others_are_counted() -> None:
    texts = Picture(plan([rank(number, 20) for number in range(20)])).texts
    assert [text for text in texts if text.startswith("worker ")] == [f"worker {n}" for n in range(8)]
    assert "12 more CPU workers" in texts


def test_names_are_text() -> None:
    """Of hosts and GPUs, in the warnings, and in what is shown for who points at it."""
    job = one_host(
        (), host=HOSTILE, warnings=(Problem(f"host {HOSTILE}: GPU 1 is left out", hosts=(HOSTILE,)),)
    )
    picture = Picture(plan(job))
    assert {element.tag.removeprefix(SVG) for element in picture.root.iter()} == {
        "svg",
        "title",
        "style",
        "g",
        "rect",
        "text",
    }
    assert "\x1b" not in picture.text
    picture.text.encode()
    assert any(text.startswith("h1</t") for text in picture.texts)


def test_the_example_of_the_docs_is_current() -> None:
    found = plan(hypothetical_job(3, 2, 4, "per-rank"), layout="exclusive")
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "images" / "plan.svg").read_text(encoding="utf-8") == svg(found)
    good = plan(hypothetical_job(2, 1, 4))
    assert (ROOT / "docs" / "images" / "plan-good.svg").read_text(encoding="utf-8") == svg(good)
    assert "images/plan.svg" in page
