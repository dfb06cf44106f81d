"""Inventories of a hypothetical allocation, for ``plan --nodes N ...``."""

from __future__ import annotations

from typing import Literal

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory

GPU_MEMORY = 80 * 1024**3
#: Bytes of memory of each node by default, for ``plan --nodes`` and for the plan that `jobscript` checks alike.
NODE_MEMORY = 512 * 1024**3
#: Most ranks, GPUs and cores of a job: more than any machine has, and a plan is made of each.
MOST_RANKS, MOST_CORES = 200_000, 20_000_000


def hypothetical_job(
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
    visible: Literal["all", "per-rank"] = "all",
    cpus_per_node: int = 64,
    memory_per_node: int = NODE_MEMORY,
    total: int | None = None,
) -> tuple[Inventory, ...]:
    """Make the inventories of a hypothetical job on alike hosts ``h1`` to ``hN``.

    Ranks fill one host after the other and are bound to no cores. Each host has two NUMA nodes with half of the cores and
    half of the GPUs each. With `visible` "all" every rank sees all GPUs of its host (as with ``--gpus-per-node``), with
    "per-rank" a part of them (as with ``--gpus-per-task``), the first ranks one more if they do not divide evenly. With
    `total` the last host has the rest of them. An OptionError if there are too many.

    >>> [(rank.rank, rank.host, rank.visible) for rank in hypothetical_job(1, 2, 4, "per-rank")]
    [(0, 'h1', '0,1'), (1, 'h1', '2,3')]
    """
    for option, number, most in (
        ("ranks-per-node", ranks_per_node, MOST_RANKS),
        ("gpus-per-node", gpus_per_node, MOST_RANKS),
        ("cpus-per-node", cpus_per_node, MOST_CORES),
    ):
        if nodes * number > most:
            raise OptionError(
                f"--nodes {nodes} --{option} {number}: too many",
                expected=f"at most {most} in all",
                fix="plan a part of the job",
            )
    cpus = tuple(range(cpus_per_node))
    half = (cpus_per_node + 1) // 2
    numa = (cpus[:half], cpus[half:] or cpus)
    found: list[Inventory] = []
    for node in range(nodes):
        rest = gpus_per_node if total is None else total - node * gpus_per_node
        gpus = tuple(
            Gpu(
                # The part of the UUID that tables have tells GPUs of different hosts apart.
                uuid=f"GPU-{node * gpus_per_node + index:08x}-0000-0000-0000-000000000000",
                index=index,
                name="GPU",
                memory=GPU_MEMORY,
                cpus=numa[2 * index >= gpus_per_node],
                pci=f"00000000:{index:02X}:00.0",
            )
            for index in range(min(gpus_per_node, rest))
        )
        for place in range(ranks_per_node):
            seen = gpus if visible == "all" else gpus[_block(len(gpus), ranks_per_node, place)]
            found.append(
                Inventory(
                    rank=node * ranks_per_node + place,
                    world_size=nodes * ranks_per_node,
                    host=f"h{node + 1}",
                    boot_id="hypothetical",
                    pid=0,
                    cpus=cpus,
                    memory=memory_per_node,
                    gpus=seen,
                    visible=None if visible == "all" else ",".join(str(gpu.index) for gpu in seen),
                )
            )
    return tuple(found)


def _block(number: int, parts: int, place: int) -> slice:
    """One of `parts` contiguous blocks whose sizes differ by at most one."""
    share, extra = divmod(number, parts)
    start = place * share + min(place, extra)
    return slice(start, start + share + (place < extra))
