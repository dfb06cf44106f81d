"""Slurm: its jobs for `launch`, and its job scripts. Source: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import Allocation, Ask, BatchSystem, Requeue, number
from dask_gpu_mpi.sites.jobscript import JobRequest, ScriptFormat
from dask_gpu_mpi.sites.launchers import LOCAL, in_batch_script

#: The number of GPUs that a step has on this node (srun(1), sbatch(1)).
GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
#: Parts of a heterogeneous job (MAX_HET_JOB_COMPS in slurm.h: 128).
MOST_PARTS = 128
_JOB_END = "SLURM_JOB_END_TIME"
#: The variable by which a Hydra starts its processes in another way than by srun, by its kind. By itself it chooses srun if there
#: are Slurm's variables, and waits forever if there is no srun, as in a container.
_BOOTSTRAP = {"hydra": "HYDRA_BOOTSTRAP", "intel": "I_MPI_HYDRA_BOOTSTRAP"}
#: With these srun would pass on a part of the variables, cores or GPUs. ``sbatch --export=NONE`` sets the first one.
_CONFINING = ("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV", "SRUN_CPUS_PER_TASK", "SLURM_GPU_BIND")
_MPIRUN = "slurm-mpirun.sbatch"


class Slurm(BatchSystem):
    """Its jobs may be heterogeneous. A command requeues them. GPUs per task hide the other GPUs of a node."""

    title = "Slurm"
    job_variable = "SLURM_JOB_ID"
    login_variable = "SLURM_SUBMIT_HOST"
    gpus_variable = GPUS_ON_NODE
    cpus_variable = "SLURM_CPUS_ON_NODE"
    launcher = "srun"
    tells_mpirun = True
    sends_signal = True
    keeps_number = True
    #: `session.on_walltime` needs the end of this job on the client's rank.
    forwarded = frozenset({_JOB_END})

    def allocation(self, environ: Mapping[str, str], ask: Ask) -> Allocation | None:
        job = self.job(environ)
        if not job:
            return None
        parts = number(environ, "SLURM_HET_SIZE") or 0
        if parts > MOST_PARTS:
            raise InputError(
                f"environment: SLURM_HET_SIZE={parts}: too many",
                expected=f"at most {MOST_PARTS}",
                fix="run `launch` inside the job",
            )
        if parts:
            nodes = sum(
                number(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{part}") or 1 for part in range(parts)
            )
        else:
            nodes = number(environ, "SLURM_JOB_NUM_NODES") or number(environ, "SLURM_NNODES") or 1
        per_node = number(environ, "SLURM_NTASKS_PER_NODE") or 1
        return Allocation("slurm", nodes, nodes * per_node, job=job, parts=parts)

    def hosts(self, environ: Mapping[str, str]) -> str:
        return environ.get("SLURM_JOB_NODELIST", "")

    def end_time(self, environ: Mapping[str, str], now: Callable[[], float], ask: Ask) -> float | None:
        found = environ.get(_JOB_END, "")
        return float(found) if re.fullmatch(r"[0-9]{1,15}", found) else None

    def is_here(self, environ: Mapping[str, str], allocation: Allocation, ask: Ask) -> bool:
        """True in a shell on the node. On a login node there is no SLURMD_NODENAME, or the one of another job.

        False in a batch script: Slurm sends signals that the user requests (``--signal``, ``scancel -s``) only to its steps.
        """
        node = environ.get("SLURMD_NODENAME")
        return bool(node) and node == environ.get("SLURM_JOB_NODELIST") and not in_batch_script(environ)

    def environment(
        self, environ: Mapping[str, str], allocation: Allocation, ask: Ask, *, launcher: str, copies: bool
    ) -> dict[str, str | None]:
        """Undo what keeps variables, cores or GPUs of the job from its ranks; give mpirun's daemons all cores and GPUs."""
        changes: dict[str, str | None] = dict.fromkeys(_CONFINING)
        own_launcher = launcher in (self.launcher, LOCAL.kind)
        # older versions of Slurm do not set the end of the job; of parts with different ends, the first counts
        if not environ.get(_JOB_END):
            # the user may have set another format for squeue
            command = ["env", "SLURM_TIME_FORMAT=standard", "squeue", "-h", "-j", _task(environ), "-o", "%e"]
            if end := earliest(ask(command).split()):
                changes[_JOB_END] = end
        # a part without tasks for each node would have one task, on one of its nodes
        for part in range(allocation.parts):
            if (tasks := f"SLURM_NTASKS_HET_GROUP_{part}") not in environ:
                nodes = number(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{part}") or 1
                changes[tasks] = str(nodes * allocation.ranks // allocation.nodes)
        if "SLURM_GPUS_PER_TASK" in environ:
            changes |= dict.fromkeys(("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU"))
        return changes if own_launcher else changes | _for_mpirun(environ, launcher, ask, copies=copies)

    def lingers(self, environ: Mapping[str, str], launcher: str) -> bool:
        return in_batch_script(environ) and launcher not in (self.launcher, LOCAL.kind)

    def ends_job(self, environ: Mapping[str, str], ask: Ask) -> bool:
        """Slurm also signals a batch script alone (``scancel --batch``), and then the job goes on."""
        return ask(["squeue", "-h", "-j", _task(environ), "-o", "%T"]).strip() != "RUNNING"

    def requeue(self, job: Requeue, environ: Mapping[str, str]) -> int | None:
        again = ["scontrol", "requeue", _task(environ)]
        may = job.may_restart(number(environ, "SLURM_RESTART_COUNT") or 0)
        return None if may and job.rerun(again, environ) else 75


def _for_mpirun(
    environ: Mapping[str, str], launcher: str, ask: Ask, *, copies: bool
) -> dict[str, str | None]:
    """The variables with which srun gives the daemons of this mpirun all cores and GPUs that the job has on their nodes."""
    changes: dict[str, str | None] = {"SLURM_CPU_BIND": "none"}
    bootstrap = _BOOTSTRAP.get(launcher, "")
    if bootstrap and bootstrap not in environ and not ask(["srun", "--version"]):
        changes[bootstrap] = "ssh"  # Hydra uses no ssh for its own node
    on_node, per_node = _count(environ, GPUS_ON_NODE) or 0, _count(environ, "SLURM_GPUS_PER_NODE")
    # a step of srun has all GPUs of the job, and nodes may differ in number
    if on_node and "SLURM_GPUS_PER_TASK" in environ:
        changes["SLURM_GPUS_PER_NODE"], per_node = str(on_node), on_node
    if per_node is not None and per_node > on_node:
        changes["SLURM_GPUS_PER_NODE"] = None
    if copies:  # this node's GPUs are not those of the others
        return changes | {"CUDA_VISIBLE_DEVICES": None}
    if per_node is not None and per_node < on_node:
        # in an exclusive job this node has all its GPUs, and srun gives the other nodes the requested number
        changes[GPUS_ON_NODE] = str(per_node)
        if visible := environ.get("CUDA_VISIBLE_DEVICES"):
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:per_node])
        on_node = per_node
    # the daemons of mpirun are on the other nodes
    if (total := _count(environ, "SLURM_GPUS")) is not None:
        changes["SLURM_GPUS"] = str(total - on_node)
    return changes


def _task(environ: Mapping[str, str]) -> str:
    """The number of this job, or of this task of an array, for Slurm's commands."""
    job, task = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{environ.get('SLURM_ARRAY_JOB_ID') or job}_{task}" if task else job


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """A number of GPUs, perhaps by type: ``4``, ``a100:4``, ``a100:4,h100:2``; None: unset, or in another format."""
    counts = [part.rpartition(":")[2] for part in environ.get(name, "").split(",")]
    return sum(map(int, counts)) if all(re.fullmatch(r"[0-9]{1,9}", count) for count in counts) else None


def earliest(ends: Sequence[str]) -> str:
    """The first of these times of squeue, in seconds since the epoch; empty: one of them is not a time."""
    from datetime import datetime

    try:
        return str(int(min(map(datetime.fromisoformat, ends)).timestamp()))
    except (ValueError, TypeError, OverflowError):  # no limit, no output, or output of another program
        return ""


class SlurmScript(ScriptFormat):
    """Directives of sbatch."""

    prefix = "#SBATCH "
    templates: Mapping[str, str] = {"srun": "slurm.sbatch", "mpirun": _MPIRUN, "mpiexec": _MPIRUN}
    default_launchers = ("srun",)
    submit = ("sbatch", "--parsable")
    job_id = r"(\d+)(?:;.*)?"
    times = ("M", "M:S", "D-H", "D-H:M", "D-H:M:S")
    words: Mapping[str, str] = {
        "account": "--account=",
        "queue": "--partition=",
        "qos": "--qos=",
        "constraint": "--constraint=",
        "mail_user": "--mail-user=",
        "output": "--output=",
    }
    short: Mapping[str, str] = {"-q": "--qos"}
    tells_gpus = True
    has_types = True
    chooses_nodes = True
    counts_cores = True
    alike = tuple(
        frozenset(names.split())
        for names in (
            "--gpus-per-node --gres --gpus -G --gpus-per-task --gpus-per-socket",
            "--mem --mem-per-cpu --mem-per-gpu",
            "--cpus-per-task -c --cpus-per-gpu",
            "--requeue --no-requeue",
            "--exclusive --oversubscribe -s",
            "--nodes -N",
            "--time -t",
            "--partition -p",
            "--account -A",
            "--qos -q",
            "--constraint -C",
            "--output -o",
            "--job-name -J",
        )
    )

    def directives(self, job: JobRequest) -> dict[str, str | None]:
        gpus = ":".join(filter(None, (job.gpu_type, str(job.gpus_per_node))))
        found: dict[str, str | None] = {
            "--nodes=": None if job.gpus else str(job.nodes),
            "--ntasks-per-node=": str(job.ranks_per_node),
            "--gpus-per-node=": gpus if job.gpus_per_node and not job.gpus else None,
            "--time=": job.walltime,
        }
        if job.gpus:
            # with tasks for each node, Slurm plans only as many nodes as there are tasks
            each = str(job.cpus_per_gpu) if job.cpus_per_gpu else None
            found |= {"--gpus=": gpus, "--ntasks-per-node=": None, "--cpus-per-gpu=": each}
        if "mail_user" in job.words:
            found["--mail-type="] = "END,FAIL"  # by default Slurm sends no mail
        if job.mebibytes:
            found["--mem="] = f"{job.mebibytes}M"
        if job.cpus_per_node:
            if job.cpus_per_node % job.ranks_per_node:
                raise InputError(
                    f"--cpus-per-node {job.cpus_per_node}: Slurm gives all ranks the same number",
                    expected=f"a multiple of {job.ranks_per_node}, the ranks of a node",
                    fix="another number, or one rank a node",
                )
            found["--cpus-per-task="] = str(job.cpus_per_node // job.ranks_per_node)
        if job.shared:
            found |= {"--exclusive": None, "--mem=": found.get("--mem=")}
        return found

    def option_name(self, directive: str) -> str:
        name = super().option_name(directive)
        is_other = name == "--gres" and "gpu" not in directive and directive != "--gres="
        return "--gres of others" if is_other else name  # they are added to the GPUs


SLURM, FORMAT = Slurm(), SlurmScript()
