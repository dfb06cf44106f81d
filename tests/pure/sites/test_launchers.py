from __future__ import annotations

import pytest

from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.sites.launchers import LAUNCHERS, Launcher, detect, scrub
from support.mocks.launchers import SAMPLES

SRUN = SAMPLES["srun"]
OPEN_MPI = SAMPLES["Open MPI's mpirun"]
HYDRA = SAMPLES["the mpiexec of MPICH or Intel MPI (Hydra)"]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_detect_reads_the_sample(launcher: Launcher) -> None:
    launched = detect(SAMPLES[launcher.name])
    assert launched is not None
    assert launched.launcher is launcher
    # PALS and Flux leave nothing out that they say
    assert (launched.rank, launched.size, launched.local_rank) == (1, 4, 1)
    assert launched.size_variable in launcher.size_variables
    kept = scrub(SAMPLES[launcher.name])
    assert detect(kept) is None
    assert set(kept) <= {"SLURM_JOB_ID", "SLURM_NTASKS"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"HOME": "/root"}, None),
        # mpirun inside a step of srun, whose variables are those of its daemon
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", **OPEN_MPI}, "Open MPI's mpirun"),
        # the script of a job without a launcher has started one
        ({**SAMPLES["dask-gpu-mpi launch"], "DGM_RANK": "0", **OPEN_MPI}, "Open MPI's mpirun"),
        ({**SRUN, **HYDRA}, "the mpiexec of MPICH or Intel MPI (Hydra)"),
        # srun --mpi=pmi2
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9"}, "srun"),
        # shells of a job, in steps of their own, and a step below these
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, None),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, None),
        ({**SRUN, "SLURM_STEP_ID": "4294967280"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}, None),
        ({**SRUN, "SLURM_STEP_ID": "4294967279"}, "srun"),
    ],
)
def test_the_innermost_launcher(environ: dict[str, str], name: str | None) -> None:
    launched = detect(environ)
    assert (launched and launched.launcher.name) == name
    assert launched is None or (launched.rank, launched.size) == (1, 4)


def test_a_variable_that_is_no_number_is_refused() -> None:
    with pytest.raises(LauncherError, match="OMPI_COMM_WORLD_SIZE='four'"):
        detect({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "four"})


KEPT = [
    "MPICH_GPU_SUPPORT_ENABLED", "SLURM_JOB_ID", "SLURM_JOBID",
    "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_GPUS", "SLURM_RESTART_COUNT", "SLURM_TMPDIR", "SLURM_SUBMIT_DIR", "SLURM_CONF", "PBS_JOBID",
    "PBS_NODEFILE", "PBS_O_WORKDIR", "LSB_JOBID", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "FLUX_JOB_ID",
    "FLUX_URI", "FLUX_JOB_TMPDIR", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT", "OPAL_PREFIX", "PMIX_PREFIX", "OMPI_CC", "OMPI_CXXFLAGS", "OMPI_MCA_btl",
    "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_mpi_yield_when_idle", "PMIX_MCA_gds",
    "PRTE_MCA_rmaps_default_mapping_policy", "MPIR_CVAR_CH4_NETMOD", "MV2_ENABLE_AFFINITY", "I_MPI_FABRICS",
    "I_MPI_ROOT", "I_MPI_PMI_LIBRARY", "UCX_TLS", "FI_PROVIDER", "MPI_HOME",
    # what merely begins like a launcher's: other programs' variables, and settings of launchers, which a task may start one with
    "HYDRA_FULL_ERROR", "HYDRA_HOST_FILE", "HYDRA_LAUNCHER", "HYDRA_IFACE", "I_MPI_HYDRA_BOOTSTRAP",
    "I_MPI_PERHOST", "MPIRUN_OPTIONS", "MPIRUN_TIMEOUT", "MPI_LOCALRANKIDS", "PMI_RATE", "PMI_DEBUG", "PMI",
    "PMI_MMAP_SYNC_WAIT_TIME", "PMIX_ROOT", "PMIX_INSTALL_PREFIX", "PRTE_PREFIX", "OMPI_VERSION", "OMPI_COMMUNITY",
    "OMPI_MCA_essence", "OMPI_MCA_btl_base_verbose", "OPAL_USER", "ORTE_ROOT", "ALPS_ROOT", "ALPS_XML_PATH",
    "PALS_CPU_BIND", "FLUX_PMI_DEBUG", "FLUX_TASK_MAP",
    "SLURM_STEPMGR", "SLURM_TASK_PROLOG", "SLURM_PMIX_DIRECT_CONN", "SLURM_PROCIDS", "SLURM_SRUN_REDUCE_TASK_EXIT_MSG",
]  # fmt: skip


def test_scrub_keeps_what_users_need() -> None:
    """What it drops: the test with real variables of each launcher."""
    assert [*scrub(dict.fromkeys(KEPT, "x"))] == KEPT


def of_open_mpi(**given: int) -> dict[str, str]:
    return {f"OMPI_COMM_WORLD_{name.upper()}": str(value) for name, value in given.items()}


def ours(*, rank: int, size: int) -> dict[str, str]:
    """A rank that `launch` has started."""
    return {"DGM_RANK": str(rank), "DGM_SIZE": str(size), "DGM_MEETING_FD": "5"}


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}
PMI_2 = {"PMI_RANK": "0", "PMI_SIZE": "2"}
HYDRA_2 = PMI_2 | {"MPI_LOCALRANKID": "0"}


@pytest.mark.parametrize(
    ("environ", "alone", "first", "one"),
    [
        ({}, True, True, True),  # no launcher, no other rank
        (of_open_mpi(rank=0, size=1), True, True, True),
        (of_open_mpi(rank=1, size=2, local_size=1), True, True, False),
        (of_open_mpi(rank=1, size=2, local_size=2), False, False, True),
        (of_open_mpi(rank=1, size=2), False, False, False),
        (of_open_mpi(rank=4, size=8, local_rank=0), False, True, False),
        (of_open_mpi(rank=5, size=8, local_rank=1), False, False, False),
        (ours(rank=0, size=1), True, True, True),
        (ours(rank=0, size=2), False, True, True),
        (ours(rank=1, size=2), False, False, True),
        (HYDRA_2 | {"MPI_LOCALNRANKS": "1"}, True, True, False),
        (HYDRA_2 | {"MPI_LOCALNRANKS": "2"}, False, True, True),
        (HYDRA, False, False, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, True, True, True),
        (PMI_2, False, False, False),  # the launcher does not say which is first
        (STEP, False, False, False),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_STEP_NUM_NODES": "8"}, True, True, False),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1"}, True, True, False),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,2"}, False, False, False),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, False, False, False),
        (STEP | {"SLURM_STEP_NUM_NODES": "1"}, False, False, True),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "1", "PMI_RANK": "1", "PMI_SIZE": "8", "PMI_FD": "9"},
            False,
            False,
            True,
        ),
        # a step in which another launcher's daemons run says nothing about its ranks
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1"} | SAMPLES["flux run"], False, False, False),
        ({"SLURM_STEP_NUM_NODES": "1", "PALS_RANKID": "0"}, False, False, False),
        (STEP | {"SLURM_STEP_NUM_NODES": "2"} | of_open_mpi(rank=0, size=1), True, True, False),
        # a launcher without a class
        ({"PMIX_NAMESPACE": "prterun-h1-1@1", "PMIX_RANK": "0"}, True, True, False),
    ],
)
def test_ranks_on_this_host(environ: dict[str, str], alone: bool, first: bool, one: bool) -> None:
    """Whether this is the only one there, or the first one, and whether there are no others."""
    found = (
        launchers.alone_on_host(environ),
        launchers.first_on_host(environ),
        launchers.all_on_one_host(environ),
    )
    assert found == (alone, first, one)


MPICH, OPEN_MPI_5 = "MPICH Version: 5.0.2", "Open MPI v5.0.11"


@pytest.mark.parametrize(
    ("launcher", "library", "environ", "one_host", "said"),
    [
        (launchers.LOCAL, "", {}, True, ""),
        (launchers.OPEN_MPI, OPEN_MPI_5, {"OMPI_MCA_mpi_ft_enable": "1"}, True, ""),
        (launchers.OPEN_MPI, OPEN_MPI_5, {"OMPI_MCA_mpi_ft_enable": "1"}, False, "but not a lost node"),
        (launchers.OPEN_MPI, OPEN_MPI_5, {}, True, "`mpirun --with-ft ulfm`"),
        (launchers.OPEN_MPI, "Open MPI v4.1.4, package", {}, True, "Open MPI v4.1.4 ends the job"),
        (launchers.HYDRA, MPICH, {}, True, "(Hydra) ends the job"),
        (launchers.PALS, "CRAY MPICH", {}, True, "`mpiexec --no-abort-on-failure`"),
        (launchers.BY_COMMAND["srun"], MPICH, {"SLURM_MPI_TYPE": "pmi2"}, False, ""),
        (launchers.BY_COMMAND["srun"], OPEN_MPI_5, {}, False, ""),
        (launchers.BY_COMMAND["srun"], MPICH, {"SLURM_MPI_TYPE": "pmix"}, False, ""),
    ],
)
def test_launchers_that_end_the_job_with_a_rank(
    launcher: Launcher, library: str, environ: dict[str, str], one_host: bool, said: str
) -> None:
    found = launcher.ends_with_a_rank(environ, library, one_host=one_host)
    assert said in found
    assert bool(said) is bool(found)
