"""A session's card: what is in it, and that nothing in it is markup of somebody else's."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from dask_gpu_mpi.job.announcement import Card

CARD = Card(
    address="tls://10.0.0.1:8786",
    closed=False,
    nodes=("n1", "n2"),
    gpus=8,
    workers=9,
    dashboard="http://localhost:8787/status?token=abc&theme=dark",
    seconds_left=3725.0,
)


class Reader(HTMLParser):
    """The words and the links of a page; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: list[str | None] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        if tag == "a":
            self.links.append(dict(attrs)["href"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def rows(card: Card) -> dict[str, str]:
    words = Reader(card.html()).words[2:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_what_an_open_session_shows() -> None:
    assert rows(CARD) == {
        "Nodes": "2 (n1, n2)",
        "GPUs": "8",
        "Workers": "9",
        "Scheduler": "tls://10.0.0.1:8786",
        "Dashboard": "http://localhost:8787/status",
        "Time left": "1:02:05",
    }
    assert Reader(CARD.html()).links == [CARD.dashboard]


def test_what_a_closed_one_shows() -> None:
    closed = dataclasses.replace(CARD, closed=True)
    assert rows(closed).keys() == {"Nodes", "GPUs", "Workers", "Scheduler"}
    assert " (closed)" in Reader(closed.html()).words


def test_what_is_unknown() -> None:
    found = rows(dataclasses.replace(CARD, dashboard=None, seconds_left=None))
    assert (found["Dashboard"], found["Time left"]) == ("none", "unknown")
    assert rows(dataclasses.replace(CARD, nodes=tuple("abcdef")))["Nodes"] == "6 (a, b, c, d, ...)"


@pytest.mark.parametrize("text", ['"><script>alert(1)</script>', "<b>&amp;'"])
def test_all_is_escaped(text: str) -> None:
    plain = Reader(CARD.html()).tags
    for changed in (
        dataclasses.replace(CARD, address=text),
        dataclasses.replace(CARD, nodes=(text, "n2")),
        dataclasses.replace(CARD, dashboard=f"http://{text}"),
    ):
        assert Reader(changed.html()).tags == plain
    assert Reader(dataclasses.replace(CARD, dashboard="javascript:alert(1)").html()).links == []


def test_its_colours_are_the_notebooks() -> None:
    assert set(re.findall(r"(?:^|[ ;\"])(?:color|background): (\w+)", CARD.html())) == {"inherit", "none"}
