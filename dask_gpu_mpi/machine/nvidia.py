"""All that is requested of NVIDIA's software: the GPUs that NVML lists, ``CUDA_VISIBLE_DEVICES``, figures, and CUDA contexts.

NVML is called in a child of the agent (`machine.gpu_probe`), in workers for their figures, and by `check`. The other modules
know GPUs by `machine.Gpu` alone. Another vendor would have a module with the same public names.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine import Gpu, nearest_ports

if TYPE_CHECKING:
    from dask_gpu_mpi.options.model import Options

T = TypeVar("T")

#: The variable by which a process is shown some of the GPUs of its host. Code that reads or sets it uses this name.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
#: The message of CUDA, and of the libraries over it, in a process that sees no GPU.
NO_GPU = re.compile(r"no CUDA-capable device|CUDA_?ERROR_?NO_?DEVICE|No CUDA GPUs", re.IGNORECASE)
#: The commands by which a person inspects the GPUs of a host, and resets them.
INSPECT_COMMAND, RESET_COMMAND = "nvidia-smi", "nvidia-smi -r"


def is_profiled(environ: Mapping[str, str]) -> bool:
    """Whether a tool for CUDA, such as Nsight Systems, has prepared this environment to load itself into each process."""
    return any(environ.get(name) for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"))


def closing_time(options: Options, environ: Mapping[str, str]) -> float:
    """Seconds in which the workers of a rank close: a profiler writes its data at the end of each process."""
    return options.shutdown_timeout / 2 if is_profiled(environ) else options.grace


def driver_is_installed() -> bool:
    """Whether the driver's library is on this host; nothing is requested of it."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


# The GPUs that NVML lists.

# nvml.h, nvmlReturn_t
NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 4, 9, 12
GPU_IS_LOST, RESET_REQUIRED, UNKNOWN = 15, 16, 999
# 16 words of 64 bits: cores 0-1023. os.cpu_count() would be too short if cores are offline.
_AFFINITY_WORDS = 16
# nvml.h: NVML_AFFINITY_SCOPE_NODE
_NUMA_NODES = 0


def visible_gpus(environ: Mapping[str, str], nvml: Any = None, own_pid: int | None = None) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment sees, MIG instances in their parent's place; lost ones have no UUID.

    Empty without NVIDIA's library or driver; an InputError if NVML is there and refuses to work, for example after a driver
    update without a reboot. Devices that the operating system hides from this process (cgroups) do not exist for CUDA either,
    which counts the others from 0; so does this list. `own_pid` is left out of `Gpu.processes`, by default this process.
    """
    visible = environ.get(VISIBLE_DEVICES)
    if sees_none(visible):
        return ()
    nvml = nvml or _import_nvml()
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
        return parse_visible(visible, [*_all_gpus(nvml, os.getpid() if own_pid is None else own_pid)])
    except nvml.NVMLError as error:
        raise InputError(
            f"NVML can't count the GPUs: {error}", fix="leave this node out of the job"
        ) from error
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise InputError(f"can't import pynvml ({error})", fix="pip install nvidia-ml-py") from error
    return pynvml


def _all_gpus(nvml: Any, own_pid: int) -> Iterator[Gpu]:
    index = 0
    for position in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(position)
            gpu = _whole_gpu(nvml, handle, index, own_pid)
            mig = _query(nvml, [0, 0], "MigMode", handle)
            found = list(_instances(nvml, handle, gpu, own_pid)) if mig[0] else [gpu]
        except nvml.NVMLError as error:
            if _code(error) == NO_PERMISSION:
                continue
            found = [Gpu(uuid="", index=index, name=str(error), memory=0)]
        yield from found
        index += 1


def _whole_gpu(nvml: Any, handle: Any, index: int, own_pid: int) -> Gpu:
    pci: Any = _query(nvml, None, "PciInfo", handle)
    bus_id = "" if pci is None else pci.busId.upper()
    nodes = _bits(_query(nvml, (), "MemoryAffinity", handle, _AFFINITY_WORDS, _NUMA_NODES))
    return Gpu(
        index=index,
        cpus=_bits(_query(nvml, (), "CpuAffinity", handle, _AFFINITY_WORDS)),
        pci=bus_id,
        numa=nodes[0] if len(nodes) == 1 else -1,
        nics=nearest_ports(bus_id) if bus_id else "",
        exclusive=_query(nvml, 0, "ComputeMode", handle) != 0,
        **_common(nvml, handle, "GPU", own_pid),
    )


def _instances(nvml: Any, parent: Any, gpu: Gpu, own_pid: int) -> Iterator[Gpu]:
    """The MIG instances of a GPU."""
    for place in range(_query(nvml, 0, "MaxMigDeviceCount", parent)):
        # NVML returns "not found" for an empty place.
        handle = _query(nvml, None, "MigDeviceHandleByIndex", parent, place)
        if handle is not None:
            own = _common(nvml, handle, gpu.name, own_pid)
            yield replace(gpu, parent=gpu.uuid, slice=place, **own)


def _common(nvml: Any, handle: Any, name: str, own_pid: int) -> dict[str, Any]:
    """The fields of a `Gpu` that a whole GPU and a MIG instance both have."""
    memory = _query(nvml, None, "MemoryInfo", handle)
    return {
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "name": _text(_query(nvml, name, "Name", handle)),
        "memory": 0 if memory is None else int(memory.total),
        "free": -1 if memory is None else int(memory.free),
        "processes": _processes(nvml, handle, own_pid),
    }


def _bits(words: Sequence[int]) -> tuple[int, ...]:
    return tuple(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def _text(value: str | bytes) -> str:
    """dask-hip's pynvml, for GPUs of AMD, has bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _processes(nvml: Any, handle: Any, own_pid: int) -> tuple[tuple[int, int | None], ...]:
    found: Sequence[Any] = _query(nvml, (), "ComputeRunningProcesses", handle)
    # nvidia-ml-py makes None of NVML_VALUE_NOT_AVAILABLE
    sizes = ((int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in found)
    return tuple((pid, held) for pid, held in sizes if pid != own_pid and held != 0)


def _query(nvml: Any, otherwise: T, name: str, *args: Any) -> T:
    """The result of a function that old drivers, MIG instances, integrated GPUs or dask-hip may not have; `otherwise` then."""
    call: Callable[..., T] = getattr(nvml, f"nvmlDeviceGet{name}", lambda *_: otherwise)
    try:
        return call(*args)
    except (
        nvml.NVMLError,
        TypeError,
    ) as error:  # TypeError: another version of the library has other arguments
        # A lost GPU gets no worker, so this error is never ignored.
        if _code(error) in (GPU_IS_LOST, RESET_REQUIRED):
            raise
        return otherwise


def _code(error: Exception) -> int:
    return int(getattr(error, "value", UNKNOWN))


# The meaning of ``CUDA_VISIBLE_DEVICES``. The rules are CUDA's (CUDA C++ Programming Guide, "CUDA Environment Variables"), except
# that a GPU that is not there, or is listed twice, is an error here, while CUDA ignores it silently: a job that requested four
# GPUs should not run on three.


def sees_none(value: str | None) -> bool:
    """Whether the value hides every GPU: empty, ``-1`` first, or ``NoDevFiles`` (an old Slurm's value).

    >>> sees_none(None), sees_none("0,1"), sees_none(""), sees_none("-1,0"), sees_none("NoDevFiles")
    (False, False, True, True, True)
    """
    if value is None:
        return False
    return value.strip() in ("", "NoDevFiles") or value.split(",")[0].strip() == "-1"


def hide_gpus(environ: MutableMapping[str, str], *, but: str = "") -> None:
    """Hide the GPUs of this host, except the one with the UUID `but`, from a process that has not used one yet."""
    environ[VISIBLE_DEVICES] = but


def parse_visible(value: str | None, devices: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Choose the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` makes visible, in its order; raises an InputError.

    The value is None (unset: all GPUs), or a list, separated by commas, of indices in NVML's order and of full or abbreviated
    UUIDs (``GPU-...``, ``MIG-...``). ``-1`` ends the list. The index or UUID of a GPU with MIG enabled selects its first
    instance. Devices that NVML can't read (empty `uuid`) are returned as well; the caller drops them with a warning. The oldest
    MIG syntax, ``MIG-GPU-<uuid>/<gi>/<ci>``, works if the driver itself has such names (before R470).

    >>> gpus = [Gpu(uuid=f"GPU-{letter}0", index=i, name="A100", memory=0) for i, letter in enumerate("abc")]
    >>> [gpu.uuid for gpu in parse_visible("2,GPU-a", gpus)]
    ['GPU-c0', 'GPU-a0']
    >>> [gpu.index for gpu in parse_visible("1,-1,0", gpus)]
    [1]
    >>> parse_visible("0,3", gpus[:1])
    Traceback (most recent call last):
    dask_gpu_mpi.errors.InputError: CUDA_VISIBLE_DEVICES='0,3': there is no GPU '3' (NVML lists 0 (GPU-a0)). Fix: ...
    """
    if value is None:
        return tuple(devices)
    if sees_none(value):
        return ()
    chosen: dict[tuple[str, int], str] = {}
    found: list[Gpu] = []
    for raw in value.split(","):
        entry = raw.strip()
        if entry == "-1":
            break
        gpu = _find(entry, value, devices, found)
        key = (gpu.uuid, gpu.index)
        if key in chosen:
            raise InputError(
                f"{VISIBLE_DEVICES}={value!r} lists one GPU twice ({chosen[key]!r} and {entry!r}; {_listed(devices)})",
                fix="list each GPU once",
            )
        chosen[key] = entry
        found.append(gpu)
    return tuple(found)


def _find(entry: str, value: str, devices: Sequence[Gpu], found: Sequence[Gpu]) -> Gpu:
    if re.fullmatch(r"[0-9]{1,9}", entry):
        fits = [gpu for gpu in devices if gpu.index == int(entry)][:1]
    elif entry[:4] in ("GPU-", "MIG-") and len(entry) > 4:
        # A lost GPU has no UUID any more, so a UUID that no device has is assumed to be its.
        fits = _by_uuid(entry, devices) or [gpu for gpu in devices if not gpu.uuid and gpu not in found][:1]
    else:
        raise InputError(
            f"{VISIBLE_DEVICES}={value!r}: invalid entry {entry!r}",
            expected=f"an index or a GPU-... or MIG-... UUID; {_listed(devices)}",
            fix="correct the variable or unset it",
        )
    if len(fits) > 1:
        raise InputError(
            f"{VISIBLE_DEVICES}={value!r}: {entry!r} fits {len(fits)} GPUs ({_listed(devices)})",
            fix="give more of the UUID",
        )
    if not fits:
        raise InputError(
            f"{VISIBLE_DEVICES}={value!r}: there is no GPU {entry!r} ({_listed(devices)})",
            fix="correct the variable or unset it",
        )
    return fits[0]


def _by_uuid(entry: str, devices: Sequence[Gpu]) -> list[Gpu]:
    """The devices whose UUID, or whose parent's, begins with the entry; of each parent the first instance only."""
    start = entry.lower()
    if exact := [gpu for gpu in devices if gpu.uuid.lower() == start]:
        return exact
    fits: dict[str, Gpu] = {}
    for gpu in devices:
        if gpu.uuid.lower().startswith(start):
            fits[gpu.uuid] = gpu
        elif gpu.parent and gpu.parent.lower().startswith(start):
            fits.setdefault(gpu.parent, gpu)
    return list(fits.values())


def _listed(devices: Sequence[Gpu]) -> str:
    if not devices:
        return "NVML lists no GPU"
    return "NVML lists " + ", ".join(f"{gpu.index} ({gpu.uuid or 'lost: ' + gpu.name})" for gpu in devices)


# Figures of GPUs while a job runs, and their health for `check`.

#: In percent; bytes in use, and in total; W; °C; bits of the reasons for lower clocks (`reasons_of`); J since the driver was
#: loaded; bytes per second over PCIe and NVLink.
FIGURES = ("use", "memory", "memory_total", "power", "temperature", "slowed", "energy", "pcie", "nvlink")
#: The reasons for which a GPU lowers its clocks under load, each with the bits that NVML has for it.
_REASONS = {"power": 0x4, "heat": 0x20 | 0x40, "hardware": 0x8 | 0x80}
SLOWED = tuple(_REASONS)
# nvml.h: nvmlClocksEventReason*. The first comes with the second as well, and with 0x80, the power brake.
_HARDWARE, _HEAT_OF_HARDWARE = 0x8, 0x40
# nvml.h: nvmlMemoryErrorType_t, nvmlEccCounterType_t
_UNCORRECTED, _SINCE_RESET = 1, 0
# nvml.h: nvmlTemperatureSensors_t, nvmlPcieUtilCounter_t, field ids; the scope of all links together
_GPU_SENSOR, _SENT, _RECEIVED = 0, 0, 1
_NVLINK_SENT, _NVLINK_RECEIVED, _ALL_LINKS = 138, 139, 2**32 - 1


def device_figures(uuid: str, nvml: Any = None, *, throughput: bool = True) -> list[float | None]:
    """The `FIGURES` of the GPU, or MIG instance, with this UUID; None for those that NVML, once initialised, does not report.

    But those of NVLink are bytes since the driver was loaded. PCIe takes 40 ms to measure (`throughput`). A MIG instance has
    memory only: the rest would be that of its GPU.
    """
    nvml = nvml or _import_nvml()
    try:
        figures = _figures(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), uuid, throughput)
    except nvml.NVMLError:
        figures = {}
    return [figures.get(name) for name in FIGURES]


def _figures(nvml: Any, handle: Any, uuid: str, throughput: bool) -> dict[str, float | None]:
    def ask(name: str, *args: Any) -> Any:
        return _query(nvml, None, name, handle, *args)

    figures: dict[str, float | None] = {}
    if (memory := ask("MemoryInfo")) is not None:
        figures |= {"memory": memory.used, "memory_total": memory.total}
    if uuid.startswith("MIG-"):
        return figures
    use = ask("UtilizationRates")
    pcie = [ask("PcieThroughput", way) for way in (_SENT, _RECEIVED)] if throughput else [None]
    links = ask("FieldValues", [(field, _ALL_LINKS) for field in (_NVLINK_SENT, _NVLINK_RECEIVED)]) or ()
    return figures | {
        "use": None if use is None else use.gpu,
        "power": _scaled(1e-3, ask("PowerUsage")),
        "temperature": ask("Temperature", _GPU_SENSOR),
        "slowed": _slowed(nvml, handle),
        "energy": _scaled(1e-3, ask("TotalEnergyConsumption")),
        "pcie": _scaled(1e3, *pcie),
        "nvlink": _scaled(1024, *(None if each.nvmlReturn else each.value.ullVal for each in links)),
    }


def _scaled(factor: float, *values: Any) -> float | None:
    """Their sum in another unit; None if one is not known, or there are none."""
    return sum(values) * factor if values and None not in values else None


def _slowed(nvml: Any, handle: Any) -> int | None:
    """The reasons for which the clocks are lowered now, a bit for each of `SLOWED`; None: not known."""
    reasons = _query(nvml, None, "CurrentClocksEventReasons", handle)
    if reasons is None:  # older drivers have this name alone, which goes with CUDA 14
        reasons = _query(nvml, None, "CurrentClocksThrottleReasons", handle)
    if reasons is None:
        return None
    if reasons & _HEAT_OF_HARDWARE:
        reasons &= ~_HARDWARE
    return sum(1 << place for place, bits in enumerate(_REASONS.values()) if reasons & bits)


def reasons_of(bits: float) -> list[str]:
    """The reasons for lowered clocks that these bits of `device_figures` stand for.

    >>> reasons_of(0), reasons_of(5)
    ([], ['power', 'hardware'])
    """
    return [why for place, why in enumerate(SLOWED) if int(bits) >> place & 1]


def gpu_health(gpus: Sequence[Gpu], nvml: Any = None) -> tuple[str, dict[str, int]]:
    """The driver's version, and by UUID the uncorrected memory errors of each GPU with ECC since its last reset."""
    nvml = nvml or _import_nvml()
    driver, ecc = "", dict[str, int]()
    with contextlib.suppress(nvml.NVMLError):  # `visible_gpus` reports why NVML does not start
        nvml.nvmlInit()
        with contextlib.suppress(nvml.NVMLError):
            driver = nvml.nvmlSystemGetDriverVersion()
        for gpu in gpus:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.parent or gpu.uuid)
                ecc[gpu.uuid] = int(nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _SINCE_RESET))
        nvml.nvmlShutdown()
    return driver, ecc


# CUDA contexts of this process, found without loading, initialising or creating anything.


def own_contexts() -> tuple[str, ...]:
    """The devices on which this process has a primary CUDA context, such as ``"device 0, GPU-5b1f..."`` by CUDA's number.

    The primary context is the one that the CUDA runtime, CuPy, Numba, RMM and PyTorch use. A process that has not loaded or not
    initialised the driver's library has none; ``cuDevicePrimaryCtxGetState`` creates none either.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD)
    except OSError:
        return ()
    count = ctypes.c_int()
    # Without a call of cuInit all other calls fail, so an error here means that the process has not initialised CUDA.
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for device in range(count.value):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        state = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if state == 0 and active.value:
            found.append(f"device {device}{_uuid(cuda, device)}")
    return tuple(found)


def _uuid(cuda: ctypes.CDLL, device: int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None)
    if ask is None or ask(ctypes.byref(raw), device) != 0:
        return ""
    return f", GPU-{uuid.UUID(bytes=bytes(raw))}"
