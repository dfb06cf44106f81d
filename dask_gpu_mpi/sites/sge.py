"""Grid Engine (SGE, Univa, Altair and Open Grid Scheduler): qsub(1), sge_pe(5).

There is no job script for it: parallel environments, their slots on each node, and GPU resources differ from site to site.
"""

from __future__ import annotations

from collections.abc import Mapping

from dask_gpu_mpi.sites.batch import Allocation, Ask, BatchSystem, Requeue, count_hosts

_HOSTS = "PE_HOSTFILE"
#: Grid Engine requeues a job that ends with this exit code.
AGAIN = 99


class Sge(BatchSystem):
    """It requeues by the exit code, and most variables of a job have no prefix."""

    title = "Grid Engine"
    job_variable = "SGE_TASK_ID"
    login_variable = "SGE_O_HOST"

    def allocation(self, environ: Mapping[str, str], ask: Ask) -> Allocation | None:
        # set in each job; "undefined" if it is not an array
        if not (task := self.job(environ)):
            return None
        job = environ.get("JOB_ID", "")
        if task != "undefined":
            job += f"_{task}"
        if not environ.get(_HOSTS):  # without a parallel environment
            return Allocation("sge", 1, 1, job=job)
        # a line for each queue of a node: NODE SLOTS QUEUE PROCESSORS; a slot mostly is a core
        hosts = dict.fromkeys(count_hosts(environ, _HOSTS, _nodes), 1)
        return Allocation("sge", len(hosts), len(hosts), hosts, job=job)

    def is_here(self, environ: Mapping[str, str], allocation: Allocation, ask: Ask) -> bool:
        return not allocation.hosts or super().is_here(environ, allocation, ask)

    def requeue(self, job: Requeue, environ: Mapping[str, str]) -> int | None:
        code = job.by_exit_code()
        return AGAIN if code is None else code


def _nodes(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.strip()]


SGE = Sge()
