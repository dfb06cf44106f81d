"""Messages between ranks that nobody waits for: MPI does not end before all have been received."""

from __future__ import annotations

import pytest

from support.jobs.mpi import Mpi

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
