"""MPI that the script begins or ends itself, or has mpi4py leave alone."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from dask_gpu_mpi.mpi.library import NETWORKS
from support.jobs.mpi import Mpi

pytestmark = pytest.mark.both_mpis

HEAD = "import mpi4py\nfrom dask_gpu_mpi import initialize\n"


@pytest.mark.parametrize(
    ("before", "size"),
    [
        # the ranks meet by the script's MPI; most of them never come back from initialize() to finalize it
        ("mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init_thread()", 2),
        # without threads: it is used in the main thread alone, and only until the ranks have met
        ("mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI", 2),
        ("mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init()", 2),
        # a rank is no MPI process, and what the script imports later is a world of one
        ("mpi4py.rc.finalize = False", 1),
        ("", 1),
    ],
    ids=["begun", "serialized", "single", "not ended", "imported later"],
)
def test_a_script_that_looks_after_mpi_itself(mpirun: Mpi, before: str, size: int) -> None:
    program = (
        f"{HEAD}{before}\ninitialize(client_rank=1)\nfrom mpi4py import MPI\nfrom distributed import Client\n"
    )
    program += "print(MPI.COMM_WORLD.size, Client().submit(abs, -3).result())\n"
    assert mpirun.run(program, 2).clean().stdout == f"{size} 3\n"


@pytest.mark.quick
def test_mpi_that_has_ended(mpirun: Mpi) -> None:
    done = mpirun.run(HEAD + "from mpi4py import MPI\nMPI.Finalize()\ninitialize()\n", 2)
    done.refused("called MPI.Finalize() before initialize()")
    assert done.stderr.count("dask_gpu_mpi: ") == 1


@pytest.mark.parametrize("options", ["", "exit=False, "], ids=["", "exit=False"])
def test_the_end_of_mpi_ends_the_cluster(mpirun: Mpi, options: str) -> None:
    """Else it would wait for ranks that wait for the end of the cluster."""
    program = f"""
        import time
        from mpi4py import MPI
        from dask_gpu_mpi import initialize

        session = initialize({options}worker_class="distributed.Worker", dashboard=False)
        since = time.monotonic()
        MPI.Finalize()
        if session:
            print("ended after", int((time.monotonic() - since) / 15) * 15, "s")
    """
    done = mpirun.run(program, 2).clean()
    assert done.stdout == "ended after 0 s\n"


def test_two_clusters_and_then_the_end_of_mpi(mpirun: Mpi) -> None:
    """MPI is the program's own again after each meeting: no message of ours is left in it, and it ends as it does without us."""
    program = """
        import time
        from dask_gpu_mpi import initialize

        for turn in range(2):
            session = initialize(exit=False, worker_class="distributed.Worker", dashboard=False)
            if session:
                session.close()
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        left = [world.iprobe() for _ in range(1000)]
        since = time.monotonic()
        found = world.gather((any(left), world.size))
        MPI.Finalize()
        if session:
            print(found, "ended after", int((time.monotonic() - since) / 15) * 15, "s")
    """
    done = mpirun.run(program, 3).clean()
    assert done.stdout == f"{[(False, 3)] * 3} ended after 0 s\n"


# -- open MPI's component that costs a second in ``MPI_Init``: left out, unless it can be used or somebody wants it


VARIABLE = "OMPI_MCA_btl"
SCRIPT = f"""
import os
from dask_gpu_mpi import initialize
initialize()
print("left behind:", os.environ.get("{VARIABLE}"))
"""
#: Open MPI's own word about every component that it opens.
OPENED = "found loaded component ofi"


@pytest.mark.of_mpi("openmpi")  # its component; with MPICH there is nothing to leave out
@pytest.mark.parametrize("chosen", [None, "self,sm,ofi"])
def test_component_is_opened_only_where_it_is_wanted(mpirun: Mpi, tmp_path: Path, chosen: str | None) -> None:
    if any(map(glob.glob, NETWORKS)):
        pytest.skip(
            "this host has a network that libfabric drives; tests/pure/mpi/test_openmpi.py covers that"
        )
    # HOME: the settings of whoever runs the tests are not these
    env = {"OMPI_MCA_btl_base_verbose": "100", "OMPI_MCA_pml": None, "HOME": str(tmp_path), VARIABLE: chosen}
    done = mpirun.run(SCRIPT, 2, env=env).check()
    assert done.stdout == f"left behind: {chosen}\n"
    assert (OPENED in done.stderr) == (chosen is not None)
