"""What ``CUDA_VISIBLE_DEVICES`` means, against the GPUs that NVML lists.

The rules are CUDA's (CUDA C++ Programming Guide, "CUDA Environment Variables"), except that what CUDA passes
over in silence, a GPU that is not there or named twice, is an error here: a job that asked for four GPUs
should not run on three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.nvml import list_gpus

__all__ = ["NO_GPU", "VISIBLE_DEVICES", "hide_gpus", "parse_visible", "sees_none", "visible_gpus"]

#: The variable by which a process is shown some of the GPUs of its host; nobody else spells it in code that reads or sets it.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
#: What CUDA, and the libraries over it, say in a process that sees no GPU.
NO_GPU = re.compile(r"no CUDA-capable device|CUDA_?ERROR_?NO_?DEVICE|No CUDA GPUs", re.IGNORECASE)


def sees_none(value: str | None) -> bool:
    """Whether the value hides every GPU: empty, ``-1`` first, or ``NoDevFiles`` (an old Slurm's value).

    >>> sees_none(None), sees_none("0,1"), sees_none(""), sees_none("-1,0"), sees_none("NoDevFiles")
    (False, False, True, True, True)
    """
    if value is None:
        return False
    return value.strip() in ("", "NoDevFiles") or value.split(",")[0].strip() == "-1"


def hide_gpus(environ: MutableMapping[str, str], *, but: str = "") -> None:
    """Hide the GPUs of this host from a process that has not used one yet.

    Parameters
    ----------
    environ : mapping
        The process's environment.
    but : str
        UUID of a GPU that it may use all the same, should it have to.
    """
    environ[VISIBLE_DEVICES] = but


def visible_gpus(environ: Mapping[str, str], nvml: Any = None, own_pid: int | None = None) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment sees, those without a UUID among them that are lost.

    Parameters
    ----------
    environ : mapping
        The environment in which ``CUDA_VISIBLE_DEVICES`` counts.
    nvml, own_pid : module, int, optional
        As `list_gpus`.

    Raises
    ------
    InputError
        ``CUDA_VISIBLE_DEVICES`` names what is not there, or NVML is there and does not work.
    """
    visible = environ.get(VISIBLE_DEVICES)
    return () if sees_none(visible) else parse_visible(visible, list_gpus(nvml, own_pid))


def parse_visible(value: str | None, devices: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Choose the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` makes visible.

    Parameters
    ----------
    value : str or None
        None (unset): all. Otherwise a list, by commas, of indices and of full or abbreviated UUIDs
        (``GPU-...``, ``MIG-...``; the start suffices where only one device has it). ``-1`` ends the list.
        ``""``, ``-1`` and ``NoDevFiles`` mean none.
    devices : sequence of Gpu
        What NVML lists (`dask_gpu_mpi.machine.nvml.list_gpus`), MIG instances in the place of their parent, in NVML's
        order, which is that of the PCI bus: the order that Slurm, PBS and ``CUDA_DEVICE_ORDER=PCI_BUS_ID``
        count in.

    Returns
    -------
    tuple of Gpu
        In the order of the list. The index or UUID of a GPU with MIG enabled means its first instance.
        Devices that NVML can't read (empty `uuid`) are returned as well where they are asked for: the caller
        drops them with a warning.

    Raises
    ------
    InputError
        A device is not there, is named twice, or a name fits several, or the value is no such list.

    Notes
    -----
    The oldest MIG syntax, ``MIG-GPU-<uuid>/<gi>/<ci>``, is understood where the driver itself calls its
    instances so (before R470).

    Examples
    --------
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
                f"{VISIBLE_DEVICES}={value!r} names one GPU twice ({chosen[key]!r} and {entry!r}; {_listed(devices)})",
                fix="name each GPU once",
            )
        chosen[key] = entry
        found.append(gpu)
    return tuple(found)


def _find(entry: str, value: str, devices: Sequence[Gpu], found: Sequence[Gpu]) -> Gpu:
    if re.fullmatch(r"[0-9]{1,9}", entry):
        fits = [gpu for gpu in devices if gpu.index == int(entry)][:1]
    elif entry[:4] in ("GPU-", "MIG-") and len(entry) > 4:
        fits = _by_uuid(entry, devices)
        if not fits:
            # A lost GPU has no UUID any more: a UUID that nobody has is taken for it.
            fits = [gpu for gpu in devices if not gpu.uuid and gpu not in found][:1]
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
    """Find the devices whose UUID, or whose parent's, begins so; of each parent the first instance only."""
    start = entry.lower()
    exact = [gpu for gpu in devices if gpu.uuid.lower() == start]
    if exact:
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
