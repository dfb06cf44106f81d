"""The GPUs of a host and their health, from a mock of NVML; what a rank sees of them; and contexts that it has made."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.nvidia import (
    device_figures,
    gpu_health,
    parse_visible,
    sees_none,
    visible_gpus,
)
from support.jobs.processes import run_python
from support.mocks.gpus import SimGpu, SimMig, emulated_environ
from support.mocks.nvml.pynvml import (
    FUNCTION_NOT_FOUND,
    GIB,
    LOST,
    NO_DRIVER,
    NO_LIBRARY,
    NO_PERMISSION,
    UNKNOWN,
    Nvml,
    device,
)


def test_all_that_a_gpu_tells() -> None:
    busy = [(77, GIB), (78, 5), (99, 100), (98, None), (97, 0)]
    nvml = Nvml(device(0, pci="00000000:0a:00.0", cpus=[0b1011, 1], busy=busy, nodes=[0, 2]))
    seen = {"cpus": (0, 1, 3, 64), "numa": 65, "pci": "00000000:0A:00.0", "free": 38 * GIB}
    others = ((78, 5), (99, 100), (98, None))
    assert visible_gpus({}, nvml, own_pid=77) == (
        Gpu("GPU-0", 0, "A100", 40 * GIB, processes=others, **seen),
    )
    assert nvml.calls == ["init", "shutdown"]
    assert visible_gpus({}, Nvml({"uuid": "GPU-0"})) == (
        Gpu("GPU-0", 0, "GPU", 0),
    )  # a driver that knows little
    # near two nodes, it is near neither
    assert [gpu.numa for gpu in visible_gpus({}, Nvml(device(0, nodes=[0b11]), device(1, nodes=[1])))] == [
        -1,
        0,
    ]


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        (0x1, 0b000),
        (0x4, 0b001),
        (0x20, 0b010),
        (0x8, 0b100),
        # the bit of hardware comes with that of its heat, or of the power brake
        (0x8 | 0x40, 0b010),
        (0x8 | 0x40 | 0x80, 0b110),
    ],
)
@pytest.mark.parametrize("name", ["EventReasons", "ThrottleReasons"])
def test_why_clocks_are_lowered(name: str, reasons: int, why: int) -> None:
    nvml = Nvml(device(0))
    setattr(nvml, f"nvmlDeviceGetCurrentClocks{name}", lambda handle: reasons)
    assert device_figures("GPU-0", nvml)[5] == why


def test_figures_that_an_older_library_does_not_have() -> None:
    nvml: Any = Nvml(device(0))
    nvml.nvmlDeviceGetPowerUsage = lambda: 1  # it has no GPU
    assert device_figures("GPU-0", nvml) == [None, 2 * GIB, 40 * GIB, *[None] * 6]


@pytest.mark.parametrize("code", [NO_DRIVER, NO_LIBRARY, UNKNOWN])
def test_no_nvidia_driver_is_no_gpu(code: int) -> None:
    assert visible_gpus({}, Nvml(init=code)) == ()


def test_mig_instances_stand_in_for_their_parent() -> None:
    name = "A100 MIG 1g"
    first = {"uuid": "MIG-a", "name": name, "memory": [5 * GIB, GIB], "busy": [(1, 9)]}
    nvml = Nvml(device(0, mode=[0, 0]), device(1, pci="x", cpus=[2], mig=[first, None, {"uuid": "MIG-c"}]))
    place: Any = {"cpus": (1,), "pci": "X", "parent": "GPU-1"}
    assert visible_gpus({}, nvml)[1:] == (
        Gpu("MIG-a", 1, name, 5 * GIB, slice=0, processes=((1, 9),), free=4 * GIB, **place),
        Gpu("MIG-c", 1, "A100", 0, slice=2, **place),
    )


def test_devices_of_other_jobs_do_not_count() -> None:
    found = visible_gpus({}, Nvml(NO_PERMISSION, device(1), NO_PERMISSION, device(3)))
    assert [(gpu.uuid, gpu.index) for gpu in found] == [("GPU-1", 0), ("GPU-3", 1)]


def test_without_the_python_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(InputError, match="pip install nvidia-ml-py"):
        visible_gpus({})


def test_health_is_the_drivers_version_and_the_memory_errors_of_each_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [Gpu("GPU-0", 0, "A", 0), Gpu("MIG-a", 1, "A MIG", 0, parent="GPU-1"), Gpu("GPU-2", 2, "A", 0)]
    nvml = Nvml(device(0, ecc=[7]), device(1, ecc=[0]), device(2), driver="580.1")
    counters: list[tuple[int, int]] = []
    ask = nvml.nvmlDeviceGetTotalEccErrors
    monkeypatch.setattr(
        nvml, "nvmlDeviceGetTotalEccErrors", lambda of, *what: counters.append(what) or ask(of, *what)
    )
    # without ECC there is no number
    assert gpu_health(gpus, nvml) == ("580.1", {"GPU-0": 7, "MIG-a": 0})
    assert nvml.calls == ["init", "shutdown"]
    assert {*counters} == {(1, 0)}  # nvml.h: NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
    assert gpu_health(gpus[:1], Nvml(device(0, ecc=LOST), driver=FUNCTION_NOT_FOUND)) == ("", {})
    nvml = Nvml(device(0, ecc=[7]), driver="580.1", init=NO_DRIVER)
    assert gpu_health(gpus[:1], nvml) == ("", {})
    assert nvml.calls == ["init"]


def test_a_compute_mode_that_lets_one_process_in() -> None:
    found = visible_gpus({}, Nvml(device(0), device(1, compute_mode=3)))
    assert [gpu.exclusive for gpu in found] == [False, True]


def named_gpu(index: int, uuid: str) -> Gpu:
    return Gpu(uuid=uuid, index=index, name="A100", memory=40 * GIB)


FOUR = tuple(named_gpu(i, uuid) for i, uuid in enumerate(["GPU-aa00", "GPU-aa11", "GPU-bb22", "GPU-cc33"]))
PARENT = "GPU-dd00"
MIG = (
    named_gpu(0, "GPU-aa00"),
    *(Gpu(f"MIG-ee0{i}", 1, "A100 MIG 1g.5gb", 5 * GIB, parent=PARENT, slice=i) for i in range(3)),
    named_gpu(2, "GPU-bb22"),
)
ONE_LOST = (*FOUR[:2], Gpu(uuid="", index=2, name="GPU is lost", memory=0), FOUR[3])


LONGER = (named_gpu(0, "GPU-a"), named_gpu(1, "GPU-ab"))
OLDEST = (Gpu("MIG-GPU-dd00/1/0", 0, "A100", GIB, parent=PARENT, slice=0),)


@pytest.mark.parametrize(
    ("devices", "value", "places"),
    [
        (FOUR, None, [0, 1, 2, 3]),
        (FOUR, "0,1", [0, 1]),
        (FOUR, "3,1", [3, 1]),
        (FOUR, " 2 , 0 ", [2, 0]),
        (FOUR, "GPU-cc33,GPU-aa00", [3, 0]),
        (FOUR, "GPU-b,GPU-c", [2, 3]),
        (FOUR, "GPU-BB22", [2]),
        (FOUR, "1,-1,3", [1]),
        *((FOUR, value, []) for value in ("", " ", "-1", "NoDevFiles")),
        (MIG, None, [0, 1, 2, 3, 4]),
        (MIG, "MIG-ee02,MIG-ee00", [3, 1]),
        (MIG, "1", [1]),
        (MIG, "GPU-dd", [1]),
        (MIG, "2,MIG-ee01", [4, 2]),
        (LONGER, "GPU-a", [0]),
        (OLDEST, "MIG-GPU-dd00/1/0", [0]),
        # a lost GPU comes back where it is asked for; its UUID can't be read any more
        (ONE_LOST, "0,1", [0, 1]),
        (ONE_LOST, "0,2", [0, 2]),
        (ONE_LOST, None, [0, 1, 2, 3]),
        (ONE_LOST, "GPU-bb22,GPU-cc33", [2, 3]),
    ],
)
def test_what_a_value_makes_visible(devices: tuple[Gpu, ...], value: str | None, places: list[int]) -> None:
    assert parse_visible(value, devices) == tuple(devices[place] for place in places)
    assert sees_none(value) == (not places)


@pytest.mark.parametrize(
    ("devices", "value", "words"),
    [
        (FOUR, "4", "'4' | there is no GPU"), (FOUR, "0,9", "'9' | there is no GPU"),
        (FOUR, "GPU-ff", "'GPU-ff' | there is no GPU"), (FOUR, "MIG-ff", "'MIG-ff' | there is no GPU"),
        (FOUR, "0,0", "twice"), (FOUR, "0,GPU-aa00", "twice | '0' | 'GPU-aa00'"), (FOUR, "GPU-aa1,GPU-aa11", "twice"),
        (FOUR, "GPU-aa", "fits 2"), (FOUR, "0,", "'' | expected an index"), (FOUR, ",0", "'' | expected an index"),
        (FOUR, ",", "'' | expected an index | 0 (GPU-aa00) | 3 (GPU-cc33)"),
        *((FOUR, entry, f"invalid entry {entry!r} ")
          for entry in ("0;1", "all", "-2", "²", "-1x", "0x1", "gpu-1111", "GPU-", "MIG-")),
        (MIG, "MIG-ee", "fits 3"), (MIG, "1,MIG-ee00", "twice"), ((), "0", "NVML lists no GPU"),
        (ONE_LOST, "GPU-bb22,GPU-ff", "lost: GPU is lost"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_what_is_there(devices: tuple[Gpu, ...], value: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_visible(value, devices)
    message = str(caught.value)
    for word in (f"CUDA_VISIBLE_DEVICES={value!r}", "NVML lists ", *words.split(" | ")):
        assert word in message
    assert "\n" not in message


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


def test_figures_of_a_gpu_as_far_as_it_has_them() -> None:
    full = SimGpu(
        "GPU-full", memory=80 * GIB, used=GIB, utilization=90, temperature=71, power=650, throttle=0x1 | 0x8 | 0x40,
        pcie=3000, nvlink=2**30,
    )  # fmt: skip
    mig = SimGpu("GPU-parent", power=300, mig=(SimMig("MIG-1", 10 * GIB),))
    none = SimGpu("GPU-none", memory=None, utilization=None, temperature=None)
    gpus = [full, none, mig, SimGpu("GPU-power", throttle=0x4)]
    environ = emulated_environ(gpus)
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
