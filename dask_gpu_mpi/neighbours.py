"""The other ranks of this host, seen from outside: which are there, and which are stopped.

For the report about a rank that says nothing itself. A launcher's daemon is the parent of all ranks that it starts on a host,
and they carry their number in their environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from . import launchers
from .errors import LauncherError

__all__ = ["allocated_hosts", "ended", "neighbours", "rank_of"]

#: The daemon that starts ranks on a host, for MPICH and its relatives.
HYDRA = ("hydra_pmi_proxy", "pmi_proxy")


def neighbours(pid: int) -> dict[int, str]:
    """The other ranks that the launcher of a rank started on this host.

    Parameters
    ----------
    pid : int
        Process id of the rank.

    Returns
    -------
    dict
        By number of the rank ``"stopped"`` (by a signal or a debugger) or ``"there"``; one that has ended is not in it. Empty
        where the system or the launcher does not tell.
    """
    import psutil

    found: dict[int, str] = {}
    try:
        siblings = psutil.Process(psutil.Process(pid).ppid()).children()
    except psutil.Error:
        return found
    for process in siblings:
        try:
            rank = -1 if process.pid == pid else rank_of(process.pid)
            if rank < 0:
                continue
            # A wrapper script may stand between the launcher and the rank.
            states = [each.status() for each in (process, *process.children())]
        except psutil.Error:
            continue
        stopped = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}.intersection(states)
        found[rank] = "stopped" if stopped else "there"
    return found


def ended(pid: int) -> int:
    """How many ranks beside this one have ended, below a launcher that does not mind (Hydra, before ``MPI_Init``).

    Parameters
    ----------
    pid : int
        Process id of a rank that is inside ``MPI_Init``.
    """
    import psutil

    try:
        rank = psutil.Process(pid)
        if psutil.Process(rank.ppid()).name() not in HYDRA:
            return 0
        started = int(rank.environ().get("MPI_LOCALNRANKS", "0"))
    except (psutil.Error, OSError, ValueError):
        return 0
    return max(0, started - 1 - len(neighbours(pid)))


def rank_of(pid: int) -> int:
    """The rank that a process is, as its launcher has told it; -1 if it has not."""
    import psutil

    try:
        launched = launchers.detect(psutil.Process(pid).environ())
    except (psutil.Error, OSError, LauncherError):
        return -1
    return launched.rank if launched is not None else -1


def allocated_hosts(environ: Mapping[str, str] | None = None) -> str:
    """The hosts of the batch job as its environment names them; empty where it does not."""
    environ = os.environ if environ is None else environ
    if found := environ.get("SLURM_JOB_NODELIST"):
        return found
    try:
        lines = Path(environ.get("PBS_NODEFILE", "")).read_text().split()
    except OSError:
        return ""
    return ", ".join(dict.fromkeys(lines))
