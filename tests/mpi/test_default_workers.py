"""CPU workers beside emulated GPUs: where tasks run that ask for nothing."""

from __future__ import annotations

import pytest

from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import script
from support.mocks.gpus import make_gpus

SCRIPT = script("mpi/scripts/default_workers.py")


@pytest.mark.parametrize("where", ["gpu", "all"])
def test_where_tasks_run_that_ask_for_nothing(mpirun: Mpi, where: str) -> None:
    options = ["--cpu-workers", "1", "--no-dashboard", "--default-workers", where]
    gpus, cpu = ["0-0", "1-1"], ["0-cpu-0"]
    told = facts(mpirun.run(SCRIPT, 2, command=options, gpus=make_gpus(2, host="one")).check())
    everybody = sorted(gpus + cpu)
    unasked = gpus if where == "gpu" else everybody
    assert told["unasked"] == told["again"] == unasked
    assert (told["cpu"], told["one"], told["run"]) == (cpu, cpu, everybody)
    assert set(told["gpu"]) <= set(gpus)
    assert told["loaded"][0] == "0-cpu-0"
    assert told["loaded"][1] in unasked
    (name, label, fix), (other, *only_label) = told["notes"]
    assert (name, other, len(only_label)) == ("0-cpu-0", "0-0", 1)
    assert "[raised by worker 0-cpu-0, rank 0 on host " in label
    assert "this worker has no GPU" in fix
    assert "--default-workers gpu" in fix
