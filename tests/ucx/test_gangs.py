"""Gangs on workers that exchange their data over UCX: members, arguments over UCX, a death, and what comes after it."""

from __future__ import annotations

from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.jobs.ucx import needs_ucx

pytestmark = needs_ucx

SCRIPT = script("ucx/scripts/gangs.py")


def test_over_ucx(mpirun: Mpi) -> None:
    done = mpirun.run(SCRIPT, 2, command=["--protocol", "ucx"]).check(3)
    assert "transport: TLS, and UCX for large data between workers" in done.stderr
    told = facts(done)
    expected = [[[0, 1], 5_000_000 * 4_999_999 / 2, True]] * 2
    assert (told["first"], told["second"]) == (expected, expected)
    assert told["error"] == [1, "1", [1]]
