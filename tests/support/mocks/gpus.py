"""GPUs that this machine does not have: hosts of GPUs described to a mock of `pynvml`, and the CUDA driver in C, compiled here.

>>> gpus = make_gpus(4, host="h1", memory=80 * GIB, cores=[(0, 1), (0, 1), (2, 3), (2, 3)])
>>> environ = emulated_environ(gpus)
>>> hosts = {"h1": SimHost(gpus), "h2": SimHost(gpus[2:]), "*": SimHost(init_fail="UNKNOWN")}
>>> environ = emulated_environ(hosts) | {"CUDA_VISIBLE_DEVICES": "0,1"}
>>> subprocess.run([sys.executable, "script.py"], env=environ)
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.mocks.nvml.pynvml import NOT_SUPPORTED, ONLY_VARIABLE, VARIABLE

#: A folder with the mock of `pynvml`, for PYTHONPATH.
NVML = Path(__file__).with_name("nvml")
GIB = 2**30


def _mask(numbers: Iterable[int]) -> list[int]:
    """Numbers as NVML has them, bits of 64 in a word."""
    bits = sum(1 << number for number in set(numbers))
    return [bits >> shift & (1 << 64) - 1 for shift in range(0, bits.bit_length(), 64)]


@dataclass(frozen=True)
class SimMig:
    """A MIG instance of an emulated GPU."""

    #: ``"MIG-..."``.
    uuid: str
    #: Bytes.
    memory: int

    def describe(self, name: str) -> dict[str, Any]:
        """Make the mock's device of it."""
        fixed = {"busy": [], "utilization": NOT_SUPPORTED, "ecc": NOT_SUPPORTED}
        return {"uuid": self.uuid, "name": name, "memory": [self.memory], **fixed}


@dataclass(frozen=True)
class SimGpu:
    """An emulated GPU. None is ``NVML_ERROR_NOT_SUPPORTED``."""

    #: ``"GPU-..."``.
    uuid: str
    #: What ``nvmlDeviceGetName`` gives.
    name: str = "NVIDIA H200"
    #: Bytes; None also for a device without memory of its own.
    memory: int | None = 141 * GIB
    #: Bytes; None: the sum of the processes.
    used: int | None = None
    #: Cores near it; None: all of the machine's.
    cores: tuple[int, ...] | None = None
    #: NUMA node; None: 0.
    node: int | None = None
    #: Percent, degrees Celsius, count.
    utilization: int | None = 0
    temperature: int | None = 40
    ecc: int = 0
    #: W; bits of NVML's throttle reasons; kB and bytes per second, as much sent as received.
    power: int | None = None
    throttle: int | None = None
    pcie: int | None = None
    nvlink: int | None = None
    #: Running processes as (pid, bytes).
    processes: tuple[tuple[int, int], ...] = ()
    #: MIG instances.
    mig: tuple[SimMig, ...] = ()

    def describe(self, place: int) -> dict[str, Any]:
        """Make the mock's device of it, at this place on its host."""
        used = sum(size for _, size in self.processes) if self.used is None else self.used
        figures = {
            name: getattr(self, name)
            for name in ("temperature", "ecc", "power", "throttle", "pcie", "nvlink")
        }
        figures["utilization"] = None if self.mig else self.utilization
        instances = [each.describe(f"{self.name} MIG {number}") for number, each in enumerate(self.mig)]
        return {
            "uuid": self.uuid,
            "name": self.name,
            "memory": NOT_SUPPORTED if self.memory is None else [self.memory, used],
            "cpus": _mask(range(os.cpu_count() or 1) if self.cores is None else self.cores),
            "nodes": _mask([self.node or 0]),
            "pci": f"00000000:{place + 1:02X}:00.0",
            "busy": self.processes,
            "mode": NOT_SUPPORTED,
            **{name: NOT_SUPPORTED if value is None else [value] for name, value in figures.items()},
            **({"mig": instances} if instances else {}),
        }


@dataclass(frozen=True)
class SimHost:
    """The GPUs of one host."""

    #: All that are in the host.
    gpus: tuple[SimGpu, ...] = ()
    #: Device files, without the number at their end: GPUs whose file a process is not permitted to open, as in a device
    #: cgroup, do not exist for it. None: there are no files.
    files: str | None = None
    #: The error that ``nvmlInit`` gives, such as ``"DRIVER_NOT_LOADED"``.
    init_fail: str | None = None
    #: Driver version.
    driver: str = "580.65.06"

    def describe(self) -> dict[str, Any]:
        """Make a dict of it, for the mock."""
        gpus = [gpu.describe(place) for place, gpu in enumerate(self.gpus)]
        return {"gpus": gpus, "files": self.files, "init_fail": self.init_fail, "driver": self.driver}


def make_gpus(
    count: int,
    *,
    host: str = "",
    name: str = "NVIDIA H200",
    memory: int = 141 * GIB,
    cores: Sequence[tuple[int, ...]] = (),
) -> tuple[SimGpu, ...]:
    """Make alike GPUs with UUIDs that depend on host and place only.

    `host`: goes into the UUIDs: GPUs of different hosts differ.
    `cores`: the cores near each GPU, shared out in equal blocks: two entries for eight GPUs are two sockets of four. Empty:
    every GPU is near all cores.
    """
    return tuple(
        SimGpu(
            uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.gpu.{host}')}",
            name=name,
            memory=memory,
            cores=cores[index * len(cores) // count] if cores else None,
        )
        for index in range(count)
    )


#: By host name, or a pattern such as ``"gpu*"``, what is in it: the first that fits, and a host that fits none has no driver.
#: Or one host, or GPUs, which are the same everywhere.
Described = Mapping[str, SimHost] | SimHost | Iterable[SimGpu]


@cache
def driver_folder() -> str:
    """A folder, for LD_LIBRARY_PATH, with a library by the name of NVML's: that it can be loaded tells of an installed driver."""
    folder = tempfile.mkdtemp(prefix="driver-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    maps = Path("/proc/self/maps").read_text().split()
    any_library = next(word for word in maps if "/libc.so" in word)
    (Path(folder) / "libnvidia-ml.so.1").symlink_to(any_library)
    return folder


def emulated_environ(gpus: Described, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Make the environment of a process that sees emulated GPUs.

    `base`: the environment to start from, default `os.environ`. Its ``CUDA_VISIBLE_DEVICES`` and isolation are left out: they
    speak of the machine's own GPUs. So add them to what this returns.
    """
    environ = dict(os.environ if base is None else base)
    for variable in ("CUDA_VISIBLE_DEVICES", ONLY_VARIABLE):
        environ.pop(variable, None)
    path = environ.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NVML), path]))
    environ["LD_LIBRARY_PATH"] = os.pathsep.join(
        filter(None, [driver_folder(), environ.get("LD_LIBRARY_PATH")])
    )
    if not isinstance(gpus, Mapping):
        gpus = {"*": gpus if isinstance(gpus, SimHost) else SimHost(tuple(gpus))}
    environ[VARIABLE] = json.dumps({name: host.describe() for name, host in gpus.items()})
    return environ


LOG_VARIABLE = "EMULATED_CUDA_LOG"
"""The file to which every process adds what it does with CUDA."""


def compile_library(source: Path, library: Path, *more: str) -> Path:
    """Compile one file of C into a shared library; returns its directory.

    The test is skipped where there is no C compiler (``$CC``, else ``cc``).
    Raises `RuntimeError`: the compiler found something, warnings included; its words are in the message.
    """
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        import pytest  # which the recordings of the docs do not need

        pytest.skip("no C compiler")
    library.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = [compiler, *flags, "-o", str(library), str(source), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return library.parent


def compile_cuda(directory: Path) -> Path:
    """Compile ``libcuda.so.1`` into a directory, which is returned, for ``LD_LIBRARY_PATH``."""
    return compile_library(Path(__file__).with_name("cuda.c"), directory / "libcuda.so.1", "-ldl")


def read_log(file: Path) -> list[tuple[int, str]]:
    """The (pid, function) of every call that initialised CUDA or made a context."""
    if not file.exists():
        return []
    return [(int(pid), function) for pid, function in map(str.split, file.read_text().splitlines())]
