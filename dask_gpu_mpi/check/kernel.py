"""A kernel on one GPU, with its result checked: `run_kernels` in the rank, `main` in a child to which only that GPU is visible.

It runs in a child since CUDA is initialised once per process, with the devices visible then, and since a GPU that hangs must not
block the rank.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.sites.launchers import scrub

_SIZE = 1 << 20
_MOST_LETTERS = 200
#: The line that the child prints after its imports.
_IMPORTED = b"imported"


@dataclass(frozen=True)
class KernelResult:
    """The result of the kernel on one GPU."""

    uuid: str
    #: Empty: correct. ``"import"``: numba can't be imported; ``"cuda"``: CUDA raised; ``"wrong"``: the result was wrong;
    #: ``"slow"``: numba was still being imported at the deadline; ``"late"``: it was imported, but no result came in time;
    #: ``"died"``: the child exited without a result.
    kind: str = ""
    #: The error; empty: none.
    text: str = ""
    #: From the start of the child until its result.
    seconds: float = 0.0


def run_kernels(uuids: Sequence[str], environ: Mapping[str, str], seconds: float) -> tuple[KernelResult, ...]:
    """Run the kernel on each of these GPUs or MIG instances, at the same time; kill the children after `seconds`.

    The children get the rank's environment without the launcher's variables.
    """
    if not uuids:
        return ()
    with ThreadPoolExecutor(len(uuids)) as pool:
        return tuple(pool.map(lambda uuid: _run(uuid, environ, seconds), uuids))


def _run(uuid: str, environ: Mapping[str, str], seconds: float) -> KernelResult:
    started = time.monotonic()
    # The child dies with this thread, which waits for it, and so with the rank.
    child = subprocess.Popen(
        # -P: import no module from the working directory, since it may be another user's
        [sys.executable, "-P", "-m", __name__, str(os.getpid())],
        env={**scrub(environ), VISIBLE_DEVICES: uuid},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        child.kill()
        # A process that hangs in the driver does not end then.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        taken = time.monotonic() - started
        output: bytes = late.output or b""  # not yet a text
        if _IMPORTED not in output.splitlines():
            return KernelResult(uuid, "slow", f"the import of numba took longer than {seconds:.0f} s", taken)
        return KernelResult(uuid, "late", f"no result within {seconds:.0f} s", taken)
    taken = time.monotonic() - started
    with contextlib.suppress(ValueError, LookupError, TypeError):
        result = json.loads(out.splitlines()[-1])
        return KernelResult(uuid, str(result["kind"]), str(result["text"]), taken)
    last = (err.strip().splitlines() or ["no error output"])[-1]
    return KernelResult(uuid, "died", f"exit code {child.returncode}: {last[:_MOST_LETTERS]}", taken)


def main() -> None:
    """The child: prints `_IMPORTED` after its imports, then the result as one line of JSON."""
    die_with_parent(int(sys.argv[1]))
    try:
        kind, text = _try()
    except Exception as error:  # an error of numba, the driver or the compiler is the result
        kind, text = "cuda", f"{type(error).__name__}: {error}"
    print(json.dumps({"kind": kind, "text": " ".join(text.split())[:_MOST_LETTERS]}), flush=True)


def _try() -> tuple[str, str]:
    try:
        import numpy as np

        cuda: Any = importlib.import_module("numba.cuda")
    except ImportError as error:
        return "import", str(error)
    print(_IMPORTED.decode(), flush=True)

    def element(x, y):  # type: ignore[no-untyped-def]  # numba finds the types
        i = cuda.grid(1)
        if i < x.size:
            y[i] = 3 * x[i] + i

    kernel = cuda.jit(element)
    x = np.arange(_SIZE, dtype=np.int64)[::-1].copy()
    y = cuda.device_array_like(x)
    kernel[_SIZE // 256, 256](cuda.to_device(x), y)
    wrong = int(np.count_nonzero(y.copy_to_host() != 3 * x + np.arange(_SIZE)))
    return ("wrong", f"{wrong} of {_SIZE} elements are wrong") if wrong else ("", "")


if __name__ == "__main__":
    main()
