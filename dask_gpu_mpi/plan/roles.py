"""Who answered, and who has which role."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dask_gpu_mpi.base.hostlist import fold_names, fold_numbers, ranks_text
from dask_gpu_mpi.errors import OptionError, PlacementError, world_too_small
from dask_gpu_mpi.machine.inventory import Inventory

from .model import PlacementOptions

__all__ = ["check_options", "choose_roles", "default_client", "in_order", "reserved_ranks"]


def in_order(inventories: Iterable[Inventory]) -> list[Inventory]:
    """Sort the ranks' answers; a missing, double or foreign one is a PlacementError."""
    ranks = sorted(inventories, key=lambda inventory: inventory.rank)
    if not ranks:
        raise PlacementError("no rank answered; needed: the inventory of at least one rank")
    numbers = [inventory.rank for inventory in ranks]
    sizes = sorted({inventory.world_size for inventory in ranks})
    if len(sizes) > 1:
        raise PlacementError(
            f"the ranks disagree on the world size: {', '.join(map(str, sizes))}; needed: one MPI world"
        )
    double = sorted({a for a, b in pairwise(numbers) if a == b})
    if double:
        hosts = fold_names(inventory.host for inventory in ranks if inventory.rank in double)
        raise PlacementError(
            f"{ranks_text(double)} answered more than once, from {hosts}; needed: one answer of each rank"
        )
    missing = sorted(set(range(sizes[0])).difference(numbers))
    if missing:
        raise PlacementError(
            f"{ranks_text(missing)} of {sizes[0]} did not answer; needed: one answer of each rank"
        )
    if len(ranks) > sizes[0] or numbers[0] < 0:
        raise PlacementError(f"ranks {fold_numbers(numbers)} answered; needed: ranks 0 to {sizes[0] - 1}")
    return ranks


def check_options(options: PlacementOptions) -> None:
    """Raise OptionError for an option that has no meaning."""
    for option, value, valid in (
        ("layout", options.layout, ("shared", "exclusive")),
        ("worker_kind", options.worker_kind, ("auto", "cpu", "gpu")),
    ):
        if value not in valid:
            raise OptionError(f"{option}={value!r} is unknown; valid: {', '.join(valid)}")
    if options.cpu_workers < 0:
        raise OptionError(
            f"cpu_workers={options.cpu_workers} is below 0; needed: CPU workers to add on every host"
        )
    if options.gpus_per_worker < 1:
        raise OptionError(
            f"gpus_per_worker={options.gpus_per_worker} is below 1; needed: GPUs that each GPU worker sees"
        )
    if options.nthreads is not None and options.nthreads < 1:
        raise OptionError(
            f"nthreads={options.nthreads} is below 1; needed: threads of each worker, or nothing"
        )


def default_client(layout: str, scheduler_rank: int, client_rank: int | None) -> int:
    """The rank that runs the script: the user's choice, else 0; in layout ``exclusive`` the first without the scheduler.

    >>> default_client("shared", 0, None), default_client("exclusive", 0, None), default_client("shared", 0, 3)
    (0, 1, 3)
    """
    if client_rank is not None:
        return client_rank
    return int(layout == "exclusive" and scheduler_rank != 1)


def reserved_ranks(options: PlacementOptions, scheduler: int, client: int) -> set[int]:
    """The ranks that take no workers: in layout ``exclusive`` those of the scheduler and the client, where there are such."""
    if options.layout != "exclusive":
        return set()
    return ({scheduler} if options.has_scheduler else set()) | ({client} if options.has_client else set())


def choose_roles(options: PlacementOptions, world_size: int) -> tuple[int, int]:
    """Choose the scheduler's and the client's rank; raise WorldTooSmallException where ranks are too few."""
    exclusive = options.layout == "exclusive"
    scheduler = options.scheduler_rank if options.has_scheduler else 0
    client = default_client(options.layout, scheduler, options.client_rank)
    if scheduler < 0 or client < 0:
        raise OptionError(f"scheduler_rank={scheduler}, client_rank={client}; needed: ranks from 0")
    roles = {"scheduler": scheduler} if options.has_scheduler else {}
    if options.has_client:
        roles["client"] = client
    elif options.client_rank is None:
        client = scheduler
    # dask-mpi starts with no worker here, and waits for one for ever.
    needed = max([client, *roles.values(), len(reserved_ranks(options, scheduler, client))]) + 1
    if world_size < needed:
        places = " and ".join(f"the {role} on rank {rank}" for role, rank in roles.items())
        raise world_too_small(
            f"layout {options.layout!r} with {places or f'client_rank={client}'} "
            f"needs at least {needed} MPI ranks, found {world_size}; start more ranks"
            + (
                ", or lower scheduler_rank and client_rank (--scheduler-rank, --client-rank)"
                if not exclusive
                else ""
            )
            + (" or take layout 'shared', which works with one" if exclusive else "")
        )
    return scheduler, client
