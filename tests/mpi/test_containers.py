"""Jobs whose ranks run in containers: with mocks of the runtimes, and in podman-hpc itself on a machine that has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from support import ROOT
from support.jobs.clusters import COMMAND, facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import expanded
from support.mocks.containers import RUNTIMES, mock_runtime, recorded

SCRIPT = """
from support.jobs.scripts.client import client, tell
where = client.run(lambda: os.environ.get("IN_CONTAINER", ""))
tell(where=sorted(where.values()), argv=sys.argv[1:], cwd=os.getcwd(), other=os.environ.get("OTHER"))
sys.exit(7)
"""
#: podman-hpc would take the first two for its own, and so would a careless launcher.
WORDS = ("--help", "--gpu", "a b")


@pytest.mark.parametrize("name", RUNTIMES)
def test_job_in_a_container(mpirun: Mpi, tmp_path: Path, name: str) -> None:
    image = "image.sif" if name == "apptainer" else "registry/image:1"
    (tmp_path / "image.sif").touch()
    (tmp_path / "analysis.py").write_text(expanded(SCRIPT))
    record = mock_runtime(tmp_path, name, image, str(ROOT))
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "OTHER": "x",
        "DASK_GPU_MPI__INTERFACE": "lo",
        "OMPI_ALLOW_RUN_AS_ROOT": None,
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": None,
    }
    options = ["--container", image, "--container-mount=/usr:/mnt:ro"]
    line = [*COMMAND, "launch", "-n", "2", *options, "analysis.py", *WORDS]
    done = mpirun.run(line, None, env=env, cwd=tmp_path).check(7)
    told = facts(done)
    assert told["where"] == [name, name]
    assert told["argv"] == [*WORDS]
    assert told["cwd"] == str(tmp_path)
    assert told["other"] == (None if name == "podman-hpc" else "x")
    lines = recorded(record)
    # what asks for the MPI library, unless `launch` itself starts the ranks, and two ranks
    assert len(lines) == (2 if name == "apptainer" else 3)
    option = "--bind=" if "exec" in lines[0] else "--volume="
    for words in lines:
        assert f"{option}/usr:/mnt:ro" in words
        assert (f"{option}{tmp_path}:{tmp_path}" in words) == (name != "shifter")


@pytest.mark.skipif(shutil.which("podman-hpc") is None, reason="no podman-hpc")
def test_job_in_podman_hpc(mpirun: Mpi, tmp_path: Path) -> None:
    """An image with nothing in it but names: programs and libraries are the node's, mounted by `--container-mount`."""
    root, image = tmp_path / "root", "localhost/dask-gpu-mpi-test:1"
    for folder in ("usr", "etc", "proc", "sys", "dev", "tmp"):
        (root / folder).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    with tarfile.open(tmp_path / "root.tar", "w") as archive:
        archive.add(root, ".")
    variables = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "IN_CONTAINER": "podman-hpc",
    }
    changes = [f"--change=ENV {name}={value}" for name, value in variables.items()]
    made = ["podman-hpc", "import", *changes, str(tmp_path / "root.tar"), image]
    subprocess.run(made, check=True, timeout=60, capture_output=True)
    (tmp_path / "analysis.py").write_text(expanded(SCRIPT))
    mounts = {"/usr", "/etc", os.path.realpath(sys.prefix), sys.prefix, sys.base_prefix, str(ROOT)}
    options = [f"--container-mount={path}" for path in sorted(mounts)]
    line = [*COMMAND, "launch", "-n", "2", "--interface", "lo", "--container", image, *options, "analysis.py"]
    done = mpirun.run([*line, *WORDS], None, env={"OTHER": "x"}, cwd=tmp_path, timeout=170).check(7)
    told = facts(done)
    assert told["where"] == ["podman-hpc"] * 2
    assert (told["argv"], told["cwd"], told["other"]) == ([*WORDS], str(tmp_path), None)
