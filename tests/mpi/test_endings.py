"""Ends that once went wrong: each a script, its exit code, and how long the job may go on after its last line."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs.clusters import COMMAND
from support.jobs.mpi import Mpi

HEAD = """
import os, sys, time
from distributed import Client
client = Client()
"""


@pytest.mark.parametrize(
    ("body", "layout", "ranks", "rc", "says"),
    [
        # rank 0 once took the client rank, which was busy with its script, for one that does not answer
        pytest.param(
            "client.shutdown(); time.sleep(8); print('end')", "exclusive", 3, 0, "end", id="shutdown"
        ),
        # only rank 0 was told that the scheduler was lost, and the script ran on
        pytest.param(
            "os.kill(client.run_on_scheduler(os.getpid), 9); time.sleep(60); print('too late')",
            "exclusive",
            3,
            1,
            "the cluster is lost",
            id="scheduler lost",
        ),
        # forked children held the agent's lifeline open until the shutdown deadline
        pytest.param(
            "import multiprocessing as mp; pool = mp.get_context('fork').Pool(2); print(pool.map(abs, [-3]))",
            "shared",
            2,
            0,
            "[3]",
            id="forked children",
            marks=pytest.mark.quick,
        ),
    ],
)
def test_the_job_ends(
    mpirun: Mpi, tmp_path: Path, body: str, layout: str, ranks: int, rc: int, says: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + body + "\n")
    program = [*COMMAND, "--layout", layout, str(script)]
    done = mpirun.run(program, ranks, timeout=60, cwd=tmp_path).check(rc)
    assert says in done.output
    assert "too late" not in done.output
    assert "did not answer" not in done.output


@pytest.mark.one_mpi
def test_what_was_printed_before_an_abort_arrives(mpirun: Mpi) -> None:
    """MPICH's launcher loses one such report in ten without the wait that tests/pure/base/test_frames.py looks at."""
    program = """
        import sys, time
        from dask_gpu_mpi.mpi.library import abort, load_mpi

        if load_mpi().COMM_WORLD.rank:
            time.sleep(60)
        print("the report", flush=True)
        print("and why", file=sys.stderr, flush=True)
        abort(3)
    """
    for _ in range(12):
        done = mpirun.run(program, 2, timeout=30).check(3)
        assert done.stdout == "the report\n"
        assert "and why\n" in done.stderr
