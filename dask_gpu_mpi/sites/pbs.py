"""PBS: OpenPBS, PBS Pro, and the common part of Torque."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import Allocation, Ask, BatchSystem, Requeue, count_hosts, number
from dask_gpu_mpi.sites.jobscript import JobRequest, ScriptFormat

#: The cores of a node that the job scripts request.
TEMPLATE_CPUS = 64
#: Counts the restarts, which are new jobs for PBS.
COUNT = "DGM_RESTART"
#: Programs whose script `job_script` looks for.
SHELLS = {"bash", "sh", "dash", "ksh", "mksh", "zsh", "csh", "tcsh", "busybox"}
#: The variables of this package.
_OURS = re.compile("DGM_|DASK_")
#: Starts a command on another node by PBS, with the command line of ssh; the variables by which an mpirun uses it, by its kind.
TMRSH = Path(__file__).with_name("tmrsh")
_AGENTS = {
    "openmpi": ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
    "hydra": ("HYDRA_LAUNCHER_EXEC",),
    "intel": ("I_MPI_HYDRA_BOOTSTRAP_EXEC",),
}
_NODES = "PBS_NODEFILE"
_SCRIPT = "pbs.pbs"
#: Options of qsub by the attribute of a job, which a job that follows it keeps.
_KEPT = {
    **{f"Resource_List.{name}": f"-l{name}=" for name in ("place", "select", "walltime", "filesystems")},
    "Account_Name": "-A",
    "Job_Name": "-N",
    "Join_Path": "-j",
}


class Pbs(BatchSystem):
    """It sends no signal before the walltime and counts no restarts. The end of a job comes from its command."""

    title = "PBS"
    job_variable = "PBS_JOBID"
    login_variable = "PBS_O_HOST"
    # of the job on each node, by `launch`: NCPUS is the number of the first chunk, even if the job has the whole node
    cpus_variable = "DGM_PBS_CPUS"
    gpus_variable = "DGM_PBS_GPUS"
    #: `session.on_walltime` needs the end of this job on the client's rank.
    forwarded = frozenset({"PBS_JOBID"})

    def allocation(self, environ: Mapping[str, str], ask: Ask) -> Allocation | None:
        if not environ.get(_NODES):
            return None
        lines = count_hosts(environ, _NODES)  # for each rank (mpiprocs)
        if environ.get("PBS_NUM_PPN"):  # Torque: for each core (ppn)
            lines = Counter(dict.fromkeys(lines, 1))
        job = self.job(environ)
        return Allocation("pbs", len(lines), lines.total(), lines, job=job)

    def hosts(self, environ: Mapping[str, str]) -> str:
        try:
            lines = Path(environ.get(_NODES, "")).read_text(errors="replace").split()
        except (OSError, ValueError):
            return ""
        return ", ".join(dict.fromkeys(lines))

    def end_time(self, environ: Mapping[str, str], now: Callable[[], float], ask: Ask) -> float | None:
        if not (job := self.job(environ)):
            return None
        described = described_by(ask(["qstat", "-f", job]))
        if (limit := FORMAT.seconds(described.get("Resource_List.walltime", ""))) is None:
            return None
        # the time that is used may be two minutes behind
        with contextlib.suppress(ValueError, OverflowError):
            return time.mktime(time.strptime(described.get("stime", ""))) + limit
        return now() + limit - (FORMAT.seconds(described.get("resources_used.walltime", "")) or 0)

    def environment(
        self, environ: Mapping[str, str], allocation: Allocation, ask: Ask, *, launcher: str, copies: bool
    ) -> dict[str, str | None]:
        changes: dict[str, str | None] = {self.cpus_variable: None, self.gpus_variable: None}
        if environ.get("OMP_NUM_THREADS") == environ.get("NCPUS"):  # PBS sets all cores, for each worker
            changes["OMP_NUM_THREADS"] = None
        # UUIDs of this node; empty: the job has no GPU
        if allocation.nodes > 1 and environ.get("CUDA_VISIBLE_DEVICES"):
            changes["CUDA_VISIBLE_DEVICES"] = None
        # Open MPI 5.0.11 reads a file of one node and crashes; --host has the node
        if launcher == "openmpi" and allocation.nodes == 1 and "PRTE_MCA_ras" not in environ:
            changes["PRTE_MCA_ras"] = "^pbs"
        path = environ.get("PATH", os.defpath)
        if (
            allocation.nodes > 1
            and not shutil.which("ssh", path=path)
            and shutil.which("pbs_tmrsh", path=path)
        ):
            changes |= {name: str(TMRSH) for name in _AGENTS.get(launcher, ()) if name not in environ}
        described = described_by(ask(["qstat", "-fw", self.job(environ)]))
        if described and "excl" not in described.get("Resource_List.place", ""):
            # other jobs may share the nodes, and without the cgroup hook nothing keeps this one to its part
            vnodes = described.get("exec_vnode", "")
            if least := min(of_hosts(vnodes, "ncpus"), default=0):
                changes[self.cpus_variable] = str(least)
            if len(gpus := {*of_hosts(vnodes, "ngpus")}) == 1 and (number_of_gpus := gpus.pop()):
                changes[self.gpus_variable] = str(number_of_gpus)
        return changes

    def requeue(self, job: Requeue, environ: Mapping[str, str]) -> int | None:
        """Submit a new job like this one; of an array, this task alone."""
        count = number(environ, COUNT) or 0
        if not job.may_restart(count):
            return None
        script = job_script(os.getppid())
        if not script:
            say("launch: not requeued: the job script was not found. Fix: submit it again")
            return None
        after = {**environ, COUNT: str(count + 1)}
        described = job.run(["qstat", "-fw", job.allocation.job], environ).stdout
        kept = resources(described, count + 1)
        if (task := number(environ, "PBS_ARRAY_INDEX")) is not None:
            # Without it, the directive of the script would start all tasks again. PBS has no array of one task: by steps of two
            # it takes the first of these.
            kept += ["-J", f"{task}-{task + 1}:2"]
        # the variables that the user has passed to qsub, and ours, as they are now
        users = re.findall(r"(?:^|(?<!\\),)(\w+)=", described_by(described).get("Variable_List", ""))
        names = {*(name for name in users if not name.startswith("PBS_")), *filter(_OURS.match, after)}
        passed = ",".join(sorted(names & after.keys() - {self.cpus_variable, self.gpus_variable}))
        queue = ["-q", environ["PBS_O_QUEUE"]] if environ.get("PBS_O_QUEUE") else []
        job.rerun(["qsub", *queue, *kept, "-v", passed, script], after)
        return None


def described_by(text: str) -> dict[str, str]:
    """The attributes in the output of ``qstat -f``: each is a line, and -w writes long ones on one."""
    return {
        name.strip(): value.strip()
        for name, _, value in (line.partition(" = ") for line in text.splitlines())
    }


def of_hosts(vnodes: str, resource: str) -> list[int]:
    """The numbers of a resource that the job has on each of its hosts.

    >>> of_hosts("(h1:ncpus=2:ngpus=1)+(h1[0]:ncpus=2+h1[1]:ncpus=2)+(h2:ncpus=3)", "ncpus")
    [6, 3]
    """
    counts: Counter[str] = Counter()
    for host, rest in re.findall(r"\(([^:()]+?)(?:\[\d+\])?:([^()]*)\)", vnodes):
        found = re.findall(rf"(?:^|:){resource}=(\d{{1,9}})(?=:|$|\+)", rest)
        counts[host] += sum(map(int, found))
    return list(counts.values())


def resources(text: str, restart: int) -> list[str]:
    """Options of qsub for a job like this one, from the output of ``qstat -fw``; a log with the user's name gets another."""
    described = described_by(text)
    found = [option + described[name] for name, option in _KEPT.items() if name in described]
    log = described.get("Output_Path", "")
    # in a folder, and by PBS's own name, each job has its own
    if log and not re.search(r"/$|\.o\d+(\.\d+)?$", log) and not os.path.isdir(log.partition(":")[2]):
        found += ["-o" + re.sub(r"\.restart\d+$", "", log) + f".restart{restart}"]
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


class PbsScript(ScriptFormat):
    """Directives of qsub: a job is a number of equal chunks."""

    prefix = "#PBS "
    templates: Mapping[str, str] = {"mpirun": _SCRIPT, "mpiexec": _SCRIPT, "pals": "pbs-pals.pbs"}
    default_launchers = ("pals",)
    has_long_options = False
    submit = ("qsub",)
    chooses_nodes = True
    counts_cores = True
    job_id = r"(?<!\S)(\d+(\[\])?(\.\S+)?)$"
    times = ("S", "M:S")
    words: Mapping[str, str] = {"account": "-A ", "queue": "-q ", "mail_user": "-M ", "output": "-o "}

    def directives(self, job: JobRequest) -> dict[str, str | None]:
        named = any(self.option_name(each) == "-l select" for each in job.directives)
        cpus = job.cpus_per_gpu if job.gpus else job.cpus_per_node
        if cpus is None:
            cpus, each = (1, "GPU") if job.gpus else (TEMPLATE_CPUS, "node")
            if not named:
                option = f"--cpus-per-{each.lower()}"
                say(f"{option} is not set: the job requests {counted(cpus, 'core')} of each {each}")
        if job.gpus and job.mebibytes and not named:
            raise InputError(
                "--memory-per-node with --gpus: in PBS each GPU is a part of the job, whose node is not known",
                expected="the memory of each GPU",
                fix="a --directive such as '-l select={all-gpus}:ncpus={cpus}:ngpus=1:mem=64gb'",
            )
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


PBS, FORMAT = Pbs(), PbsScript()
