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

__all__ = ["allocated_hosts", "first_process", "launched_as", "neighbours", "started_here"]

#: The daemon that starts ranks on a host, for MPICH and its relatives.
HYDRA = ("hydra_pmi_proxy", "pmi_proxy")


def neighbours(pid: int) -> dict[int, str]:
    """The other ranks that the launcher of a rank started on this host.

    Looks once through all processes of the host.

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

    first = first_process(pid)
    states: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    above = 0
    try:
        for process in psutil.process_iter(["ppid", "status"]):
            states[process.pid] = process.info["status"]
            children.setdefault(process.info["ppid"], []).append(process.pid)
            if process.pid == first:
                above = process.info["ppid"]
    except (psutil.Error, OSError):
        return {}
    found: dict[int, str] = {}
    for sibling in children.get(above, ()) if above else ():
        launched = (
            None if sibling == first or states[sibling] == psutil.STATUS_ZOMBIE else launched_as(sibling)
        )
        if launched is None:
            continue
        # Wrapper scripts may stand between the launcher and the rank: what runs below them is the same rank.
        mine, seen = [sibling], {states[sibling]}
        while mine:
            for child in children.get(mine.pop(), ()):
                if launched_as(child) == launched:
                    mine.append(child)
                    seen.add(states[child])
        stopped = seen & {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
        found[launched.rank] = "stopped" if stopped else "there"
    return found


def started_here(pid: int) -> int:
    """How many ranks were started on this host by a launcher that does not mind when one ends before ``MPI_Init`` (Hydra).

    Parameters
    ----------
    pid : int
        Process id of one of them.

    Returns
    -------
    int
        0 below other launchers: they end the job by themselves.
    """
    import psutil

    try:
        rank = psutil.Process(pid)
        if psutil.Process(psutil.Process(first_process(pid)).ppid()).name() not in HYDRA:
            return 0
        return int(rank.environ().get("MPI_LOCALNRANKS", "0"))
    except (psutil.Error, OSError, ValueError):
        return 0


def launched_as(pid: int) -> launchers.Launched | None:
    """What the launcher has told a process about itself; None where it is no rank, or can't be asked."""
    import psutil

    try:
        return launchers.detect(psutil.Process(pid).environ())
    except (psutil.Error, OSError, LauncherError):
        return None


def first_process(pid: int) -> int:
    """The process that the launcher itself started for a rank: the rank, or the outermost of the scripts wrapped around it."""
    import psutil

    launched = launched_as(pid)
    try:
        while launched is not None and launched_as(above := psutil.Process(pid).ppid()) == launched:
            pid = above
    except psutil.Error:
        pass
    return pid


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
