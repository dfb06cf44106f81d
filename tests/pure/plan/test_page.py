"""A plan as a page, and as a notebook's card."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from dask_gpu_mpi.plan.page import card, page
from dask_gpu_mpi.plan.picture import svg
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from inventories import gpu, one_host, plan

HOSTILE = "h1'\"><img src=x onerror=alert(1)></details><script>alert(2)</script>"


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hostile() -> Plan:
    return plan(
        one_host(
            (gpu(0, name="<b>A100</b>"),),
            host=HOSTILE,
            warnings=(f"host {HOSTILE}: <i>GPU</i> 1 is left out\x1b[2J",),
        )
    )


def test_the_page_has_the_picture_the_warnings_and_the_table() -> None:
    found = plan(hypothetical_job(3, 2, 4, "per-rank"), layout="exclusive")
    text = page(found)
    read = Reader(text)
    assert svg(found, warnings=False).strip() in text
    assert found.warnings[0] in read.texts
    assert read.tags.count("table") == 2
    assert "no worker" in read.texts
    assert {"host h2: ranks 2-3, 512.00 GiB, 4 GPUs", "5-3", "3 GPU GPU-0000000b"} <= set(read.texts)
    assert "<ol" not in page(plan(hypothetical_job(1, 1, 1)))


def test_the_page_loads_and_runs_nothing() -> None:
    for text in (page(hostile()), page(plan(hypothetical_job(2, 1, 2)))):
        read = Reader(text)
        assert not {"script", "link", "iframe", "i", "b"} & set(read.tags)
        assert "img" not in read.tags
        assert not [name for name, _ in read.attributes if name in ("src", "href") or name.startswith("on")]
        assert dict(read.attributes)["http-equiv"] == "Content-Security-Policy"
        assert "\x1b" not in text
    assert any("<i>GPU</i> 1 is left out" in text for text in Reader(page(hostile())).texts)


def test_the_card_holds_the_picture_as_an_image() -> None:
    found = hostile()
    read = Reader(card(found))
    assert read.tags.count("img") == 1
    assert not {"script", "style", "svg", "i", "b"} & set(read.tags)
    source = next(value for name, value in read.attributes if name == "src")
    assert source is not None
    picture = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
    assert picture == svg(found, warnings=False)
    ElementTree.fromstring(picture)
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert {"table", "details"} <= set(read.tags)
    assert any(f"host {HOSTILE}" in text for text in read.texts)


def test_the_card_is_for_pages_of_others() -> None:
    """No ids that may be there already, and no style sheet, which would apply to the whole page."""
    text = card(plan(hypothetical_job(2, 1, 2)))
    assert not re.search(r"<style|\sid=", text)
    assert text == plan(hypothetical_job(2, 1, 2))._repr_html_()
