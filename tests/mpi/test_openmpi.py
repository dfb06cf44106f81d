"""Open MPI's component that costs a second in ``MPI_Init``: left out, unless it can be used or somebody wants it."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from dask_gpu_mpi.mpi.openmpi import NETWORKS
from support.jobs.mpi import Mpi

VARIABLE = "OMPI_MCA_btl"
SCRIPT = f"""
import os
from dask_gpu_mpi import initialize
initialize()
print("left behind:", os.environ.get("{VARIABLE}"))
"""
#: Open MPI's own word about every component that it opens.
OPENED = "found loaded component ofi"


@pytest.mark.quick(chosen=None)
@pytest.mark.parametrize("chosen", [None, "self,sm,ofi"])
def test_component_is_opened_only_where_it_is_wanted(mpirun: Mpi, tmp_path: Path, chosen: str | None) -> None:
    if mpirun.name != "openmpi":
        pytest.skip("Open MPI's component; with MPICH there is nothing to leave out")
    if any(map(glob.glob, NETWORKS)):
        pytest.skip(
            "this host has a network that libfabric drives; tests/pure/mpi/test_openmpi.py covers that"
        )
    # HOME: the settings of whoever runs the tests are not these
    env = {"OMPI_MCA_btl_base_verbose": "100", "OMPI_MCA_pml": None, "HOME": str(tmp_path), VARIABLE: chosen}
    done = mpirun.run(SCRIPT, 2, env=env).check()
    assert done.stdout == f"left behind: {chosen}\n"
    assert (OPENED in done.stderr) == (chosen is not None)
