"""Large arrays between workers of two hosts, over streams: they are right, and a worker or link that dies costs time only."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

EXCHANGE = script("hosts/scripts/exchange.py")
CROSSING = script("hosts/scripts/crossing.py")


@pytest.mark.parametrize(
    ("options", "streams"), [((), {2, 4}), (("--no-data-encryption",), {2, 4}), (("--protocol", "tcp"), {0})]
)
def test_arrays_between_hosts(mpirun: Mpi, bed: TestBed, options: tuple[str, ...], streams: set[int]) -> None:
    done = mpirun.run(EXCHANGE, 2, bed=bed, hosts=bed.hosts[:2], command=options).check()
    told = facts(done)
    assert told["right"] == [True] * 8
    assert told["bytes"] == 4 * 2 * 30_000_000
    assert len(set(told["streams"])) == 1
    assert set(told["streams"]) <= streams
    assert told["after_death"] == told["expected"]


def carries(bed: TestBed, host: str, *, packets: bool) -> None:
    """Whether the bridge carries packets from and to this host. The host itself notices nothing."""
    port, state = host.replace("h", "p"), "3" if packets else "0"
    command = bed.on("switch", ["bridge", "link", "set", "dev", port, "state", state])
    subprocess.run(command, check=True, timeout=10)


@contextlib.contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do this in a thread, which is told when to end."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=[over])
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_packets_are_lost(mpirun: Mpi, bed: TestBed, tmp_path: Path) -> None:
    """One per cent of the time none arrives; netem is not in every kernel."""

    def lose(over: threading.Event) -> None:
        while not over.wait(1.0):
            carries(bed, "h2", packets=False)
            time.sleep(0.01)
            carries(bed, "h2", packets=True)

    with meanwhile(lose):
        where: dict[str, Any] = {"bed": bed, "hosts": bed.hosts[:2]}
        done = mpirun.run(CROSSING, 2, args=[str(tmp_path)], command=(), timeout=150, **where)
    assert facts(done.check())["right"] is True


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, None], ids=["for a while", "until the end"])
def test_a_link_is_cut_in_the_middle(
    surviving: Mpi, bed: TestBed, tmp_path: Path, seconds: int | None
) -> None:
    """What was on its way arrives, or is computed again on another host."""
    cut = []

    def cut_link(over: threading.Event) -> None:
        while not (tmp_path / "crossing").exists():
            if over.wait(0.005):
                return
        carries(bed, "h3", packets=False)
        cut.append((tmp_path / "crossed").exists())
        until = time.monotonic() + (seconds or 170)
        while time.monotonic() < until and not (seconds is None and (tmp_path / "crossed").exists()):
            if over.wait(0.1):
                break
        carries(bed, "h3", packets=True)

    tolerates = ("--tolerate-lost-ranks", "1")
    with meanwhile(cut_link):
        done = surviving.run(CROSSING, 3, args=[str(tmp_path)], bed=bed, command=tolerates, timeout=200)
    assert cut == [False]
    assert facts(done)["right"] is True
    if seconds is not None:  # Open MPI's mpirun does not survive the loss of a node
        done.check()
