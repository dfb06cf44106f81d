"""A job whose containers srun starts, with a mock of Pyxis in front of a real srun."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from support.bed.slurm import Slurm
from support.jobs.clusters import facts
from support.mocks.containers import mock_pyxis, recorded

IMAGE = "nvcr.io/nvidia/rapidsai/base:26.10"
SCRIPT = """
from support.jobs.scripts.client import client, tell
names = ("IN_CONTAINER", "SLURMD_NODENAME", "NVIDIA_VISIBLE_DEVICES")
tell(where=sorted(client.run(lambda: [os.environ.get(name) for name in names]).values()), cwd=os.getcwd())
"""


def test_srun_gets_the_image(slurm: Slurm, tmp_path: Path) -> None:
    record = mock_pyxis(tmp_path, IMAGE)
    job = slurm.run(
        SCRIPT,
        *("--nodes=2", "--mem=2000", "--exclude=h3"),
        args=["--container-mount=/usr:/mnt:ro"],
        env={"DGM_CONTAINER": IMAGE, "PATH": f"{tmp_path}:{sys.prefix}/bin:{os.environ['PATH']}"},
    )
    told = facts(job.wait().check().output)
    assert told["where"] == [["pyxis", host, "all"] for host in ("h1", "h2")]
    assert told["cwd"] == str(job.directory)
    folders = [f"{path}:{path}" for path in ("/tmp", job.directory, job.directory / "logs")]
    for words in recorded(record):
        assert f"--container-image={IMAGE}" in words
        assert f"--container-workdir={job.directory}" in words
        (mounts,) = (word for word in words if word.startswith("--container-mounts="))
        assert mounts.split("=")[1].split(",")[:3] == ["/usr:/mnt:ro", *folders[:2]]
    assert "--mpi=none" in recorded(record)[0]  # what asks for the MPI library
    assert mounts.endswith(folders[-1])
    assert len(recorded(record)) == 2


def test_image_by_an_option_of_srun(slurm: Slurm, tmp_path: Path) -> None:
    """As at CSCS: here srun has that option by a script, and the image's Python is the one in PATH."""
    (tmp_path / "srun").write_text(
        f'#!/bin/bash\nfor word; do shift; [[ $word == --environment=* ]] && echo "$word" >> {tmp_path}/record '
        f'|| set -- "$@" "$word"; done\nexec {shutil.which("srun")} "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "image.toml").touch()
    job = slurm.run(
        SCRIPT,
        *("--nodes=2", "--mem=2000", "--exclude=h3"),
        args=[f"--container={tmp_path}/image.toml"],
        env={"PATH": f"{tmp_path}:{sys.prefix}/bin:{os.environ['PATH']}"},
    )
    told = facts(job.wait().check().output)
    assert [host for _, host, _ in told["where"]] == ["h1", "h2"]
    assert told["cwd"] == str(job.directory)
    # for the MPI library, and for the ranks
    assert (tmp_path / "record").read_text() == f"--environment={tmp_path}/image.toml\n" * 2
