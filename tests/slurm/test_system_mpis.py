"""The MPI libraries of the distribution, once each: loaded by mpi4py from PyPI, which needs to be told which."""

from __future__ import annotations

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
