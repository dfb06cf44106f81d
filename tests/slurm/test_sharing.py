"""Several jobs at once, and hosts that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from dask_gpu_mpi import job_script
from support.bed.slurm import NAMES, ONE, Slurm, template, wait_all
from support.jobs.clusters import PLAN, facts, until, workers_of
from support.jobs.mpi import Mpi


@pytest.mark.parametrize(
    ("either", "launcher"),
    [("open", "srun"), ("cgroups", "srun"), ("cgroups", "mpirun")],
    indirect=["either"],
)
def test_jobs_that_share_nodes_keep_to_their_part(either: Slurm, launcher: str) -> None:
    waits = """
import time
tell(threads=sorted(client.nthreads().values()))
here = os.environ["MEETING"]
open(os.path.join(here, os.environ["SLURM_JOB_ID"]), "w").close()
limit = time.monotonic() + 60
while len(os.listdir(here)) < 3 and time.monotonic() < limit:
    time.sleep(0.05)
tell(met=len(os.listdir(here)))
"""

    def script(gpus: int) -> str:
        return job_script(
            "slurm",
            ["-c", "exec(open('script.py').read())"],
            nodes=1,
            gpus_per_node=gpus,
            cpus_per_node=1,
            memory_per_node="2000M",
            time="5",
            launcher=launcher,
            shared=True,
            directives=["--nodelist=h1"],
        )

    place = {"MEETING": str(either.meeting_place())}
    files = {"script.py": PLAN + waits}
    without = either.submit(script(0), env=place, files=files)
    jobs = [either.submit(script(2), env=place, files=files) for _ in range(2)]
    until(lambda: all(job.show() and job.gpus for job in jobs), 60, "both run")
    # one of all cores, to which the affinity does not confine it here; without cgroups it sees GPUs, too
    threads = facts(without.wait().check().output)["threads"]
    assert threads == [1] or not either.cgroups
    visible = []
    for job in jobs:
        told = facts(job.wait().check().output)
        rows = workers_of(told)
        assert (told["met"], told["threads"]) == (3, [1, 1])
        assert sum(row["memory"] for row in rows.values()) <= 2000 * 2**20
        visible += [row["visible"] for row in rows.values() if row["visible"]]
    assert sorted(visible) == sorted(gpu.uuid for gpu in either.gpus["h1"])


def test_an_array_whose_members_join_one_cluster(slurm: Slurm) -> None:
    file = slurm.meeting_place() / "cluster.json"
    waits = """
client.wait_for_workers(3, timeout=60)
rows = looks(client)
tell(workers=rows, doubled=client.gather(client.map(lambda x: 2 * x, range(32))))
"""
    options = ("--nodes=1", "--ntasks-per-node=1", "--mem=1000", "--exclusive=user")
    first = slurm.run(PLAN + waits, *options, args=["--scheduler-file", str(file)])
    first.wait_for("FACTS")
    joins = ["--no-scheduler", "--scheduler-file", str(file)]
    array = slurm.submit(template("slurm.sbatch", ONE), *options, "--array=0-1", args=joins)
    told = facts(first.wait().check().output)
    for member in array.members(2):
        member.wait(30).check()
    rows = workers_of(told)
    assert len(rows) == 3
    assert "0-0" in rows
    assert len({(row["host"], row["visible"]) for row in rows.values()}) == 3
    assert told["doubled"] == [2 * x for x in range(32)]
    assert not Path(file).exists()


def test_hosts_that_differ(slurm: Slurm) -> None:
    options = ("--nodes=3", "--ntasks-per-node=1", "--mem=4000")
    job = slurm.run(PLAN, *options, name="slurm-mpirun.sbatch", asked=("--gpus=10",))
    rows = workers_of(facts(job.wait().check().output))
    assert sorted(rows) == [f"{rank}-{gpu}" for rank, count in enumerate((4, 4, 2)) for gpu in range(count)]
    for rank, host in enumerate(("h1", "h2", "h3")):
        own = {row["visible"] for row in rows.values() if row["host"] == host}
        assert own == {gpu.uuid for gpu in slurm.gpus[host]}
        assert all(row["host"] == host for name, row in rows.items() if name.startswith(f"{rank}-")), rows


@pytest.mark.of_mpi("mpich")
def test_every_node_of_a_heterogeneous_job_has_a_rank(slurm: Slurm) -> None:
    """The job script's --ntasks-per-node is of the first part only."""
    job = slurm.run(PLAN, "--nodes=1", "--mem=1000", ":", "--nodes=2", "--mem=1000", asked=())
    told = facts(job.wait().check().output)
    assert sorted({row["host"] for row in told["workers"]}) == ["h1", "h2", "h3"]


def test_a_heterogeneous_job(slurm: Slurm, detected_mpi: Mpi) -> None:
    # two parts with other GPUs and another time limit each; the smaller one counts
    tells = "tell(left=current_session().time_left())\n"
    part = ("--ntasks-per-node=1", "--mem=1000", "--exclusive=user")
    first, second = (
        ("--nodes=1", "--gpus-per-node=2", "--time=9"),
        ("--nodes=2", "--gpus-per-node=1", "--time=5"),
    )
    parts = (*first, *part, ":", *second, *part)
    jobs = {name: slurm.run(PLAN + tells, *parts, name=name, asked=()) for name in NAMES}
    wait_all(jobs.values())
    # mpirun would take the first part for the whole; below PMIx srun sometimes does not see that all has ended (Slurm 22.05)
    refused = {"slurm-mpirun.sbatch": "mpirun"}
    if detected_mpi.name == "openmpi":
        refused["slurm.sbatch"] = "srun --mpi=pmix"
    for name, what in refused.items():
        ended = jobs.pop(name).wait().check("FAILED", 2)
        assert f"heterogeneous jobs of Slurm can't be started by {what} (expected srun and" in ended.output
        assert ended.output.count("\n") == 1
    for job in jobs.values():
        told = facts(job.wait().check().output)
        assert sorted(workers_of(told)) == ["0-0", "0-1", "1-0", "2-0"]
        assert len({(row["host"], row["visible"]) for row in told["workers"]}) == 4
        assert 240 < told["left"] <= 300
