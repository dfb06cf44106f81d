"""The CUDA keep-alive process: it has the CUDA driver initialised while the processes of the workers come up.

The first process on a host to call ``cuInit`` waits for the driver to bring up its GPUs one after the other, even in persistence
mode (on 4xH200 a second); while one has it, the others wait for a tenth of that. Neither the rank nor its agent can be that one:
of CUDA, nothing works in what a process forks after ``cuInit``, and all workers are forked. So a process of its own does it from
the first moment on, makes no context, and ends when the workers are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from dask_gpu_mpi.mpi.launchers import first_on_host, scrub
from dask_gpu_mpi.options.model import Options

__all__ = ["CudaKeepalive", "may_be_kept_up", "may_use_cuda", "start_cuda_keepalive"]

#: Seconds after which it ends in any case: nothing but the start wants it.
LONGEST = 120.0
#: Where MPS listens by default.
MPS = "/tmp/nvidia-mps"

# Ends with its parent, by PR_SET_PDEATHSIG and by the end of its standard input, for which a thread waits while `cuInit` runs.
# What is wrong with CUDA the workers will say.
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
    """Have the GPUs of this host brought up, where that is this rank's to do.

    Parameters
    ----------
    options : Options
        What the user asked for.
    environ : mapping
        The process's environment.

    Returns
    -------
    CudaKeepalive or None
        To be released once the workers are there.
    """
    if may_use_cuda(options, environ) and first_on_host(environ) and may_be_kept_up(environ):
        with contextlib.suppress(OSError):  # no process can be had: whoever needs one will say so
            return CudaKeepalive(environ)
    return None


def may_use_cuda(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the workers may be GPU workers, as far as is known now: a guess that costs nothing but time where it is wrong."""
    if options.worker_kind == "cpu" or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return False
    if options.worker_kind == "gpu":
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def may_be_kept_up(environ: Mapping[str, str]) -> bool:
    """Whether there is nothing to be said against it: with MPS ``cuInit`` starts a server, which others take for a stranger's."""
    return "CUDA_MPS_PIPE_DIRECTORY" not in environ and not os.path.exists(MPS)


class CudaKeepalive:
    """The process that has called ``cuInit``.

    An interpreter without anything else, which is up long before an agent: the GPUs are what the start of many waits for.

    Parameters
    ----------
    environ : mapping
        The process's environment: which GPUs it sees, where libraries are. The launcher's identity is taken out of it.

    Raises
    ------
    OSError
        No process can be had.
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
        """Let it end; again: nothing."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        # In the driver it may hang, and nobody is to wait for that.
        with contextlib.suppress(
            RuntimeError
        ):  # no thread can be had: then it is collected when this process ends
            threading.Thread(target=process.wait, name="CUDA driver", daemon=True).start()
