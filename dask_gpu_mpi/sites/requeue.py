"""What follows exit code 75, a checkpoint: the batch system is asked to run the job again, a limited number of times."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dask_gpu_mpi.base.safe_paths import open_to_append
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.sites.launchers import number

from .allocation import TITLES, Allocation

__all__ = ["Requeue", "job_script", "pbs_resources", "requeue"]

#: Seconds for a command of the batch system.
TIMEOUT = 60.0
#: Counts the jobs that PBS has been given for one another: it counts no restarts.
PBS_COUNT = "DGM_RESTART"
SHELLS = {"bash", "sh", "dash", "ksh", "mksh", "zsh", "csh", "tcsh", "busybox"}
_KEPT = (("Resource_List.(select|place|walltime|filesystems)", "-l{0}={1}"), ("Account_Name", "-A{1}"))

Run = Callable[[Sequence[str], Mapping[str, str]], subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Requeue:
    """A job that may be run again."""

    allocation: Allocation
    #: How often, in all.
    limit: int
    #: The job script, where one has to be submitted again (PBS); empty: unknown.
    script: str = ""
    #: Folder for the count of restarts (LSF counts none).
    logs: str = ""


def requeue(job: Requeue, environ: Mapping[str, str], run: Run | None = None) -> int | None:
    """Have the job run again; says so where it can't be.

    Returns
    -------
    int or None
        What to exit with; None: 75.
    """
    run = run or _run
    system, name = job.allocation.system, job.allocation.requeue_as
    if system == "slurm":
        if not _left(job, number(environ, "SLURM_RESTART_COUNT") or 0):
            return None
        _report(run(["scontrol", "requeue", name], environ))
    elif system == "pbs":
        count = number(environ, PBS_COUNT) or 0
        if not _left(job, count):
            return None
        if not job.script:
            say("launch: not requeued: the job script was not found. Fix: submit it again")
            return None
        after = {**environ, PBS_COUNT: str(count + 1)}
        kept = pbs_resources(run(["qstat", "-fw", name], environ).stdout)
        names = ",".join(sorted(key for key in after if key.startswith(("DGM_", "DASK_"))))
        queue = ["-q", environ["PBS_O_QUEUE"]] if environ.get("PBS_O_QUEUE") else []
        _report(run(["qsub", *queue, *kept, "-v", names, job.script], after))
    elif system == "lsf":
        return _lsf(job)
    else:
        say(f"launch: not requeued: {TITLES[system]} requeues no job. Fix: start it again")
    return None


def pbs_resources(described: str) -> list[str]:
    """Options of qsub for a job like this one, from ``qstat -fw``: what was requested of it on the command line."""
    found = []
    for pattern, option in _KEPT:
        for match in re.finditer(rf"^ *{pattern} = (.*)$", described, re.MULTILINE):
            found.append(option.format(match[1], match[match.lastindex or 1].strip()))
    return found


def job_script(parent: int) -> str:
    """The script that the nearest shell above runs, from this parent on (`timeout` may be between); empty: there is none."""
    import psutil

    try:
        process = psutil.Process(parent)
        above = (process, *process.parents())
        # by the program: the name of a process that is a script is the script's
        words = next((each.cmdline() for each in above if os.path.basename(each.exe()) in SHELLS), [])
    except psutil.Error:
        return ""
    return next((word for word in words[1:] if word[:1] not in ("", "-") and os.path.isfile(word)), "")


def _lsf(job: Requeue) -> int | None:
    """LSF requeues by the exit code (``bsub -Q 75``), without limit: the lines of a file count."""
    file = Path(job.logs or ".", f"{job.allocation.job}.restarts")  # the folder may be that of many jobs
    try:
        with open(
            open_to_append(file, make=True, readable=True), "a+", encoding="ascii", errors="replace"
        ) as lines:
            lines.write("75\n")
            lines.seek(0)
            count = len(lines.readlines())
    except OSError as error:
        say(f"launch: not requeued: {file} can't be written ({error.strerror}), so restarts can't be counted")
        return 1
    return None if _left(job, count - 1) else 1


def _left(job: Requeue, count: int) -> bool:
    if count < job.limit:
        return True
    say(f"launch: not requeued: {count} restarts so far (--requeue {job.limit})")
    return False


def _report(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())
        say(
            f"launch: not requeued: {' '.join(done.args[:2])} exited with code {done.returncode}: {why[:300] or 'no output'}"
        )


def _run(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=TIMEOUT,
            preexec_fn=_hear_signals,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 127, "", str(error))


def _hear_signals() -> None:
    """In the child: `Runner` has blocked them in this process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
