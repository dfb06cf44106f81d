"""The CUDA keep-alive process: it keeps the CUDA driver initialised while the processes of the workers start.

The first process on a node that calls ``cuInit`` waits until the driver has initialised all GPUs, even in persistence mode: a
second on 4xH200. While one process has done so, the others wait a tenth of that. Neither the rank nor its agent can be that
process: CUDA does not work in processes that are forked after ``cuInit``, and all workers are forked. So a separate process
calls it at the start, makes no context, and ends when the workers are up.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES, driver_is_installed, sees_none
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.sites.launchers import first_on_host, scrub

#: Seconds after which it ends in any case: only the start needs it.
LONGEST = 120.0
#: The directory in which MPS listens by default.
MPS = "/tmp/nvidia-mps"

# Ends with its parent, at the end of its standard input, for which a thread waits while `cuInit` runs. It reports no errors of
# CUDA: the workers do.
_CODE = """
import _thread, ctypes, os, select, sys

def end():
    select.select([0], [], [], float(sys.argv[1]))
    os._exit(0)

_thread.start_new_thread(end, ())
try:
    ctypes.CDLL("libcuda.so.1").cuInit(0)
except (OSError, AttributeError):
    pass
end()
"""


def start_cuda_keepalive(options: Options, environ: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Start the process, if this rank is the first of its node and may have GPU workers; else return None.

    It is an interpreter that imports nothing else, and so is there long before the agent. It has the variables of `environ`, less
    those of the launcher.
    """
    # With MPS, ``cuInit`` starts a server, which would count as a process of another user.
    with_mps = "CUDA_MPS_PIPE_DIRECTORY" in environ or os.path.exists(MPS)
    if with_mps or not may_use_cuda(options, environ) or not first_on_host(environ):
        return None
    with contextlib.suppress(OSError):  # no process can be started: the agent's start reports that
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, str(LONGEST)],
            env=scrub(environ),
            stdin=subprocess.PIPE,
            # While it is in the driver it can't be killed, and a launcher waits for the end of these two streams.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    return None


def may_use_cuda(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the workers may be GPU workers, as far as is known now: a wrong guess costs only time."""
    if options.worker_kind == "cpu" or sees_none(environ.get(VISIBLE_DEVICES)):
        return False
    return options.worker_kind == "gpu" or driver_is_installed()


def release(keepalive: subprocess.Popen[bytes]) -> None:
    """Let the process end."""
    assert keepalive.stdin is not None
    keepalive.stdin.close()
    # It may hang in the driver, so a thread waits for it. If no thread can be started, the kernel reaps it later.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=keepalive.wait, name="CUDA driver", daemon=True).start()
