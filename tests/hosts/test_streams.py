"""Large arrays between workers of two hosts, which go over streams: they are right, and a worker that dies costs time only."""

from __future__ import annotations

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

EXCHANGE = script("hosts/scripts/exchange.py")


@pytest.mark.parametrize(
    ("options", "streams"), [((), 2), (("--no-data-encryption",), 4), (("--protocol", "tcp"), 0)]
)
def test_arrays_between_hosts(mpirun: Mpi, bed: TestBed, options: tuple[str, ...], streams: int) -> None:
    done = mpirun.run(EXCHANGE, 2, bed=bed, hosts=bed.hosts[:2], command=options, timeout=90).check()
    told = facts(done)
    assert told["right"] == [True] * 8
    assert told["bytes"] == 4 * 2 * 30_000_000
    assert set(told["streams"]) == {streams}
    assert told["after_death"] == told["expected"]
