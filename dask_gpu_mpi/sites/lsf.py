"""LSF of IBM."""

from __future__ import annotations

from collections.abc import Mapping

from dask_gpu_mpi.sites.batch import Allocation, Ask, BatchSystem, Requeue, count_hosts
from dask_gpu_mpi.sites.jobscript import JobRequest, ScriptFormat

_HOSTS = "LSB_DJOB_HOSTFILE"
_SCRIPT = "lsf.bsub"


class Lsf(BatchSystem):
    """It requeues by the exit code (``bsub -Q 75``), and sends signals to all processes of a job."""

    title = "LSF"
    job_variable = "LSB_JOBID"
    login_variable = "LSB_SUB_HOST"
    sends_signal = True
    signals_all = True
    requeues_by_code = True
    keeps_number = True

    def allocation(self, environ: Mapping[str, str], ask: Ask) -> Allocation | None:
        if not environ.get(_HOSTS):
            return None
        # a line for each slot, which mostly is a core
        hosts = dict.fromkeys(count_hosts(environ, _HOSTS), 1)
        job = self.job(environ)
        index = environ.get("LSB_JOBINDEX", "0")
        if index != "0":  # all tasks of an array share the number of the job
            job += f"_{index}"
        return Allocation("lsf", len(hosts), len(hosts), hosts, job=job)

    def requeue(self, job: Requeue, environ: Mapping[str, str]) -> int | None:
        return job.by_exit_code()


class LsfScript(ScriptFormat):
    """Directives of bsub, in slots, which mostly are cores."""

    prefix = "#BSUB "
    templates: Mapping[str, str] = {"mpirun": _SCRIPT, "mpiexec": _SCRIPT}
    has_long_options = False
    submit = ("bsub",)
    job_id = r"Job <(\d+)> is submitted.*"
    tells_ranks = False
    times = ("M", "H:M")
    words: Mapping[str, str] = {"account": "-P ", "queue": "-q ", "mail_user": "-u ", "output": "-o "}

    def directives(self, job: JobRequest) -> dict[str, str | None]:
        minutes = -(-job.seconds // 60)  # LSF has no seconds
        # a slot is a core; on a whole node, which has no number of cores, one for each rank is enough
        slots = job.cpus_per_node or job.ranks_per_node
        memory = f" rusage[mem={job.mebibytes}MB/host]" if job.mebibytes else ""
        found: dict[str, str | None] = {
            "-n ": str(job.nodes * slots),
            "-R ": f'"span[ptile={slots}]{memory}"',
            "-gpu ": f'"num={job.gpus_per_node}:mode=shared:j_exclusive=yes"' if job.gpus_per_node else None,
            "-W ": f"{minutes // 60:02}:{minutes % 60:02}",
        }
        if job.shared:
            found["-x"] = None
        if "mail_user" in job.words:
            found["-N"] = ""  # a mail in addition to the log
        return found

    def replaced(self, directive: str) -> frozenset[str]:
        return super().replaced(directive) - {"-R"}  # several of these add up


LSF, FORMAT = Lsf(), LsfScript()
