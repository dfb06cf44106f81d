"""What a worker sends with its heartbeats besides distributed's own metrics: under `METRIC`, a few numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Worker
from distributed.diagnostics import nvml
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils import offload

from dask_gpu_mpi.base.recording import METRIC
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES

__all__ = ["Figures", "of_device", "spilled_from_device"]


class Figures(WorkerPlugin):
    """Adds the metric `METRIC` to a worker.

    It has ``time`` (seconds since the epoch), ``sent`` and ``received`` (bytes of task data exchanged with other workers since
    the worker's start); where distributed does not know them ``spilled`` (bytes of device memory that are kept in host memory,
    or None); and ``gpus``: use in percent, bytes used and in total of each of its GPUs, where these are not the one that
    distributed's monitor samples, the first that the process sees.

    Parameters
    ----------
    devices : sequence of str
        UUIDs of the GPUs that the worker sees.
    """

    name = "dask_gpu_mpi-figures"

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._received = 0
        #: The last transfer that is in `_received`.
        self._last: Any = None

    def setup(self, worker: Worker) -> None:
        """Called by distributed in the worker's process."""
        metrics: Any = getattr(worker, "metrics", None)
        if metrics is not None:  # not in another version
            metrics[METRIC] = self.measure

    async def measure(self, worker: Any) -> dict[str, Any]:
        """The figures of now."""
        self._count(getattr(worker, "transfer_incoming_log", ()))
        figures: dict[str, Any] = {
            "time": time.time(),
            "sent": getattr(worker, "transfer_outgoing_bytes_total", None),
            "received": self._received,
        }
        if not hasattr(worker.data, "spilled_total"):
            figures["spilled"] = spilled_from_device(worker.data)
        if self._monitor_sees_others() and nvml.device_get_count():
            figures["gpus"] = await offload(lambda: [of_device(device) for device in self.devices])
        return figures

    def _monitor_sees_others(self) -> bool:
        """Whether distributed's monitor, which samples the first visible GPU, has not all of this worker's."""
        first = os.environ.get(VISIBLE_DEVICES, "").partition(",")[0]
        return bool(self.devices) and self.devices != (first,)

    def _count(self, log: Sequence[Mapping[str, Any]]) -> None:
        """Add the transfers that have come since the last call; the log is short, the newest at its end."""
        newest = log[-1] if log else None
        for transfer in reversed(log):
            if transfer is self._last:
                break
            self._received += transfer["total"]
        self._last = newest


def spilled_from_device(data: Any) -> int | None:
    """Bytes of device memory that dask-cuda's ``DeviceHostFile`` keeps in host memory; None: not known."""
    try:
        host = data.host_buffer.fast
        return int(sum(host.weights[key] for key, value in host.d.items() if _is_from_device(value)))
    except AttributeError:  # another class, another version, or no limit of host memory
        return None


def _is_from_device(value: Any) -> bool:
    return type(value).__name__ == "DeviceSerialized"


def of_device(device: str) -> list[int | None]:
    """Use in percent, bytes used and bytes in total of the GPU, or the slice, with this UUID; None: NVML does not know."""
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.encode())
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return [None, None, None]
    try:
        use = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    except pynvml.NVMLError:  # of a MIG slice it is not known
        use = None
    return [use, memory.used, memory.total]
