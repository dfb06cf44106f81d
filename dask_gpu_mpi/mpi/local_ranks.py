"""The other ranks of this host, inspected from outside: which run, and which are stopped.

For the report about a rank that does not respond. A launcher's daemon is the parent of all ranks that it starts on a host,
and they carry their number in their environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites import launchers

__all__ = ["first_process", "is_child_of", "launched_as", "neighbours", "started_here"]

#: The daemons that start ranks on a host, and their variable of how many.
DAEMONS = {daemon: each.local_size for each in launchers.LAUNCHERS for daemon in each.daemons}


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
        where the system or the launcher does not show it.
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
    """How many ranks were started on this host by a launcher that does not mind when one ends before ``MPI_Init``.

    Hydra minds none that exits, Open MPI's mpirun none that exits with code 0.

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
        daemon = psutil.Process(psutil.Process(first_process(pid)).ppid()).name()
        return int(psutil.Process(pid).environ().get(DAEMONS.get(daemon, ""), "0"))
    except (psutil.Error, OSError, ValueError):
        return 0


def launched_as(pid: int) -> launchers.Launched | None:
    """What the launcher has set for a process; None where it is no rank, or can't be inspected."""
    import psutil

    try:
        return launchers.detect(psutil.Process(pid).environ())
    except (psutil.Error, OSError, LauncherError):
        return None


def first_process(pid: int, *, but_shells: bool = False) -> int:
    """The process that the launcher itself started for a rank: the rank, or the outermost of the scripts wrapped around it.

    Parameters
    ----------
    pid : int
        Process id of the rank.
    but_shells : bool
        Stop below a shell in which somebody has typed the command (``srun --pty bash``): it goes on after it.
    """
    import psutil

    launched = launched_as(pid)
    try:
        while launched is not None and launched_as(above := psutil.Process(pid).ppid()) == launched:
            if but_shells and _typed(above, pid):
                break
            pid = above
    except psutil.Error:
        pass
    return pid


def _typed(shell: int, pid: int) -> bool:
    """Whether a process has job control on a terminal, and has started this one as a job of its own.

    The shell of a wrapper script leaves its commands in its own process group.
    """
    try:
        group, session, terminal, foreground = (
            int(field) for field in Path(f"/proc/{shell}/stat").read_text().rpartition(")")[2].split()[2:6]
        )
        job = os.getpgid(pid)
    except (OSError, ValueError):
        return False
    return terminal != 0 and group != job and (session == shell or foreground == job)


def is_child_of(pid: int) -> bool:
    """Whether this process was started by that one or its children, with no launcher between them.

    Parameters
    ----------
    pid : int
        Process id, of another process or of this one.
    """
    import psutil

    try:
        for above in psutil.Process().parents():
            if above.name() in DAEMONS:
                return False
            if above.pid == pid:
                return True
    except psutil.Error:
        pass
    return False
