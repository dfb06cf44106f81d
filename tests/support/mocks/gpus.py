"""GPUs that this machine does not have: NVML and the CUDA driver in C, compiled here, and hosts of GPUs described to them.

>>> gpus = make_gpus(4, host="h1", memory=80 * GIB, cores=[(0, 1), (0, 1), (2, 3), (2, 3)])
>>> environ = emulated_environ(compile_nvml(directory), gpus)
>>> hosts = {"h1": SimHost(gpus), "h2": SimHost(gpus, only=(2, 3)), "*": SimHost(init_fail="UNKNOWN")}
>>> environ = emulated_environ(directory, hosts) | {"CUDA_VISIBLE_DEVICES": "0,1"}
>>> subprocess.run([sys.executable, "script.py"], env=environ)

The grammar of the environment variable is at the top of ``nvml.c``; nothing else needs to know it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "GIB",
    "LOG_VARIABLE",
    "ONLY_VARIABLE",
    "VARIABLE",
    "SimCluster",
    "SimGpu",
    "SimHost",
    "SimMig",
    "compile_cuda",
    "compile_library",
    "compile_nvml",
    "emulated_environ",
    "make_gpus",
    "read_log",
]


VARIABLE = "EMULATED_NVML"
"""The one variable that describes every host's GPUs."""

ONLY_VARIABLE = "EMULATED_NVML_ONLY"
"""Per process: the places (``"1,3"``) of the GPUs that exist for it, as in the device cgroup of one rank."""

NVML = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
GIB = 2**30

Failures = Mapping[str, str | int]


def compile_nvml(directory: Path) -> Path:
    """Compile the library into a directory.

    `directory`: where `libnvidia-ml.so.1` goes; made if missing.
    Raises `RuntimeError`: the compiler found something, warnings included; its words are in the message.
    """
    return compile_library(NVML, directory / LIBRARY)


def compile_library(source: Path, library: Path, *more: str) -> Path:
    """Compile one file of C into a shared library; returns its directory, and raises as `compile_nvml` says.

    The test is skipped where there is no C compiler (``$CC``, else ``cc``).
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


def _text(value: object) -> str:
    """The value as the grammar takes it, or an error where it would read as something else."""
    text = str(value)
    if any(character in text for character in ",|;\n") or text != text.strip():
        raise ValueError(
            f"{text!r} can't be described to the emulated NVML: it holds one of , | ; or outer blanks"
        )
    return text


def _item(head: str, *fields: tuple[str, object]) -> str:
    """One item of the grammar; fields whose value is None are left out, True is a bare key."""
    given = [(key, value) for key, value in fields if value is not None and value is not False]
    return ",".join([head, *(key if value is True else f"{key}={_text(value)}" for key, value in given)])


def _pairs(pairs: Iterable[tuple[object, object]]) -> str | None:
    return "+".join(f"{left}:{right}" for left, right in pairs) or None


def _ranges(numbers: Iterable[int]) -> str:
    """Render core numbers compactly: ``"0-3+8"`` (an environment variable has room for 128 KiB)."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "+".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True)
class SimMig:
    """A MIG instance of an emulated GPU."""

    #: ``"MIG-..."``.
    uuid: str
    #: Bytes.
    memory: int
    #: None: the parent's name and the place on it.
    name: str | None = None
    #: Bytes; None: the sum of `processes`.
    used: int | None = None
    #: Running processes as (pid, bytes).
    processes: tuple[tuple[int, int], ...] = ()
    #: Every call on it gives ``NVML_ERROR_GPU_IS_LOST``.
    lost: bool = False
    #: Function (``"nvmlDeviceGetName"``, ``"*"``) to its error, ``"NO_PERMISSION"`` or a number.
    failures: Failures | None = None

    def item(self) -> str:
        """Render this instance in the grammar of ``nvml.c``."""
        return _item(
            "mig",
            ("uuid", self.uuid),
            ("name", self.name),
            ("memory", self.memory),
            ("used", self.used),
            ("processes", _pairs(self.processes)),
            ("lost", self.lost),
            ("fail", _pairs((self.failures or {}).items())),
        )


@dataclass(frozen=True)
class SimGpu:
    """An emulated GPU."""

    #: ``"GPU-..."``.
    uuid: str
    #: What ``nvmlDeviceGetName`` gives.
    name: str = "NVIDIA H200"
    #: Bytes; None: a device without memory of its own (``NVML_ERROR_NOT_SUPPORTED``).
    memory: int | None = 141 * GIB
    #: Bytes; None: the sum of the processes, those of the instances included.
    used: int | None = None
    #: Cores near it; None: all of the machine's; empty: ``NVML_ERROR_NOT_SUPPORTED``.
    cores: tuple[int, ...] | None = None
    #: NUMA node; None: 0.
    node: int | None = None
    #: ``"0000:3b:00.0"``; None: made from the place on the host.
    pci: str | None = None
    #: Percent, degrees Celsius, count.
    utilization: int | None = None
    temperature: int | None = None
    ecc: int | None = None
    #: W; bits of NVML's throttle reasons; kB and bytes per second, as much sent as received. None: ``NVML_ERROR_NOT_SUPPORTED``.
    power: int | None = None
    throttle: int | None = None
    pcie: int | None = None
    nvlink: int | None = None
    #: As in `SimMig`.
    processes: tuple[tuple[int, int], ...] = ()
    lost: bool = False
    failures: Failures | None = None
    #: MIG instances.
    mig: tuple[SimMig, ...] = ()

    def item(self) -> str:
        """Render this GPU and its instances in the grammar of ``nvml.c``."""
        gpu = _item(
            "gpu",
            ("uuid", self.uuid),
            ("name", self.name),
            ("memory", "none" if self.memory is None else self.memory),
            ("used", self.used),
            ("cores", None if self.cores is None else _ranges(self.cores) or "none"),
            ("node", self.node),
            ("pci", self.pci),
            ("utilization", self.utilization),
            ("temperature", self.temperature),
            ("ecc", self.ecc),
            ("power", self.power),
            ("throttle", self.throttle),
            ("pcie", self.pcie),
            ("nvlink", self.nvlink),
            ("processes", _pairs(self.processes)),
            ("lost", self.lost),
            ("fail", _pairs((self.failures or {}).items())),
        )
        return "|".join([gpu, *(instance.item() for instance in self.mig)])


@dataclass(frozen=True)
class SimHost:
    """The GPUs of one host."""

    #: All that are in the host.
    gpus: tuple[SimGpu, ...] = ()
    #: Device isolation: only the GPUs at these places exist, and are indexed from 0. None: all.
    only: tuple[int, ...] | None = None
    #: Device files, without the number at their end: GPUs whose file a process is not permitted to open, as in a device
    #: cgroup, do not exist for it. None: there are no files.
    files: str | None = None
    #: The error that ``nvmlInit`` gives, such as ``"DRIVER_NOT_LOADED"``.
    init_fail: str | int | None = None
    #: Driver version.
    driver: str | None = None

    def describe(self) -> str:
        """Render this host's items in the grammar of ``nvml.c``, without a pattern."""
        attributes = {
            "init-fail": self.init_fail,
            "driver": self.driver,
            "files": self.files,
        }
        items = [_item(f"{key}={_text(value)}") for key, value in attributes.items() if value is not None]
        if self.only is not None:
            items.append(f"only={'+'.join(map(str, self.only))}")
        return "|".join([*items, *(gpu.item() for gpu in self.gpus)])

    def environ(self) -> dict[str, str]:
        """Return the one variable, for every host alike."""
        return {VARIABLE: self.describe()}


@dataclass(frozen=True)
class SimCluster:
    """Hosts with different GPUs."""

    #: Host name, or a pattern such as ``"gpu*"``, to what is in it. The first that fits is taken; a host that fits none
    #: has no driver.
    hosts: Mapping[str, SimHost]

    def environ(self) -> dict[str, str]:
        """Return the one variable, the same on every host."""
        return {VARIABLE: ";".join(f"{name}:{host.describe()}" for name, host in self.hosts.items())}


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


Described = SimCluster | SimHost | Mapping[str, SimHost] | Iterable[SimGpu]


def emulated_environ(libdir: Path, gpus: Described, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Make the environment of a process that sees emulated GPUs.

    `libdir`: what `compile_nvml` returned; goes first on ``LD_LIBRARY_PATH``, before a driver's own library.
    `gpus`: what there is; GPUs alone are the same on every host.
    `base`: the environment to start from, default `os.environ`. Its ``CUDA_VISIBLE_DEVICES`` and isolation are left out: they
    speak of the machine's own GPUs. So add them to what this returns.
    """
    environ = dict(os.environ if base is None else base)
    for variable in ("CUDA_VISIBLE_DEVICES", ONLY_VARIABLE):
        environ.pop(variable, None)
    old = environ.get("LD_LIBRARY_PATH")
    environ["LD_LIBRARY_PATH"] = f"{libdir}{os.pathsep}{old}" if old else str(libdir)
    if isinstance(gpus, Mapping):
        gpus = SimCluster(gpus)
    elif not isinstance(gpus, (SimCluster, SimHost)):
        gpus = SimHost(tuple(gpus))
    return environ | gpus.environ()


LOG_VARIABLE = "EMULATED_CUDA_LOG"
"""The file to which every process adds what it does with CUDA."""

CUDA = Path(__file__).with_name("cuda.c")


def compile_cuda(directory: Path) -> Path:
    """Compile ``libcuda.so.1`` into a directory, which is returned, for ``LD_LIBRARY_PATH``."""
    return compile_library(CUDA, directory / "libcuda.so.1", "-ldl")


def read_log(file: Path) -> list[tuple[int, str]]:
    """The (pid, function) of every call that initialised CUDA or made a context."""
    if not file.exists():
        return []
    return [(int(pid), function) for pid, function in map(str.split, file.read_text().splitlines())]
