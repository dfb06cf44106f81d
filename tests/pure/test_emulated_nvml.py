"""The emulated NVML, seen by pynvml."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.jobs.processes import run_python
from support.jobs.scripts import script
from support.mocks.gpus import (
    GIB,
    SimGpu,
    SimMig,
    emulated_environ,
    make_gpus,
)

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler")

THIS_HOST = os.uname().nodename

LOOK = script("pure/scripts/asks_nvml.py")


def run(script: str, environ: dict[str, str]) -> tuple[str, str]:
    """Run a Python script in a process of its own: standard output and standard error."""
    done = run_python(script, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def look(environ: dict[str, str]) -> Any:
    """Return what pynvml sees: a list of GPUs, or the name of the error of ``nvmlInit``."""
    return json.loads(run(LOOK, environ)[0])


def test_gpus_are_seen_as_described(libdir: Path) -> None:
    gpus = make_gpus(
        16, host=THIS_HOST, name="NVIDIA A100-SXM4-80GB", memory=80 * GIB, cores=[(0, 1), (2, 3, 70)]
    )
    seen = look(emulated_environ(libdir, gpus))
    assert [gpu["UUID"] for gpu in seen] == [gpu.uuid for gpu in gpus]
    assert {gpu["Name"] for gpu in seen} == {"NVIDIA A100-SXM4-80GB"}
    assert [gpu["Index"] for gpu in seen] == [gpu["MinorNumber"] for gpu in seen] == list(range(16))
    assert all(gpu["memory"] == [80 * GIB, 0, 80 * GIB] for gpu in seen)
    assert [gpu["cores"] for gpu in seen] == [[0, 1]] * 8 + [[2, 3, 70]] * 8
    assert all(gpu["same"] == [gpu["UUID"]] * 2 for gpu in seen)
    assert len({gpu["pci"] for gpu in seen}) == 16
    assert all(gpu["MigMode"] == "NVMLError_NotSupported" and gpu["mig"] == [] for gpu in seen)
    used = SimGpu(
        "GPU-x", memory=8 * GIB, pci="0001:3b:00.0", minor=5, utilization=42, processes=((7, GIB), (8, GIB))
    )
    (one,) = look(emulated_environ(libdir, [used]))
    assert (one["pci"], one["MinorNumber"], one["utilization"]) == ("00000001:3B:00.0", 5, 42)
    assert one["memory"] == [8 * GIB, 2 * GIB, 6 * GIB]
    assert one["processes_v2"] == one["processes_v3"] == [[7, GIB], [8, GIB]]


FIGURES = """
import json, sys, time
import pynvml
from dask_gpu_mpi.machine.nvidia import device_figures
pynvml.nvmlInit()
first = [device_figures(uuid) for uuid in sys.argv[1:]]
time.sleep(0.1)
quick = device_figures(sys.argv[1], throughput=False)
print(json.dumps([first, quick]))
"""


def test_figures_of_a_gpu_as_far_as_it_has_them(libdir: Path) -> None:
    full = SimGpu(
        "GPU-full", memory=80 * GIB, used=GIB, utilization=90, temperature=71, power=650, throttle=0x1 | 0x8 | 0x40,
        pcie=3000, nvlink=2**30,
    )  # fmt: skip
    mig = SimGpu("GPU-parent", power=300, mig=(SimMig("MIG-1", 10 * GIB),))
    deaf = dict.fromkeys(
        [f"nvmlDeviceGet{name}" for name in ("FieldValues", "Temperature", "UtilizationRates", "MemoryInfo")],
        "NOT_SUPPORTED",
    )
    gpus = [full, SimGpu("GPU-none", failures=deaf), mig, SimGpu("GPU-power", throttle=0x4, lost=False)]
    environ = emulated_environ(libdir, gpus)
    uuids = ["GPU-full", "GPU-none", "MIG-1", "GPU-power", "GPU-other"]
    done = run_python(FIGURES, *uuids, env=environ)
    assert done.returncode == 0, done.stderr
    (first, none, instance, power, other), quick = json.loads(done.stdout)
    assert first[:6] == [90, GIB, 80 * GIB, 650.0, 71, 0b010]
    # what grows: J, and bytes both ways
    assert first[7] == 6_000_000
    assert 30 <= quick[6] - first[6] < 650 * 60
    assert 2 * 2**30 // 20 <= quick[8] - first[8] < 2 * 2**30 * 60
    assert quick[7] is None
    assert none == other == [None] * 9
    # else each instance would have the power of its GPU, which sums would count several times
    assert instance == [None, 0, 10 * GIB, *[None] * 6]
    assert power[5] == 0b001
