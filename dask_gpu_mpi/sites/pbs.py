"""PBS: OpenPBS, PBS Pro, and the common part of Torque."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.sites.batch import (
    Allocation,
    Ask,
    BatchSystem,
    JobRequest,
    Requeue,
    count_hosts,
    number,
)

#: The cores of a node that the job scripts request.
TEMPLATE_CPUS = 64
#: Counts the restarts, which are new jobs for PBS.
COUNT = "DGM_RESTART"
SHELLS = {"bash", "sh", "dash", "ksh", "mksh", "zsh", "csh", "tcsh", "busybox"}
_NODES = "PBS_NODEFILE"
_SCRIPT = "pbs.pbs"
_KEPT = (("Resource_List.(select|place|walltime|filesystems)", "-l{0}={1}"), ("Account_Name", "-A{1}"))


class Pbs(BatchSystem):
    """It sends no signal before the walltime and counts no restarts. The end of a job comes from its command."""

    title = "PBS"
    job_variable = "PBS_JOBID"
    login_variable = "PBS_O_HOST"
    #: `session.on_walltime` needs the end of this job on the client's rank.
    forwarded = frozenset({"PBS_JOBID"})

    prefix = "#PBS "
    templates: Mapping[str, str] = {"mpirun": _SCRIPT, "mpiexec": _SCRIPT, "pals": "pbs-pals.pbs"}
    default_launchers = ("pals",)
    submit = ("qsub",)
    chooses_nodes = True
    job_id = r"(?<!\S)(\d+(\[\])?(\.\S+)?)$"
    times = ("S", "M:S")
    words: Mapping[str, str] = {"account": "-A ", "queue": "-q ", "mail_user": "-M ", "output": "-o "}

    def allocation(self, environ: Mapping[str, str], ask: Ask) -> Allocation | None:
        if not environ.get(_NODES):
            return None
        lines = count_hosts(environ, _NODES)  # for each rank (mpiprocs)
        if environ.get("PBS_NUM_PPN"):  # Torque: for each core (ppn)
            lines = Counter(dict.fromkeys(lines, 1))
        job = environ.get(self.job_variable, "")
        return Allocation("pbs", len(lines), lines.total(), lines, job=job)

    def hosts(self, environ: Mapping[str, str]) -> str:
        try:
            lines = Path(environ.get(_NODES, "")).read_text(errors="replace").split()
        except (OSError, ValueError):
            return ""
        return ", ".join(dict.fromkeys(lines))

    def end_time(self, environ: Mapping[str, str], now: Callable[[], float], ask: Ask) -> float | None:
        if not (job := environ.get(self.job_variable)):
            return None
        try:
            found = json.loads(ask(["qstat", "-f", "-F", "json", job]) or "{}")
            (described,) = found["Jobs"].values()
            limit = self.seconds(str(described["Resource_List"]["walltime"]))
            used = self.seconds(str(described.get("resources_used", {}).get("walltime", "0")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return None if limit is None else now() + limit - (used or 0)

    def environment(
        self, environ: Mapping[str, str], allocation: Allocation, ask: Ask, *, launcher: str, copies: bool
    ) -> dict[str, str | None]:
        changes: dict[str, str | None] = {}
        if environ.get("OMP_NUM_THREADS") == environ.get("NCPUS"):  # PBS sets all cores, for each worker
            changes["OMP_NUM_THREADS"] = None
        # UUIDs of this node; empty: the job has no GPU
        if allocation.nodes > 1 and environ.get("CUDA_VISIBLE_DEVICES"):
            changes["CUDA_VISIBLE_DEVICES"] = None
        return changes

    def requeue(self, job: Requeue, environ: Mapping[str, str]) -> int | None:
        """Submit a new job like this one."""
        count = number(environ, COUNT) or 0
        if not job.may_restart(count):
            return None
        script = job_script(os.getppid())
        if not script:
            say("launch: not requeued: the job script was not found. Fix: submit it again")
            return None
        after = {**environ, COUNT: str(count + 1)}
        kept = resources(job.run(["qstat", "-fw", job.allocation.job], environ).stdout)
        names = ",".join(sorted(key for key in after if key.startswith(("DGM_", "DASK_"))))
        queue = ["-q", environ["PBS_O_QUEUE"]] if environ.get("PBS_O_QUEUE") else []
        job.rerun(["qsub", *queue, *kept, "-v", names, script], after)
        return None

    def directives(self, job: JobRequest) -> dict[str, str | None]:
        named = any(self.option_name(each) == "-l select" for each in job.directives)
        cpus = job.cpus_per_gpu if job.gpus else job.cpus_per_node
        if cpus is None:
            cpus, each = (1, "GPU") if job.gpus else (TEMPLATE_CPUS, "node")
            if not named:
                say(f"--cpus-per-{each} is not set: the job requests {counted(cpus, 'core')} of each {each}")
        # with a number of GPUs alone, a chunk is a GPU
        chunk = f"{job.gpus or job.nodes}:ncpus={cpus}:mpiprocs={job.ranks_per_node}"
        if job.gpus_per_node:
            chunk += f":ngpus={1 if job.gpus else job.gpus_per_node}"
        if job.mebibytes:
            chunk += f":mem={job.mebibytes}mb"
        return {
            "-l select=": chunk,
            "-l place=": f"{'free' if job.gpus else 'scatter'}:{'shared' if job.shared else 'excl'}",
            "-l walltime=": job.walltime,
            "-m ": "ae" if "mail_user" in job.words else None,
        }


def resources(described: str) -> list[str]:
    """Options of qsub for a job like this one, from the requests in the output of ``qstat -fw``."""
    found = []
    for pattern, option in _KEPT:
        for match in re.finditer(rf"^ *{pattern} = (.*)$", described, re.MULTILINE):
            found.append(option.format(match[1], match[match.lastindex or 1].strip()))
    return found


def job_script(parent: int) -> str:
    """The script of the nearest shell among this process and its parents (`timeout` may come first); empty: there is none."""
    import psutil

    try:
        process = psutil.Process(parent)
        above = (process, *process.parents())
        # by the program, since the process of a script has the name of the script
        words = next((each.cmdline() for each in above if os.path.basename(each.exe()) in SHELLS), [])
    except psutil.Error:
        return ""
    return next((word for word in words[1:] if word[:1] not in ("", "-") and os.path.isfile(word)), "")


PBS = Pbs()
