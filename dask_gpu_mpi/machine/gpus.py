"""The GPUs of this host, as NVML lists them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dask_gpu_mpi.errors import InputError

__all__ = ["Gpu", "gpus_of_host", "list_gpus"]

T = TypeVar("T")

# nvml.h, nvmlReturn_t
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
RESET_REQUIRED = 16
UNKNOWN = 999

# 16 words of 64 bits: cores 0-1023. os.cpu_count() would be too short where cores are offline.
_AFFINITY_WORDS = 16


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance.

    Attributes
    ----------
    uuid : str
        ``GPU-...`` or ``MIG-...``. Empty: NVML lists the GPU but can't read it (a lost GPU); then `name` is
        NVML's text.
    index : int
        NVML's index, in PCI order; for a MIG instance its parent's.
    name : str
        The product's name.
    memory : int
        Bytes of device memory; of the slice for a MIG instance; 0 where NVML does not say.
    cpus : tuple of int
        Cores of the NUMA node near the GPU; empty: unknown.
    pci : str
        PCI bus id; empty: unknown.
    parent : str
        UUID of the GPU that a MIG instance is a part of; empty for a whole GPU.
    slice : int
        Index of the MIG instance on its parent; -1 for a whole GPU.
    processes : tuple of (int, int or None)
        The compute processes other than the one that looked, and the bytes of device memory that each holds; None: NVML does not
        say how many.
    free : int
        Bytes of device memory that were free when we looked; -1: unknown.
    """

    uuid: str
    index: int
    name: str
    memory: int
    cpus: tuple[int, ...] = ()
    pci: str = ""
    parent: str = ""
    slice: int = -1
    processes: tuple[tuple[int, int | None], ...] = ()
    free: int = -1

    @property
    def busy(self) -> int | None:
        """Bytes of device memory that `processes` hold; None: they hold some, and NVML does not say how much."""
        total = 0
        for _, held in self.processes:
            if held is None:
                return None
            total += held
        return total


def list_gpus(nvml: Any = None, own_pid: int | None = None) -> tuple[Gpu, ...]:
    """List the host's GPUs, whatever ``CUDA_VISIBLE_DEVICES`` says; MIG instances in their parent's place.

    Devices that the operating system hides from this process (cgroups) are not there for CUDA either, which
    then counts the others from 0; so does this list.

    Parameters
    ----------
    nvml : module, optional
        What to ask, `pynvml` unless given.
    own_pid : int, optional
        The process that is left out of `Gpu.processes`; this process unless given.

    Returns
    -------
    tuple of Gpu
        Empty without NVIDIA library or driver. A GPU that NVML can't read has an empty `uuid`.

    Raises
    ------
    InputError
        NVML is there and refuses to work, say after a driver update without a reboot.
    """
    if nvml is None:
        nvml = _import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if _code(error) in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, UNKNOWN):
            return ()
        raise InputError(
            f"NVML does not start: {error}; mend the NVIDIA driver, leave this host out of the job, "
            "or set CUDA_VISIBLE_DEVICES='' to do without GPUs"
        ) from error
    try:
        return tuple(_list(nvml, os.getpid() if own_pid is None else own_pid))
    except nvml.NVMLError as error:
        raise InputError(f"NVML can't count the GPUs: {error}; leave this host out of the job") from error
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise InputError(f"no module to ask for GPUs with ({error}): pip install nvidia-ml-py") from error
    return pynvml


def _list(nvml: Any, own_pid: int) -> Iterator[Gpu]:
    index = 0
    for position in range(nvml.nvmlDeviceGetCount()):
        try:
            found = _one(nvml, position, index, own_pid)
        except nvml.NVMLError as error:
            if _code(error) == NO_PERMISSION:
                continue
            found = [Gpu(uuid="", index=index, name=str(error), memory=0)]
        yield from found
        index += 1


def _one(nvml: Any, position: int, index: int, own_pid: int) -> list[Gpu]:
    handle = nvml.nvmlDeviceGetHandleByIndex(position)
    gpu = _read(nvml, handle, index, own_pid)
    mig = _ask(nvml, [0, 0], nvml.nvmlDeviceGetMigMode, handle)
    return list(_instances(nvml, handle, gpu, own_pid)) if mig[0] else [gpu]


def _read(nvml: Any, handle: Any, index: int, own_pid: int) -> Gpu:
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _ask(nvml, None, lambda: nvml.nvmlDeviceGetPciInfo(handle))
    words: Sequence[int] = _ask(nvml, (), nvml.nvmlDeviceGetCpuAffinity, handle, _AFFINITY_WORDS)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=_text(_ask(nvml, "GPU", nvml.nvmlDeviceGetName, handle)),
        memory=0 if memory is None else int(memory.total),
        cpus=tuple(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1),
        pci="" if pci is None else _text(pci.busId).upper(),
        processes=_processes(nvml, handle, own_pid),
        free=-1 if memory is None else int(memory.free),
    )


def _instances(nvml: Any, parent: Any, gpu: Gpu, own_pid: int) -> Iterator[Gpu]:
    for place in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, parent)):
        # Places can be empty: NVML then says "not found".
        handle = _ask(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, place)
        if handle is None:
            continue
        memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
        yield Gpu(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            index=gpu.index,
            name=_text(_ask(nvml, gpu.name, nvml.nvmlDeviceGetName, handle)),
            memory=0 if memory is None else int(memory.total),
            cpus=gpu.cpus,
            pci=gpu.pci,
            parent=gpu.uuid,
            slice=place,
            processes=_processes(nvml, handle, own_pid),
            free=-1 if memory is None else int(memory.free),
        )


def _processes(nvml: Any, handle: Any, own_pid: int) -> tuple[tuple[int, int | None], ...]:
    found: Sequence[Any] = _ask(nvml, (), nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # nvidia-ml-py makes None of NVML_VALUE_NOT_AVAILABLE
    sizes = ((int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in found)
    return tuple((pid, held) for pid, held in sizes if pid != own_pid and held != 0)


def gpus_of_host(views: Iterable[tuple[int, Iterable[Gpu]]]) -> list[Gpu]:
    """Put together what the ranks of one host see; none of the ranks counts as another process.

    Parameters
    ----------
    views : iterable of (int, iterable of Gpu)
        Process id of each rank, and what it sees.

    Returns
    -------
    list of Gpu
        Each once, in PCI order. Each rank looked at its own time: the worst that one saw counts.
    """
    seen = [(pid, tuple(gpus)) for pid, gpus in views]
    ranks = {pid for pid, _ in seen}
    found: dict[str, Gpu] = {}
    held: dict[str, dict[int, int | None]] = {}
    for _, gpus in seen:
        for gpu in gpus:
            known = found.setdefault(gpu.uuid, gpu)
            free = min((number for number in (known.free, gpu.free) if number >= 0), default=-1)
            found[gpu.uuid] = replace(known, free=free)
            sizes = held.setdefault(gpu.uuid, {})
            for pid, size in gpu.processes:
                before = sizes.get(pid)
                sizes[pid] = size if before is None else max(before, size or 0)
    for uuid, sizes in held.items():
        others = tuple((pid, size) for pid, size in sizes.items() if pid not in ranks)
        found[uuid] = replace(found[uuid], processes=others)
    # Behind cgroups each rank counts from 0: there an index orders nothing.
    return sorted(found.values(), key=lambda gpu: (gpu.pci, 0 if gpu.pci else gpu.index, gpu.slice, gpu.uuid))


def _ask(nvml: Any, otherwise: T, call: Callable[..., T], *args: Any) -> T:
    """Ask for what a driver may not know (old drivers, MIG instances, integrated GPUs)."""
    try:
        return call(*args)
    except nvml.NVMLError as error:
        # A lost GPU takes no worker, so this is never passed over.
        if _code(error) in (GPU_IS_LOST, RESET_REQUIRED):
            raise
        return otherwise


def _code(error: Exception) -> int:
    return int(getattr(error, "value", UNKNOWN))


def _text(value: str | bytes) -> str:
    # nvidia-ml-py before 12 gives bytes
    return value.decode() if isinstance(value, bytes) else value
