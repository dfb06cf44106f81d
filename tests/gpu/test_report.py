"""The report of a job on real GPUs: their use and memory over time, and data that went between them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, facts
from support.jobs.mpi import Mpi
from support.jobs.screens import browser
from support.jobs.scripts import script

#: Each GPU computes for some seconds, holds memory meanwhile, and fetches from the others.
SCRIPT = script("gpu/scripts/works.py")


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_use_and_memory_over_time(name: str, mpirun: Mpi, gpus: Any) -> None:
    job = mpirun.start([*COMMAND, "--report", name, "script.py"], 1)
    (job.directory / "script.py").write_text(SCRIPT)
    done = job.wait(180).check(0)
    told = facts(done)
    count = len(gpus.uuids)
    assert (told["workers"], told["sums"]) == (count, [count * 1_000_000] * count)
    if name.endswith(".html"):
        with browser() as chromium:
            tabs = {tab.title: tab for tab in chromium.open(job.directory / name)}
        assert [title for title, _ in tabs["GPUs"].figures][:2] == ["GPU use, %", "GPU memory in use"]
        assert all(marks and min(marks) > 0 for _, marks in tabs["GPUs"].figures), tabs["GPUs"].figures
        assert tabs["GPUs"].painted >= 2
        return
    record = json.loads((job.directory / name).read_text())["record"]
    for worker in record["workers"]:
        # 2 GiB of the kernel's, and a context; and the kernel has kept it busy
        [of_device] = worker["device_memory"]
        assert 2 << 30 < worker["peaks"]["gpu_memory"] <= of_device
        assert worker["peaks"]["gpu"] > 50
        # W and °C, and J of some seconds
        assert 20 < worker["peaks"]["gpu_power"] < 3000
        assert 10 < worker["peaks"]["gpu_temperature"] < 120
        assert "gpu_pcie" in worker["peaks"]
        assert 20 < worker["energy"][0] < 3000 * 180
        columns = record["series"]["workers"][worker["name"]]
        assert len([value for value in columns["gpu"] if value]) >= 3
    pairs = {(row["from"], row["to"]) for row in record["transfers"]["rows"] if row["bytes"] >= 1_000_000}
    assert len(pairs) == count * (count - 1)
