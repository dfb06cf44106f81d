"""The live view of samples that come late, fail or hang, in tmux; tests/mpi/test_top.py has it of a job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.cli import live_view
from dask_gpu_mpi.errors import InputError
from support import ROOT
from support.jobs.clusters import alive, until
from support.jobs.screens import Tmux

#: Runs `watch` on samples that the argument names.
PROGRAM = """
import asyncio, sys
from dask_gpu_mpi.cli.live_view import check_terminal, watch
from dataclasses import replace
from dask_gpu_mpi.view.snapshot import NoAnswerError, snapshot_of
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


View = Callable[[str], Tmux]


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[View]:
    """Starts it in a terminal, with samples of this kind."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    (tmp_path / "watch.py").write_text(PROGRAM)
    with Tmux.opened(tmp_path) as tmux:

        def start(mode: str) -> Tmux:
            tmux.start([sys.executable, "watch.py", mode])
            return tmux

        yield start


def test_a_terminal_that_hangs_up_ends_it(view: View) -> None:
    tmux = view("works")
    tmux.wait_for("nodes 64, GPUs 512")
    tmux.signal(signal.SIGHUP)
    assert "closed" in tmux.check_end(128 + signal.SIGHUP)


@pytest.mark.parametrize(("mode", "error"), [("breaks", "RuntimeError: broken"), ("fails", "no scheduler")])
def test_an_error_is_raised_after_the_terminal_is_restored(view: View, mode: str, error: str) -> None:
    assert error in view(mode).check_end(1)


def test_a_scheduler_that_does_not_answer_is_asked_again(view: View) -> None:
    tmux = view("busy")
    tmux.wait_for("no answer for ")
    assert "no answer" not in tmux.wait_for("4:59:5")  # the fifth sample's time left


def test_the_time_left_goes_on_between_samples_and_keys_work_then(view: View) -> None:
    tmux = view("slow")
    tmux.wait_for("0:59:58 left, nodes 64")
    tmux.keys("C-z", "s")  # which does not leave it
    tmux.wait_for("sort: USE%")
    tmux.keys("q")
    tmux.check_end(0)


def test_a_terminal_that_is_gone_ends_it(view: View) -> None:
    tmux = view("works")
    tmux.wait_for("nodes 64")
    pid = tmux.program
    tmux.close_terminal()
    until(lambda: not alive(pid), 30)


def test_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin, stdout, term in ((False, False, "xterm"), (True, False, "xterm"), (True, True, "dumb")):
        monkeypatch.setattr("sys.stdin.isatty", lambda stdin=stdin: stdin, raising=False)
        monkeypatch.setattr("sys.stdout.isatty", lambda stdout=stdout: stdout, raising=False)
        monkeypatch.setenv("TERM", term)
        with pytest.raises(InputError, match="not a terminal"):
            live_view.check_terminal()
    monkeypatch.setenv("TERM", "xterm")
    live_view.check_terminal()
