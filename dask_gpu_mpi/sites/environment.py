"""What ``launch`` changes in the environment of the launcher, and what Open MPI is told to forward to other nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dask_gpu_mpi.sites.launcher_table import scrub
from dask_gpu_mpi.sites.launchers import detect

from .allocation import Allocation
from .mpi_library import MpiLibrary
from .starter import Starter

__all__ = ["forwarded", "launch_environment"]

Changes = dict[str, str | None]

#: A shell's and a login's own, and what is true on one node only.
_ONE_NODE = (
    "_ CUDA_VISIBLE_DEVICES DISPLAY ENVIRONMENT HOME HOST HOSTNAME KRB5CCNAME LOGNAME MAIL OLDPWD PWD SHELL SHLVL TERM "
    "TMPDIR TMP TEMP USER XAUTHORITY"
)
NOT_FORWARDED = frozenset(_ONE_NODE.split())
#: Of batch systems, launchers and sessions.
_OTHERS = (
    "BASH_ DBUS_ FLUX_ HYDRA_ HYDI_ LSB_ LSF_ LS_ OMPI_ PALS_ PBS_ PMI_ PMIX_ PRTE_ SLURM_ SLURMD_ SSH_ XDG_"
)
NOT_FORWARDED_PREFIXES = tuple(_OTHERS.split())
#: `session.on_walltime` asks for the end of this job on the client's rank.
FORWARDED = frozenset({"PBS_JOBID", "SLURM_JOB_END_TIME"})


def launch_environment(
    environ: Mapping[str, str], allocation: Allocation, library: MpiLibrary, starter: Starter, *, root: bool
) -> Changes:
    """The variables to set, or (None) to unset, before the launcher starts.

    Parameters
    ----------
    root : bool
        Whether this is the superuser, whom Open MPI refuses.
    """
    changes: Changes = {}
    if (
        detect(environ) is not None
    ):  # a shell that is a rank itself, as in `srun --pty bash`: what it starts must not be
        changes.update(dict.fromkeys(sorted(environ.keys() - scrub(environ).keys())))
    if starter.kind == "openmpi" and root:
        changes |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if library.family == "cray" or starter.kind == "pals":
        changes["MPICH_GPU_SUPPORT_ENABLED"] = "0"  # Dask moves the data, not MPI
    if scratch := environ.get("DGM_SCRATCH"):
        changes["DASK_GPU_MPI__LOCAL_DIRECTORY"] = scratch
    if allocation.system in ("slurm", "lsf", "flux"):  # they can send one before the walltime
        changes["DASK_GPU_MPI__WALLTIME_SIGNAL"] = environ.get("DASK_GPU_MPI__WALLTIME_SIGNAL") or "USR1"
    if allocation.system == "pbs":
        if environ.get("OMP_NUM_THREADS") == environ.get("NCPUS"):  # PBS's: all cores, for each worker
            changes["OMP_NUM_THREADS"] = None
        if allocation.nodes > 1 and environ.get(
            "CUDA_VISIBLE_DEVICES"
        ):  # this node's UUIDs; empty: the job has no GPU
            changes["CUDA_VISIBLE_DEVICES"] = None
    if allocation.system == "slurm":
        changes |= _slurm(environ, starter)
    return {
        name: value
        for name, value in changes.items()
        if (name in environ if value is None else environ.get(name) != value)
    }


def _slurm(environ: Mapping[str, str], starter: Starter) -> Changes:
    """Undo GPUs per task, which hide the GPUs of a node from its ranks; let mpirun's own daemons have all cores and GPUs."""
    changes: Changes = {}
    on_node = _count(environ, "SLURM_GPUS_ON_NODE") or 0
    per_node = _count(environ, "SLURM_GPUS_PER_NODE")
    if "SLURM_GPUS_PER_TASK" in environ:
        changes |= dict.fromkeys(("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU"))
        # A step of srun has all GPUs of the job, of which nodes may have different numbers.
        if on_node and starter.kind != "srun":
            changes["SLURM_GPUS_PER_NODE"], per_node = str(on_node), on_node
    changes["SLURM_GPU_BIND"] = None
    if starter.kind == "srun":
        return changes
    changes["SLURM_CPU_BIND"] = "none"
    if per_node is not None and per_node > on_node:
        changes["SLURM_GPUS_PER_NODE"] = None
    if starter.kind != "openmpi":
        return changes | {"CUDA_VISIBLE_DEVICES": None}  # Hydra copies this node's to all
    if per_node is not None and per_node < on_node:
        # of an exclusive job this node has all GPUs, others by srun those that were requested
        visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:per_node]
        changes |= {"SLURM_GPUS_ON_NODE": str(per_node), "CUDA_VISIBLE_DEVICES": ",".join(visible)}
        on_node = per_node
    if (total := _count(environ, "SLURM_GPUS")) is not None:  # its daemons are on the other nodes
        changes["SLURM_GPUS"] = str(total - on_node)
    return changes


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """A number of GPUs, perhaps by type: ``4``, ``a100:4``, ``a100:4,h100:2``; None: unset, or of another form."""
    counts = [part.rpartition(":")[2] for part in environ.get(name, "").split(",")]
    return sum(map(int, counts)) if all(re.fullmatch(r"[0-9]{1,9}", count) for count in counts) else None


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """The names that Open MPI, which forwards nothing by itself, is told to set on other nodes.

    All that other launchers would forward, but what is true on one node only.
    """
    kept = scrub(environ)
    return sorted(
        name
        for name in kept
        if name in FORWARDED
        or (name == "CUDA_VISIBLE_DEVICES" and not kept[name])  # no GPU, on any node
        or (
            re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
            and name not in NOT_FORWARDED
            and not name.startswith(NOT_FORWARDED_PREFIXES)
        )
    )
