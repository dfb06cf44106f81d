"""MPI that the script begins or ends itself, or has mpi4py leave alone."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from dask_gpu_mpi.mpi.openmpi import NETWORKS
from support.jobs.clusters import foreign_lines
from support.jobs.mpi import Mpi

pytestmark = pytest.mark.both_mpis

HEAD = "import mpi4py\nfrom dask_gpu_mpi import initialize\n"


@pytest.mark.parametrize(
    "before",
    [
        # most ranks never come back from initialize() to finalize it
        "mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init_thread()",
        "mpi4py.rc.finalize = False",
    ],
)
def test_a_script_that_looks_after_mpi_itself(mpirun: Mpi, before: str) -> None:
    program = HEAD + before + "\ninitialize()\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size)\n"
    done = mpirun.run(program, 2).check()
    assert done.stdout == "2\n"
    assert foreign_lines(done.stderr) == []


@pytest.mark.parametrize(
    ("before", "level"),
    [
        ("mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI", "SERIALIZED"),
        ("mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init()", "SINGLE"),
    ],
)
def test_mpi_without_threads(mpirun: Mpi, before: str, level: str) -> None:
    """The script's rank would hear nothing of the others: a lost scheduler, for example, and the job would never end."""
    done = mpirun.run(HEAD + before + "\ninitialize(client_rank=1)\nprint('here')\n", 2, timeout=40).check(2)
    assert f"MPI was initialized with MPI_THREAD_{level} (expected MPI_THREAD_MULTIPLE" in done.refusal
    assert "Fix: MPI.Init_thread() instead of MPI.Init()" in done.refusal
    assert done.stderr.count("dask_gpu_mpi: ") == 1
    assert "here" not in done.stdout


def test_one_rank_needs_no_threads_of_mpi(mpirun: Mpi) -> None:
    program = HEAD + "mpi4py.rc.threads = False\ninitialize()\nprint('here')\n"
    assert mpirun.run(program, 1).check().stdout == "here\n"


@pytest.mark.quick("mpich")
def test_mpi_that_has_ended(mpirun: Mpi) -> None:
    done = mpirun.run(HEAD + "from mpi4py import MPI\nMPI.Finalize()\ninitialize()\n", 2, timeout=30).check(2)
    assert "called MPI.Finalize() before initialize()" in done.refusal
    assert done.stderr.count("dask_gpu_mpi: ") == 1


def test_a_second_cluster_that_the_end_of_mpi_ends(mpirun: Mpi) -> None:
    program = """
        import time
        from dask_gpu_mpi import initialize

        def cluster():
            return initialize(exit=False, worker_class="distributed.Worker", dashboard=False)

        if session := cluster():
            session.close()
        session = cluster()
        from mpi4py import MPI
        since = time.monotonic()
        MPI.Finalize()
        if session:
            print("closed" if session.closed else "open", "after", int((time.monotonic() - since) / 15) * 15, "s")
    """
    done = mpirun.run(program, 2, timeout=60).check()
    assert done.stdout == "closed after 0 s\n"
    assert foreign_lines(done.stderr) == []


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


# -- messages between ranks that nobody waits for: MPI does not end before all have been received


LEAVES = """
    import atexit, os, sys, time
    from dask_gpu_mpi.mpi.library import load_mpi
    from dask_gpu_mpi.mpi.mailbox import Mailbox

    def look(*_):
        word = "messages are" if any(box._comm.iprobe() for _ in range(1000)) else "nothing is"
        print(f"rank {box.rank}: {word} left\\n", end="", flush=True)

    MPI = load_mpi()
    if HOW == "sys.exit":  # what is registered last runs first
        atexit.register(look)
    else:
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=look), None)
    box = Mailbox(MPI.COMM_WORLD, "host", time.monotonic() + 60, {"of others": bytes, "of rank 0": None})
    for _ in range(20):
        if box.rank:
            box.send(0, "of others", bytes(1 << 16))
        else:
            box.send_all("of rank 0")
    if os.fork() == 0:
        box.close()  # is not this process's to do
        os._exit(0)
    os.wait()
    if box.rank == 2:
        time.sleep(0.5)  # the others leave first
    HOW()
"""


@pytest.mark.quick(how="sys.exit")
@pytest.mark.parametrize("how", ["sys.exit", "MPI.Finalize"])
def test_all_are_received_before_mpi_ends(mpirun: Mpi, how: str) -> None:
    program = LEAVES.replace("HOW ==", f"{how!r} ==").replace("HOW()", f"{how}()")
    done = mpirun.run(program, 3, timeout=30).check()
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: nothing is left" for rank in range(3)]
