"""Screens that people look at: a terminal (bash in tmux, 80 columns wide), and a browser that opens reports."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import until


class Tmux:
    """One pane with a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = f"dgm-{uuid.uuid4().hex[:8]}"
        env = {**os.environ, "PS1": "$ ", "HISTFILE": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        env.pop("TMUX", None)
        shell = "exec bash --norc --noprofile -i"
        size = ["-x", "80", "-y", "24"]
        command = ["tmux", "-L", self._name, "-f", "/dev/null", "new-session", "-d", *size, shell]
        subprocess.run(command, check=True, timeout=20, env=env, cwd=folder)

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Tmux]:
        """One that ends with the context; the test is skipped where there is no tmux."""
        if shutil.which("tmux") is None:
            pytest.skip("no tmux")
        tmux = cls(folder)
        try:
            yield tmux
        finally:
            tmux._tmux("kill-server")

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self._name, *words]
        return subprocess.run(command, check=True, timeout=20, capture_output=True, text=True).stdout

    def keys(self, *keys: str) -> None:
        """Press keys, by tmux's names."""
        self._tmux("send-keys", *keys)

    def run(self, line: str) -> None:
        """Type a command line."""
        self._tmux("send-keys", "-l", line)
        self.keys("Enter")

    def top(self, *arguments: str) -> None:
        """Start `top`."""
        self.start([sys.executable, "-m", "dask_gpu_mpi", "top", *arguments])

    def start(self, words: list[str]) -> None:
        """Start a program; its exit code will be on the screen, and what ``stty`` said before and after in files."""
        self.run(f"stty -g > before; {shlex.join(words)}; echo code=$?; stty -g > after; touch done")

    @property
    def screen(self) -> str:
        """What is on the screen."""
        return self._tmux("capture-pane", "-p")

    def wait_for(self, text: str, seconds: float = 40.0) -> str:
        """Wait until this is on the screen; the screen then."""
        try:
            until(lambda: text in self.screen, seconds)
        except AssertionError:
            raise AssertionError(f"no {text!r} within {seconds} s on\n{self.screen}") from None
        return self.screen

    def ask(self, what: str) -> str:
        """A variable of tmux's."""
        return self._tmux("display-message", "-p", f"#{{{what}}}").strip()

    @property
    def drawn(self) -> bool:
        """Whether a program has the alternate screen, and has hidden the cursor."""
        return (self.ask("alternate_on"), self.ask("cursor_flag")) == ("1", "0")

    @property
    def as_found(self) -> bool:
        """Whether there is the shell's screen, with its cursor."""
        return (self.ask("alternate_on"), self.ask("cursor_flag")) == ("0", "1")

    @property
    def program(self) -> int:
        """The process of the program that the shell runs."""
        shell = int(self.ask("pane_pid"))
        (child,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        return int(child)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program."""
        os.kill(self.program, number)

    def close_terminal(self) -> None:
        """Close the terminal of the shell and the program; another shell gets a new one."""
        self._tmux("respawn-pane", "-k")

    def check_end(self, code: int, seconds: float = 20.0) -> str:
        """Wait for the end with this code, and compare the terminal with what it was; the screen then."""
        shown = self.wait_for(f"code={code}", seconds)
        until((self.folder / "done").exists, 10, "the shell goes on")
        assert self.as_found, (self.ask("alternate_on"), self.ask("cursor_flag"))
        assert (self.folder / "before").read_text() == (self.folder / "after").read_text()
        return shown


TABS = (
    "Overview", "GPUs", "Memory & spill", "Tasks", "Task prefixes", "Transfers", "Events", "Start-up", "Plan & options",
)  # fmt: skip
#: Of a tab: its figures with the length of each of their sources, and its text.
LOOK = """
const section = document.querySelectorAll('section')[arguments[0]];
const figures = [...section.querySelectorAll('[data-root-id]')]
  .map(element => Bokeh.documents[0].get_model_by_id(element.dataset.rootId))
  .map(figure => [figure.title.text, figure.renderers.map(each => each.data_source.get_length())]);
return [figures, section.textContent];
"""
DRAWN = "return window.Bokeh !== undefined && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"
#: Canvases with a colour; Bokeh keeps them in shadow trees.
PAINTED = """
const found = [];
const walk = root => {
  for (const each of root.querySelectorAll('*')) {
    if (each.matches('canvas')) found.push(each);
    if (each.shadowRoot) walk(each.shadowRoot);
  }
};
walk(document);
return found.filter(canvas => {
  if (!canvas.width || !canvas.height || !canvas.getClientRects().length) return false;
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 200 && Math.max(data[i], data[i+1], data[i+2]) - Math.min(data[i], data[i+1], data[i+2]) > 40) return true;
  return false;
}).length;
"""
#: What Chromium says of the reading below, not of the page.
OWN_READING = "willReadFrequently"


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
        self.driver = driver

    def open(self, path: Path, *, dark: bool = False) -> list[Tab]:
        """Open a report, click each tab, and return what it shows; errors on the console are failures."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(path.as_uri())
        until(lambda: self.driver.execute_script(DRAWN), 30, "the page is drawn")
        buttons = self.driver.find_elements("css selector", "nav button")
        tabs = []
        for number, button in enumerate(buttons):
            title = button.text
            button.click()
            figures, text = self.driver.execute_script(LOOK, number)
            tabs.append(Tab(title, [tuple(each) for each in figures], text, self._painted(len(figures))))
        told = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        assert [message for message in told if OWN_READING not in message] == []
        return tabs

    def style(self, property_: str) -> str:
        """A style of the page's body."""
        found: str = self.driver.execute_script(
            "return getComputedStyle(document.body)[arguments[0]]", property_
        )
        return found

    def _painted(self, expected: int) -> int:
        """How many canvases have colours, once they are as many as expected."""
        with contextlib.suppress(AssertionError):
            until(lambda: self.driver.execute_script(PAINTED) >= expected, 15)
        return int(self.driver.execute_script(PAINTED))


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
