"""A terminal for tests: bash in a tmux of its own, 80 columns wide."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.jobs.clusters import until

__all__ = ["Tmux"]


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
        """Start `top`; its exit code will be on the screen, and what ``stty`` said before and after in files."""
        words = [sys.executable, "-m", "dask_gpu_mpi", "top", *arguments]
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

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program that the shell runs."""
        shell = int(self.ask("pane_pid"))
        (child,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        os.kill(int(child), number)

    def check_end(self, code: int, seconds: float = 20.0) -> str:
        """Wait for the end with this code, and compare the terminal with what it was; the screen then."""
        shown = self.wait_for(f"code={code}", seconds)
        until((self.folder / "done").exists, 10, "the shell goes on")
        assert self.as_found, (self.ask("alternate_on"), self.ask("cursor_flag"))
        assert (self.folder / "before").read_text() == (self.folder / "after").read_text()
        return shown
