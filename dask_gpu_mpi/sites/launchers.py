"""Which launcher started this process, and as which rank: read from the environment.

MPI is the authority on rank and world size; see `dask_gpu_mpi.mpi.launcher_check` where the two disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpu_mpi.errors import LauncherError

from .launcher_table import LAUNCHERS, Launcher, scrub

__all__ = [
    "Launched",
    "all_launched",
    "all_on_one_host",
    "alone_on_host",
    "detect",
    "first_on_host",
    "library_name",
    "number",
    "scrub",
    "speaks",
]

#: What launchers that are in no row of the table set (``prterun``, ALPS).
_FOREIGN = ("PMIX_", "PMI_", "PMI2_", "ALPS_")
#: Slurm's numbers of steps that no srun has made: the batch script's, an interactive shell's and their like (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Launched:
    """The launcher that started this process, and what its variables are here."""

    #: Its row in the table.
    launcher: Launcher
    #: This process's.
    rank: int
    #: The world's; None if the launcher does not set it.
    size: int | None
    #: This process's on its host. Never a GPU index: it may count GPUs that this process can't see.
    local_rank: int | None
    #: The variable that has `size`.
    size_variable: str = ""

    @property
    def name(self) -> str:
        """The launcher's name."""
        return self.launcher.name

    def __str__(self) -> str:
        """Rank, size and local rank in one short line."""
        size = "?" if self.size is None else self.size
        local = "?" if self.local_rank is None else self.local_rank
        return f"{self.name}: rank {self.rank} of {size}, local rank {local}"


def detect(environ: Mapping[str, str]) -> Launched | None:
    """The innermost launcher that started this process as one of its ranks.

    Parameters
    ----------
    environ : Mapping
        The environment of the process.

    Returns
    -------
    Launched or None
        None if no launcher did: a shell of a batch job is none.

    Raises
    ------
    LauncherError
        A variable of the launcher is no number.
    """
    return next(iter(all_launched(environ)), None)


def alone_on_host(environ: Mapping[str, str]) -> bool:
    """Whether this is the only rank on its host, as far as the launcher sets it; also True without a launcher."""
    launched = detect(environ)
    if launched is None or launched.size == 1:
        return True
    if launched.launcher.local_size:
        return environ.get(launched.launcher.local_size) == "1"
    if launched.name != "srun":
        return False  # Slurm's variable is about the step in which their daemons run
    # "1(x8)", by the hosts of the step
    return bool(re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")))


def all_on_one_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host, as far as every launcher that has left its variables here sets that.

    True also without a launcher; False where there may be one that is not in our table.
    """
    launched = all_launched(environ)
    if not launched:
        return not any(name.startswith(_FOREIGN) for name in environ)
    # The table's last row is for what no other fits, and fits where others do: many speak PMI.
    named = [each for each in launched if each.launcher is not LAUNCHERS[-1]] or launched
    return all(_on_one_host(each, environ) for each in named)


def _on_one_host(launched: Launched, environ: Mapping[str, str]) -> bool:
    if launched.size == 1:
        return True
    if launched.launcher.local_size:
        return launched.size is not None and number(environ, launched.launcher.local_size) == launched.size
    return launched.name == "srun" and environ.get("SLURM_STEP_NUM_NODES") == "1"


def first_on_host(environ: Mapping[str, str]) -> bool:
    """Whether this is the first rank of its host; False where the launcher does not set it."""
    launched = detect(environ)
    return alone_on_host(environ) or (launched is not None and launched.local_rank == 0)


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this rank reports for all ranks where they can't communicate: rank 0 of the launcher, or no launcher."""
    launched = detect(environ)
    return launched is None or not launched.rank


def all_launched(environ: Mapping[str, str]) -> list[Launched]:
    """Every launcher that has left its variables here, the innermost first."""
    found = []
    for launcher in LAUNCHERS:
        rank = number(environ, launcher.rank) if launcher.mark in environ else None
        if rank is None:
            continue
        if launcher.mark == "SLURM_STEP_ID" and (number(environ, launcher.mark) or 0) >= _FIRST_SPECIAL_STEP:
            continue
        variable = next((name for name in launcher.size if environ.get(name)), "")
        size = number(environ, variable) if variable else None
        found.append(Launched(launcher, rank, size, number(environ, launcher.local_rank), variable))
    return found


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Read a launcher's variable: None where it is not set; raise LauncherError where it is no number."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise LauncherError(
            f"environment: invalid {name}={text[:40]!r} (expected a number, which the launcher sets). Fix: do not set it yourself"
        )
    return int(text)


def library_name(version: str) -> str:
    r"""The first few words, on one line.

    >>> library_name("Open MPI v5.0.11, package: Open MPI user@host")
    'Open MPI v5.0.11'
    >>> library_name("MPICH Version:      5.0.2\nMPICH Release date: ...\0")
    'MPICH Version: 5.0.2'
    """
    return " ".join(version.replace("\0", "").partition("\n")[0].partition(",")[0].split())
