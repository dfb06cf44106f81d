"""The CUDA keep-alive process: it keeps the CUDA driver initialised while the processes of the workers start.

The first process on a host to call ``cuInit`` waits for the driver to bring up its GPUs one after the other, even in persistence
mode (on 4xH200 a second); while one has it, the others wait for a tenth of that. Neither the rank nor its agent can do that:
CUDA does not work in what a process forks after ``cuInit``, and all workers are forked. So a process of its own does it from
the start, makes no context, and ends when the workers are up.
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

__all__ = ["CudaKeepalive", "may_be_kept_up", "may_use_cuda", "start_cuda_keepalive"]

#: Seconds after which it ends in any case: only the start needs it.
LONGEST = 120.0
#: Where MPS listens by default.
MPS = "/tmp/nvidia-mps"

# Ends with its parent, by PR_SET_PDEATHSIG and by the end of its standard input, for which a thread waits while `cuInit` runs.
# The workers report what is wrong with CUDA.
_CODE = """
import _thread, ctypes, os, select, sys
parent, longest = int(sys.argv[1]), float(sys.argv[2])
if parent:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit()

def end():
    select.select([0], [], [], longest)
    os._exit(0)

_thread.start_new_thread(end, ())
try:
    ctypes.CDLL("libcuda.so.1").cuInit(0)
except (OSError, AttributeError):
    pass
end()
"""


def start_cuda_keepalive(options: Options, environ: Mapping[str, str]) -> CudaKeepalive | None:
    """The process that keeps the GPUs of this host initialised, to be released once they are up; else None."""
    if may_use_cuda(options, environ) and first_on_host(environ) and may_be_kept_up(environ):
        with contextlib.suppress(OSError):  # no process can be started: what depends on one reports it
            return CudaKeepalive(environ)
    return None


def may_use_cuda(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the workers may be GPU workers, as far as is known now: a wrong guess costs only time."""
    if options.worker_kind == "cpu" or sees_none(environ.get(VISIBLE_DEVICES)):
        return False
    return options.worker_kind == "gpu" or driver_is_installed()


def may_be_kept_up(environ: Mapping[str, str]) -> bool:
    """Not with MPS, where ``cuInit`` starts a server, which would count as a process of somebody else."""
    return "CUDA_MPS_PIPE_DIRECTORY" not in environ and not os.path.exists(MPS)


class CudaKeepalive:
    """The process that has called ``cuInit``.

    An interpreter that imports nothing else, which starts long before an agent: with many GPUs, the start waits for them.

    Parameters
    ----------
    environ : mapping
        The process's environment: which GPUs it sees, where libraries are. The launcher's variables are removed.

    Raises
    ------
    OSError
        No process can be started.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        # PR_SET_PDEATHSIG follows the thread that forks: only the main thread lives as long as the process.
        follow = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, str(os.getpid() if follow else 0), str(LONGEST)],
            env=scrub(environ),
            stdin=subprocess.PIPE,
            # Inside the driver it can't be killed at once, and a launcher waits for the end of these two.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Let it end; a second call does nothing."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        # In the driver it may hang, and nobody is to wait for that.
        # no thread can be started: then it is reaped when this process ends
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=process.wait, name="CUDA driver", daemon=True).start()
