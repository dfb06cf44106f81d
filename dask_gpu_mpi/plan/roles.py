"""The ranks in order, and which of them has which role."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dask_gpu_mpi.base.text import fold_names, fold_numbers, ranks_text
from dask_gpu_mpi.errors import PlacementError, world_too_small
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.options.model import Options

__all__ = ["choose_roles", "default_client", "expected_client", "in_order", "reserved_ranks"]


def in_order(inventories: Iterable[Inventory]) -> list[Inventory]:
    """Sort the inventories by rank; a missing, double or foreign one is a PlacementError."""
    ranks = sorted(inventories, key=lambda inventory: inventory.rank)
    if not ranks:
        raise PlacementError("no inventory (expected one of each rank)")
    numbers = [inventory.rank for inventory in ranks]
    sizes = {inventory.world_size for inventory in ranks}
    if len(sizes) > 1:
        raise PlacementError(
            f"the ranks disagree on the world size: {', '.join(map(str, sorted(sizes)))} (expected one MPI world)"
        )
    size = sizes.pop()
    double = sorted({a for a, b in pairwise(numbers) if a == b})
    if double:
        hosts = fold_names(inventory.host for inventory in ranks if inventory.rank in double)
        raise PlacementError(
            f"{ranks_text(double)} answered more than once, from {hosts} (expected one inventory of each rank)"
        )
    missing = sorted(set(range(size)).difference(numbers))
    if missing:
        raise PlacementError(f"no inventory of {ranks_text(missing)} of {size} (expected one of each rank)")
    if len(ranks) > size:
        raise PlacementError(f"ranks {fold_numbers(numbers)} answered (expected ranks 0 to {size - 1})")
    return ranks


def default_client(layout: str, scheduler_rank: int, client_rank: int | None) -> int:
    """The rank that runs the script: the user's choice, else 0; in layout ``exclusive`` the first without the scheduler.

    >>> default_client("shared", 0, None), default_client("exclusive", 0, None), default_client("shared", 0, 3)
    (0, 1, 3)
    """
    if client_rank is not None:
        return client_rank
    return int(layout == "exclusive" and scheduler_rank != 1)


def expected_client(options: Options) -> int:
    """The rank that runs the script: the user's choice, else that of the layout."""
    return default_client(options.layout, options.scheduler_rank, options.client_rank)


def reserved_ranks(options: Options, scheduler: int, client: int, *, has_client: bool) -> set[int]:
    """The ranks that take no workers: in layout ``exclusive`` those of the scheduler and the client, where there are such."""
    if options.layout != "exclusive":
        return set()
    return ({scheduler} if options.scheduler else set()) | ({client} if has_client else set())


def choose_roles(options: Options, world_size: int, *, has_client: bool) -> tuple[int, int]:
    """Choose the scheduler's and the client's rank; raise WorldTooSmallException where ranks are too few."""
    scheduler = options.scheduler_rank if options.scheduler else 0
    client = default_client(options.layout, scheduler, options.client_rank)
    roles = {"scheduler": scheduler} if options.scheduler else {}
    if has_client:
        roles["client"] = client
    elif options.client_rank is None:
        client = scheduler
    # dask-mpi starts with no worker here, and waits for one forever.
    least = (
        max([client, *roles.values(), len(reserved_ranks(options, scheduler, client, has_client=has_client))])
        + 1
    )
    if world_size < least:
        fix = "lower scheduler_rank and client_rank (--scheduler-rank, --client-rank)"
        if options.layout == "exclusive":
            fix = "take layout 'shared', which works with one"
        places = " and ".join(f"the {role} on rank {rank}" for role, rank in roles.items())
        raise world_too_small(
            f"layout {options.layout!r} with {places or f'client_rank={client}'} "
            f"needs at least {least} MPI ranks, found {world_size}. Fix: start more ranks, or {fix}"
        )
    return scheduler, client
