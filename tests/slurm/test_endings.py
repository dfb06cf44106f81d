"""How jobs end: what Slurm then says of them, and that nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from support.bed.slurm import NAMES, RUNS, TWO, BatchJob, Slurm, wait_all
from support.jobs.clusters import CLIENT, facts, parent
from support.jobs.mpi import Mpi

WAITS = CLIENT + "print('the script runs', flush=True)\ntime.sleep(600)\n"
#: The second run finds what the first has written, and ends.
CHECKPOINTS = """
from support.jobs.scripts.client import client, tell
from pathlib import Path
from dask_gpu_mpi import current_session

state, session = Path("checkpoint"), current_session()
if state.exists():
    tell(found=state.read_text(), restarts=os.environ.get("SLURM_RESTART_COUNT"), answer=client.submit(sum, [1, 2]).result())
    sys.exit(0)

def write():
    # the cluster still works
    state.write_text(str(client.submit(sum, range(10)).result()))

session.on_walltime(write, before=BEFORE)
print("the script runs", flush=True)
while True:
    time.sleep(0.05)
"""
#: A host is left to the job that runs out of time.
SMALL = ("--nodes=1", *TWO[1:])


@pytest.fixture(scope="module")
def timed(open_slurm: Slurm) -> Iterator[dict[str, BatchJob]]:
    """Jobs that run out of their minute while the other tests of this module run, by job script."""
    options = (*SMALL[:-1], "--nodelist=h3", "--exclusive=user", "--time=1")
    jobs = {name: open_slurm.run(WAITS, *options, name=name) for name in NAMES}
    for job in jobs.values():
        open_slurm.jobs.remove(job)
    yield jobs
    for job in jobs.values():
        job.close()


@pytest.fixture(autouse=True)
def _early(timed: dict[str, BatchJob]) -> None:
    """Started before the first test."""


@pytest.mark.parametrize(
    ("either", "name"), [("open", "slurm.sbatch"), ("cgroups", "slurm-mpirun.sbatch")], indirect=["either"]
)
def test_scancel(either: Slurm, detected_mpi: Mpi, name: str) -> None:
    job = either.run(WAITS, *TWO, name=name, at=RUNS)
    either.ask("scancel", job.number)
    # On the other hosts Slurm tells Open MPI's daemon alone; it ends at once, and then Slurm kills what is below it.
    killed = either.cgroups and detected_mpi.name == "openmpi"
    ended = job.wait(30, allowed=r"dgm-|sem\.mp-" if killed else "^$")
    assert ended.state == "CANCELLED"
    assert "Traceback" not in ended.output


@pytest.mark.both_mpis
@pytest.mark.parametrize("name", NAMES)
def test_programs_that_the_script_leaves_behind(slurm: Slurm, name: str) -> None:
    """Slurm ends some at once with the step, and the job the others."""
    text = "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\nsys.exit(0)\n"
    ended = slurm.run(CLIENT + text, *TWO, name=name).wait(60)
    assert ended.state == "COMPLETED"


@pytest.mark.both_mpis
def test_scancel_of_the_batch_script_alone(slurm: Slurm) -> None:
    """The ranks get nothing from Slurm; the launcher is then ended by `launch`."""
    job = slurm.run(WAITS, *TWO, at=RUNS)
    slurm.ask("scancel", "--batch", "--signal=TERM", job.number)
    ended = job.wait(75, allowed=r"mpich_shm_|dgm-|sem\.mp-")
    assert "SIGTERM received; ending the job" in ended.output
    assert "the ranks have not ended after 35 s; the launcher gets SIGTERM" in ended.output
    assert ended.state in ("FAILED", "CANCELLED")


@pytest.mark.parametrize("name", NAMES)
def test_scancel_of_a_script_that_writes_checkpoints(slurm: Slurm, name: str) -> None:
    # TERM asks for the checkpoint, and the ranks end with 75; the user wants no second run
    script = CHECKPOINTS.replace("BEFORE", "1")
    job = slurm.run(script, *SMALL, name=name, at=RUNS)
    slurm.ask("scancel", job.number)
    ended = job.wait(30)
    # nothing of it is left: who would requeue it has done so
    assert (ended.state, job.show()["JobState"]) == ("CANCELLED", "CANCELLED")
    # of Open MPI's daemons some die of scancel
    assert ended.code == 75 or name != "slurm.sbatch"
    assert "Traceback" not in ended.output


@pytest.mark.both_mpis
def test_a_launcher_that_does_not_belong_to_the_mpi(slurm: Slurm, detected_mpi: Mpi) -> None:
    job = slurm.run(CLIENT + "print('the script runs')\n", *TWO, env={"DGM_MPI": "none"})
    # Open MPI 5 leaves these of every process without a launcher, however it ends
    ended = job.wait(allowed=r"ompi\.|sm_segment\.").check("FAILED", 2)
    assert "the script runs" not in ended.output
    remedy = {"openmpi": "use srun --mpi=pmix", "mpich": "use srun --mpi=pmi2"}[detected_mpi.name]
    errors = [line for line in ended.output.splitlines() if line.startswith("dask_gpu_mpi: error:")]
    # ranks that do not know of each other: one speaks, or one on each host
    assert 1 <= len(errors) <= 2
    assert all("launcher and MPI library do not match" in line and remedy in line for line in errors), errors


@pytest.mark.parametrize("name", NAMES)
def test_requeued_after_a_checkpoint(slurm: Slurm, name: str) -> None:
    # before the time limit, which is a minute: with less than 57 seconds left, the callback
    script = {before: CHECKPOINTS.replace("BEFORE", before) for before in ("1", "57")}
    options = ("--exclusive=user", "--time=1")
    limited = slurm.run(script["57"], *SMALL, *options, name=name)
    # and beside it one that is asked to by a signal: srun passes it to the ranks, mpirun from the batch script's trap
    usr1 = {"DASK_GPU_MPI__WALLTIME_SIGNAL": "USR1"}
    asked = slurm.run(script["1"], *TWO, "--exclusive=user", name=name, env=usr1, at=RUNS)
    slurm.ask("scancel", *(() if name == "slurm.sbatch" else ("--batch",)), "-s", "USR1", asked.number)
    for job in (limited, asked):
        job.start_again()
    wait_all([limited, asked])
    for job in (limited, asked):
        ended = job.wait().check()
        assert facts(ended.output) == {"found": "45", "restarts": "1", "answer": 3}
        assert "Traceback" not in ended.output


@pytest.mark.both_mpis
@pytest.mark.parametrize(("rank", "name"), [*enumerate(NAMES)])
def test_a_rank_is_killed(slurm: Slurm, rank: int, name: str) -> None:
    # the client's rank, or one without it; slurm.sbatch has Slurm wait half a minute for what is left
    job = slurm.run(WAITS, *TWO, name=name, at=RUNS)
    os.kill(job.ranks()[rank], signal.SIGKILL)
    # MPICH's library leaves its shared memory when killed; who is killed by srun can't clean up
    ended = job.wait(allowed=r"mpich_shm_|dgm-|sem\.mp-" if name == "slurm.sbatch" else "mpich_shm_")
    assert ended.state == "FAILED"
    assert ended.code != 0
    assert ended.output.count("the script runs") == 1


@pytest.mark.both_mpis
def test_a_daemon_of_mpirun_is_killed(slurm: Slurm, detected_mpi: Mpi) -> None:
    # as when a host is lost; Open MPI's mpirun then ends with code 0
    jobs = [
        slurm.run(WAITS, *TWO, "--exclusive=user", name="slurm-mpirun.sbatch", env={"DGM_RESTARTS": "0"})
        for _ in range(2)
    ]
    for job in jobs:
        job.wait_for("the script runs")
    os.kill(parent(jobs[0].ranks()[1]), signal.SIGKILL)
    # without --batch it goes to the daemons: Open MPI's die of it, MPICH's pass it on to the script, which it ends
    slurm.ask("scancel", "-s", "USR1", jobs[1].number)
    wait_all(jobs)
    for job in jobs:
        ended = job.wait(allowed=r"mpich_shm_|dgm-|sem\.mp-|prte")
        assert ended.state == "FAILED"
        assert ended.code != 0
        assert detected_mpi.name != "openmpi" or ended.output.count("but the job has not completed") == 1


def test_one_member_of_an_array_is_requeued(slurm: Slurm) -> None:
    waits = """
from pathlib import Path
restarts = os.environ.get("SLURM_RESTART_COUNT")
if os.environ["SLURM_ARRAY_TASK_ID"] == "0":
    print("member 0 runs", flush=True)
    while not Path("done").exists():
        time.sleep(0.1)
    print("member 0 ends, restarts", restarts)
    sys.exit(0)
if Path("checkpoint").exists():
    print("member 1 ends, restarts", restarts)
    Path("done").touch()
    sys.exit(0)
from dask_gpu_mpi import current_session
current_session().on_walltime(Path("checkpoint").touch, before=1)
print("member 1 runs", flush=True)
while True:
    time.sleep(0.05)
"""
    job = slurm.run(CLIENT + waits, *SMALL, "--array=0-1", env={"DASK_GPU_MPI__WALLTIME_SIGNAL": "USR1"})
    # Slurm gives the number of the whole array to its last member
    other, last = job.members(2)
    last.wait_for("member 1 runs")
    other.wait_for("member 0 runs")
    slurm.ask("scancel", "-s", "USR1", last.number)
    last.start_again()
    assert other.show()["JobState"] == "RUNNING"
    other.wait_for("member 0 ends, restarts None")
    ended = other.wait().check()
    last.wait().check()
    assert ended.output.count("member 1 ends, restarts 1") == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_time_limit(timed: dict[str, BatchJob], name: str) -> None:
    # Slurm looks every half minute, and kills after KillWait
    ended = timed[name].wait(60 + 30 + 30)
    assert ended.state == "TIMEOUT"
    assert ended.output.count("the script runs") == 1
    assert "Traceback" not in ended.output
