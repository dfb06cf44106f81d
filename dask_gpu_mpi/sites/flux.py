"""Flux, whose instance may itself be a job of another batch system."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import Allocation, Ask, BatchSystem, is_this_host
from dask_gpu_mpi.sites.jobscript import JobRequest, ScriptFormat


class Flux(BatchSystem):
    """The nodes and the end of its jobs come from its commands. It requeues no job."""

    title = "Flux"
    is_inner = True
    job_variable = "FLUX_JOB_ID"
    launcher = "flux"
    sends_signal = True

    def job(self, environ: Mapping[str, str]) -> str:
        # in a batch script the job is that of the script's own instance, by another name
        return super().job(environ) or environ.get("FLUX_ENCLOSING_ID", "")

    def allocation(self, environ: Mapping[str, str], ask: Ask) -> Allocation | None:
        # On a login node or below `flux start`, an instance may not belong to a job.
        if not environ.get("FLUX_URI") or not (job := ask(["flux", "getattr", "jobid"]).strip()):
            return None
        if not job.isprintable():
            return None
        size = ask(["flux", "getattr", "size"]).strip()
        nodes = int(size) if re.fullmatch(r"[1-9][0-9]{0,8}", size) else 1
        return Allocation("flux", nodes, nodes, job=job)

    def is_here(self, environ: Mapping[str, str], allocation: Allocation, ask: Ask) -> bool:
        # `flux proxy` reaches the job from other nodes
        return is_this_host(ask(["flux", "getattr", "hostlist"]).strip())

    def end_time(self, environ: Mapping[str, str], now: Callable[[], float], ask: Ask) -> float | None:
        if not self.job(environ):
            return None
        left = ask(["flux", "job", "timeleft"]).strip()
        known = re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", left)
        # flux prints UINT_MAX for a job without a limit (older ones 0), and 0 for a job that has ended
        return now() + float(left) if known and 0 < float(left) < 2**32 - 1 else None


class FluxScript(ScriptFormat):
    """Directives of ``flux batch``, which allocates no memory."""

    prefix = "# flux: "
    templates: Mapping[str, str] = {"flux": "flux.sh"}
    default_launchers = ("flux",)
    submit = ("flux", "batch")
    job_id = r"(?<!\S)([fƒ]\w+)(?!\S)"
    tells_ranks = False
    times = ("M", "Ss", "Mm", "Hh", "Dd")
    words: Mapping[str, str] = {
        "account": "--bank=",
        "queue": "--queue=",
        "constraint": "--requires=",
        "output": "--output=",
    }

    def directives(self, job: JobRequest) -> dict[str, str | None]:
        if job.memory_per_node:
            raise InputError(
                "--memory-per-node: Flux allocates no memory",
                expected="under Slurm, PBS and LSF",
                fix="leave it out",
            )
        found: dict[str, str | None] = {"--nodes=": str(job.nodes), "--time-limit=": f"{job.seconds}s"}
        if job.shared:
            found |= {
                "--exclusive": None,
                "--nslots=": str(job.nodes),
                "--cores-per-slot=": str(job.cpus_per_node),
                "--gpus-per-slot=": str(job.gpus_per_node) if job.gpus_per_node else None,
            }
        return found


FLUX, FORMAT = Flux(), FluxScript()
