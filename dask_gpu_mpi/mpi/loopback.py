"""MPI that others do not reach: without a port if all ranks are on one host, and no memory of the group's.

Each rank of MPICH and its relatives listens on a TCP port, by UCX or libfabric, even if all ranks are on one host and talk by
shared memory. UCX authenticates nobody: a process that reaches such a port reads and writes the rank's memory (docs/security.md).
So on one host UCX starts without TCP. Between hosts TCP may be the only way, which no rank can find out alone: there it stays.

UCX makes its System V shared memory with mode 0660, whatever the umask: whoever has the job's group, on many systems a whole
institute, can write into what passes between its ranks. Without it UCX takes POSIX shared memory, which is its owner's alone.

Before release 1.20 UCX also installs handlers for signals, which print 40 lines into the job's output if the process crashes, be
it by a stranger's packet or in the user's code. Without them such a process ends as any Python does: by the signal, and with
``faulthandler``'s traceback if that is on.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from dask_gpu_mpi.network.ucx import AT_LOAD, AT_LOAD_BETWEEN_NODES, CLOSED, opened_by, variables

__all__ = ["closed_to_others", "left_open", "missing"]

NO_SYSTEM_V = "^sysv"
#: What is set for UCX, and for it and libfabric on one host, and the variables with which somebody has chosen already.
ANYWHERE = {"UCX_TLS": (NO_SYSTEM_V, re.compile(r"UCX_TLS"))}
ON_ONE_HOST = {
    "UCX_TLS": (CLOSED, re.compile(r"UCX_TLS")),
    "UCX_NET_DEVICES": ("lo", re.compile(r"UCX_NET_DEVICES")),  # even if somebody has chosen TCP
    "FI_TCP_IFACE": ("lo", re.compile(r"FI_(PROVIDER|TCP_IFACE)")),
    "FI_SOCKETS_IFACE": ("lo", re.compile(r"FI_(PROVIDER|SOCKETS_IFACE)")),
}
#: UCX's shared memory in ``UCX_TLS``. Without it ranks of one host talk by TCP, which finds no way by loopback.
MEMORY = {"all", "sm", "shm", "mm", "posix", "sysv"}
#: MPICH and its relatives say in their version what they send with: "ch4:ucx ofi".
WITH_UCX = re.compile(r"ch[34]:[\w, ]*\bucx\b")


@contextmanager
def closed_to_others(environ: Mapping[str, str], *, one_host: bool) -> Iterator[None]:
    """Load and initialise MPI in here. Afterwards the variables are not set: the UCX of Dask is to use the network.

    Parameters
    ----------
    environ : mapping
        What the user has chosen.
    one_host : bool
        Whether all ranks are on this host.
    """
    wanted = dict(ANYWHERE)
    if not _ucx_is_loaded():  # later it warns of a variable that nobody uses
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


def left_open(environ: Mapping[str, str], version: str) -> str:
    """The warning of a setting by which ranks that are all on this host listen on a TCP port of UCX; empty: none does.

    Parameters
    ----------
    environ : mapping
        What the user, or a module of the site, has chosen.
    version : str
        ``MPI.Get_library_version()``.
    """
    if "UCX_TLS" not in environ or not opened_by(environ) or not WITH_UCX.search(version):
        return ""
    devices = environ.get("UCX_NET_DEVICES", "lo" if _by_memory(environ) else "")
    reached = "node" if devices == "lo" else "network"
    return (
        f"MPI: UCX_TLS={environ['UCX_TLS']} has each rank listen on a TCP port that asks for no key: anyone on this {reached} "
        f"who reaches it can read and write the memory of the ranks. Fix: unset UCX_TLS in this job, or UCX_TLS={CLOSED}"
    )


def missing(environ: Mapping[str, str], version: str) -> str:
    """The setting without which MPI, started outside `closed_to_others`, listens on a TCP port of UCX; empty: none is missing."""
    return f"UCX_TLS={CLOSED}" if "UCX_TLS" not in environ and WITH_UCX.search(version) else ""


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
