"""Whether UCX works on a node: `try_ucx` in a rank, `main` in a child of it, which sends itself something over UCX.

In a child: UCX and the MPI library of the rank do not go together, and a GPU that hangs must not block the rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dask_gpu_mpi.base.pdeathsig import die_with_parent
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES
from dask_gpu_mpi.mpi.launchers import scrub

__all__ = ["UcxResult", "try_ucx"]

#: Bytes that the child sends itself.
_SIZE = 1 << 20
_MOST_LETTERS = 200


@dataclass(frozen=True)
class UcxResult:
    """The result of trying UCX on one node."""

    #: Empty: what was sent has come; else why not.
    error: str = ""


def try_ucx(device: str, environ: Mapping[str, str], seconds: float) -> UcxResult:
    """Have a child send itself something over UCX, and kill it after `seconds`.

    Parameters
    ----------
    device : str
        UUID of the GPU whose memory it sends; empty: host memory.
    environ : mapping
        Of the rank; the child gets it without the launcher's variables.
    seconds : float
        Until the result.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid()), device],
        env={**scrub(environ), VISIBLE_DEVICES: device},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver
            child.communicate(timeout=1.0)
        return UcxResult(f"no result within {seconds:.0f} s")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return UcxResult(str(json.loads(out.splitlines()[-1])["error"]))
    last = (err.strip().splitlines() or ["no error output"])[-1]
    return UcxResult(f"exit code {child.returncode}: {last[:_MOST_LETTERS]}")


def main() -> None:
    """The child: prints the result as one line of JSON."""
    die_with_parent(int(sys.argv[1]))
    try:
        asyncio.run(_send(bool(sys.argv[2])))
        error = ""
    except Exception as raised:  # whatever UCX, RMM or the driver raises is the result
        error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"error": " ".join(error.split())[:_MOST_LETTERS]}), flush=True)
    os._exit(0)  # UCX at Python's end is not what is tried


async def _send(on_device: bool) -> None:
    from dask_gpu_mpi.network.ucx_endpoint import Ucx

    Ucx.loopback = True  # to itself
    if on_device:
        import dask

        dask.config.set({"distributed-ucxx.create-cuda-context": True})
    ucx = await Ucx.begin()
    tag = secrets.randbits(64)
    endpoint = await ucx.connect(ucx.address, send_tag=tag, receive_tag=tag)
    data = secrets.token_bytes(_SIZE)
    sent: Any = bytearray(data)
    received: Any = bytearray(_SIZE)
    if on_device:
        import rmm

        sent, received = rmm.DeviceBuffer.to_device(data), ucx.device_array(_SIZE)
        ucx.synchronize()
    await asyncio.gather(endpoint.send(sent), endpoint.receive(received))
    if (received.tobytes() if on_device else bytes(received)) != data:
        raise ValueError("what came is not what was sent")


if __name__ == "__main__":
    main()
