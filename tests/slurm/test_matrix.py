"""Launchers, the ways to ask for GPUs, numbers of hosts, with and without cgroups: what the workers see from inside."""

from __future__ import annotations

from typing import Any

import pytest

from support.bed.slurm import NAMES, BatchJob, Slurm
from support.jobs.clusters import PLAN, facts, workers_of

MEMORY = 4000  # MiB of a job on each host
SCRIPT = PLAN + "tell(doubled=client.gather(client.map(lambda x: 2 * x, range(32))))\nsys.exit(7)\n"
#: How to ask for two GPUs on each host, and the ranks on each host.
FLAGS = {
    "gpus-per-node": (("--gpus-per-node=2",), 1),
    "gres": (("--gres=gpu:2",), 1),
    "gpus-per-task": (("--gpus-per-task=1",), 2),
    "gpu-bind": (("--gpus-per-node=2", "--gpu-bind=single:1"), 2),
}


def check(job: BatchJob, told: dict[str, Any]) -> None:
    """One worker for each GPU that Slurm gave the job, each as the plan has it, within the job's memory."""
    rows, plan = workers_of(told), told["plan"]
    assert told["doubled"] == [2 * x for x in range(32)]
    assert {row["visible"]: row["host"] for row in rows.values()} == job.given
    assert len(rows) == len(job.given)
    assert sorted(rows) == sorted(worker["name"] for worker in plan["workers"])
    for worker in plan["workers"]:
        row = rows[worker["name"]]
        assert (row["host"], row["visible"]) == (worker["host"], worker["device"])
        assert row["name"] == f"{worker['rank']}-{worker['gpu_index']}"
        assert row["memory"] == worker["memory_limit"]
        assert row["identity"] == []
    for host in job.gpus:
        limits = [row["memory"] for row in rows.values() if row["host"] == host]
        assert 0 < sum(limits) <= MEMORY * 2**20


@pytest.mark.parametrize(
    ("either", "name", "flag"),
    [
        *(("cgroups", name, flag) for name in NAMES for flag in FLAGS),
        ("open", NAMES[0], "gpus-per-task"),
        ("open", NAMES[1], "gpu-bind"),
    ],
    indirect=["either"],
)
def test_one_worker_for_each_gpu(either: Slurm, name: str, flag: str) -> None:
    # on 3 hosts; the other modules have jobs on 1 and 2
    asked, ranks = FLAGS[flag]
    job = either.run(
        SCRIPT,
        # a job alone on its hosts is given all of their GPUs, whatever it asks for
        *("--nodes=3", f"--ntasks-per-node={ranks}", f"--mem={MEMORY}", "--exclusive=user"),
        name=name,
        asked=asked,
    )
    ended = job.wait().check("FAILED", 7)
    assert len(job.gpus) == 3
    check(job, facts(ended.output))
