"""Errors that travel between ranks, and the one report that is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    InputError,
    StartupError,
    WorldTooSmallException,
    world_too_small,
)

from .hostlist import ranks_text

__all__ = ["Failure", "one_report"]

#: Failures that one report spells out.
MOST_PARTS = 6


@dataclass(frozen=True)
class Failure:
    """An error that travels between ranks.

    Attributes
    ----------
    text : str
        One line.
    exit_code : int
        2 for input, 1 for the rest.
    world_too_small : bool
        Becomes the exception that dask-mpi's users catch.
    of_a_rank : bool
        The text says what a rank has or has not done, so that it must be named.
    """

    text: str
    exit_code: int
    world_too_small: bool = False
    of_a_rank: bool = False

    @classmethod
    def of(cls, error: DaskGpuMpiError) -> Failure:
        """The failure that carries `error`."""
        return cls(str(error), error.exit_code, isinstance(error, WorldTooSmallException))

    def error(self, *, reported: bool) -> DaskGpuMpiError:
        """The exception it came from, or nearly so."""
        made: DaskGpuMpiError
        if self.world_too_small:
            made = world_too_small(self.text)
        elif self.exit_code == 2:
            made = InputError(self.text)
        else:
            made = StartupError(self.text)
            made.exit_code = self.exit_code
        made.reported = reported
        return made


def one_report(failures: Mapping[int, Failure], hosts: Mapping[int, str], size: int) -> Failure:
    """Put the failures of several ranks into one: ranks that say the same share a part.

    Parameters
    ----------
    failures : mapping
        By rank.
    hosts : mapping
        Host of each rank, as far as it is known.
    size : int
        Number of ranks.
    """
    ranks_of: dict[Failure, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        ranks_of.setdefault(failure, []).append(rank)
    parts = []
    for failure, ranks in ranks_of.items():
        # What everybody says needs no name, and some texts bring their own.
        everybody = len(ranks) == size and not failure.of_a_rank
        if everybody or failure.text.startswith("rank"):
            parts.append(failure.text)
            continue
        named = sorted({hosts[rank] for rank in ranks if rank in hosts})
        where = f" on {', '.join(named[:4])}{' and others' if len(named) > 4 else ''}" if named else ""
        parts.append(f"{ranks_text(ranks)} of {size}{where}: {failure.text}")
    if len(parts) > MOST_PARTS:
        parts[MOST_PARTS:] = [f"and {len(parts) - MOST_PARTS} more failures of this kind"]
    codes = {failure.exit_code for failure in ranks_of}
    code = codes.pop() if len(codes) == 1 else 1
    return Failure("; ".join(parts), code, any(failure.world_too_small for failure in ranks_of))
