"""MPI over the loopback interface alone, where all ranks are on one host.

MPICH and its relatives make each rank listen on an interface of the network too, by UCX or libfabric, though such ranks talk
through shared memory. Whoever reaches such a port can send the job messages as a rank (docs/security.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["on_loopback"]

#: What is set for UCX and libfabric, and the variables with which somebody has chosen already.
SETTINGS = {
    "UCX_NET_DEVICES": re.compile(r"UCX_(NET_DEVICES|TLS)"),
    "FI_TCP_IFACE": re.compile(r"FI_(PROVIDER|TCP_IFACE)"),
    "FI_SOCKETS_IFACE": re.compile(r"FI_(PROVIDER|SOCKETS_IFACE)"),
}


@contextmanager
def on_loopback(environ: Mapping[str, str]) -> Iterator[None]:
    """Initialise MPI in here. Afterwards the variables are not set: the UCX of Dask is to use the network."""
    settings = [name for name, chosen in SETTINGS.items() if not any(map(chosen.fullmatch, environ))]
    os.environ.update(dict.fromkeys(settings, "lo"))
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
