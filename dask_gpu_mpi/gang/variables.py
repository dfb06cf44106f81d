"""The environment variables of a member: those by which torch, JAX and NCCL find each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES

if TYPE_CHECKING:
    from .members import Member

__all__ = ["applied", "device_of", "variables_of"]

#: Of these the user's own values stay.
DEFAULTS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def variables_of(
    member: Member, size: int, master_addr: str, master_port: int, interface: str | None
) -> dict[str, str]:
    """What a member's environment has while it runs: torchrun's names, JAX's, and the cluster's interface."""
    host = f"[{master_addr}]" if ":" in master_addr else master_addr
    variables = {
        "RANK": member.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": member.local_rank,
        "LOCAL_WORLD_SIZE": member.local_size,
        "GROUP_RANK": member.node_rank,
        "GROUP_WORLD_SIZE": member.nodes,
        "NODE_RANK": member.node_rank,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "JAX_COORDINATOR_ADDRESS": f"{host}:{master_port}",
        "JAX_NUM_PROCESSES": size,
        "JAX_PROCESS_ID": member.rank,
    }
    if interface is not None:
        # "=": this very name, where NCCL would take any that begins with it
        variables |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    return {name: str(value) for name, value in variables.items()}


@contextmanager
def applied(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process, and restore what was there before."""
    new = {name: value for name, value in variables.items() if name not in DEFAULTS or name not in os.environ}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def device_of(resources: Mapping[str, float], environ: Mapping[str, str]) -> int | None:
    """The index by which a worker's process knows its own GPU: its first visible one, or None without a GPU.

    Workers of this package have a resource that tells; those of another cluster have a GPU if they are shown one.

    >>> device_of({"GPU": 1}, {}), device_of({"CPU": 4}, {"CUDA_VISIBLE_DEVICES": "0"}), device_of({}, {})
    (0, None, None)
    """
    if "GPU" in resources or "CPU" in resources:
        return 0 if resources.get("GPU") else None
    return 0 if environ.get(VISIBLE_DEVICES, "").strip() not in ("", "-1", "NoDevFiles", "void") else None
