"""What tests of reports share: made-up ones, and a browser that opens them."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TABS", "Browser", "Tab", "browser", "made_up"]

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TABS = (
    "Overview",
    "Start-up",
    "GPUs",
    "Memory & spill",
    "Tasks",
    "Task prefixes",
    "Transfers",
    "Events",
)
#: Of a tab: its figures with the length of each of their sources, and its text.
LOOK = """
const section = document.querySelectorAll('section')[arguments[0]];
const figures = [...section.querySelectorAll('[data-root-id]')]
  .map(element => Bokeh.documents[0].get_model_by_id(element.dataset.rootId))
  .map(figure => [figure.title.text, figure.renderers.map(each => each.data_source.get_length())]);
return [figures, section.textContent];
"""
#: Finds what Bokeh keeps in shadow trees.
FIND = """
const found = [];
const walk = root => {
  for (const each of root.querySelectorAll('*')) {
    if (each.matches(arguments[0])) found.push(each);
    if (each.shadowRoot) walk(each.shadowRoot);
  }
};
walk(document);
"""
#: What Chromium says of the reading below, not of the page.
OWN_READING = "willReadFrequently"
PAINTED = (
    FIND
    + """
return found.filter(canvas => {
  if (!canvas.width || !canvas.height || !canvas.getClientRects().length) return false;
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 200 && Math.max(data[i], data[i+1], data[i+2]) - Math.min(data[i], data[i+1], data[i+2]) > 40) return true;
  return false;
}).length;
"""
)


def made_up(nodes: int, gpus: int, seconds: int, tasks: int) -> Any:
    """A job of the benchmark that makes jobs up."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("recording").made_up(nodes, gpus, seconds, tasks)
    finally:
        del sys.path[0]


@dataclass(frozen=True)
class Tab:
    """What a browser shows of a tab."""

    title: str
    #: Title of each figure, and the number of marks of each of its renderers.
    figures: list[tuple[str, list[int]]]
    text: str
    #: Canvases on which something has a colour.
    painted: int


class Browser:
    """Chromium, without a window."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, path: Path, *, dark: bool = False) -> list[Tab]:
        """Open a report, click each tab, and return what it shows; errors on the console are failures."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._driver.get(path.as_uri())
        self._until(
            "return window.Bokeh !== undefined && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"
        )
        buttons = self._driver.find_elements("css selector", "nav button")
        tabs = []
        for number, button in enumerate(buttons):
            title = button.text
            button.click()
            figures, text = self._driver.execute_script(LOOK, number)
            painted = self._painted(len(figures))
            tabs.append(Tab(title, [(name, marks) for name, marks in figures], text, painted))
        told = [entry["message"] for entry in self._driver.get_log("browser") if entry["level"] != "INFO"]
        assert [message for message in told if OWN_READING not in message] == []
        return tabs

    def style(self, property_: str) -> str:
        """A style of the page's body."""
        found: str = self._driver.execute_script(
            "return getComputedStyle(document.body)[arguments[0]]", property_
        )
        return found

    def _until(self, script: str) -> None:
        deadline = time.monotonic() + 30
        while not self._driver.execute_script(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def _painted(self, expected: int) -> int:
        """How many canvases have colours, once they are as many as expected."""
        deadline = time.monotonic() + 15
        while True:
            painted: int = self._driver.execute_script(PAINTED, "canvas")
            if painted >= expected or time.monotonic() > deadline:
                return painted
            time.sleep(0.05)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser; a test is skipped where there is none, and says so."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = [
        next(filter(None, map(shutil.which, names)), None)
        for names in (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))
    ]
    if None in programs:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1400,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(programs[1]))
    try:
        driver.set_page_load_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
