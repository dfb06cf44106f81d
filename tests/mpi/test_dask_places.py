"""What Dask's documentation promises of a cluster, on one of two ranks over TLS: each call of a client keeps it."""

from __future__ import annotations

import re
from pathlib import Path

from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

#: What each of its functions has to return; a traceback where it has failed.
EXPECTED = {
    "nested": [14, 14],
    "upload": dict.fromkeys(("all", "restarted", "died"), [[1, 2]] * 2),
    "restart": {"names": ["0", "1"], "new": ["0", "1"], "kept": "cancelled", "works": 7},
    # restarts that were asked for count as no deaths
    "restart_again_and_again": ["0", "1"],
    # one that is retired stays so
    "retire": {"names": ["0"], "moved": 499500, "restarted": ["0"], "works": 3},
    "report": list(range(1, 11)),
}


def test_calls_of_a_client(mpirun: Mpi, tmp_path: Path) -> None:
    options = ["--dashboard-address", "127.0.0.1:0"]
    places = script("mpi/scripts/dask_places.py")
    done = mpirun.run(places, 2, command=options, args=[str(tmp_path)]).check()
    assert facts(done) == EXPECTED
    page = (tmp_path / "report.html").read_text()
    assert all(part in page for part in ("Task Stream", "Worker Profile", "Scheduler Profile", "Bandwidth"))
    # nobody was lost, and the job ends well
    ours = [line for line in done.stderr.splitlines() if line.startswith("dask_gpu_mpi: ")]
    assert [line for line in ours if re.search("removed|lost|error", line)] == []
    assert "Traceback" not in done.stderr
