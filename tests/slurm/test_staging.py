"""Copies of an environment on the nodes of a job of Slurm, whose hosts share everything but /dev/shm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.bed.slurm import NAMES, TWO, BatchJob, Slurm
from support.jobs.clusters import facts, packed_environment

SCRIPT = """
from support.jobs.scripts.client import client, tell
from pathlib import Path
from dask_gpu_mpi import current_session

node = lambda: (os.environ["SLURMD_NODENAME"], sys.prefix, os.path.exists(sys.prefix + "/first-run"))
found = sorted(client.run(node).values())
if os.environ.get("WAITS") and not Path("checkpoint").exists():
    client.run(lambda: open(sys.prefix + "/first-run", "w").close())
    current_session().on_walltime(Path("checkpoint").touch, before=1)
    print("the script runs", flush=True)
    time.sleep(600)
tell(found=found, restarts=os.environ.get("SLURM_RESTART_COUNT"))
"""


@pytest.fixture
def packed(tmp_path: Path) -> str:
    return str(packed_environment(tmp_path))


def copies(slurm: Slurm) -> set[str]:
    return {path.name for path in slurm.shared_memory(("h1", "h2")) if path.name.startswith("dgm-stage-")}


def run(slurm: Slurm, packed: str, *options: str, name: str = NAMES[0], **env: str) -> BatchJob:
    """A job on two nodes, each with a copy."""
    env["DGM_SCRATCH"] = "/dev/shm"
    return slurm.run(SCRIPT, *TWO, *options, name=name, args=["--stage", packed], env=env)


def test_a_copy_on_each_node(slurm: Slurm, packed: str) -> None:
    job = run(slurm, packed, name=NAMES[1])
    ended = job.wait().check()
    found = facts(ended.output)["found"]
    assert [host for host, *_ in found] == ["h1", "h2"]
    # a job that may be requeued finds it by its number
    assert all(prefix.startswith(f"/dev/shm/dgm-stage-{job.number}-") for _, prefix, _ in found)
    assert "each node has its copy" in ended.output
    assert copies(slurm) == set()


def test_a_requeued_job_uses_its_copies_again(slurm: Slurm, packed: str) -> None:
    job = run(slurm, packed, "--exclusive=user", WAITS="yes", DASK_GPU_MPI__WALLTIME_SIGNAL="USR1")
    job.wait_for("the script runs")
    slurm.ask("scancel", "-s", "USR1", job.number)
    job.start_again()
    ended = job.wait().check()
    told = facts(ended.output)
    assert told["restarts"] == "1"
    assert [(host, again) for host, _, again in told["found"]] == [("h1", True), ("h2", True)]
    assert copies(slurm) == set()


def test_a_job_that_is_cancelled(slurm: Slurm, packed: str) -> None:
    job = run(slurm, packed, WAITS="yes")
    job.wait_for("the script runs")
    slurm.ask("scancel", job.number)
    # Slurm starts no step of a cancelled job: the epilog of the site removes the copies
    ended = job.wait(allowed=r"dgm-")
    assert ended.state == "CANCELLED"
    (left,) = copies(slurm)
    assert f"/dev/shm/{left} may be left on nodes" in ended.output
    for host in ("h1", "h2"):
        subprocess.run(slurm.bed.on(host, ["sh", "-c", "rm -rf /dev/shm/dgm-*"]), check=True, timeout=30)
