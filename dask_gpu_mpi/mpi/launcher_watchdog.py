"""A launcher that does not end when its job is aborted.

Open MPI 5's ``mpirun`` waits for the daemons of all hosts then: for ever, where a host has fallen silent, and SIGTERM does not
help either. The batch job would sit there until its walltime. So before a rank aborts the job it leaves a process behind that
looks after the launcher.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["look_after_launcher"]

#: Names of processes that are launchers which are known to hang.
HANGING = ("mpirun", "mpiexec", "orterun", "prterun")
#: Seconds that the launcher gets to end.
PATIENCE = 10.0

# By a descriptor, not by a number that may be somebody else's by then. It is readable once the process has ended.
_CODE = """
import os, select, signal, sys
fd, pid, patience = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if not select.select([fd], [], [], patience)[0]:
    try:
        with open(os.open("/proc/%d/fd/2" % pid, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), "w") as file:
            print("dask_gpu_mpi: the launcher has not ended %g s after the job was aborted: it is killed" % patience, file=file)
    except OSError:
        pass
    signal.pidfd_send_signal(fd, signal.SIGKILL)
"""


def look_after_launcher(pid: int | None = None, patience: float = PATIENCE) -> None:
    """Leave a process behind that kills the launcher unless it ends by itself.

    Parameters
    ----------
    pid : int, optional
        The launcher; None: the parent of this process, if that is one that is known to hang.
    patience : float
        Seconds that it gets.
    """
    with contextlib.suppress(OSError):  # it has ended, or this kernel knows no descriptors of processes
        if pid is None:
            pid = os.getppid()
            if Path(f"/proc/{pid}/comm").read_text().strip() not in HANGING:
                return
        fd = os.pidfd_open(pid)
        try:
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(fd), str(pid), str(patience)],
                # Nothing of this rank's: its launcher waits until nobody holds the rank's output any more.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(fd,),
                # The launcher ends this rank with everything in its session.
                start_new_session=True,
            )
        finally:
            os.close(fd)
