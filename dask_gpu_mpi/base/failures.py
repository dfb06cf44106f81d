"""Errors that travel between ranks, the one report that is made of them, and where it is printed.

Ranks and agents make them, `startup.coordinator` makes the report, and `job.entering` prints it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from dask_gpu_mpi import errors
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import listed, ranks_text
from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    InputError,
    Problem,
    StartupError,
    WorldTooSmallException,
    world_too_small,
)

#: Failures that one report spells out; it counts the others.
MOST_PARTS = 6


@dataclass(frozen=True)
class Failure:
    """An error that travels between ranks.

    >>> from dask_gpu_mpi.errors import OptionError
    >>> failure = Failure.of(OptionError("--nthreads: invalid value 'x'"))
    >>> (failure.exit_code, failure.kind)
    (2, 'OptionError')
    >>> failure.error(reported=True)
    OptionError("--nthreads: invalid value 'x'")
    """

    problem: Problem
    #: Of the job.
    exit_code: int = StartupError.exit_code
    #: Name of its class in `dask_gpu_mpi.errors`; empty: the exit code decides. The report does not depend on it.
    kind: str = field(default="", compare=False)
    #: Its first parts, if the report combines several problems.
    parts: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that carries an error, of any class."""
        if not isinstance(error, DaskGpuMpiError):
            return cls(Problem(f"{type(error).__name__}: {error}"))
        parts = error.problems if len(error.problems) > 1 else ()
        return cls(error.problem, error.exit_code, type(error).__name__, parts)

    def error(self, *, reported: bool) -> DaskGpuMpiError:
        """The exception that it was made of, so that every rank raises the same."""
        small = self.kind == WorldTooSmallException.__name__
        made = world_too_small(self.problem) if small else self._class()(self.problem)
        if made.exit_code != self.exit_code:  # that of a signal
            made.exit_code = self.exit_code
        made.problems = self.parts or (self.problem,)
        made.reported = reported
        return made

    def _class(self) -> type[DaskGpuMpiError]:
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, DaskGpuMpiError):
            return found
        return InputError if self.exit_code == InputError.exit_code else StartupError


def one_report(failures: Mapping[int, Failure], hosts: Mapping[int, str], size: int) -> Failure:
    """Combine the failures of some of `size` ranks; those with the same problem share a part. `hosts` may lack some ranks.

    >>> full = Failure(Problem("/tmp is full"))
    >>> one_report({1: full, 2: full, 3: Failure(Problem("no GPU"), 2)}, {1: "n1", 2: "n2"}, 4).problem.text
    'ranks 1-2 of 4 on n1, n2: /tmp is full; rank 3 of 4: no GPU'
    """
    ranks_of: dict[Failure, list[int]] = {}
    of_ranks = set[Failure]()
    for rank, failure in sorted(failures.items()):
        alike = replace(failure, problem=replace(failure.problem, ranks=()))
        ranks_of.setdefault(alike, []).append(rank)
        if failure.problem.ranks:
            of_ranks.add(alike)
    problems = []
    for failure, ranks in ranks_of.items():
        problem = failure.problem
        # A failure of all ranks names none, unless it is about each of them; and some have their place already.
        if not problem.where and (len(ranks) < size or failure in of_ranks):
            named = sorted({hosts[rank] for rank in ranks if rank in hosts})
            on = f" on {listed(named)}" if named else ""
            problem = replace(
                problem, where=f"{ranks_text(ranks)} of {size}{on}", ranks=tuple(ranks), hosts=tuple(named)
            )
        problems.append(problem)
    parts = [str(problem) for problem in problems[:MOST_PARTS]]
    if len(problems) > MOST_PARTS:
        parts.append(f"and {len(problems) - MOST_PARTS} more failures of this kind")
    codes = {failure.exit_code for failure in ranks_of}
    code = codes.pop() if len(codes) == 1 else StartupError.exit_code
    kinds = {failure.kind for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else ""
    if WorldTooSmallException.__name__ in kinds:  # users of dask-mpi catch it
        kind = WorldTooSmallException.__name__
    if len(problems) == 1:
        return Failure(problems[0], code, kind)
    return Failure(Problem("; ".join(parts)), code, kind, tuple(problems[:MOST_PARTS]))


#: Prints an error of this process, and returns whether it has; otherwise it is one line on standard error.
_print: Callable[[DaskGpuMpiError], bool] = lambda error: False  # noqa: E731


@contextlib.contextmanager
def report_by(printer: Callable[[DaskGpuMpiError], bool]) -> Iterator[None]:
    """Let `printer` print the errors that this process reports; what it returns False for is one line on standard error."""
    global _print
    before, _print = _print, printer
    try:
        yield
    finally:
        _print = before


def report_error(error: DaskGpuMpiError) -> None:
    """Print an error once (`reported`), on standard error unless `report_by` has chosen another way."""
    if not error.reported and not _print(error):
        say(f"error: {error}")
    error.reported = True
