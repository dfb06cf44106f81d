"""Gang tasks: what a function finds in its group and environment, how gangs fail, and who is a member."""

from __future__ import annotations

import re

from support.jobs.clusters import TELL, facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.mocks.gpus import make_gpus


def test_group_and_environment(mpirun: Mpi) -> None:
    mpirun.run(script("mpi/scripts/group.py"), 2, command=[]).clean(3)


def test_failures(mpirun: Mpi) -> None:
    mpirun.run(script("mpi/scripts/gangs_that_fail.py"), 2, command=[]).check(3)


UNCAUGHT = """
from dask_gpu_mpi import current_session
def inner(group):
    return 1 // group.rank
current_session().spmd(inner)
"""


def test_uncaught_error_is_shown_with_the_members_traceback(mpirun: Mpi) -> None:
    done = mpirun.run(UNCAUGHT, 2, command=[]).check(1)
    assert done.stderr.count("ZeroDivisionError: integer division or modulo by zero\n") == 1
    # cloudpickle from 3.1.3 on takes the file's name out of functions, and with it Python's way to the source line
    assert re.search(r'File ".*", line 4, in inner\n', done.stderr), done.stderr
    assert done.stderr.count("SpmdError: spmd: rank 0 (worker 0 on ") == 1


def test_workers_without_a_nanny_are_refused(mpirun: Mpi) -> None:
    options = ["--worker-class", "distributed.Worker"]
    done = mpirun.run(UNCAUGHT, 1, command=options).clean(2)
    assert done.stderr.count("error: spmd: worker(s) 0 without a nanny") == 1


DEVICES = f"""{TELL}
from dask_gpu_mpi import current_session
session = current_session()
def look(group):
    return group.rank, group.size, group.device, os.environ["CUDA_VISIBLE_DEVICES"]
cpu = [worker.name for worker in session.plan.workers if worker.kind == "cpu"]
everybody = [worker.name for worker in session.plan.workers]
tell(gpus=session.spmd(look), cpu=session.spmd(look, workers=cpu), all=session.spmd(look, workers=everybody))
"""


def test_gpu_workers_are_the_members_and_know_their_device(mpirun: Mpi) -> None:
    gpus = make_gpus(2, host="one")
    told = facts(mpirun.run(DEVICES, 2, command=["--cpu-workers", "1"], gpus=gpus).check())
    assert told["gpus"] == [[rank, 2, 0, gpus[rank].uuid] for rank in range(2)]
    assert told["cpu"] == [[0, 1, None, ""]]
    # by name: 0-0, 0-cpu-0, 1-1
    assert [row[2] for row in told["all"]] == [0, None, 0]
