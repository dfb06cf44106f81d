"""The live view in a terminal of its own (a pty); tests/mpi/test_top.py has it in tmux."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dask_gpu_mpi.cli import live_view
from dask_gpu_mpi.errors import InputError
from support import ROOT
from support.jobs.clusters import until

#: Runs `watch` on samples that the argument names.
PROGRAM = """
import asyncio, sys
sys.path.insert(0, "tests")
from dask_gpu_mpi.cli.live_view import check_terminal, watch
from dataclasses import replace
from dask_gpu_mpi.view.snapshot import NoAnswerError
from dask_gpu_mpi.view.snapshot import snapshot_of
from support.mocks.snapshots import cluster

class Source:
    def __init__(self):
        self.samples = 0
    async def sample(self):
        self.samples += 1
        if sys.argv[1] == "fails":
            raise OSError("no scheduler")
        if sys.argv[1] == "breaks" and self.samples == 2:
            raise RuntimeError("broken")
        if sys.argv[1] == "busy" and self.samples in (2, 3, 4):
            raise NoAnswerError("busy")
        if sys.argv[1] == "slow" and self.samples == 2:
            await asyncio.sleep(3600)
        return replace(snapshot_of(*cluster(64, 8), 7.0), end=7.0 + 3600 * self.samples)
    def close(self):
        print("closed", flush=True)

check_terminal()
sys.exit(asyncio.run(watch(Source(), 0.2)))
"""


class Pty:
    """A program whose terminal is ours."""

    def __init__(self, mode: str) -> None:
        self.fd, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.fd)
        env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, mode],
            stdin=end,
            stdout=end,
            stderr=subprocess.PIPE,
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(end)
        os.set_blocking(self.fd, False)
        self.shown = ""

    def read(self) -> str:
        """What was drawn since the last call, added to `shown`."""
        try:
            new = os.read(self.fd, 1 << 16).decode()
        except OSError:  # nothing yet, or its end
            new = ""
        self.shown += new
        return new

    def wait_for(self, text: str) -> None:
        until(lambda: (self.read(), text in self.shown)[1], 30, text)

    def check_end(self, code: int) -> str:
        """Wait for its end; the terminal must be as it was. Its standard error."""
        until(lambda: (self.read(), self.process.poll() is not None)[1], 30, "the end")
        while self.read():
            pass
        assert self.process.stderr is not None
        said = self.process.stderr.read().decode()
        assert self.process.returncode == code, said
        assert termios.tcgetattr(self.fd) == self.before
        assert self.shown.count("\x1b[?1049h") == self.shown.count("\x1b[?1049l")
        assert self.shown.rfind("\x1b[?25l") < self.shown.rfind("\x1b[?25h") or "\x1b[?25l" not in self.shown
        assert "closed" in self.shown.rpartition("\x1b[?1049l")[2]
        return said


@contextmanager
def view(mode: str = "works") -> Iterator[Pty]:
    one = Pty(mode)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()
        if one.fd >= 0:
            os.close(one.fd)


def test_a_terminal_that_hangs_up_ends_it() -> None:
    with view() as one:
        one.wait_for("nodes 64")
        one.process.send_signal(signal.SIGHUP)
        assert one.check_end(128 + signal.SIGHUP) == ""


@pytest.mark.parametrize(("mode", "error"), [("breaks", "RuntimeError: broken"), ("fails", "no scheduler")])
def test_an_error_is_raised_after_the_terminal_is_restored(mode: str, error: str) -> None:
    with view(mode) as one:
        assert error in one.check_end(1)


def test_a_scheduler_that_does_not_answer_is_asked_again() -> None:
    with view("busy") as one:
        one.wait_for("no answer for ")
        one.wait_for("4:59:5")  # the fifth sample's time left
        one.read()
        one.shown = one.shown[one.shown.rfind("\x1b[H") :]
        os.write(one.fd, b"s")
        one.wait_for("sort: USE%")
        assert "no answer" not in one.shown
    with view("slow") as one:  # the time left goes on between samples
        one.wait_for("0:59:58 left, nodes 64")
        os.write(one.fd, b"q")
        assert one.check_end(0) == ""


def test_ctrl_z_does_not_leave_it() -> None:
    with view() as one:
        one.wait_for("nodes 64")
        os.write(one.fd, b"\x1as")
        one.wait_for("sort: USE%")
        os.write(one.fd, b"q")
        assert one.check_end(0) == ""


def test_a_terminal_that_is_gone_ends_it() -> None:
    with view() as one:
        one.wait_for("nodes 64")
        os.close(one.fd)
        one.fd = -1
        assert one.process.wait(30) != 0


def test_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="not a terminal"):
        live_view.check_terminal()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(InputError, match="not a terminal"):
        live_view.check_terminal()
    monkeypatch.setenv("TERM", "xterm")
    live_view.check_terminal()
