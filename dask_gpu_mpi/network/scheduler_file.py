"""Scheduler files, and clusters that are there already.

A scheduler file is distributed's JSON (``address``, ``id``, ``services``, ``workers``), so that its own tools find the scheduler,
with a key of ours that carries the credentials. It is readable for its owner only, appears whole or not at all, and is removed
at the end by whoever wrote it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import Protocol

__all__ = ["Target", "read_scheduler_file", "read_target", "remove_scheduler_file", "write_scheduler_file"]

#: Our key in the scheduler file.
CREDENTIALS_KEY = "dask-gpu-mpi"


@dataclass(frozen=True)
class Target:
    """A cluster to join or to connect to."""

    #: The scheduler's, with its protocol.
    address: str
    #: Dask configuration with the credentials; empty without TLS.
    config: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def protocol(self) -> str:
        """That of the address: a `Protocol`, or another that distributed has."""
        return Protocol.of(self.address) or self.address.partition("://")[0]

    def unique_name(self, name: str | None) -> str:
        """A prefix for the names of workers that join, which no other job can have: the names there are not ours to know."""
        token = secrets.token_hex(4)
        return f"{name}-{token}" if name else f"join-{token}"


def write_scheduler_file(
    path: str, address: str, port: int | None, identity: str, config: dict[str, Any]
) -> None:
    """Write the file, mode 0600, by rename.

    Raises
    ------
    InputError
        It can't be written there.
    """
    content = {
        "type": "Scheduler",
        "id": identity,
        "address": address,
        "services": {} if port is None else {"dashboard": port},
        "workers": {},
        CREDENTIALS_KEY: {"config": config, "host": socket.gethostname()},
    }
    target = Path(path).absolute()
    try:
        # mkstemp makes the file with mode 0600
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(
            f"the scheduler file {path!r} can't be written ({error.strerror}). Fix: give another path with scheduler_file "
            "(--scheduler-file)"
        ) from None


def remove_scheduler_file(path: str, identity: str) -> None:
    """Remove the file, if it is still the one that this job wrote."""
    try:
        if json.loads(Path(path).read_text()).get("id") == identity:
            os.unlink(path)
    except (OSError, ValueError):
        pass


def read_scheduler_file(path: str | os.PathLike[str]) -> Target:
    """Read a scheduler file, ours or distributed's.

    Raises
    ------
    InputError
        It is not there, or is none.
    """
    try:
        content = json.loads(Path(path).read_text())
        address = content["address"]
    except FileNotFoundError:
        raise InputError(
            f"no scheduler file {os.fspath(path)!r}. Fix: start the cluster with --scheduler-file first, and wait for the file"
        ) from None
    except OSError as error:
        raise InputError(f"the scheduler file {os.fspath(path)!r} can't be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f'{os.fspath(path)!r} is no scheduler file (expected JSON with an "address")'
        ) from None
    ours = content.get(CREDENTIALS_KEY, {})
    host = ours.get("host", socket.gethostname())
    if "://127." in address and host != socket.gethostname():
        raise InputError(
            f"the cluster of {os.fspath(path)!r} listens on {address} of host {host}, which can't be reached from "
            f"{socket.gethostname()}. Fix: start it with an interface that others reach (--interface), or connect from {host}"
        )
    return Target(address, ours.get("config", {}))


def read_target(options: Options) -> Target:
    """The cluster that ``scheduler=False`` means: by its address, or by its file."""
    if options.scheduler_file:
        target = read_scheduler_file(options.scheduler_file)
        return (
            target if options.scheduler_address is None else Target(options.scheduler_address, target.config)
        )
    assert options.scheduler_address is not None  # `options.resolve` refuses neither
    address = options.scheduler_address
    address = address if "://" in address else f"tcp://{address}"
    if address.startswith("tls://"):
        import dask.config

        if not dask.config.get("distributed.comm.tls.ca-file", None):
            raise InputError(
                f"{address} requires certificates, and none are configured. Fix: use the cluster's scheduler file instead "
                "(--scheduler-file), which carries them"
            )
    return Target(address)
