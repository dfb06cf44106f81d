"""Ranks that wait leave the cores to others."""

from __future__ import annotations

import time

from clusters import TELL, cpu_seconds, ranks_of
from harness import Mpi

SCRIPT = (
    TELL
    + """
import time
from dask_gpu_mpi import initialize
initialize(worker_class="distributed.Nanny")
tell(up=True)
go_on = os.path.join(os.environ["TMPDIR"], "go-on")
while not os.path.exists(go_on):
    time.sleep(0.5)
"""
)
SECONDS, SHARE = 4.0, 0.02


def test_idle_ranks_use_no_core(mpirun: Mpi) -> None:
    job = mpirun.start(SCRIPT, 4)
    job.wait_for("FACTS")
    ranks = ranks_of(job)
    assert list(ranks) == [0, 1, 2, 3]
    shares: dict[int, float] = {}
    for _ in range(2):  # a count of CPU time, not of time; but the first look may see the end of the start
        before, start = {rank: cpu_seconds(pid) for rank, pid in ranks.items()}, time.monotonic()
        time.sleep(SECONDS)
        elapsed = time.monotonic() - start
        shares = {rank: (cpu_seconds(pid) - before[rank]) / elapsed for rank, pid in ranks.items()}
        if max(shares.values()) < SHARE:
            break
    (job.directory / "go-on").touch()
    job.wait(30).check(0)
    assert max(shares.values()) < SHARE, shares
