"""The job scripts of computing centres under a Slurm with their partitions and types of GPUs, which refuses what they refuse."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.bed.slurm import Slurm, new_slurm
from support.jobs.clusters import LOOKS, facts, workers_of
from support.mocks import inputs
from support.sites import ROWS, Row

#: The first two hosts have 4 GPUs of each type.
CENTRE = {
    "CPUS": "384",
    "MEMORY": "1000000",
    "TYPES": "a100 h100 h200 gh200",
    "FEATURES": "gpu,nvme,a100",
    "RULES": str(Path(__file__).parent / "rules"),
}
command = partial(inputs.command, "jobscript")


@pytest.fixture(scope="module")
def centre() -> Iterator[Slurm]:
    with new_slurm(cgroups=False, env=CENTRE) as slurm:
        yield slurm


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer_of(slurm: Slurm, words: str, here: Path) -> tuple[int, str]:
    """The exit code of ``sbatch --test-only``, and its answer."""
    (here / "job").write_text(command(*shlex.split(words), "-t", "60", "--", "my.py"))
    line = slurm.bed.on("h1", ["sbatch", "--test-only", str(here / "job")])
    env = {**os.environ, "SLURM_CONF": str(slurm.conf)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("row", [row for row in ROWS if row.system == "slurm"], ids=lambda row: row.name)
def test_sbatch_accepts_the_script(centre: Slurm, here: Path, row: Row) -> None:
    code, answer = answer_of(centre, row.words, here)
    assert code == 0, answer
    assert "to start at" in answer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("slurm -N 2 --gpus-per-node 1 -p gh", "gh: --mem, --gres and --gpus-per-task are not available"),
        ("slurm -N 1 --gpus-per-node 2 -p zen4_h200", "zen4_h200: --mem is not allowed"),
        ("slurm -N 1 --gpus-per-node 2 -p zen4_h200 --shared --cpus-per-node 8", "24 cores for each GPU"),
        ("slurm -N 2 --gpus-per-node 4 -p gpu --qos gpu-exc", "gpu: tasks and memory follow from the GPUs"),
        ("slurm -N 2 --gpus-per-node v100:4", "Requested node configuration is not available"),
    ],
)
def test_rules_refuse_a_script_without_the_site(centre: Slurm, here: Path, words: str, message: str) -> None:
    code, answer = answer_of(centre, words, here)
    assert code
    assert message in answer


def test_number_of_gpus_on_nodes_of_slurms_choice(slurm: Slurm, here: Path) -> None:
    """More than any host has (4, 4 and 2), so that the nodes have different numbers."""
    (here / "script.py").touch()
    words = ("slurm", "--gpus", "9", "--shared", "--cpus-per-gpu", "1", "--mem", "1G", "-t", "5")
    job = slurm.submit(command(*words, "--", "script.py"), files={"script.py": LOOKS})
    rows = workers_of(facts(job.wait().check().output))
    assert len(rows) == 9
    assert len({row["host"] for row in rows.values()}) == 3
