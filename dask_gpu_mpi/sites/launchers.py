"""Launchers: a class for each, with the variables of its ranks and the options with which `launch` starts them.

By these classes a process detects the launcher that has started it, and its rank (`detect`), and a child process is kept from
joining the job as a rank that already exists (`scrub`). MPI is the authority on rank and world size; if it differs from the
launcher, see `dask_gpu_mpi.mpi.library`. `launch` uses the second half of each class: `dask_gpu_mpi.sites.choice`, `.command`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.batch import SYSTEMS, Allocation, number, systems_of

# MPI libraries, by the text with their version.

#: MPI libraries with the same launchers.
Family = Literal["openmpi", "mpich", "intel", "cray", "other"]
#: By the first line of the text. Cray's contains MPICH as well.
_FAMILIES: tuple[tuple[str, Family], ...] = (
    ("cray", "cray"),
    (r"open\s?mpi|spectrum mpi", "openmpi"),
    ("intel", "intel"),
    ("mpich|mvapich", "mpich"),
)
#: Cray's MPI needs no GPU support, since Dask moves the data.
CRAY: Mapping[str, str | None] = {"MPICH_GPU_SUPPORT_ENABLED": "0"}


def family_of(version: str) -> Family:
    """The family whose launchers start a library.

    >>> [family_of(text) for text in ("Open MPI v5.0.11", "MPICH Version: 5.0.2", "MVAPICH2 Version : 2.3.7")]
    ['openmpi', 'mpich', 'mpich']
    >>> [family_of(text) for text in ("Intel(R) MPI Library 2021.18", "MPI VERSION    : CRAY MPICH version 8.1", "")]
    ['intel', 'cray', 'other']
    """
    first = version.replace("\0", "").partition("\n")[0]
    return next(
        (family for pattern, family in _FAMILIES if re.search(pattern, first, re.IGNORECASE)), "other"
    )


def library_name(version: str) -> str:
    r"""The first few words, on one line.

    >>> library_name("Open MPI v5.0.11, package: Open MPI user@host")
    'Open MPI v5.0.11'
    >>> library_name("MPICH Version:      5.0.2\nMPICH Release date: ...\0")
    'MPICH Version: 5.0.2'
    """
    return " ".join(version.replace("\0", "").partition("\n")[0].partition(",")[0].split())


# The launchers.


class Launcher:
    """The differences between launchers. A subclass overrides the attributes and methods that apply to it."""

    # -- its ranks

    #: Its name in messages.
    name = ""
    #: Of the rank in the world.
    rank_variable = ""
    #: Of the world size. The first one that is set counts; there may be none.
    size_variables: tuple[str, ...] = ()
    #: Of the rank on its host.
    local_rank_variable = ""
    #: Of the number of ranks on this host; empty: it has none.
    local_size_variable = ""
    #: The variable that only this launcher sets. Other launchers may use the same protocol without it.
    mark = ""
    #: Names of the variables by which a process detects its rank, with ``*`` at the end of a prefix. They are harmful in the
    #: environment of a child. The user's settings of the launcher or of an MPI library are not among them.
    scrubbed = ""
    #: Whether the variables certainly belong to this process. Under an mpirun, Slurm's belong to the mpirun's daemon.
    sure = True
    #: Its processes that start the ranks on a host, and that accept a rank's exit code 0 before ``MPI_Init``.
    daemons: tuple[str, ...] = ()
    #: What anyone can do who reaches one of its ports, in words after "can"; empty: it checks who connects, or has no port.
    exposes = ""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Whether it has started this process, or one of its parents, as a rank; its variables are set."""
        return True

    def is_alone(self, environ: Mapping[str, str]) -> bool:
        """Whether this rank is certainly the only one on its host."""
        return bool(self.local_size_variable) and environ.get(self.local_size_variable) == "1"

    def has_one_host(self, environ: Mapping[str, str], size: int | None) -> bool:
        """Whether all `size` ranks (None: unknown) are certainly on this host."""
        return (
            bool(self.local_size_variable)
            and size is not None
            and number(environ, self.local_size_variable) == size
        )

    # -- `launch`

    #: Its name for `launch`, the name of its command if it belongs to a batch system; empty: `launch` does not use it.
    kind = ""
    #: A regular expression of the output of ``mpirun --version``; empty: its command is not mpirun or mpiexec.
    version_pattern = ""
    #: The name of its command that is a better choice than its others, if it has one.
    best = ""
    #: MPI libraries whose ranks this mpirun can start.
    families: tuple[Family, ...] = ()
    #: Its plugins by which it and an MPI library find each other (``srun --mpi``), by the library's family. Default: the site's.
    fitting_plugins: Mapping[str, tuple[str, ...]] = {}
    #: Options for processes that do not end together, which follow `options`.
    patient: tuple[str, ...] = ()
    #: Options if the standard input is empty.
    without_input: tuple[str, ...] = ()
    #: Whether it copies this node's variables to all nodes.
    copies = True
    #: Whether its exit code may be 0 after the loss of a node, or whether it waits for a node that is silent.
    may_lose_nodes = False

    def available_plugins(self, path: str, ask: Callable[[Sequence[str]], str]) -> frozenset[str] | None:
        """The values of `fitting_plugins` that are available on this node; None: unknown."""
        return None

    def environment(self, *, root: bool) -> dict[str, str | None]:
        """The variables to set, or (None) to unset, before it starts; `root`: for the superuser."""
        return {}

    def batch_signals_ranks(self, environ: Mapping[str, str]) -> bool:
        """Whether the batch system itself signals its ranks, so that `launch` must not forward a SIGTERM."""
        return False

    def check(self, allocation: Allocation, path: str, mpi: str) -> None:
        """Raise a LauncherError if it can't start this job."""
        if allocation.parts:
            raise _can_not_start_parts(os.path.basename(path))

    def options(self, allocation: Allocation, environ: Mapping[str, str], mpi: str) -> list[str]:
        """Its options for the requested ranks, each of which gets all cores and GPUs of its node."""
        return []

    # -- a rank that dies

    #: Whether it ends the job if a rank is killed, but not if one ends with a code other than 0.
    reacts_to_signals_only = False

    def end_command(self, environ: Mapping[str, str]) -> list[str]:
        """In a rank: the command that ends all ranks, if this rank's end does not."""
        return []

    def surviving(self, library: str) -> tuple[str, ...]:
        """Further options with which the job survives a lost rank, if it has any."""
        return ()

    def ends_with_a_rank(self, environ: Mapping[str, str], library: str, *, one_host: bool) -> str:
        """In a rank: why the job still ends when a rank or a node is lost, and the fix; empty: it does not."""
        return f"{self.name} ends the job when a rank is lost. Fix: srun with MPICH, or Open MPI 5 (docs/exit-codes.md)"


def _can_not_start_parts(how: str) -> LauncherError:
    return LauncherError(
        f"launch: heterogeneous jobs of Slurm can't be started by {how}",
        expected="srun and an MPI other than Open MPI",
        fix="a homogeneous job",
    )


def _with_ranks(allocation: Allocation) -> str:
    return ",".join(f"{name}:{ranks}" for name, ranks in allocation.hosts.items())


#: Variables of PMI-1 and PMI-2: a process can't join the job without descriptor, port and rank. Other variables may have the same
#: prefix, such as a bank's ``PMI_RATE``.
PMI = (
    "PMI_RANK PMI_SIZE PMI_FD PMI_PORT PMI_ID PMI_SPAWNED PMI_HOSTNAME PMI_JOBID PMI_KVS PMI_KVSNAME PMI_APPNUM PMI_DOMAIN "
    "PMI_LOCAL_RANK PMI_LOCAL_SIZE PMI_UNIVERSE_SIZE PMI_PROCESS_MAPPING PMI_CONTROL_FD PMI_CONTROL_PORT PMI_SHARED_SECRET "
    "PMI_VERSION PMI_SUBVERSION PMI_TOTALVIEW PMI2_*"
)
#: Variables of PMIx: a client needs the name space, the rank and the address of a server.
PMIX = (
    "PMIX_NAMESPACE PMIX_RANK PMIX_ID PMIX_SERVER_* PMIX_SYSTEM_TMPDIR PMIX_HOSTNAME PMIX_VERSION PMIX_BFROP_BUFFER_TYPE "
    "PMIX_GDS_MODULE PMIX_PTL_MODULE PMIX_SECURITY_MODE PMIX_DSTORE_* PMIX_PARAM_FILE_PASSED PMIX_KEEPALIVE_PIPE PMIX_LAUNCHER_* "
    "PMIX_MCA_ess PMIX_MCA_ess_* PMIX_MCA_prte PMIX_MCA_prte_* PMIX_MCA_plm PMIX_MCA_plm_* PMIX_MCA_pmix PMIX_MCA_pmix_* "
    "PMIX_MCA_pmixclient PMIX_MCA_pmixclient_* PMIX_MCA_ptl PMIX_MCA_ptl_*"
)


class Local(Launcher):
    """`launch` itself, which starts ranks on its own node (`sites.local`). They all have all variables, cores and GPUs."""

    name = "dask-gpu-mpi launch"
    rank_variable = "DGM_RANK"
    size_variables = ("DGM_SIZE",)
    local_rank_variable = "DGM_RANK"
    local_size_variable = "DGM_SIZE"
    # the descriptor of the rank's socket, at the other end of which is `launch`
    mark = "DGM_MEETING_FD"
    scrubbed = "DGM_RANK DGM_SIZE DGM_MEETING_FD"

    kind = "local"

    def ends_with_a_rank(self, environ: Mapping[str, str], library: str, *, one_host: bool) -> str:
        return ""


class OpenMpi(Launcher):
    """Open MPI: it copies no variables to other nodes by itself, and its exit code may be 0 after the loss of a node."""

    name = "Open MPI's mpirun"
    rank_variable = "OMPI_COMM_WORLD_RANK"
    size_variables = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"
    local_size_variable = "OMPI_COMM_WORLD_LOCAL_SIZE"
    mark = "OMPI_COMM_WORLD_RANK"
    # Settings stay: those of the library and of the compiler wrappers, the permission to run as root (without it, MPI_Init of a
    # child fails in a container), the place of a relocated installation. But some settings (MCA) contain the rank's identity.
    scrubbed = (
        "OMPI_COMM_WORLD_* OMPI_WORLD_* OMPI_UNIVERSE_SIZE OMPI_APP_CTX_NUM_PROCS OMPI_NUM_APP_CTX OMPI_FIRST_RANKS "
        "OMPI_ARGV OMPI_COMMAND OMPI_FILE_LOCATION OMPI_PARENT_PORT OMPI_TOOL_NAME OMPI_LIBDIR_LOC OPAL_USER_PARAMS_GIVEN "
        "OMPI_MCA_ess OMPI_MCA_ess_* OMPI_MCA_orte OMPI_MCA_orte_* OMPI_MCA_prte OMPI_MCA_prte_* OMPI_MCA_pmix OMPI_MCA_pmix_* "
        "OMPI_MCA_schizo OMPI_MCA_schizo_* OMPI_MCA_plm OMPI_MCA_plm_* OMPI_MCA_num_procs OMPI_MCA_initial_wdir "
        "OMPI_MCA_cpu_type OMPI_MCA_PREFIXES OMPI_MCA_shmem_RUNTIME_* ORTE_SCHIZO_DETECTION PRTE_LAUNCHED PRTE_SHARED_FS "
        "PRTE_MCA_ess PRTE_MCA_ess_* PRTE_MCA_prte PRTE_MCA_prte_* PRTE_MCA_plm PRTE_MCA_plm_* PRTE_MCA_pmix PRTE_MCA_pmix_* "
        "PRTE_MCA_pmixclient PRTE_MCA_pmixclient_* PRTE_MCA_ptl PRTE_MCA_ptl_* " + PMIX
    )

    kind = "openmpi"
    version_pattern = r"Open MPI|OpenRTE|PRRTE|prterun"
    families: tuple[Family, ...] = ("openmpi", "other")
    daemons = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted")
    exposes = "run commands as you"
    without_input = ("--stdin", "none")  # Open MPI 5 never forwards the end of the file
    copies = False
    may_lose_nodes = True

    def environment(self, *, root: bool) -> dict[str, str | None]:
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}

    def surviving(self, library: str) -> tuple[str, ...]:
        # with --enable-recovery alone, the library aborts each rank that was connected to the lost one over TCP
        return ("--with-ft", "ulfm") if re.match(r"Open MPI v([5-9]|\d\d)", library) else ()

    def ends_with_a_rank(self, environ: Mapping[str, str], library: str, *, one_host: bool) -> str:
        if not self.surviving(library):
            return f"{library_name(library)} ends the job when a rank is lost. Fix: Open MPI 5, or srun with MPICH"
        if environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("1", "true"):
            return "mpirun ends the job when a rank is lost. Fix: `mpirun --with-ft ulfm`, or `dask-gpu-mpi launch`"
        if one_host:
            return ""
        return "mpirun of Open MPI survives a lost rank, but not a lost node. Fix: srun with MPICH, if nodes may be lost"

    def options(self, allocation: Allocation, environ: Mapping[str, str], mpi: str) -> list[str]:
        options = ["-np", f"{allocation.ranks}"]
        if allocation.hosts:  # without a number, a node would get a rank for each core
            options += ["--host", _with_ranks(allocation), "--map-by", "slot"]
        elif allocation.batch.tells_mpirun:
            options += ["--map-by", f"ppr:{allocation.ranks_per_node}:node"]
        else:
            # there may be more ranks than cores, since ranks mostly wait
            options += ["--map-by", "slot:OVERSUBSCRIBE"]
        options += ["--bind-to", "none"]
        if not allocation.batch.is_one_node:
            options += [word for name in forwarded(environ) for word in ("-x", name)]
        return options


class Hydra(Launcher):
    """Hydra: MPICH and its relatives."""

    name = "the mpiexec of MPICH or Intel MPI (Hydra)"
    rank_variable = "PMI_RANK"
    size_variables = ("PMI_SIZE",)
    local_rank_variable = "MPI_LOCALRANKID"
    local_size_variable = "MPI_LOCALNRANKS"
    # srun --mpi=pmi2, PALS and Flux use PMI as well, without this variable
    mark = "MPI_LOCALRANKID"
    scrubbed = (
        "HYDI_CONTROL_FD HYDRA_CONTROL_FD MPI_LOCALRANKID MPI_LOCALNRANKS I_MPI_MPIRUN I_MPI_HYDRA_UUID I_MPI_INFO_* "
        "I_MPI_RANK_* MV2_COMM_WORLD_* " + PMI
    )

    reacts_to_signals_only = True
    kind = "hydra"
    version_pattern = r"HYDRA|MVAPICH"
    families: tuple[Family, ...] = ("mpich", "intel", "cray", "other")
    daemons = ("hydra_pmi_proxy", "pmi_proxy")
    exposes = "end the job"
    may_lose_nodes = True

    def options(self, allocation: Allocation, environ: Mapping[str, str], mpi: str) -> list[str]:
        where: list[str] = []
        if allocation.hosts:
            where = self.host_options(allocation)
        elif allocation.batch.tells_mpirun:
            where = ["-ppn", f"{allocation.ranks_per_node}"]
        return ["-n", f"{allocation.ranks}", *where, "-bind-to", "none"]

    def host_options(self, allocation: Allocation) -> list[str]:
        """The options with the nodes."""
        return ["-hosts", _with_ranks(allocation)]


class Intel(Hydra):
    """Intel MPI's Hydra, whose ``-hosts`` accepts no numbers. Its ranks have the same variables."""

    kind = "intel"
    version_pattern = r"Intel\(R\) MPI"
    best = "mpiexec.hydra"  # mpirun is a shell script around it, and forwards no signal
    families: tuple[Family, ...] = ("mpich", "intel", "other")

    def host_options(self, allocation: Allocation) -> list[str]:
        return ["-hosts", ",".join(allocation.hosts), "-ppn", f"{allocation.ranks_per_node}"]


class Pals(Launcher):
    """PALS of HPE Cray."""

    name = "PALS (mpiexec)"
    rank_variable = "PALS_RANKID"
    size_variables = ("PMI_SIZE", "PALS_SIZE")
    local_rank_variable = "PALS_LOCAL_RANKID"
    mark = "PALS_RANKID"
    scrubbed = (
        "PALS_RANKID PALS_LOCAL_RANKID PALS_LOCAL_SIZE PALS_SIZE PALS_TASKID PALS_NODEID PALS_APID PALS_APINFO PALS_FD "
        "PALS_SPOOL_DIR PALS_STARTUP_BARRIER ALPS_APP_* " + PMI
    )

    kind = "pals"
    version_pattern = r"\Ampiexec version \d"
    families: tuple[Family, ...] = ("mpich", "cray", "other")

    def options(self, allocation: Allocation, environ: Mapping[str, str], mpi: str) -> list[str]:
        return ["-n", f"{allocation.ranks}", "--ppn", f"{allocation.ranks_per_node}", "--cpu-bind", "none"]

    def surviving(self, library: str) -> tuple[str, ...]:
        return ("--no-abort-on-failure",)

    def ends_with_a_rank(self, environ: Mapping[str, str], library: str, *, one_host: bool) -> str:
        return (
            "PALS was not tested with lost ranks; without --no-abort-on-failure it ends the job. Fix: `mpiexec "
            "--no-abort-on-failure`, or `dask-gpu-mpi launch`"
        )


class FluxRun(Launcher):
    """``flux run``."""

    name = "flux run"
    rank_variable = "FLUX_TASK_RANK"
    size_variables = ("FLUX_JOB_SIZE",)
    local_rank_variable = "FLUX_TASK_LOCAL_ID"
    mark = "FLUX_TASK_RANK"
    scrubbed = (
        "FLUX_TASK_RANK FLUX_TASK_LOCAL_ID FLUX_JOB_SIZE FLUX_JOB_NNODES FLUX_KVS_NAMESPACE FLUX_PMI_LIBRARY_PATH "
        + PMI
    )

    kind = "flux"
    # other libraries use Flux's own PMI
    fitting_plugins: Mapping[str, tuple[str, ...]] = {"openmpi": ("pmix",)}

    def options(self, allocation: Allocation, environ: Mapping[str, str], mpi: str) -> list[str]:
        ranks, nodes = allocation.ranks, allocation.nodes
        size = f"--ntasks={ranks}" if ranks % nodes else f"--tasks-per-node={allocation.ranks_per_node}"
        free = ("--exclusive", "-o", "cpu-affinity=off", "-o", "gpu-affinity=off")
        meet = ["-o", f"pmi={mpi}"] if mpi else []
        return ["run", f"--nodes={nodes}", size, *free, *meet]


def in_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is a script of Slurm's sbatch, and not a shell of salloc or srun."""
    return environ.get("ENVIRONMENT") == "BATCH"


#: Numbers from here on belong to steps without srun: the batch script, an interactive shell and the like (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class Srun(Launcher):
    """srun of Slurm. Its variables are in all processes of a step, including the daemons of an mpirun."""

    name = "srun"
    rank_variable = "SLURM_PROCID"
    size_variables = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank_variable = "SLURM_LOCALID"
    mark = "SLURM_STEP_ID"
    # With SLURM_STEP_ID and without PMI, Open MPI 4 treats a child as a rank of srun and aborts. The variables of the job, which
    # sbatch sets too, stay.
    scrubbed = (
        "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_STEPID SLURM_STEP_* SLURM_TASK_PID "
        "SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT SLURM_LAUNCH_NODE_IPADDR SLURM_MPI_TYPE SLURM_PMI_FD SLURM_PMI2_* "
        "SLURM_PMIX_MAPPING_SERV SLURM_PMIXP_* " + PMI + " " + PMIX
    )
    sure = False

    kind = "srun"
    #: ParaStation's Slurm (JSC) has plugins of its own.
    fitting_plugins: Mapping[str, tuple[str, ...]] = {
        "openmpi": ("pmix", "pspmix"),
        "mpich": ("pmi2", "pspmi"),
        "intel": ("pmi2", "pspmi"),
    }
    patient = ("--wait=0",)  # of several the last one counts

    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Whether srun has started this step: a batch script or an interactive shell has a special number."""
        return (number(environ, self.mark) or 0) < _FIRST_SPECIAL_STEP

    def is_alone(self, environ: Mapping[str, str]) -> bool:
        # "1(x8)": one on each of 8 hosts
        return bool(re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")))

    def has_one_host(self, environ: Mapping[str, str], size: int | None) -> bool:
        return environ.get("SLURM_STEP_NUM_NODES") == "1"

    def available_plugins(self, path: str, ask: Callable[[Sequence[str]], str]) -> frozenset[str] | None:
        listed = ask([path, "--mpi=list"])
        return frozenset(re.findall(r"\w+", listed.partition("are...")[2])) or None

    def batch_signals_ranks(self, environ: Mapping[str, str]) -> bool:
        """Slurm sends SIGTERM to the ranks; srun would kill them if it got one as well."""
        return in_batch_script(environ)

    def check(self, allocation: Allocation, path: str, mpi: str) -> None:
        if allocation.parts and mpi.startswith("pmix"):
            raise _can_not_start_parts(f"srun --mpi={mpi}")

    def options(self, allocation: Allocation, environ: Mapping[str, str], mpi: str) -> list[str]:
        options = [f"--mpi={mpi}"] if mpi else []
        options.append("--cpu-bind=none")
        if allocation.parts:
            options.append(f"--het-group=0-{allocation.parts - 1}")
        else:
            options += [
                f"--nodes={allocation.nodes}",
                f"--ntasks={allocation.ranks}",
                f"--ntasks-per-node={allocation.ranks_per_node}",
            ]
        if not in_batch_script(environ):
            # the shell of `salloc` or `srun --pty` may be a step, which has the node
            options.append("--overlap")
        # end the step after the death of a rank, but not while all ranks end, which would change the exit code
        return [*options, "--kill-on-bad-exit=0", "--wait=30"]

    def end_command(self, environ: Mapping[str, str]) -> list[str]:
        step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        return ["scancel", "--signal=KILL", step]

    def surviving(self, library: str) -> tuple[str, ...]:
        return ("--no-kill", *self.patient)

    def ends_with_a_rank(self, environ: Mapping[str, str], library: str, *, one_host: bool) -> str:
        return ""


class Foreign(Launcher):
    """A command that starts the ranks of the job by itself, such as TACC's ibrun. Its ranks have the MPI library's variables."""

    name = "the command of --launcher-command"
    # for containers alone: it is not in LAUNCHERS
    scrubbed = f"MPI_LOCALRANKID OMPI_COMM_WORLD_RANK {PMI} {PMIX}"
    kind = "command"


class Pmi(Launcher):
    """Any other launcher with PMI, which many use."""

    name = "a launcher with PMI"
    rank_variable = "PMI_RANK"
    size_variables = ("PMI_SIZE",)
    local_rank_variable = "PMI_LOCAL_RANK"
    mark = "PMI_RANK"
    scrubbed = PMI
    sure = False


LOCAL, OPEN_MPI, HYDRA, INTEL, PALS, FOREIGN = Local(), OpenMpi(), Hydra(), Intel(), Pals(), Foreign()
#: Innermost first: an mpirun runs inside the step of a batch job, never the other way round. Ranks of `launch` itself have no
#: variables of a launcher around it, but the script may start another launcher, and its ranks have those of the script's rank.
LAUNCHERS: tuple[Launcher, ...] = (OPEN_MPI, HYDRA, PALS, FluxRun(), Srun(), LOCAL, Pmi())
#: Each mpirun and mpiexec for `launch`, in the order in which the output of ``--version`` is compared. If several can start the
#: ranks of a library, the library's own launcher is the best one, then the last one of this list.
MPIRUNS: tuple[Launcher, ...] = (OPEN_MPI, INTEL, HYDRA, PALS)
#: The batch systems' own launchers, by their command.
BY_COMMAND: Mapping[str, Launcher] = {
    each.kind: each for each in LAUNCHERS if each.kind and not each.version_pattern and each is not LOCAL
}


# The launcher that has started this process.


@dataclass(frozen=True)
class Launched:
    """The launcher that started this process, and the values of its variables."""

    launcher: Launcher
    #: The rank of this process.
    rank: int
    #: The size of the world; None if the launcher does not set it.
    size: int | None
    #: The rank of this process on its host. It is not a GPU index, since this process may not see all GPUs.
    local_rank: int | None
    #: The variable with `size`.
    size_variable: str = ""


def all_launched(environ: Mapping[str, str]) -> list[Launched]:
    """Every launcher whose variables are in this environment, the innermost first."""
    found = []
    for launcher in LAUNCHERS:
        rank = number(environ, launcher.rank_variable) if launcher.mark in environ else None
        if rank is None or not launcher.has_started(environ):
            continue
        variable = next((name for name in launcher.size_variables if environ.get(name)), "")
        size = number(environ, variable) if variable else None
        found.append(Launched(launcher, rank, size, number(environ, launcher.local_rank_variable), variable))
    return found


def detect(environ: Mapping[str, str]) -> Launched | None:
    """The innermost launcher that started this process as one of its ranks; None: it is not a rank.

    LauncherError if a variable of the launcher is not a number.
    """
    return next(iter(all_launched(environ)), None)


def alone_on_host(environ: Mapping[str, str]) -> bool:
    """Whether this is the only rank on its host by the launcher's variables, or there is no launcher."""
    launched = detect(environ)
    if launched is None or launched.size == 1:
        return True
    return launched.launcher.is_alone(environ)


#: Prefixes of variables of launchers without a class here (``prterun``, ALPS).
_OF_UNKNOWN = ("PMIX_", "PMI_", "PMI2_", "ALPS_")


def all_on_one_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host by the variables of every launcher here, or there is no launcher.

    False if there may be a launcher without a class here.
    """
    launched = all_launched(environ)
    if not launched:
        return not any(name.startswith(_OF_UNKNOWN) for name in environ)
    # the last class fits others as well, since many launchers use PMI
    named = [each for each in launched if each.launcher is not LAUNCHERS[-1]] or launched
    return all(each.size == 1 or each.launcher.has_one_host(environ, each.size) for each in named)


def first_on_host(environ: Mapping[str, str]) -> bool:
    """Whether this is the first rank of its host; False if the launcher does not set it."""
    launched = detect(environ)
    return alone_on_host(environ) or (launched is not None and launched.local_rank == 0)


def reports_for_all(environ: Mapping[str, str]) -> bool:
    """Whether this rank reports for all ranks if they can't communicate: rank 0, or a process without a launcher."""
    launched = detect(environ)
    return launched is None or not launched.rank


# The variables of child processes, and of other nodes.

#: The names in `Launcher.scrubbed` of all launchers: whole names, and prefixes.
_PATTERNS = frozenset(" ".join(launcher.scrubbed for launcher in LAUNCHERS).split())
_SCRUBBED = frozenset(name for name in _PATTERNS if not name.endswith("*"))
_SCRUBBED_PREFIXES = tuple(name.removesuffix("*") for name in _PATTERNS if name.endswith("*"))


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank without the variables of its launcher: in a child with it, ``MPI_Init`` makes a world of one.

    The job's variables (``SLURM_JOB_ID``, ``PBS_NODEFILE``, ...) and the user's settings of MPI libraries stay.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }


#: Variables of a shell, of a login, and of one node only.
_ONE_NODE = (
    "_ CUDA_VISIBLE_DEVICES DISPLAY ENVIRONMENT HOME HOST HOSTNAME KRB5CCNAME LOGNAME MAIL OLDPWD PWD SHELL SHLVL TERM "
    "TMPDIR TMP TEMP USER XAUTHORITY"
)
NOT_FORWARDED = frozenset(_ONE_NODE.split())
#: Prefixes of variables of launchers and sessions.
_OTHERS = "BASH_ DBUS_ HYDRA_ HYDI_ OMPI_ PALS_ PMI_ PMIX_ PRTE_ SSH_ XDG_"
NOT_FORWARDED_PREFIXES = (*_OTHERS.split(), *(prefix for prefixes in SYSTEMS.values() for prefix in prefixes))


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """The names of the variables that Open MPI, which forwards nothing by itself, must set on other nodes.

    These are all that other launchers would copy, except those of one node only.
    """
    kept = scrub(environ)
    needed = frozenset[str]().union(*(system.forwarded for system in systems_of(environ)))
    return sorted(
        name
        for name in kept
        if name in needed
        or (name == "CUDA_VISIBLE_DEVICES" and not kept[name])  # empty: no GPU on any node
        or (
            re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
            and name not in NOT_FORWARDED
            and not name.startswith(NOT_FORWARDED_PREFIXES)
        )
    )
