"""Whether the launcher and the MPI library match, and the message if they do not."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from dask_gpu_mpi.base.timeouts import RANK_0_GRACE
from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.batch import number
from dask_gpu_mpi.sites.launchers import Launched, all_launched, detect, library_name


def is_mpich_before_5(version: str) -> bool:
    """Whether the library is MPICH itself (not Intel's, Cray's, MVAPICH's) of a version below 5.

    >>> [is_mpich_before_5(f"MPICH Version:      {number}") for number in ("4.0.2", "3.4", "5.0.2", "40.1")]
    [True, True, False, False]
    >>> is_mpich_before_5("MPI VERSION    : CRAY MPICH version 4.1")
    False
    """
    return re.match(r"MPICH Version:\s*[1-4]\.", version) is not None


def check_library(environ: Mapping[str, str], library_path: str, host: str) -> None:
    """Refuse an MPI library that would abort in ``MPI_Init``, which no code could catch.

    That is MPICH without PMIx below a launcher that supports nothing else (Open MPI's mpirun, ``srun --mpi=pmix``). Does not
    initialise MPI: call it before mpi4py.MPI is imported.

    `library_path`: the MPI library, or something linked to it (``importlib.util.find_spec("mpi4py.MPI").origin``). Raises a
    LauncherError. The rule is MPICH's own (src/util/mpir_pmi.c, ``check_MPIR_CVAR_PMI_VERSION``), since 4.2. Before, each rank
    became a world of one, which is right if the launcher has started one.
    """
    if "PMIX_NAMESPACE" not in environ or "PMI_SIZE" in environ or "MPIR_CVAR_PMI_VERSION" in environ:
        return
    library, has_pmix = _inspect_library(library_path)
    # Intel's, Cray's and MVAPICH's builds have other version texts, and find PMIx in other ways.
    if has_pmix or not library.startswith("MPICH Version"):
        return
    launched = detect(environ)
    if launched is None or launched.size is None:
        where, launcher = "this process", "its launcher"
        fix = f"use {_srun(library)}, or {_OWN_MPIRUN}"
    elif launched.size == 1 and is_mpich_before_5(library):
        return
    else:
        where = f"rank {launched.rank} of {launched.size}"
        launcher = f"{launched.launcher.name} ({launched.size_variable}={launched.size})"
        fix = _fix(launched, library)
    raise LauncherError(
        f"the MPI library ({library_name(library)}) does not support PMIx, and {launcher} offers nothing "
        f"else: {_MISMATCH}",
        fix=fix,
        where=f"{where} on {host}",
    )


def cross_check(
    environ: Mapping[str, str], world_size: int, rank: int, host: str, *, library: str = ""
) -> None:
    """Compare MPI's world with the launcher's.

    `world_size`, `rank`: of MPI's ``COMM_WORLD``. `library` (``MPI.Get_library_version()``): the fix is for this library only.
    Raises a LauncherError if the two disagree: each rank would be a cluster by itself, and all would run the script.
    """
    launched = all_launched(environ)
    mpi = f"MPI ({library_name(library)})" if library else "MPI"
    singleton = f"{mpi} started as a singleton (a world of 1 rank)"
    if not launched:
        tasks = number(environ, "SLURM_NTASKS") if "SLURM_JOB_ID" in environ else None
        if world_size == 1 and tasks is not None and tasks > 1:
            raise LauncherError(
                f"{singleton}: this process is none of the {tasks} tasks of the Slurm job "
                f"(SLURM_NTASKS={tasks})",
                fix=f"start it with srun, as in {_srun(library)} -n {tasks} python ..., or with mpirun",
                where=f"rank {rank} on {host}",
            )
        return
    inner = launched[0]
    if inner.size is None or inner.size == world_size:
        return
    if world_size == 1:
        raise LauncherError(
            f"{singleton} although {_launch(inner)}: {_MISMATCH}",
            fix=_fix(inner, library),
            where=f"rank {inner.rank} of {inner.size} on {host}",
        )
    if not inner.launcher.sure or any(outer.size == world_size for outer in launched):
        # Variables of the daemon, or left over from a launcher around this one: MPI has found the right ones.
        return
    raise LauncherError(
        f"{mpi} started a world of {world_size} ranks although {_launch(inner)}: {_MISMATCH}",
        fix=_fix(inner, library),
        where=f"rank {rank} on {host}",
    )


def wait_for_rank_0_to_report(environ: Mapping[str, str]) -> bool:
    """Sleep `RANK_0_GRACE` seconds in ranks other than 0; then return whether this rank has nothing to report.

    For ranks that can't communicate. None may exit before rank 0 has reported, since a launcher ends all ranks when one fails.
    Then the first rank of each other host reports, in case its host alone lacks something. If rank 0 has failed as well, most
    launchers have ended this rank by then.
    """
    launched = detect(environ)
    if launched is None or not launched.rank:
        return False
    time.sleep(RANK_0_GRACE)
    return launched.local_rank not in (0, None)


def _inspect_library(path: str) -> tuple[str, bool]:
    """The version text of an MPI library, and whether it is linked to a PMIx client; ("", False) if it can't be loaded."""
    import ctypes

    try:
        library = ctypes.CDLL(path)
        text, length = ctypes.create_string_buffer(1 << 13), ctypes.c_int()
        # one of the few calls that MPI allows before MPI_Init; MPI_MAX_LIBRARY_VERSION_STRING is at most 8192
        library.MPI_Get_library_version(text, ctypes.byref(length))
    except (OSError, AttributeError):
        return "", False
    return text.value.decode(errors="replace"), hasattr(library, "PMIx_Init")


def _srun(library: str) -> str:
    """The command that was measured to work: Open MPI with PMIx, MPICH and Intel MPI with PMI-2 (docs: launcher × MPI)."""
    kind = library.lower()
    if "open mpi" in kind:
        return "srun --mpi=pmix"
    if "mpich" in kind or "intel" in kind:
        return "srun --mpi=pmi2"
    return "srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"


_OWN_MPIRUN = "the mpirun of the MPI library that mpi4py loads"
_MISMATCH = "launcher and MPI library do not match"


def _launch(launched: Launched) -> str:
    return (
        f"{launched.launcher.name} launched {launched.size} ranks ({launched.size_variable}={launched.size})"
    )


def _fix(launched: Launched, library: str) -> str:
    if launched.launcher.name == "srun":
        return f"use {_srun(library)}, or {_OWN_MPIRUN}"
    return f"use {_OWN_MPIRUN} (`python -m mpi4py --mpi-library` shows it), or install the MPI library of this launcher"
