"""Copies of an environment on the nodes of a job of Slurm, whose hosts share everything but /dev/shm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.bed.slurm import ONE, Slurm, template
from support.jobs.clusters import TELL, facts, small_environment

TWO = ("--nodes=2", "--mem=1000", "--exclude=h3")
SCRIPT = (
    TELL
    + """
import time
from pathlib import Path
from distributed import Client

client = Client()
if os.environ.get("WAITS"):
    print("the script runs", flush=True)
    time.sleep(600)
if not Path("checkpoint").exists():
    Path("checkpoint").touch()
    sys.exit(75)
tell(
    found=sorted(client.run(lambda: (os.environ["SLURMD_NODENAME"], sys.prefix)).values()),
    restarts=os.environ.get("SLURM_RESTART_COUNT"),
)
"""
)


@pytest.fixture
def packed(tmp_path: Path) -> str:
    source = small_environment(tmp_path / "env")
    subprocess.run(["tar", "-czf", tmp_path / "env.tar.gz", "-C", source, "."], check=True, timeout=60)
    return str(tmp_path / "env.tar.gz")


def copies(slurm: Slurm) -> set[str]:
    return {path.name for path in slurm.shared_memory(("h1", "h2")) if path.name.startswith("dgm-stage-")}


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-mpirun.sbatch"])
def test_a_copy_on_each_node_of_each_run(slurm: Slurm, packed: str, name: str) -> None:
    """The copies of the first run are gone before the job is requeued."""
    job = slurm.submit(
        template(name, ONE),
        *TWO,
        "--exclusive=user",
        args=["--stage", packed, "script.py"],
        files={"script.py": SCRIPT},
        env={"DGM_SCRATCH": "/dev/shm"},
    )
    job.start_again()
    assert copies(slurm) == set()
    ended = job.wait().check()
    told = facts(ended.output)
    assert told["restarts"] == "1"
    assert [host for host, _ in told["found"]] == ["h1", "h2"]
    assert all(prefix.startswith("/dev/shm/dgm-stage-") for _, prefix in told["found"])
    assert ended.output.count("copied to 2 nodes") == 2
    assert copies(slurm) == set()


def test_a_job_that_is_cancelled(slurm: Slurm, packed: str) -> None:
    job = slurm.submit(
        template("slurm.sbatch", ONE),
        *TWO,
        args=["--stage", packed, "script.py"],
        files={"script.py": SCRIPT},
        env={"DGM_SCRATCH": "/dev/shm", "WAITS": "yes"},
    )
    job.wait_for("the script runs")
    slurm.ask("scancel", job.number)
    # Slurm starts no step of a cancelled job: the epilog of the site removes the copies
    ended = job.wait(allowed=r"dgm-")
    assert ended.state == "CANCELLED"
    (left,) = copies(slurm)
    assert f"/dev/shm/{left} may be left on nodes" in ended.output
    for host in ("h1", "h2"):
        subprocess.run(slurm.bed.on(host, ["sh", "-c", "rm -rf /dev/shm/dgm-*"]), check=True, timeout=30)
