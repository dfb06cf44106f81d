"""The picture of a plan, read as XML."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.plan.picture import (
    MOST_WARNINGS,
    svg,
)
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from support import ROOT
from support.mocks.inputs import GIB, one_host, plan

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


def test_many_nodes_that_all_differ_stay_small() -> None:
    job = [replace(one, memory=(number + 1) * GIB) for number, one in enumerate(hypothetical_job(256, 1, 8))]
    picture = Picture(plan(job))
    assert len(picture.text) < 100_000
    assert any(text.startswith("240 more nodes, of other kinds: h") for text in picture.texts)


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


def test_long_names_are_shortened_and_stand_in_the_title() -> None:
    name = "node-" * 50
    picture = Picture(plan(one_host((), host=name)))
    titles = [title.text or "" for title in picture.root.iter(f"{SVG}title")]
    assert any(title.startswith(f"{name}: rank 0") for title in titles)
    assert all(len(text) < 120 for text in picture.texts)
    assert any(text.startswith("node-node-") and text.endswith("…") for text in picture.texts)


def test_nothing_lies_outside() -> None:
    """No box ends beyond the one around it; positions add up from the root."""
    job = list(hypothetical_job(30, 2, 6))
    job[8] = replace(job[8], gpus=job[8].gpus[:1])
    job[9] = replace(job[9], gpus=job[9].gpus[:1])
    root = Picture(plan(job, cpu_workers=3)).root
    _, _, width, height = map(int, str(root.get("viewBox")).split())

    def ends(element: ElementTree.Element, x: int, y: int) -> None:
        for child in element:
            at = re.fullmatch(r"translate\((\d+) (\d+)\)", child.get("transform", "translate(0 0)"))
            assert at is not None
            left, top = x + int(at[1]), y + int(at[2])
            if child.tag == f"{SVG}rect":
                assert left + int(child.get("width", "0")) <= width
                assert top + int(child.get("height", "0")) <= height
            ends(child, left, top)

    ends(root, 0, 0)


def test_light_and_dark_and_nothing_from_elsewhere() -> None:
    text = svg(plan(hypothetical_job(1, 1, 1)))
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert "@media (prefers-color-scheme: dark)" in style
    rules = [line for line in style.splitlines() if "{" in line and not line.startswith("@")]
    assert all(
        part.strip().startswith(".dgm-plan ") for rule in rules for part in rule.split("{")[0].split(",")
    )
    assert text.count("http") == 1  # the namespace
    assert " id=" not in text


def test_the_example_of_the_docs_is_current() -> None:
    found = plan(hypothetical_job(3, 2, 4, "per-rank"), layout="exclusive")
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "images" / "plan.svg").read_text(encoding="utf-8") == svg(found)
    good = plan(hypothetical_job(2, 1, 4))
    assert (ROOT / "docs" / "images" / "plan-good.svg").read_text(encoding="utf-8") == svg(good)
    assert "images/plan.svg" in page
