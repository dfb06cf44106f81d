"""The MPI libraries of the distribution, once each: loaded by mpi4py from PyPI, which needs to be told which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.bed.slurm import NAMES, Slurm
from support.jobs.clusters import LOOKS, facts, workers_of
from support.mocks.gpus import driver_folder

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
SCRIPT = LOOKS + (
    "from mpi4py import MPI\ntell(library=MPI.Get_library_version())\n"
    "tell(doubled=client.gather(client.map(lambda x: 2 * x, range(32))))\n"
)


def system_mpi(folder: Path, abi: str, library: str, name: str) -> tuple[str, dict[str, str]]:
    """The launcher, and what has mpi4py load the library, which has another name for it in this folder."""
    mpirun = Path(f"/usr/bin/mpirun.{abi}")
    if not mpirun.exists() or not (LIBRARIES / library).exists():
        pytest.skip(f"the distribution's {abi} is not installed (ci/slurm.sh installs it)")
    (folder / name).symlink_to(LIBRARIES / library)
    env = {"MPI4PY_MPIABI": abi, "MPI4PY_LIBMPI": str(folder / name), "LD_LIBRARY_PATH": str(folder)}
    return str(mpirun), env


@pytest.mark.parametrize("script", NAMES)
@pytest.mark.parametrize(
    ("abi", "library", "name", "says"),
    # mpi4py's wheel wants the name that MPICH itself gives its library, the distribution gives another
    [
        ("openmpi", "libmpi.so.40", "libmpi.so.40", "Open MPI v4."),
        ("mpich", "libmpich.so.12", "libmpi.so.12", "MPICH Version:\t4."),
    ],
    ids=["openmpi", "mpich"],
)
def test_the_distributions_mpi(
    slurm: Slurm, tmp_path: Path, script: str, abi: str, library: str, name: str, says: str
) -> None:
    mpirun, env = system_mpi(tmp_path, abi, library, name)
    options = ("--nodes=2", "--ntasks-per-node=1", "--mem=2000", "--exclusive=user")
    env |= {"LD_LIBRARY_PATH": f"{tmp_path}:{driver_folder()}", "DGM_LAUNCHER": mpirun}
    job = slurm.run(SCRIPT, *options, name=script, asked=("--gpus-per-node=2",), env=env)
    told = facts(job.wait().check().output)
    assert told["library"].startswith(says)
    assert told["doubled"] == [2 * x for x in range(32)]
    rows = workers_of(told)
    assert sorted(rows) == ["0-0", "0-1", "1-0", "1-1"]
    assert {row["visible"]: row["host"] for row in rows.values()} == job.given
    assert all(row["identity"] == [] for row in rows.values()), rows


def test_the_end_of_the_mpi_of_the_script_itself(tmp_path: Path) -> None:
    """The other rank does not wait for a message: MPICH 4's MPI_Finalize over UCX has a way of its own in MPI's child."""
    mpirun, env = system_mpi(tmp_path, "mpich", "libmpich.so.12", "libmpi.so.12")
    program = """
from mpi4py import MPI
from dask_gpu_mpi import initialize
session = initialize(worker_class="distributed.Worker", dashboard=False)
MPI.Finalize()
print("closed" if session.closed else "open", session.mpi_library.partition("\\n")[0])
"""
    line = [mpirun, "-n", "2", sys.executable, "-c", program]
    done = subprocess.run(
        line, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("closed MPICH Version:\t4."), done.stdout
