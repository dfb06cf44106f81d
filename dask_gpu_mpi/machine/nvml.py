"""NVML, the library of NVIDIA's driver: the GPUs of this host as it lists them, and how they are.

With `visible_devices` (``CUDA_VISIBLE_DEVICES``) and `contexts` (CUDA contexts) all that a rank asks of NVIDIA's software.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.gpus import Gpu

T = TypeVar("T")

#: The commands by which a person inspects the GPUs of a host, and resets them.
INSPECT_COMMAND, RESET_COMMAND = "nvidia-smi", "nvidia-smi -r"

# nvml.h, nvmlReturn_t
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
RESET_REQUIRED = 16
UNKNOWN = 999

# nvml.h: nvmlMemoryErrorType_t, nvmlEccCounterType_t
_UNCORRECTED, _SINCE_RESET = 1, 0

# 16 words of 64 bits: cores 0-1023. os.cpu_count() would be too short where cores are offline.
_AFFINITY_WORDS = 16


def list_gpus(nvml: Any = None, own_pid: int | None = None) -> tuple[Gpu, ...]:
    """List the host's GPUs, whatever ``CUDA_VISIBLE_DEVICES`` is; MIG instances in their parent's place.

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
            f"NVML does not start: {error}",
            fix="repair the NVIDIA driver of this node, leave the node out of the job, or set CUDA_VISIBLE_DEVICES='' to "
            "do without GPUs",
        ) from error
    try:
        return tuple(_list(nvml, os.getpid() if own_pid is None else own_pid))
    except nvml.NVMLError as error:
        raise InputError(
            f"NVML can't count the GPUs: {error}", fix="leave this node out of the job"
        ) from error
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def gpu_health(gpus: Sequence[Gpu], nvml: Any = None) -> tuple[str, dict[str, int]]:
    """Ask NVML for the driver's version, and for the uncorrected memory errors of each GPU since its last reset.

    Returns
    -------
    (driver, errors by UUID)
        What NVML does not report is left out: GPUs without ECC, drivers without the call.
    """
    if nvml is None:
        nvml = _import_nvml()
    driver, ecc = "", dict[str, int]()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return driver, ecc  # `list_gpus` reports why
    try:
        with contextlib.suppress(nvml.NVMLError):
            driver = _text(nvml.nvmlSystemGetDriverVersion())
        for gpu in gpus:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.parent or gpu.uuid)
                ecc[gpu.uuid] = int(nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _SINCE_RESET))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return driver, ecc


def driver_is_installed() -> bool:
    """Whether NVIDIA's driver has put its libraries on this host. Asks it nothing."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise InputError(f"can't import pynvml ({error})", fix="pip install nvidia-ml-py") from error
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
        exclusive=_ask(nvml, 0, nvml.nvmlDeviceGetComputeMode, handle) != 0,
    )


def _instances(nvml: Any, parent: Any, gpu: Gpu, own_pid: int) -> Iterator[Gpu]:
    for place in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, parent)):
        # Places can be empty: NVML then returns "not found".
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
            exclusive=gpu.exclusive,
        )


def _processes(nvml: Any, handle: Any, own_pid: int) -> tuple[tuple[int, int | None], ...]:
    found: Sequence[Any] = _ask(nvml, (), nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # nvidia-ml-py makes None of NVML_VALUE_NOT_AVAILABLE
    sizes = ((int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in found)
    return tuple((pid, held) for pid, held in sizes if pid != own_pid and held != 0)


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
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# CUDA contexts that this process has already: found without loading, initialising or making anything.

MAPS = Path("/proc/self/maps")


def own_contexts(maps: Path = MAPS) -> tuple[str, ...]:
    """List the devices on which this process has a primary CUDA context.

    The primary context is what the CUDA runtime, CuPy, Numba, RMM and PyTorch use. A process that has not loaded the driver's
    library, or not initialised it, has none, and that is all that is asked of it (``cuDevicePrimaryCtxGetState``, which
    makes none either; CUDA Driver API, "Primary Context Management").

    Parameters
    ----------
    maps : Path
        What lists the files that the process has mapped (proc_pid_maps(5)).

    Returns
    -------
    tuple of str
        Such as ``"device 0, GPU-5b1f..."``, the number being CUDA's own.
    """
    cuda = _loaded(maps)
    if cuda is None:
        return ()
    count = ctypes.c_int()
    # Of all calls only cuInit works in a process without it: an error here means that nobody has called it.
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for device in range(count.value):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        state = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if state == 0 and active.value:
            found.append(f"device {device}{_uuid(cuda, device)}")
    return tuple(found)


def _loaded(maps: Path) -> ctypes.CDLL | None:
    """The driver's library, if this process has it already."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libcuda.so" in line}
    for path in sorted(path for path in paths if Path(path).name.startswith("libcuda.so")):
        try:
            cuda = ctypes.CDLL(path)  # by its own path: nothing is loaded, the one that is there is found
        except OSError:
            continue
        if hasattr(cuda, "cuDeviceGetCount") and hasattr(cuda, "cuDevicePrimaryCtxGetState"):
            return cuda
    return None


def _uuid(cuda: ctypes.CDLL, device: int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None)
    if ask is None or ask(ctypes.byref(raw), device) != 0:
        return ""
    return f", GPU-{uuid.UUID(bytes=bytes(raw))}"
