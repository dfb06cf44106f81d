"""MPI that others do not reach: over the loopback interface alone, where all ranks are on one host, and no memory of the group's.

MPICH and its relatives make each rank listen on an interface of the network too, by UCX or libfabric, though such ranks talk
through shared memory. Whoever reaches such a port can send the job messages as a rank (docs/security.md).

UCX makes its System V shared memory with mode 0660, whatever the umask: whoever has the job's group, on many systems a whole
institute, can write into what passes between its ranks. Without it UCX takes POSIX shared memory, which is its owner's alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["closed_to_others"]

NO_SYSTEM_V = "^sysv"
#: What is set for UCX, and for it and libfabric on one host, and the variables with which somebody has chosen already.
ANYWHERE = {"UCX_TLS": re.compile(r"UCX_TLS")}
ON_ONE_HOST = {
    "UCX_NET_DEVICES": re.compile(r"UCX_(NET_DEVICES|TLS)"),
    "FI_TCP_IFACE": re.compile(r"FI_(PROVIDER|TCP_IFACE)"),
    "FI_SOCKETS_IFACE": re.compile(r"FI_(PROVIDER|SOCKETS_IFACE)"),
}


@contextmanager
def closed_to_others(environ: Mapping[str, str], *, one_host: bool) -> Iterator[None]:
    """Initialise MPI in here. Afterwards the variables are not set: the UCX of Dask is to use the network.

    Parameters
    ----------
    environ : mapping
        What the user has chosen.
    one_host : bool
        Whether all ranks are on this host.
    """

    def unset(names: Mapping[str, re.Pattern[str]]) -> list[str]:
        return [name for name, chosen in names.items() if not any(map(chosen.fullmatch, environ))]

    settings = dict.fromkeys(unset(ANYWHERE), NO_SYSTEM_V)
    if one_host:
        settings |= dict.fromkeys(unset(ON_ONE_HOST), "lo")
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
