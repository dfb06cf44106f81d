"""The lines at the head of the job scripts, as they are: what options of sbatch make of them."""

from __future__ import annotations

import sys

import pytest

from support import ROOT
from support.bed.slurm import NAMES, JobError, Slurm
from support.jobs.clusters import LOOKS, facts, workers_of

#: Two hosts with four GPUs each.
TWO = ("--nodes=2", "--exclude=h3")


@pytest.mark.parametrize(
    ("name", "options", "gpus"),
    [
        ("slurm.sbatch", ("--gpus-per-node=2",), 2),
        # is added to the script's --gpus-per-node, and with --exclusive the whole host is given
        ("slurm-mpirun.sbatch", ("--gres=gpu:2",), 4),
        # must fit the script's --gpus-per-node
        ("slurm.sbatch", ("--ntasks-per-node=4", "--gpus-per-task=1"), 4),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else str(value),
)
def test_options_of_sbatch_against_those_of_the_script(
    slurm: Slurm, name: str, options: tuple[str, ...], gpus: int
) -> None:
    job = slurm.submit(
        ROOT / "jobscripts" / name, *TWO, *options, args=["script.py"], files={"script.py": LOOKS}
    )
    rows = workers_of(facts(job.wait().check().output))
    for host in ("h1", "h2"):
        seen = [row["visible"] for row in rows.values() if row["host"] == host]
        assert len(seen) == gpus
        assert {gpu.uuid for gpu in slurm.gpus[host]}.issuperset(seen)
        assert len(set(seen)) == gpus


@pytest.mark.both_mpis
@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_all_variables_and_cores_of_the_job(slurm: Slurm, name: str) -> None:
    """``sbatch --export=NONE`` sets the first of these, and setup files of some sites the last."""
    setup = "export MINE=1 SLURM_EXPORT_ENV=PATH SRUN_CPUS_PER_TASK=1\n"
    tells = "tell(**{name: [*client.run(os.getenv, name).values()] for name in ('MINE', 'SLURM_CPUS_PER_TASK')})\n"
    job = slurm.submit(
        ROOT / "jobscripts" / name,
        *TWO,
        args=["script.py"],
        env={"DGM_SETUP": "setup.sh"},
        files={"script.py": LOOKS + tells, "setup.sh": setup},
    )
    told = facts(job.wait().check().output)
    assert (told["MINE"], told["SLURM_CPUS_PER_TASK"]) == (["1"] * 8, [None] * 8)


def test_options_that_sbatch_refuses(slurm: Slurm) -> None:
    for option in ("--gpus-per-task=1", "--gpus=2"):
        with pytest.raises(JobError, match="sbatch: error:"):
            slurm.submit(ROOT / "jobscripts" / "slurm.sbatch", *TWO, option, args=["script.py"])


def test_sbatch_reads_the_words_of_the_generator(slurm: Slurm) -> None:
    """As a user submits: `jobscript --submit`, by the sbatch that is there."""
    words = (
        "--nodes 2 --gpus-per-node 2 --time 1-12 --shared --cpus-per-node 3 --mem 1G --mail-user a@b.c -C a|b "
        "--output here-%j.log --directive=--hold --directive=--nodelist=h[1-2] --directive=--gres=gpu:2 --directive=--no-requeue "
        "--submit -- --layout shared -c pass"
    )
    make = (sys.executable, "-m", "dask_gpu_mpi", "jobscript", "slurm", *words.split())
    with pytest.raises(JobError, match="Invalid feature specification"):
        slurm.ask(*make)
    number = slurm.ask(*(word for word in make if word not in ("-C", "a|b"))).strip()
    shown = slurm.ask("scontrol", "show", "job", number)
    slurm.ask("scancel", number)
    parts = "TimeLimit=1-12:00:00 NumNodes=2 CPUs/Task=3 MinMemoryNode=1G OverSubscribe=OK MailUser=a@b.c "
    parts += f"MailType=END,FAIL /here-{number}.log TresPerNode=gres:gpu:2 Requeue=0"
    assert [part for part in parts.split() if part not in shown] == []
