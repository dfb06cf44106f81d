"""The machine of a rank: its GPUs, cores, memory and files. Here are the GPUs, as data that is the same for every vendor.

`machine.nvidia` fills it, `machine.inventory` sends it to the hub, and the plan and `check` use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dask_gpu_mpi.base.text import fold_numbers


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance."""

    #: ``GPU-...`` or ``MIG-...``. Empty: the vendor's library lists the GPU but can't read it (a lost GPU), and `name` is its
    #: error.
    uuid: str
    #: The library's index, in PCI order; for a MIG instance its parent's.
    index: int
    #: The product's name.
    name: str
    #: Bytes of device memory; of the slice for a MIG instance; 0: unknown.
    memory: int
    #: Cores of the NUMA node near the GPU; empty: unknown.
    cpus: tuple[int, ...] = ()
    #: PCI bus id; empty: unknown.
    pci: str = ""
    #: NUMA node of the host memory near it; -1: unknown, or several.
    numa: int = -1
    #: InfiniBand ports near it (`nearest_ports`).
    nics: str = ""
    #: UUID of the GPU that a MIG instance is a part of; empty for a whole GPU.
    parent: str = ""
    #: Index of the MIG instance on its parent; -1 for a whole GPU.
    slice: int = -1
    #: The compute processes of others, and the bytes of device memory that each holds; None: unknown.
    processes: tuple[tuple[int, int | None], ...] = ()
    #: Bytes of free device memory; -1: unknown.
    free: int = -1
    #: Whether only one process may use it: its compute mode is not the default.
    exclusive: bool = False

    @property
    def busy(self) -> int | None:
        """Bytes of device memory that `processes` hold; None: they hold some, and how much is unknown."""
        sizes = [held for _, held in self.processes]
        return None if None in sizes else sum(filter(None, sizes))


@dataclass(frozen=True)
class Promise:
    """The GPUs that a node should have, by a variable of the batch system or of CUDA, or by the driver."""

    #: Their number; 0: unknown, or the ranks must use none.
    count: int = 0
    #: The variable and its value, or in words; empty: nothing is known.
    source: str = ""
    #: What helps if none is visible.
    fix: str = ""
    #: Whether other jobs may use the other GPUs of the node.
    is_shared: bool = False


#: Nothing is known.
NO_PROMISE = Promise()


def why_none(environ: Mapping[str, str], inspect: str, exists: Callable[[str], bool] = os.path.exists) -> str:
    """What most likely helps on a node on which the job has GPUs, but sees none; `inspect`: the vendor's command.

    >>> why_none({"APPTAINER_CONTAINER": "/a.sif"}, "nvidia-smi", lambda _: False)
    'start the container with its GPU option (--nv, --gpus all, --device nvidia.com/gpu=all)'
    """
    if exists("/dev/kfd"):
        return "these are GPUs of AMD (rocm-smi), seen with the pynvml of dask-hip only; choose nodes with GPUs of NVIDIA"
    in_container = any(name in environ for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"))
    if in_container or exists("/.dockerenv") or exists("/run/.containerenv"):
        return "start the container with its GPU option (--nv, --gpus all, --device nvidia.com/gpu=all)"
    return f"run {inspect} on that node (is the driver loaded?)"


def near(cpus: Iterable[int], numa: int | None, nics: str) -> str:
    """The cores, NUMA node and network devices near a GPU, in words; empty: unknown.

    >>> near((0, 1, 2), 1, "mlx5_0:1"), near((0, 1), None, ""), near((), None, "")
    ('0-2, NUMA 1, mlx5_0:1', '0-1', '')
    """
    node = "" if numa is None else f"NUMA {numa}"
    return ", ".join(filter(None, (fold_numbers(cpus), node, nics)))


def nearest_ports(pci: str, sys: Path = Path("/sys")) -> str:
    """The InfiniBand ports nearest to the device with this PCI bus id, as ``UCX_NET_DEVICES`` has them.

    The nearest share most of the path from the root of PCI, or else the NUMA node. Empty: no port is nearer than others, or
    UCX has to choose, which knows who reaches whom: ports are Ethernet's (RoCE), or of different subnets.
    """
    domain, _, place = pci.lower().partition(":")
    device = sys / "bus/pci/devices" / f"{domain[-4:]}:{place}"  # NVML's domain has eight digits
    found: dict[tuple[int, bool], list[str]] = {}
    subnets = set()
    try:
        node = (device / "numa_node").read_text()
        for port in sorted(sys.glob("class/infiniband/*/ports/*")):
            layer, state = ((port / name).read_text() for name in ("link_layer", "state"))
            if layer.strip() != "InfiniBand" or not state.startswith("4"):  # IB_PORT_ACTIVE
                continue
            subnets.add((port / "gids/0").read_text()[:19])
            nic = port.parents[1] / "device"
            common = os.path.commonpath([os.path.realpath(device), os.path.realpath(nic)])
            same = (nic / "numa_node").read_text() == node != "-1\n"
            found.setdefault((common.count("/"), same), []).append(f"{port.parents[1].name}:{port.name}")
    except (OSError, ValueError):  # the id is no name of a file
        return ""
    return ",".join(found[max(found)]) if len(found) > 1 and len(subnets) == 1 else ""
