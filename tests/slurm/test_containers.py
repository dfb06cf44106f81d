"""A job whose containers srun starts, with a mock of Pyxis in front of a real srun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.bed.slurm import Slurm
from support.jobs.clusters import CLIENT, facts
from support.mocks.containers import mock_pyxis, recorded

IMAGE = "nvcr.io/nvidia/rapidsai/base:26.10"
SCRIPT = (
    CLIENT
    + """
names = ("IN_CONTAINER", "SLURMD_NODENAME", "NVIDIA_VISIBLE_DEVICES")
tell(where=sorted(client.run(lambda: [os.environ.get(name) for name in names]).values()), cwd=os.getcwd())
"""
)


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
