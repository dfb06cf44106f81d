"""UCX alone (``protocol="ucx"`` without security) beside MPI, on hosts without GPUs, over shared memory and TCP.

tests/gpu has what needs NVLink, test_beside_tls UCX beside TLS. See ci/ucx.sh.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import (
    MESSAGES,
    facts,
    foreign_lines,
    gone,
    ranks_of,
    scratch_of,
    workers_of,
)
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.jobs.ucx import needs_ucx

pytestmark = needs_ucx

HEAD = script("ucx/scripts/without_gpus.py")
INITIALIZED = "from dask_gpu_mpi import initialize\nsession = initialize(protocol='ucx', security=False)\nclient = Client()\n"


def check(told: dict[str, Any], workers: int) -> dict[str, dict[str, Any]]:
    """What holds for every such cluster; returns the looks by name."""
    rows = workers_of(told)
    assert len(rows) == workers
    assert told["scheduler"].startswith("ucx://")
    assert all(row["address"].startswith("ucx://") for row in rows.values()), rows
    assert all(row["nanny"] and row["identity"] == [] for row in rows.values()), rows
    # which carry no data: UCX would keep a core busy in each agent
    assert all(address.startswith("tcp://") for address in told["nannies"]), told["nannies"]
    assert len(set(told["agents"])) == len(told["nannies"]) == workers
    assert told["total"] == pytest.approx(2e6, rel=0.01)
    assert told["twice"] == pytest.approx(2 * told["total"], rel=1e-9)
    return rows


@pytest.mark.quick("mpich")
def test_command(mpirun: Mpi) -> None:
    """No main guard, MPI in the script and in tasks, and its exit code."""
    script = (
        HEAD
        + "client = Client()\nseen(client)\ntell(watching=[*client.run(watches_ucx, nanny=True).values()])\n"
        + "tell(worlds=[*client.run(world).values()])\n"
        + MESSAGES
        + "sys.exit(7)\n"
    )
    done = mpirun.run(script, 2, command=["--protocol", "ucx", "--no-security"], timeout=90).check(7)
    told = facts(done)
    check(told, 2)
    assert told["world"] == 1  # the rank is no MPI process
    assert told["worlds"] == [5, 5]
    assert told["watching"] == [False, False], "agents watch UCX, which keeps a core of each busy"
    assert told["messages"] == [2_000_000_000]
    assert foreign_lines(done.stderr) == []
    assert scratch_of(mpirun.jobs[-1]) == []


@pytest.mark.both_mpis
def test_mpi_before_ucx(mpirun: Mpi) -> None:
    """It is said, with a remedy, and the remedy works."""
    program = "from mpi4py import MPI\n" + HEAD + INITIALIZED + "seen(client)\n"
    done = mpirun.run(program, 2, timeout=90).check(1)
    assert "Fix: `import ucxx` before mpi4py.MPI" in done.stderr
    check(facts(mpirun.run("import ucxx\n" + program, 2, timeout=90).check()), 2)


def test_two_hosts(mpirun: Mpi, hosts: TestBed) -> None:
    """What the user configured for transfers and UCX is kept: also a number, which UCX's package does not take."""
    env = {
        "DASK_DISTRIBUTED__WORKER__TRANSFER__MESSAGE_BYTES_LIMIT": "123 MB",
        "DASK_DISTRIBUTED_UCXX__ENVIRONMENT__RNDV_THRESH": "12345",
    }
    asked = "from ucxx import get_config\ntell(threshold=[*client.run(lambda: get_config()['RNDV_THRESH']).values()])\n"
    program = HEAD + INITIALIZED + "seen(client)\n" + asked + MESSAGES
    done = mpirun.run(program, 2, env=env, bed=hosts, hosts=["h1", "h2"], timeout=90).check()
    told = facts(done)
    rows = check(told, 2)
    assert told["messages"] == [123_000_000]
    assert len(told["threshold"]) == 2
    assert [value for value in told["threshold"] if "12345" not in value] == []
    assert foreign_lines(done.stderr) == []
    assert {row["host"] for row in rows.values()} == {"h1", "h2"}
    assert len({row["address"].rpartition(":")[0] for row in rows.values()}) == 2


def test_killed_and_restarted_workers_come_back(mpirun: Mpi) -> None:
    program = """
import signal
before = {row["name"]: row["pid"] for row in looks(client)}
client.submit(lambda: os.kill(os.getpid(), signal.SIGKILL), retries=0, workers=[0], pure=False)
def is_back():
    global after
    try:
        after = {row["name"]: row["pid"] for row in looks(client)}
    except Exception:
        after = {}
    return len(after) == 2 and after[0] != before[0]
wait_until(is_back, 60)
client.restart(timeout=60)
restarted = {row["name"]: row["pid"] for row in looks(client)}
tell(other=after[1] == before[1], restarted=[restarted[name] != after[name] for name in (0, 1)])
seen(client)
"""
    done = mpirun.run(HEAD + INITIALIZED + program, 2, timeout=110).check()
    check(facts(done), 2)
    assert facts(done)["other"] is True
    assert facts(done)["restarted"] == [True, True]


def test_killed_rank_ends_the_job(mpirun: Mpi) -> None:
    job = mpirun.start(HEAD + INITIALIZED + "tell(up=True)\nimport time\ntime.sleep(600)\n", 2)
    job.wait_for("FACTS", 60)
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    assert gone(job, 20), job.processes()
    assert job.wait(10).rc != 0
    assert scratch_of(job) == []
