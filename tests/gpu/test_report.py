"""The report of a job on real GPUs: their use and memory over time, and data that went between them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, TELL, facts
from support.jobs.mpi import Mpi
from support.jobs.screens import browser

#: Each GPU computes for some seconds, holds memory meanwhile, and fetches from the others.
SCRIPT = (
    TELL
    + """
import time
from distributed import Client

def burn(seconds, megabytes):
    import numpy as np
    import numba.cuda

    @numba.cuda.jit
    def spin(values, turns):
        i = numba.cuda.grid(1)
        if i < values.size:
            value = values[i]
            for _ in range(turns):
                value = value * 1.0000001 + 0.5
            values[i] = value

    values = numba.cuda.to_device(np.ones(megabytes << 17))
    end = time.time() + seconds
    while time.time() < end:
        spin[4096, 256](values, 2000)
        numba.cuda.synchronize()
    return bytes(1_000_000)

client = Client()
workers = list(client.scheduler_info(n_workers=-1)["workers"])
held = [client.submit(burn, 8, 2048, workers=[worker], pure=False) for worker in workers]
sums = [client.submit(lambda *parts: sum(map(len, parts)), *held, workers=[worker], pure=False) for worker in workers]
tell(sums=client.gather(sums), workers=len(workers))
time.sleep(2)
"""
)


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
        assert all(marks and min(marks) > 0 for _, marks in tabs["GPUs"].figures)
        assert tabs["GPUs"].painted >= 2
        return
    record = json.loads((job.directory / name).read_text())["record"]
    for worker in record["workers"]:
        # 2 GiB of the kernel's, and a context; and the kernel has kept it busy
        [of_device] = worker["device_memory"]
        assert 2 << 30 < worker["peaks"]["gpu_memory"] <= of_device
        assert worker["peaks"]["gpu"] > 50
        columns = record["series"]["workers"][worker["name"]]
        assert len([value for value in columns["gpu"] if value]) >= 3
    pairs = {(row["from"], row["to"]) for row in record["transfers"]["rows"] if row["bytes"] >= 1_000_000}
    assert len(pairs) == count * (count - 1)
