"""CUDA contexts that this process has already: found without loading, initialising or making anything."""

from __future__ import annotations

import ctypes
import uuid
from pathlib import Path

__all__ = ["own_contexts"]

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
