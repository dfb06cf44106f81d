"""Ranks that wait leave the cores to others."""

from __future__ import annotations

import time

from support.jobs.clusters import TELL, cpu_seconds, facts, ranks_of
from support.jobs.mpi import Mpi

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


WATCHED = (
    TELL
    + """
from distributed import Client
from dask_gpu_mpi import initialize
initialize(cpu_workers=1)
with Client() as client:
    look = lambda dask_worker: sorted(dask_worker.periodic_callbacks)
    tell(nannies=list(client.run(look, nanny=True).values()), workers=list(client.run(look).values()))
"""
)


def test_nannies_do_not_measure_the_event_loop_that_they_share(mpirun: Mpi) -> None:
    told = facts(mpirun.run(WATCHED, 1, timeout=60).check())
    assert len(told["nannies"]) == len(told["workers"]) == 2
    for callbacks in told["nannies"]:
        assert {"tick", "ticks"}.isdisjoint(callbacks)
        assert "memory_monitor" in callbacks
    assert all("tick" in callbacks for callbacks in told["workers"]), told["workers"]
