"""The command ``top``: it finds the cluster, and prints it once or shows it live. It leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import termios
import time
import tty
from dataclasses import replace
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import show
from dask_gpu_mpi.cli.options import read_texts
from dask_gpu_mpi.errors import ClusterLostError, InputError
from dask_gpu_mpi.job.outcome import code_of_signal
from dask_gpu_mpi.network.scheduler_file import Target, read_scheduler_file, require_credentials
from dask_gpu_mpi.view import snapshot as snapshots
from dask_gpu_mpi.view.snapshot import Link, NoAnswerError, Snapshot
from dask_gpu_mpi.view.top_view import View, keys_of, plain, press, rows_of_screen, screen

#: Signals that end it.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: Seconds after which it draws again without news: for the clock.
TICK = 1.0


def check_terminal() -> None:
    """Raise an InputError if there is no terminal for the view and its keys."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise InputError(
            "top: standard input and output are not a terminal",
            expected="a terminal with TERM set",
            fix="run it in a terminal (ssh -t, srun --pty), or print once with --once or --json",
        )


class _LiveView:
    """One live view."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._terminal = sys.stdin.fileno()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._view = View()
        self.snapshot: Snapshot | None = None
        #: Time of the snapshot, by `time.monotonic`.
        self._sampled = 0.0
        #: Whether the cluster has not responded since.
        self._silent = False
        self._code: int | None = None

    async def run(self, link: Link, interval: float) -> int:
        """Show samples until a key or a signal ends the view; return the exit code."""
        for number in ENDING:
            self._loop.add_signal_handler(number, self._end, code_of_signal(number))
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would leave the terminal as it is now
        self._loop.add_signal_handler(signal.SIGWINCH, self._wake.set)
        self._loop.add_reader(self._terminal, self._on_keys)
        sampling = asyncio.ensure_future(self._sample(link, interval))
        # the alternate screen
        live = Live(console=self._console, screen=True, auto_refresh=False)
        before = termios.tcgetattr(self._terminal)
        try:
            tty.setcbreak(self._terminal, termios.TCSANOW)
            live.start()
            while self._code is None:
                if sampling.done():
                    sampling.result()  # raises its error
                live.update(self._screen(), refresh=True)
                await self._news(sampling)
            return self._code
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sampling
            self._loop.remove_reader(self._terminal)
            with contextlib.suppress(OSError):  # the terminal may be gone
                live.stop()
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._terminal, termios.TCSANOW, before)

    async def _news(self, sampling: asyncio.Future[None]) -> None:
        waking = asyncio.ensure_future(self._wake.wait())
        both: set[asyncio.Future[Any]] = {waking, sampling}
        await asyncio.wait(both, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()
        self._wake.clear()

    async def _sample(self, link: Link, interval: float) -> None:
        while True:
            try:
                self.snapshot = await link.sample()
            except NoAnswerError:
                self._silent = True
            else:
                self._sampled, self._silent = time.monotonic(), False
            self._wake.set()
            await asyncio.sleep(interval)

    def _screen(self) -> RenderableType:
        if self.snapshot is None:
            return "connecting ...  (q quits)"
        width, height = self._console.size
        age = time.monotonic() - self._sampled
        now = replace(self.snapshot, time=self.snapshot.time + age)  # for the time left
        silence = age if self._silent else None
        return screen(now, self._view, width, height, silence)

    def _end(self, code: int) -> None:
        self._code = code
        self._wake.set()

    def _on_keys(self) -> None:
        try:
            text = os.read(self._terminal, 1024).decode("ascii", "ignore")
        except OSError:
            text = ""
        if not text:  # the terminal is gone
            self._loop.remove_reader(self._terminal)
            self._end(code_of_signal(signal.SIGHUP))
            return
        rows = self.snapshot.rows if self.snapshot is not None else ()
        height = rows_of_screen(self.snapshot, self._console.height) if self.snapshot else 1
        for key in keys_of(text):
            if not press(self._view, key, rows, height):
                self._end(0)
        self._wake.set()


async def watch(link: Link, interval: float) -> int:
    """Show a cluster, sampled every `interval` seconds, until its end or the key q (code 0), or a signal (128 + its number)."""
    view = _LiveView()
    try:
        return await view.run(link, interval)
    except ClusterLostError:
        if view.snapshot is None:
            raise
        # the last table stays in the terminal
        show([plain(view.snapshot, Console().width)])
        say("top: the cluster has ended")
        return 0
    finally:
        link.close()


#: Seconds between the two samples for rates. In a cluster of up to 200 workers, each of them reports at least as often.
BETWEEN = 1.0


def find_cluster(scheduler_file: str | None) -> Target:
    """The cluster of this file, else of Dask's configuration: its scheduler's address, or our option for a file."""
    import dask

    address = dask.config.get("scheduler-address", None)
    if scheduler_file is None and address:
        return Target(str(address))
    configured = read_texts({"scheduler_file": scheduler_file}).scheduler_file
    if not configured:
        raise InputError(
            "top: no cluster found",
            expected="--scheduler-file FILE, or a process that a running job's script has started",
            fix="start the job with --scheduler-file FILE, and give top the same",
        )
    target = read_scheduler_file(configured)
    require_credentials(target, configured)
    return target


def run_top(scheduler_file: str | None, *, once: bool, as_json: bool, interval: float) -> int:
    """Run the command and return its exit code; DaskGpuMpiError if there is no such cluster, or if it has ended."""
    if not (once or as_json):
        check_terminal()
    target = find_cluster(scheduler_file)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for names that this terminal can't show
    # distributed logs each connection that ends; one line of our own is enough
    logging.disable(logging.CRITICAL)
    try:
        if once or as_json:
            snapshot = asyncio.run(_sampled(target))
            if as_json:
                print(json.dumps(snapshots.as_json(snapshot)))
            else:
                show([plain(snapshot, Console().width if sys.stdout.isatty() else None)])
            return 0
        return asyncio.run(watch(Link(target), interval))
    finally:
        logging.disable(logging.NOTSET)


async def _sampled(target: Target) -> Snapshot:
    link = Link(target)
    try:
        await link.sample()
        await asyncio.sleep(BETWEEN)
        return await link.sample()
    finally:
        link.close()
