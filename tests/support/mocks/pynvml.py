"""A mock of `pynvml`, over dicts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = [
    "FUNCTION_NOT_FOUND",
    "GIB",
    "LOST",
    "MISMATCH",
    "NOT_FOUND",
    "NO_DRIVER",
    "NO_LIBRARY",
    "NO_PERMISSION",
    "UNKNOWN",
    "NVMLError",
    "Nvml",
    "device",
]

GIB = 1024**3


NO_PERMISSION, NOT_FOUND, NO_DRIVER, NO_LIBRARY, FUNCTION_NOT_FOUND, LOST = 4, 6, 9, 12, 13, 15


MISMATCH, UNKNOWN = 18, 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML text {value}")
        self.value = value


class Nvml:
    """What `pynvml` has, over dicts: a device is a dict, an int in the place of a value is NVML's error code."""

    NVMLError = NVMLError

    def __init__(
        self, *devices: Any, init: int = 0, count: int = 0, driver: Any = FUNCTION_NOT_FOUND
    ) -> None:
        self.devices, self.init, self.count, self.driver = devices, init, count, driver
        self.calls: list[str] = []

    def _get(self, device: dict[str, Any], key: str, default: Any = FUNCTION_NOT_FOUND) -> Any:
        value = device.get(key, default)
        if isinstance(value, int):
            raise NVMLError(value)
        return value

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.init:
            raise NVMLError(self.init)

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._get({"driver": self.driver}, "driver")

    def nvmlDeviceGetCount(self) -> int:
        if self.count:
            raise NVMLError(self.count)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        device = self.devices[index]
        if isinstance(device, int):
            raise NVMLError(device)
        return device

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return next(device for device in self.devices if device["uuid"] == uuid)

    def nvmlDeviceGetComputeMode(self, device: Any) -> int:
        mode: int = device.get("compute_mode", 0)
        return mode

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)  # uncorrected, since the last reset
        (number,) = self._get(device, "ecc")
        return int(number)

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
        return len(device["mig"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        if device["mig"][index] is None:
            raise NVMLError(NOT_FOUND)
        return device["mig"][index]

    def nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._get(device, "busy")]


def device(number: int, **more: Any) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "name": "A100", "memory": [40 * GIB, 2 * GIB], **more}
