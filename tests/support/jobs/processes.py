"""Python in a process of its own, and the surroundings that all of them have."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from typing import Any

#: Variables of a terminal or a user that change what programs print.
PRINTING = ("COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PYTHONUNBUFFERED", "TERM")


def run_python(code: str, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run code with these arguments; `more`: of `subprocess.run`."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, **more}
    return subprocess.run([sys.executable, "-c", code, *words], **how)


def give_surroundings() -> None:
    """Give this process, and so all that it starts, the surroundings of a login shell: signals, umask, open files and the rest.

    Below nohup, in a shell's background or in a service these differ, and are inherited. Tests of such surroundings make them.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o022)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest one that is free
    for name in PRINTING:
        os.environ.pop(name, None)
    # others may enter it, and an ASCII locale can name it
    folder = tempfile.gettempdir()
    if not folder.isascii() or not os.stat(folder).st_mode & stat.S_IXOTH:
        os.environ.pop("TMPDIR", None)
        tempfile.tempdir = None


def slack() -> float:
    """What limits are multiplied by: 1, but more on a machine that has more than twice as much to do as it has cores.

    A row of its own does not reach that; somebody else's work on the machine does, and then every second is a longer one.
    """
    cores = len(os.sched_getaffinity(0))
    return min(4.0, max(1.0, os.getloadavg()[0] / (2 * cores)))
