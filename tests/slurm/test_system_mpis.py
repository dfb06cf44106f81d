"""The MPI libraries of the distribution, once each: loaded by mpi4py from PyPI, which needs to be told which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.bed.slurm import Slurm
from support.jobs.clusters import CLIENT, facts, workers_of
from support.mocks.gpus import driver_folder

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
SCRIPT = (
    CLIENT
    + """
from mpi4py import MPI
tell(
    library=MPI.Get_library_version(),
    doubled=client.gather(client.map(lambda x: 2 * x, range(32))),
    workers=looks(client),
)
"""
)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.parametrize(
    ("abi", "library", "says"),
    # mpi4py's wheel wants the name that MPICH itself gives its library, the distribution gives another
    [
        ("openmpi", "libmpi.so.40", "Open MPI v4."),
        ("mpich", "libmpich.so.12 as libmpi.so.12", "MPICH Version:\t4."),
    ],
    ids=["openmpi", "mpich"],
)
def test_the_distributions_mpi(
    slurm: Slurm, tmp_path: Path, launcher: str, abi: str, library: str, says: str
) -> None:
    file, _, name = library.partition(" as ")
    mpirun = Path(f"/usr/bin/mpirun.{abi}")
    if not mpirun.exists() or not (LIBRARIES / file).exists():
        pytest.skip(f"the distribution's {abi} is not installed (ci/slurm.sh installs it)")
    here = tmp_path / (name or file)
    here.symlink_to(LIBRARIES / file)
    job = slurm.run(
        SCRIPT,
        *("--nodes=2", "--ntasks-per-node=1", "--mem=2000", "--exclusive=user"),
        name="slurm.sbatch" if launcher == "srun" else "slurm-mpirun.sbatch",
        asked=("--gpus-per-node=2",),
        env={
            "MPI4PY_MPIABI": abi,
            "MPI4PY_LIBMPI": str(here),
            "LD_LIBRARY_PATH": f"{tmp_path}:{driver_folder()}",
            "DGM_LAUNCHER": str(mpirun),
        },
    )
    told = facts(job.wait().check().output)
    assert told["library"].startswith(says)
    assert told["doubled"] == [2 * x for x in range(32)]
    rows = workers_of(told)
    assert sorted(rows) == ["0-0", "0-1", "1-0", "1-1"]
    given = {slurm.gpus[host][place].uuid: host for host, places in job.gpus.items() for place in places}
    assert {row["visible"]: row["host"] for row in rows.values()} == given
    assert all(row["identity"] == [] for row in rows.values()), rows


def test_the_end_of_the_mpi_of_the_script_itself(tmp_path: Path) -> None:
    """The other rank does not wait for a message: MPICH 4's MPI_Finalize over UCX has a way of its own in MPI's child."""
    mpirun = Path("/usr/bin/mpirun.mpich")
    if not mpirun.exists() or not (LIBRARIES / "libmpich.so.12").exists():
        pytest.skip("the distribution's mpich is not installed (ci/slurm.sh installs it)")
    library = tmp_path / "libmpi.so.12"
    library.symlink_to(LIBRARIES / "libmpich.so.12")
    program = """
from mpi4py import MPI
from dask_gpu_mpi import initialize
session = initialize(worker_class="distributed.Worker", dashboard=False)
MPI.Finalize()
print("closed" if session.closed else "open", session.mpi_library.partition("\\n")[0])
"""
    done = subprocess.run(
        [mpirun, "-n", "2", sys.executable, "-c", program],
        env={
            **os.environ,
            "MPI4PY_MPIABI": "mpich",
            "MPI4PY_LIBMPI": str(library),
            "LD_LIBRARY_PATH": str(tmp_path),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("closed MPICH Version:\t4."), done.stdout
