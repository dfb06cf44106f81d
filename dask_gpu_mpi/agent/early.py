"""What a rank begins with, as soon as it knows its options: its agent, which imports meanwhile what the rank never does, and, one
on each host, the process that has the CUDA driver bring up the GPUs.

The rank itself imports what it needs to join only after that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping

from dask_gpu_mpi.mpi import launchers
from dask_gpu_mpi.options.table import Options

from .cuda_keepalive import Driver, may_be_kept_up
from .handle import AgentProcess

__all__ = ["start_agent", "start_driver"]


def start_agent(options: Options, environ: Mapping[str, str], *, again: bool = False) -> AgentProcess:
    """Start the agent of this rank; it still has to be configured.

    Parameters
    ----------
    options : Options
        What the user asked for.
    environ : mapping
        The process's environment.
    again : bool
        In place of one that was lost: what the rank sees is known.
    """
    begins = _begins(options, environ)
    return AgentProcess(environ, begins, look="cuda" in begins and not again)


def start_driver(options: Options, environ: Mapping[str, str]) -> Driver | None:
    """Have the GPUs of this host brought up, where that is this rank's to do.

    Parameters
    ----------
    options : Options
        What the user asked for.
    environ : mapping
        The process's environment.

    Returns
    -------
    Driver or None
        To be released once the workers are there.
    """
    if _may_use_cuda(options, environ) and launchers.first_on_host(environ) and may_be_kept_up(environ):
        with contextlib.suppress(OSError):  # no process can be had: whoever needs one will say so
            return Driver(environ)
    return None


def _begins(options: Options, environ: Mapping[str, str]) -> set[str]:
    """What the agent begins with: see `agentstart.main`."""
    begins = {"ucx"} if options.protocol.moves_device_memory else set()
    if _may_use_cuda(options, environ):
        begins.add("cuda")
    return begins


def _may_use_cuda(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the agent should import dask_cuda at once: a guess that costs nothing but time where it is wrong."""
    if options.worker_kind == "cpu" or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return False
    if options.worker_kind == "gpu":
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
