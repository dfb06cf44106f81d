"""The harness itself: real jobs, their output, their end, and what they leave behind."""

from __future__ import annotations

import pytest

from support.jobs.mpi import JobTimeout, LeakedProcesses, Mpi

BOTH_ASLEEP = r"asleep(.|\n)*asleep"  # MPICH may print two ranks' words on one line


def test_timeout_tells_where_and_kills_all(mpirun: Mpi) -> None:
    job = mpirun.start("import time\ndef nap():\n    time.sleep(600)\nprint('asleep', flush=True)\nnap()", 2)
    job.wait_for(BOTH_ASLEEP)
    with pytest.raises(JobTimeout, match="in nap"):
        job.wait(0.1)
    assert not job.processes()


def test_leak_is_found_and_ended(mpirun: Mpi) -> None:
    # a new session, no inherited files: nothing ties the process to the job but its environment
    program = """
        import subprocess
        quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)
    """
    job = mpirun.start(program, None)
    with pytest.raises(LeakedProcesses, match="sleep 600"):
        job.wait(grace=0.1)
    assert not job.processes()
