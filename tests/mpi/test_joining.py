"""A cluster without a script, how others find it, and the workers of other jobs that join it."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest

from support.jobs.clusters import COMMAND, Driver, facts, until, up
from support.jobs.mpi import Mpi

#: A program that lends its workers to somebody else's cluster for as long as a function runs.
LENDER = """
from support.jobs.scripts.tell import looks, tell
from mpi4py import MPI
from dask_gpu_mpi import connect, execute

def borrow(path):
    with connect(path) as client:
        client.wait_for_workers(5, timeout=30)
        tell(workers=looks(client), rank=MPI.COMM_WORLD.rank)
        return len(client.scheduler_info(n_workers=-1)["workers"])

answer = execute(borrow, (sys.argv[1],), scheduler=False, scheduler_file=sys.argv[1], worker_name="lent")
if MPI.COMM_WORLD.rank == 0:
    tell(answer=answer)
"""


@pytest.mark.timeout(180)
def test_cluster_by_its_file(mpirun: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    owner = up(mpirun, file, 2)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {"address", "id", "services", "workers"} <= set(json.loads(file.read_text()))
    with Driver(file) as driver:
        assert driver.ask("names()") == ["0", "1"]
        assert driver.ask("client.submit(lambda: 42).result()") == 42

        # A second job adds its workers; its names are none of those that are there, and its end is its own.
        joined = up(mpirun, file, 2, "--no-scheduler")
        names = driver.ask("names()")
        assert len(set(names)) == 4
        assert {"0", "1"} < set(names)
        assert len(driver.ask("list(client.run(lambda: 1).values())")) == 4
        joined.signal(signal.SIGTERM)
        done = joined.wait()
        assert done.rc != 0
        assert done.left == ()
        until(lambda: driver.ask("names()") == ["0", "1"], 10, "the joined workers leave")
        assert file.exists()

        # execute(scheduler=False): its end does not end the other's scheduler. Two jobs that join do not clash either.
        # Dask does not accept an interface beside an address.
        again = up(mpirun, file, 1, "--no-scheduler", "--worker-options", '{"interface": "lo"}')
        told = facts(mpirun.run(LENDER, 2, args=[str(file)]).clean())
        assert told["answer"] == 5
        assert sum(str(row["name"]).startswith("lent-") for row in told["workers"]) == 2
        until(lambda: len(driver.ask("names()")) == 3, 10, "the lent workers leave")
        assert driver.ask("client.submit(lambda: 43).result()") == 43

        # The owner's end is everybody's.
        driver.ask("client.shutdown()")
        # FAILS now and then: heartbeats under way when the scheduler closes are logged by workers with a traceback
        owner.wait().clean(0)
        assert not file.exists()
        assert again.wait().check(0).stderr.count("Traceback") == len(again.wait().left) == 0
    assert list(tmp_path.iterdir()) == []


def test_cluster_by_its_address(mpirun: Mpi, tmp_path: Path) -> None:
    # without a launcher, in the clear; dask-mpi's way to name the scheduler
    file = tmp_path / "scheduler.json"
    # nor is there a script whose report there would be
    owner = up(mpirun, file, None, "--no-security", "--report", "report.json")
    address = json.loads(file.read_text())["address"]
    assert address.startswith("tcp://")
    joined = mpirun.start([*COMMAND, "--no-scheduler", address], 2)
    joined.wait_for("2 workers on 1 host", stream="stderr")
    with Driver(file) as driver:
        assert len(set(driver.ask("names()"))) == 3
        # they listen where the scheduler is reached, not on all interfaces
        listens = "lambda dask_worker: {each.bound_address[0] for each in dask_worker.listeners}"
        assert driver.ask(f"sorted(set().union(*client.run({listens}).values()))") == ["127.0.0.1"]
    owner.signal(signal.SIGTERM)
    done = owner.wait().check(128 + signal.SIGTERM)
    assert "report: no effect without a script" in done.stderr
    assert not (owner.directory / "report.json").exists()
    assert not file.exists()
    assert done.left == joined.wait().check(0).left == ()
