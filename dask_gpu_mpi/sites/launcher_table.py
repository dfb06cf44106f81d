"""The launchers and their environment variables, as a table; and a child's environment without them.

A child process must not have these variables: an MPI library in it would join the job as a rank that already exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LAUNCHERS", "Launcher", "scrub"]


@dataclass(frozen=True)
class Launcher:
    """A launcher and the variables that it gives to each rank."""

    #: As messages call it.
    name: str
    #: Variable of the rank in the world.
    rank: str
    #: Variables of the world size: the first one that is set counts. None may be set.
    size: tuple[str, ...]
    #: Variable of the rank on its host.
    local_rank: str
    #: The variable that only this launcher sets: without it, it was another one that speaks the same protocol.
    mark: str
    #: What a rank had (rank 1 of 4, the second on its host), for tests.
    sample: Mapping[str, str]
    #: Names of the variables by which a process knows which rank it is, ``*`` at the end of a prefix that is its own: in the
    #: environment of a child they are harmful. What users set to configure it, or an MPI library, is not among them.
    scrubbed: str
    #: Whether the variables are certainly this process's own. Slurm's are the launcher daemon's under any mpirun.
    sure: bool = True
    #: Variable of the number of ranks on this host; empty: it has none.
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

_PATTERNS = frozenset(" ".join(launcher.scrubbed for launcher in LAUNCHERS).split())
_SCRUBBED = frozenset(name for name in _PATTERNS if not name.endswith("*"))
_SCRUBBED_PREFIXES = tuple(name.removesuffix("*") for name in _PATTERNS if name.endswith("*"))


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
