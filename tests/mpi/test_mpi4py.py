"""MPI that the script begins or ends itself, or has mpi4py leave alone."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from dask_gpu_mpi.mpi.library import NETWORKS
from support.jobs.clusters import foreign_lines
from support.jobs.mpi import Mpi

pytestmark = pytest.mark.both_mpis

HEAD = "import mpi4py\nfrom dask_gpu_mpi import initialize\n"


@pytest.mark.parametrize(
    ("before", "size"),
    [
        # the ranks meet by the script's MPI; most of them never come back from initialize() to finalize it
        ("mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init_thread()", 2),
        # a rank is no MPI process, and what the script imports later is a world of one
        ("mpi4py.rc.finalize = False", 1),
        ("", 1),
    ],
    ids=["begun", "not ended", "imported later"],
)
def test_a_script_that_looks_after_mpi_itself(mpirun: Mpi, before: str, size: int) -> None:
    program = HEAD + before + "\ninitialize()\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size)\n"
    done = mpirun.run(program, 2).check()
    assert done.stdout == f"{size}\n"
    assert foreign_lines(done.stderr) == []


@pytest.mark.parametrize(
    "before",
    [
        "mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI",
        "mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init()",
    ],
    ids=["serialized", "single"],
)
def test_mpi_of_the_script_without_threads(mpirun: Mpi, before: str) -> None:
    """It is used in the main thread alone, and only until the ranks have met."""
    program = (
        HEAD
        + before
        + "\ninitialize(client_rank=1)\nprint('level', MPI.Query_thread(), MPI.COMM_WORLD.size)\n"
    )
    program += "from distributed import Client\nwith Client() as client:\n    print(client.submit(abs, -3).result())\n"
    done = mpirun.run(program, 2).check()
    level, _, answer = done.stdout.partition("\n")
    assert level.split()[2] == "2"
    assert answer == "3\n"
    assert foreign_lines(done.stderr) == []


@pytest.mark.quick
def test_mpi_that_has_ended(mpirun: Mpi) -> None:
    done = mpirun.run(HEAD + "from mpi4py import MPI\nMPI.Finalize()\ninitialize()\n", 2).check(2)
    assert "called MPI.Finalize() before initialize()" in done.refusal
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
    done = mpirun.run(program, 2).check()
    assert done.stdout == "ended after 0 s\n"
    assert foreign_lines(done.stderr) == []


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
    done = mpirun.run(program, 3).check()
    assert done.stdout == f"{[(False, 3)] * 3} ended after 0 s\n"
    assert foreign_lines(done.stderr) == []


def test_a_rank_that_fails_in_a_program_that_continues(mpirun: Mpi) -> None:
    """Its launcher may not end the others, which wait for it in MPI."""
    program = """
        from dask_gpu_mpi import initialize

        session = initialize(exit=False, worker_class="distributed.Worker", dashboard=False)
        if session:
            session.close()
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            raise ValueError('of rank 1')
        MPI.COMM_WORLD.Barrier()
    """
    done = mpirun.run(program, 2).check(1)
    assert (
        "rank 1 of 2 has failed (exit code 1), and other ranks may wait for it in MPI; aborting the job"
        in done.stderr
    )


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
