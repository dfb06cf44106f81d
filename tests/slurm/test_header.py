"""The lines at the head of the job scripts, as they are: what options of sbatch make of them."""

from __future__ import annotations

import pytest

from support import ROOT
from support.bed.slurm import JobError, Slurm
from support.jobs.clusters import TELL, facts, workers_of

TEMPLATES = ("slurm.sbatch", "slurm-mpirun.sbatch")
SCRIPT = (
    TELL
    + """
from distributed import Client
client = Client()
tell(workers=looks(client))
"""
)
#: Two hosts with four GPUs each.
TWO = ("--nodes=2", "--exclude=h3")


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (("--gpus-per-node=2",), 2),
        # is added to the script's --gpus-per-node, and with --exclusive the whole host is given
        (("--gres=gpu:2",), 4),
        # must fit the script's --gpus-per-node
        (("--ntasks-per-node=4", "--gpus-per-task=1"), 4),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else str(value),
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_options_of_sbatch_against_those_of_the_script(
    slurm: Slurm, name: str, options: tuple[str, ...], gpus: int
) -> None:
    job = slurm.submit(
        ROOT / "jobscripts" / name, *TWO, *options, args=["script.py"], files={"script.py": SCRIPT}
    )
    rows = workers_of(facts(job.wait().check().output))
    for host in ("h1", "h2"):
        seen = [row["visible"] for row in rows.values() if row["host"] == host]
        assert len(seen) == gpus
        assert {gpu.uuid for gpu in slurm.gpus[host]}.issuperset(seen)
        assert len(set(seen)) == gpus


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--gpus=2"])
def test_options_that_sbatch_refuses(slurm: Slurm, option: str) -> None:
    with pytest.raises(JobError, match="sbatch: error:"):
        slurm.submit(ROOT / "jobscripts" / "slurm.sbatch", *TWO, option, args=["script.py"])
