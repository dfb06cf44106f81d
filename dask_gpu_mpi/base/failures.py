"""Errors that travel between ranks, the one report that is made of them, and where it is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dask_gpu_mpi import errors
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    InputError,
    StartupError,
    WorldTooSmallException,
    world_too_small,
)

__all__ = ["Failure", "one_report", "report_error"]

#: Failures that one report spells out; it counts the others.
MOST_PARTS = 6


@dataclass(frozen=True)
class Failure:
    """An error that travels between ranks.

    >>> from dask_gpu_mpi.errors import OptionError
    >>> failure = Failure.of(OptionError("--nthreads: invalid value 'x'"))
    >>> failure
    Failure(text="--nthreads: invalid value 'x'", exit_code=2, kind='OptionError', of_a_rank=False)
    >>> failure.error(reported=True)
    OptionError("--nthreads: invalid value 'x'")
    """

    #: One line.
    text: str
    #: 2 for input, 1 for the rest.
    exit_code: int
    #: Name of its class in `dask_gpu_mpi.errors`; empty: the exit code decides. Ranks with the same text share a part of the
    #: report, whatever the class.
    kind: str = field(default="", compare=False)
    #: The text is about the rank, so the report must name it.
    of_a_rank: bool = False

    @classmethod
    def of(cls, error: DaskGpuMpiError) -> Failure:
        """The failure that carries `error`."""
        return cls(str(error), error.exit_code, type(error).__name__)

    def error(self, *, reported: bool) -> DaskGpuMpiError:
        """The exception that it was made of, so that every rank raises the same."""
        small = self.kind == WorldTooSmallException.__name__
        made = world_too_small(self.text) if small else self._class()(self.text)
        if made.exit_code != self.exit_code:  # that of a signal
            made.exit_code = self.exit_code
        made.reported = reported
        return made

    def _class(self) -> type[DaskGpuMpiError]:
        found = getattr(errors, self.kind, None) if self.kind in errors.__all__ else None
        if isinstance(found, type) and issubclass(found, DaskGpuMpiError):
            return found
        return InputError if self.exit_code == InputError.exit_code else StartupError


def one_report(failures: Mapping[int, Failure], hosts: Mapping[int, str], size: int) -> Failure:
    """Combine the failures of several ranks: ranks with the same text share a part.

    Parameters
    ----------
    failures : mapping
        By rank.
    hosts : mapping
        Host of each rank, as far as it is known.
    size : int
        Number of ranks.

    Examples
    --------
    >>> full = Failure("/tmp is full", 1)
    >>> one_report({1: full, 2: full, 3: Failure("no GPU", 2)}, {1: "n1", 2: "n2"}, 4).text
    'ranks 1-2 of 4 on n1, n2: /tmp is full; rank 3 of 4: no GPU'
    """
    ranks_of: dict[Failure, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        ranks_of.setdefault(failure, []).append(rank)
    parts = []
    for failure, ranks in ranks_of.items():
        # A failure of all ranks names none, and some texts begin with their rank.
        all_alike = len(ranks) == size and not failure.of_a_rank
        if all_alike or failure.text.startswith("rank"):
            parts.append(failure.text)
            continue
        named = sorted({hosts[rank] for rank in ranks if rank in hosts})
        where = f" on {', '.join(named[:4])}{' and others' if len(named) > 4 else ''}" if named else ""
        parts.append(f"{ranks_text(ranks)} of {size}{where}: {failure.text}")
    if len(parts) > MOST_PARTS:
        parts[MOST_PARTS:] = [f"and {len(parts) - MOST_PARTS} more failures of this kind"]
    codes = {failure.exit_code for failure in ranks_of}
    code = codes.pop() if len(codes) == 1 else 1
    kinds = {failure.kind for failure in failures.values()}
    return Failure("; ".join(parts), code, _kind_of_all(kinds))


def _kind_of_all(kinds: set[str]) -> str:
    """The class of a report: what dask-mpi's users catch, else the class of all failures; empty: the exit code decides."""
    if WorldTooSmallException.__name__ in kinds:
        return WorldTooSmallException.__name__
    return kinds.pop() if len(kinds) == 1 else ""


def report_error(error: DaskGpuMpiError) -> None:
    """Print an error on standard error, once (`reported`)."""
    if not error.reported:
        say(f"error: {error}")
    error.reported = True
