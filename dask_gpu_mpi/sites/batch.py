"""When the batch system will end the job.

Slurm sets it in the environment. PBS and Flux are asked with their own commands, once; the answer is counted down from then on.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

__all__ = ["end_time"]

#: Seconds that a command of the batch system gets to answer.
COMMAND_TIMEOUT = 5.0

Ask = Callable[[Sequence[str]], str]


def end_time(
    environ: Mapping[str, str], *, now: Callable[[], float] = time.time, ask: Ask | None = None
) -> float | None:
    """The moment at which the job will be ended.

    Parameters
    ----------
    environ : mapping
        The process's environment.
    now : callable
        Seconds since the epoch.
    ask : callable, optional
        Runs a command and returns what it prints, ``""`` if it can't be run or fails.

    Returns
    -------
    float or None
        Seconds since the epoch; None: unknown.

    Notes
    -----
    Slurm: ``SLURM_JOB_END_TIME`` (sbatch(1)). OpenPBS and PBS Pro: ``qstat -f -F json``, ``Resource_List.walltime`` less
    ``resources_used.walltime``. Flux: ``flux job timeleft``.
    """
    ask = ask or _ask
    found = environ.get("SLURM_JOB_END_TIME", "")
    if re.fullmatch(r"[0-9]{1,15}", found):
        return float(found)
    if job := environ.get("PBS_JOBID"):
        return _pbs(job, now, ask)
    if environ.get("FLUX_JOB_ID"):
        left = ask(["flux", "job", "timeleft"]).strip()
        known = re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", left)
        # flux prints 0 for a job without a limit as well as for one that has ended
        return now() + float(left) if known and float(left) else None
    return None


def _pbs(job: str, now: Callable[[], float], ask: Ask) -> float | None:
    try:
        found = json.loads(ask(["qstat", "-f", "-F", "json", job]) or "{}")
        (described,) = found["Jobs"].values()
        limit = _seconds(described["Resource_List"]["walltime"])
        used = _seconds(described.get("resources_used", {}).get("walltime", "0"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return now() + limit - used


def _seconds(text: str) -> float:
    """``HH:MM:SS``, ``MM:SS`` or seconds, as PBS writes durations; ValueError if it is none."""
    if not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9}){0,2}", str(text)):
        raise ValueError(text)
    total = 0.0
    for part in str(text).split(":"):
        total = total * 60 + float(part)
    return total


def _ask(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",  # of what users have called their jobs
            timeout=COMMAND_TIMEOUT,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
