"""A mock of `pynvml`, over dicts: in one process, or for the jobs that have this folder on PYTHONPATH.

A device is a dict; an int in the place of a value is NVML's error code. In a job the devices come from the variable that
`support.mocks.gpus` writes, and what is not replaced here, constants and errors, is the real module's.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 1024**3
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, NO_DRIVER, NO_LIBRARY = 1, 3, 4, 6, 9, 12
FUNCTION_NOT_FOUND, LOST, MISMATCH, UNKNOWN = 13, 15, 18, 999
#: The description of every host's GPUs; per process the places of those that exist for it, as in the device cgroup of a rank.
VARIABLE, ONLY_VARIABLE = "EMULATED_NVML", "EMULATED_NVML_ONLY"


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML text {value}")
        self.value = value


class Nvml:
    """What `pynvml` has."""

    NVMLError: Any = NVMLError

    def __init__(
        self, *devices: Any, init: int = 0, count: int = 0, driver: Any = FUNCTION_NOT_FOUND
    ) -> None:
        self.devices, self.init, self.count, self.driver = devices, init, count, driver
        self.calls: list[str] = []

    def _get(self, device: dict[str, Any], key: str) -> Any:
        value = device.get(key, FUNCTION_NOT_FOUND)
        if isinstance(value, int):
            raise self.NVMLError(value)
        return value

    def _number(self, device: dict[str, Any], key: str) -> int:
        (number,) = self._get(device, key)
        return int(number)

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.init:
            raise self.NVMLError(self.init)

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._get({"driver": self.driver}, "driver")

    def nvmlDeviceGetCount(self) -> int:
        if self.count:
            raise self.NVMLError(self.count)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        device = self.devices[index]
        if isinstance(device, int):
            raise self.NVMLError(device)
        return device

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> Any:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        for device in self.devices:
            for each in (device, *device.get("mig", ())):
                if each is not None and each["uuid"] == text:
                    return each
        raise self.NVMLError(NOT_FOUND)

    def nvmlDeviceGetIndex(self, device: Any) -> int:
        place: int = device["index"]
        return place

    def nvmlDeviceGetComputeMode(self, device: Any) -> int:
        mode: int = device.get("compute_mode", 0)
        return mode

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)  # uncorrected, since the last reset
        return self._number(device, "ecc")

    def nvmlDeviceGetUUID(self, device: Any) -> Any:
        return self._get(device, "uuid")

    def nvmlDeviceGetName(self, device: Any) -> Any:
        return self._get(device, "name")

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:
        total, *used = self._get(device, "memory")
        return SimpleNamespace(total=total, free=total - sum(used), used=sum(used))

    def nvmlDeviceGetPciInfo(self, device: Any) -> Any:
        return SimpleNamespace(busId=self._get(device, "pci"))

    def nvmlDeviceGetCpuAffinity(self, device: Any, words: int) -> Any:
        mask = self._get(device, "cpus")
        return [*mask, *([0] * (words - len(mask)))]

    def nvmlDeviceGetMemoryAffinity(self, device: Any, words: int, scope: int) -> Any:
        assert scope == 0  # NUMA nodes, not sockets
        mask = self._get(device, "nodes")
        return [*mask, *([0] * (words - len(mask)))]

    def nvmlDeviceGetMigMode(self, device: Any) -> Any:
        return [1, 1] if "mig" in device else self._get(device, "mode")

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        return len(device.get("mig", ()))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        if device["mig"][index] is None:
            raise self.NVMLError(NOT_FOUND)
        return device["mig"][index]

    def nvmlDeviceIsMigDeviceHandle(self, device: Any) -> bool:
        return "parent" in device

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: Any) -> Any:
        return device["parent"]

    def nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._get(device, "busy")]

    nvmlDeviceGetComputeRunningProcesses_v2 = nvmlDeviceGetComputeRunningProcesses

    def nvmlDeviceGetUtilizationRates(self, device: Any) -> Any:
        return SimpleNamespace(gpu=self._number(device, "utilization"))

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int) -> int:
        assert sensor == 0
        return self._number(device, "temperature")

    def nvmlDeviceGetPowerUsage(self, device: Any) -> int:
        return 1000 * self._number(device, "power")  # mW

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any) -> int:
        return int(1000 * self._number(device, "power") * time.monotonic())  # mJ

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Any) -> int:
        return self._number(device, "throttle")

    def nvmlDeviceGetPcieThroughput(self, device: Any, counter: int) -> int:
        assert counter in (0, 1)  # sent, received
        return self._number(device, "pcie")  # kB/s

    def nvmlDeviceGetFieldValues(self, device: Any, fields: Any) -> Any:
        """Bytes sent (138) and received (139) over NVLink, of all links, in KiB."""
        found = []
        for field, scope in fields:
            assert field in (138, 139)
            assert scope == 2**32 - 1
            value = device.get("nvlink", NOT_SUPPORTED)
            grown = 0 if isinstance(value, int) else int(value[0] * time.monotonic() / 1024)
            code = value if isinstance(value, int) else 0
            found.append(SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(ullVal=grown)))
        return found


def device(number: int, **more: Any) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "name": "A100", "memory": [40 * GIB, 2 * GIB], **more}


def emulate() -> None:
    """Put the real module in the place of this one, with the functions above instead of its own."""
    elsewhere = [path for path in sys.path if path != os.path.dirname(__file__)]
    spec = PathFinder.find_spec("pynvml", elsewhere)
    assert spec is not None
    assert spec.loader is not None
    real = sys.modules["pynvml"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real)
    Nvml.NVMLError = real.NVMLError
    job = Job(real)
    for name in vars(Nvml):
        if name.startswith("nvml"):
            setattr(real, name, job.function(name))


class Job:
    """The emulated NVML of a process: its devices are those that were described when it was initialised last."""

    def __init__(self, real: ModuleType) -> None:
        self.real: Any = real
        self.references = 0
        self.nvml = Nvml()

    def function(self, name: str) -> Callable[..., Any]:
        """A function of the module: its arguments are such as the real one takes."""
        signature = inspect.signature(getattr(self.real, name))

        def call(*args: Any) -> Any:
            signature.bind(*args)
            if name == "nvmlInit":
                self.real.nvmlLib = self  # the library is loaded
                self.nvml = described(self.real)
            elif not self.references:
                raise NvmlError(UNINITIALIZED)
            found = getattr(self.nvml, name)(*args)
            self.references += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            return found

        NvmlError = self.real.NVMLError
        return call


def described(real: Any) -> Nvml:
    """The devices that the variables describe for this host and process."""
    full = os.uname().nodename
    hosts = json.loads(os.environ.get(VARIABLE, "{}"))
    names = {full, full.partition(".")[0]}
    host = next((host for pattern, host in hosts.items() if fnmatch.filter(names, pattern)), None)
    if host is None:
        return Nvml(init=NO_DRIVER)
    only = os.environ.get(ONLY_VARIABLE)
    places = None if only is None else [int(place) for place in only.split(",")]
    found = [
        device
        for place, device in enumerate(host["gpus"])
        if (places is None or place in places) and may_open(host["files"], place)
    ]
    for index, device in enumerate(found):
        device["index"] = index
        for place, instance in enumerate(device.get("mig", ())):
            instance |= {"index": place, "parent": device}
    code = host["init_fail"] and getattr(real, f"NVML_ERROR_{host['init_fail']}")
    return Nvml(*found, init=code or 0, driver=host["driver"])


def may_open(files: str | None, place: int) -> bool:
    """Whether this process may open a GPU's device file; what else comes of opening it does not matter."""
    if files is None:
        return True
    try:
        os.close(os.open(f"{files}{place}", os.O_RDONLY | os.O_NONBLOCK))
    except FileNotFoundError:
        raise
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True


if __name__ == "pynvml":
    emulate()
