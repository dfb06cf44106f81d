"""The preflight of the job scripts, under a real Slurm."""

from __future__ import annotations

import re

from support.bed.slurm import Slurm
from support.jobs.clusters import LOOKS, facts, workers_of

OPTIONS = ("--nodes=2", "--ntasks-per-node=1", "--mem=2000", "--exclusive=user")


def test_a_job_that_it_lets_pass(confined: Slurm) -> None:
    # without GPUs, which the cgroup hides all
    job = confined.run(LOOKS, *OPTIONS, name="slurm-mpirun.sbatch", asked=(), env={"DGM_CHECK": "yes"})
    ended = job.wait().check()
    assert len(re.findall("^check of 2 ranks on 2 nodes", ended.output, re.MULTILINE)) == 1
    rows = workers_of(facts(ended.output))
    assert sorted(rows) == ["0", "1"]
    assert {row["host"] for row in rows.values()} == {"h1", "h2"}
    assert all(0 < row["memory"] <= 2000 * 2**20 for row in rows.values()), rows


def test_a_job_that_it_refuses(slurm: Slurm) -> None:
    # an emulated GPU runs no kernel
    job = slurm.run(LOOKS, *OPTIONS, env={"DGM_CHECK": "yes"})
    ended = job.wait()
    assert ended.state == "FAILED"
    assert ended.code in (1, 2)
    assert "FACTS" not in ended.output
    assert re.findall(r"^  ERROR +(\w+)", ended.output, re.MULTILINE) == ["kernel"]
