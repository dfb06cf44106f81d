"""The launchers and their environment variables: telling who started this process, checking it, and leaving it behind.

MPI is the authority on rank and world size. The variables explain what went wrong when MPI and launcher disagree, and
a child process must not have them: an MPI library in it would join the job as a rank that already exists.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpu_mpi.errors import LauncherError

__all__ = [
    "LAUNCHERS",
    "Launched",
    "Launcher",
    "alone_on_host",
    "check_library",
    "cross_check",
    "detect",
    "keeps_silent",
    "library_name",
    "scrub",
    "speaks",
]


@dataclass(frozen=True)
class Launcher:
    """A launcher and the variables that it gives to each rank.

    Attributes
    ----------
    name : str
        For people.
    rank, local_rank : str
        Variables of the rank in the world, and of the rank on its host.
    size : tuple of str
        Variables of the world size: the first one that is set counts. None may be set.
    mark : str
        The variable that only this launcher sets: without it, it was another one that speaks the same protocol.
    sample : Mapping
        What a rank was seen to have (rank 1 of 4, the second on its host), for tests.
    scrubbed : str
        Names of the variables by which it tells a process which rank it is, ``*`` at the end of a prefix that is its own: in the
        environment of a child they are harmful. What users set to configure it, or an MPI library, is not among them.
    sure : bool
        Whether the variables are certainly this process's own. Slurm's are the launcher daemon's under any mpirun.
    local_size : str
        Variable of the number of ranks on this host; empty: it has none.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    mark: str
    sample: Mapping[str, str]
    scrubbed: str
    sure: bool = True
    local_size: str = ""


#: What a launcher that speaks PMI-1 or PMI-2 sets: without descriptor, port and rank nobody can join by it. Not every name that
#: begins so is its own: a bank's ``PMI_RATE`` is not.
PMI = (
    "PMI_RANK PMI_SIZE PMI_FD PMI_PORT PMI_ID PMI_SPAWNED PMI_HOSTNAME PMI_JOBID PMI_KVS PMI_KVSNAME PMI_APPNUM PMI_DOMAIN "
    "PMI_LOCAL_RANK PMI_LOCAL_SIZE PMI_UNIVERSE_SIZE PMI_PROCESS_MAPPING PMI_CONTROL_FD PMI_CONTROL_PORT PMI_SHARED_SECRET "
    "PMI_VERSION PMI_SUBVERSION PMI_TOTALVIEW PMI2_*"
)
#: The same of PMIx: a client needs the name space, the rank and the address of a server.
PMIX = (
    "PMIX_NAMESPACE PMIX_RANK PMIX_ID PMIX_SERVER_* PMIX_SYSTEM_TMPDIR PMIX_HOSTNAME PMIX_VERSION PMIX_BFROP_BUFFER_TYPE "
    "PMIX_GDS_MODULE PMIX_PTL_MODULE PMIX_SECURITY_MODE PMIX_DSTORE_* PMIX_PARAM_FILE_PASSED PMIX_KEEPALIVE_PIPE PMIX_LAUNCHER_* "
    "PMIX_MCA_ess PMIX_MCA_ess_* PMIX_MCA_prte PMIX_MCA_prte_* PMIX_MCA_plm PMIX_MCA_plm_* PMIX_MCA_pmix PMIX_MCA_pmix_* "
    "PMIX_MCA_pmixclient PMIX_MCA_pmixclient_* PMIX_MCA_ptl PMIX_MCA_ptl_*"
)

#: Innermost first: an mpirun runs inside a batch job's step, and never the other way round.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "Open MPI's mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        mark="OMPI_COMM_WORLD_RANK",
        sample={
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_FILE_LOCATION": "/tmp/ompi.4794/1/0",
            "PMIX_NAMESPACE": "prterun-host-4794@1",
            "PMIX_RANK": "1",
            "PMIX_SERVER_URI41": "prterun-host-4794@0.0;tcp4://127.0.0.1:33807",
            "PRTE_LAUNCHED": "1",
        },
        # Its settings stay: of the library, the wrappers' compilers, leave to run as root (without it a child's MPI_Init fails in
        # a container), where a relocated installation lies. But it passes some identity as settings (MCA), too.
        scrubbed="OMPI_COMM_WORLD_* OMPI_WORLD_* OMPI_UNIVERSE_SIZE OMPI_APP_CTX_NUM_PROCS OMPI_NUM_APP_CTX OMPI_FIRST_RANKS "
        "OMPI_ARGV OMPI_COMMAND OMPI_FILE_LOCATION OMPI_PARENT_PORT OMPI_TOOL_NAME OMPI_LIBDIR_LOC OPAL_USER_PARAMS_GIVEN "
        "OMPI_MCA_ess OMPI_MCA_ess_* OMPI_MCA_orte OMPI_MCA_orte_* OMPI_MCA_prte OMPI_MCA_prte_* OMPI_MCA_pmix OMPI_MCA_pmix_* "
        "OMPI_MCA_schizo OMPI_MCA_schizo_* OMPI_MCA_plm OMPI_MCA_plm_* OMPI_MCA_num_procs OMPI_MCA_initial_wdir "
        "OMPI_MCA_cpu_type OMPI_MCA_PREFIXES OMPI_MCA_shmem_RUNTIME_* ORTE_SCHIZO_DETECTION PRTE_LAUNCHED PRTE_SHARED_FS "
        "PRTE_MCA_ess PRTE_MCA_ess_* PRTE_MCA_prte PRTE_MCA_prte_* PRTE_MCA_plm PRTE_MCA_plm_* PRTE_MCA_pmix PRTE_MCA_pmix_* "
        "PRTE_MCA_pmixclient PRTE_MCA_pmixclient_* PRTE_MCA_ptl PRTE_MCA_ptl_* " + PMIX,
    ),
    Launcher(
        "MVAPICH2's mpirun",
        rank="MV2_COMM_WORLD_RANK",
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        mark="MV2_COMM_WORLD_RANK",
        sample={"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
        scrubbed="MV2_COMM_WORLD_* MPISPAWN_* MPIRUN_RANK MPIRUN_NPROCS MPIRUN_ID MPIRUN_HOST MPIRUN_HOSTIP MPIRUN_PORT "
        "MPIRUN_CHECK_PORT MPIRUN_MPD MPIRUN_PROCESSES MPIRUN_COMM_MULTIPLE",
    ),
    Launcher(
        "the mpiexec of MPICH or Intel MPI (Hydra)",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        # srun --mpi=pmi2, PALS and Flux speak PMI as well, without this one
        mark="MPI_LOCALRANKID",
        sample={
            "PMI_RANK": "1",
            "PMI_SIZE": "4",
            "PMI_FD": "9",
            "MPI_LOCALRANKID": "1",
            "MPI_LOCALNRANKS": "2",
            "HYDI_CONTROL_FD": "7",
        },
        scrubbed="HYDI_CONTROL_FD HYDRA_CONTROL_FD MPI_LOCALRANKID MPI_LOCALNRANKS I_MPI_MPIRUN I_MPI_HYDRA_UUID I_MPI_INFO_* "
        "I_MPI_RANK_* " + PMI,
    ),
    Launcher(
        "PALS (mpiexec)",
        rank="PALS_RANKID",
        size=("PMI_SIZE", "PALS_SIZE"),
        local_rank="PALS_LOCAL_RANKID",
        mark="PALS_RANKID",
        sample={
            "PALS_RANKID": "1",
            "PALS_LOCAL_RANKID": "1",
            "PALS_APID": "af1c",
            "PMI_SIZE": "4",
            "PMI_RANK": "1",
        },
        scrubbed="PALS_RANKID PALS_LOCAL_RANKID PALS_LOCAL_SIZE PALS_SIZE PALS_TASKID PALS_NODEID PALS_APID PALS_APINFO PALS_FD "
        "PALS_SPOOL_DIR PALS_STARTUP_BARRIER ALPS_APP_* " + PMI,
    ),
    Launcher(
        "jsrun",
        rank="JSM_NAMESPACE_RANK",
        size=("JSM_NAMESPACE_SIZE",),
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        mark="JSM_NAMESPACE_RANK",
        sample={"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"},
        scrubbed="JSM_NAMESPACE_* JSM_JSRUN JSM_JSRUN_* LSF_PM_* " + PMIX,
    ),
    Launcher(
        "flux run",
        rank="FLUX_TASK_RANK",
        size=("FLUX_JOB_SIZE",),
        local_rank="FLUX_TASK_LOCAL_ID",
        mark="FLUX_TASK_RANK",
        sample={
            "FLUX_TASK_RANK": "1",
            "FLUX_JOB_SIZE": "4",
            "FLUX_TASK_LOCAL_ID": "1",
            "PMI_RANK": "1",
            "PMI_FD": "5",
        },
        scrubbed="FLUX_TASK_RANK FLUX_TASK_LOCAL_ID FLUX_JOB_SIZE FLUX_JOB_NNODES FLUX_KVS_NAMESPACE FLUX_PMI_LIBRARY_PATH "
        + PMI,
    ),
    Launcher(
        "srun",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        mark="SLURM_STEP_ID",
        sample={
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NODELIST": "h[1-2]",
        },
        # With SLURM_STEP_ID in it and no PMI, Open MPI 4 takes a child for a rank of srun and aborts. The job's shape, which
        # sbatch sets too, stays.
        scrubbed="SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_STEPID SLURM_STEP_* SLURM_TASK_PID "
        "SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT SLURM_LAUNCH_NODE_IPADDR SLURM_MPI_TYPE SLURM_PMI_FD SLURM_PMI2_* "
        "SLURM_PMIX_MAPPING_SERV SLURM_PMIXP_* " + PMI + " " + PMIX,
        sure=False,
    ),
    Launcher(
        "a launcher that speaks PMI",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank="PMI_LOCAL_RANK",
        mark="PMI_RANK",
        sample={"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"},
        scrubbed=PMI,
        sure=False,
    ),
)

_WORDS = frozenset(" ".join(launcher.scrubbed for launcher in LAUNCHERS).split())
_SCRUBBED = frozenset(word for word in _WORDS if not word.endswith("*"))
_SCRUBBED_PREFIXES = tuple(word.removesuffix("*") for word in _WORDS if word.endswith("*"))

#: Slurm's numbers of steps that no srun has made: the batch script's, an interactive shell's and their like (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: Seconds after which a rank takes it that rank 0 has said what there is to say.
SECOND_WORD = 2.0


@dataclass(frozen=True)
class Launched:
    """Who started this process, and what it says.

    Attributes
    ----------
    launcher : Launcher
        Its row in the table.
    rank : int
        This process's.
    size : int or None
        The world's; None if the launcher does not say.
    local_rank : int or None
        This process's on its host. Never a GPU index: it may count GPUs that this process can't see.
    size_variable : str
        Where `size` stands.
    """

    launcher: Launcher
    rank: int
    size: int | None
    local_rank: int | None
    size_variable: str = ""

    @property
    def name(self) -> str:
        """The launcher's name."""
        return self.launcher.name

    def __str__(self) -> str:
        """Rank, size and local rank in one short line."""
        size = "?" if self.size is None else self.size
        local = "?" if self.local_rank is None else self.local_rank
        return f"{self.name}: rank {self.rank} of {size}, local rank {local}"


def detect(environ: Mapping[str, str]) -> Launched | None:
    """Tell the innermost launcher that started this process as one of its ranks.

    Parameters
    ----------
    environ : Mapping
        The environment of the process.

    Returns
    -------
    Launched or None
        None if no launcher did: a shell of a batch job is none.

    Raises
    ------
    LauncherError
        A variable of the launcher is no number.
    """
    return next(iter(_all_launched(environ)), None)


def alone_on_host(environ: Mapping[str, str]) -> bool:
    """Whether this is the only rank on its host, as far as the launcher says; also True without a launcher."""
    launched = detect(environ)
    if launched is None or launched.size == 1:
        return True
    if launched.launcher.local_size:
        return environ.get(launched.launcher.local_size) == "1"
    if launched.name != "srun":
        return False  # Slurm's word is about the step in which their daemons run
    # "1(x8)", by the hosts of the step
    return bool(re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")))


def first_on_host(environ: Mapping[str, str]) -> bool:
    """Whether this is the first rank of its host; False where the launcher does not say."""
    launched = detect(environ)
    return alone_on_host(environ) or (launched is not None and launched.local_rank == 0)


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this rank says what all ranks have to say but can't tell each other: rank 0 of the launcher, or no launcher."""
    launched = detect(environ)
    return launched is None or not launched.rank


def keeps_silent(environ: Mapping[str, str]) -> bool:
    """Wait for rank 0 to speak first; then tell whether this rank is to add nothing.

    For ranks that can't tell each other what is wrong. None may leave before rank 0 has spoken, since a launcher ends all ranks
    when one fails. Then the first rank of each other host speaks, in case it is its host alone that lacks something: where rank
    0 has failed as well, most launchers have ended it by then.
    """
    launched = detect(environ)
    if launched is None or not launched.rank:
        return False
    time.sleep(SECOND_WORD)
    return launched.local_rank not in (0, None)


def check_library(environ: Mapping[str, str], library_path: str, host: str) -> None:
    """Refuse an MPI library that would abort in ``MPI_Init``, where nothing can be caught any more.

    That is MPICH without PMIx below a launcher that speaks nothing else (Open MPI's mpirun, ``srun --mpi=pmix``). Found out
    without initialising MPI: call it before mpi4py.MPI is imported.

    Parameters
    ----------
    environ : Mapping
        The environment of this process.
    library_path : str
        The MPI library, or something linked to it: ``importlib.util.find_spec("mpi4py.MPI").origin``.
    host : str
        Name of this host, for the message.

    Raises
    ------
    LauncherError
        The library would abort.

    Notes
    -----
    The rule is MPICH's own (src/util/mpir_pmi.c, ``check_MPIR_CVAR_PMI_VERSION``), since 4.2. Before, each rank became a world
    of one, which is right where the launcher has started one.
    """
    if "PMIX_NAMESPACE" not in environ or "PMI_SIZE" in environ or "MPIR_CVAR_PMI_VERSION" in environ:
        return
    library, speaks_pmix = _look_at_library(library_path)
    # Intel's, Cray's and MVAPICH's builds call themselves otherwise, and find PMIx in ways of their own.
    if speaks_pmix or not library.startswith("MPICH Version"):
        return
    launched = detect(environ)
    if launched is None or launched.size is None:
        who, started = "this process", "the launcher of this process"
    else:
        who = f"rank {launched.rank} of {launched.size}"
        started = (
            f"{launched.name}, which has started {launched.size} ({launched.size_variable}={launched.size}),"
        )
        if launched.size == 1 and re.match(r"MPICH Version:\s*[1-4]\.", library):
            return
    remedy = _remedy(launched, library) if launched is not None else f"use {_srun(library)}, or {_OWN_MPIRUN}"
    raise LauncherError(
        f"{who} on {host}: the MPI library ({library_name(library)}) does not speak PMIx, and {started} speaks nothing else: "
        f"they do not belong together; {remedy}"
    )


def cross_check(
    environ: Mapping[str, str], world_size: int, rank: int, host: str, *, library: str = ""
) -> None:
    """Compare MPI's world with the launcher's.

    Parameters
    ----------
    environ : Mapping
        The environment of this process.
    world_size, rank : int
        Size of MPI's ``COMM_WORLD``, and this process's rank in it.
    host : str
        Name of this host, for the message.
    library : str, optional
        What ``MPI.Get_library_version()`` says: with it the remedy is for this library only.

    Raises
    ------
    LauncherError
        The two disagree: each rank would be a cluster of its own, and all would run the script.
    """
    launched = _all_launched(environ)
    library = library_name(library)
    mine = f"the MPI library ({library})" if library else "the MPI library"
    if not launched:
        tasks = _number(environ, "SLURM_NTASKS") if "SLURM_JOB_ID" in environ else None
        if world_size == 1 and tasks is not None and tasks > 1:
            raise LauncherError(
                f"rank {rank} on {host}: {mine} sees a world of 1 rank, but the Slurm job has SLURM_NTASKS={tasks} and this "
                f"process was not started as one of them; start it with srun, as in {_srun(library)} -n {tasks} python ..., "
                "or with mpirun"
            )
        return
    inner = launched[0]
    if inner.size is None or inner.size == world_size:
        return
    says = f"{inner.size_variable}={inner.size}"
    if world_size == 1:
        raise LauncherError(
            f"rank {inner.rank} of {inner.size} on {host}: {mine} sees a world of 1 rank, but {inner.name} has started "
            f"{inner.size} ({says}): they do not belong together; {_remedy(inner, library)}"
        )
    if not inner.launcher.sure or any(outer.size == world_size for outer in launched):
        # Variables of the daemon, or left over from a launcher around this one: MPI has found the right ones.
        return
    raise LauncherError(
        f"rank {rank} on {host}: {mine} sees a world of {world_size} ranks, but {inner.name} has started {inner.size} "
        f"({says}); {_remedy(inner, library)}"
    )


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without anything by which an MPI library would take a child for a rank of the job.

    The job's own variables (``SLURM_JOB_ID``, ``PBS_NODEFILE``, ...) and the user's settings of MPI libraries stay.

    Parameters
    ----------
    environ : Mapping
        The environment of a rank.

    Returns
    -------
    dict
        That of a child, in which ``MPI_Init`` makes a world of one.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }


def _all_launched(environ: Mapping[str, str]) -> list[Launched]:
    found = []
    for launcher in LAUNCHERS:
        rank = _number(environ, launcher.rank) if launcher.mark in environ else None
        if rank is None:
            continue
        if launcher.mark == "SLURM_STEP_ID" and (_number(environ, launcher.mark) or 0) >= _FIRST_SPECIAL_STEP:
            continue
        variable = next((name for name in launcher.size if environ.get(name)), "")
        size = _number(environ, variable) if variable else None
        found.append(Launched(launcher, rank, size, _number(environ, launcher.local_rank), variable))
    return found


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise LauncherError(
            f"environment: {name}={text[:40]!r} is no number; needed: what the launcher sets, so do not set it yourself"
        )
    return int(text)


def library_name(library: str) -> str:
    """The name in "Open MPI v5.0.11, package: ..." and "MPICH Version:      5.0.2" and a line break: their first few words."""
    return " ".join(library.replace("\0", "").partition("\n")[0].partition(",")[0].split())


def _look_at_library(path: str) -> tuple[str, bool]:
    """What an MPI library calls itself, and whether it is linked to a PMIx client; ("", False) if it can't be asked."""
    import ctypes

    try:
        library = ctypes.CDLL(path)
        text, length = (
            ctypes.create_string_buffer(1 << 13),
            ctypes.c_int(),
        )  # MPI_MAX_LIBRARY_VERSION_STRING: 8192
        # one of the few calls that MPI allows before MPI_Init
        library.MPI_Get_library_version(text, ctypes.byref(length))
    except (OSError, AttributeError):
        return "", False
    return text.value.decode(errors="replace"), hasattr(library, "PMIx_Init")


def _srun(library: str) -> str:
    """What was measured to work: Open MPI with PMIx, MPICH and Intel MPI with PMI-2 (docs: launcher × MPI)."""
    kind = library.lower()
    if "open mpi" in kind:
        return "srun --mpi=pmix"
    if "mpich" in kind or "intel" in kind:
        return "srun --mpi=pmi2"
    return "srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"


_OWN_MPIRUN = "the mpirun of the MPI library that mpi4py loads"


def _remedy(launched: Launched, library: str) -> str:
    if launched.name == "srun":
        return f"use {_srun(library)}, or {_OWN_MPIRUN}"
    return f"use {_OWN_MPIRUN} ('python -m mpi4py --mpi-library' names it), or install the MPI library of this launcher"
