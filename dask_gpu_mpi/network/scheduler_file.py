"""Scheduler files, and the clusters to which they lead.

A scheduler file is distributed's JSON (``address``, ``id``, ``services``, ``workers``), so that distributed's tools find the
scheduler, with an additional key for the credentials. Only its owner can read it. It appears whole or not at all, and the job
that wrote it removes it at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from dask_gpu_mpi.base.files import UntrustedFileError, located, open_regular, read_trusted, replace
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import UCX, Options, Protocol, WorkerUcx

#: Our key in the scheduler file.
CREDENTIALS_KEY = "dask-gpu-mpi"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+:[0-9]{1,5}")
#: Dask reads a link as a template: no braces.
_LINK = re.compile(r"https?://[^\s{}]+")
#: The configuration that is used of a file. Dask's ``preload`` for example would run code.
_CONNECTION_KEYS = "distributed.comm."
#: Seconds between two looks for a file that is not there yet.
POLL = 0.1


@dataclass(frozen=True)
class Target:
    """A cluster to join or to connect to."""

    #: Of the scheduler, with its protocol.
    address: str
    #: Dask configuration with the credentials; empty without TLS.
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    #: Link to its dashboard, with the token; empty: it has none; None: unknown.
    dashboard: str | None = field(default=None, repr=False)

    @property
    def protocol(self) -> Protocol | None:
        """The protocol of the address; None: another one of distributed."""
        return Protocol.of(self.address)


def write_scheduler_file(
    path: str,
    address: str,
    port: int | None,
    identity: str,
    config: dict[str, Any],
    dashboard: str | None = None,
) -> None:
    """Write the file, mode 0600, by rename; an InputError if that fails, or would replace another kind of file."""
    if _has_other_content(path):
        raise InputError(
            f"the file {path!r} exists, and is not a scheduler file",
            expected="a name for a new file",
            fix="give another one with scheduler_file (--scheduler-file)",
        )
    content = {
        "type": "Scheduler",
        "id": identity,
        "address": address,
        "services": {} if port is None else {"dashboard": port},
        "workers": {},
        CREDENTIALS_KEY: {"config": config, "host": socket.gethostname(), "dashboard": dashboard or ""},
    }
    try:
        replace(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise InputError(
            f"the scheduler file {path!r} can't be written ({error.strerror})",
            fix="give another path with scheduler_file (--scheduler-file)",
        ) from None


def _has_other_content(path: str) -> bool:
    """Whether a file is there, perhaps the user's script, that no job has written as its scheduler file."""
    with (
        contextlib.suppress(OSError),
        located(path) as (folder, name),
        open(open_regular(folder, name), "rb") as file,
    ):
        try:
            content = json.loads(file.read() or b'{"address": ""}')
        except (ValueError, RecursionError):
            return True
        return not (isinstance(content, dict) and "address" in content)
    return False


def remove_scheduler_file(path: str, identity: str) -> None:
    """Remove the file, if it is still the one that this job wrote."""
    with (
        contextlib.suppress(OSError),
        located(path) as (folder, name),
        open(open_regular(folder, name), "rb") as file,
    ):
        if f'"id": {json.dumps(identity)}'.encode() in file.read():  # as `write_scheduler_file` writes it
            os.unlink(name, dir_fd=folder)


def wait_for_scheduler_file(path: str | os.PathLike[str], timeout: Any = None) -> None:
    """Wait until the file is there: its job may still be in the queue.

    `timeout`: seconds, or a text as Dask reads it; None: that of Dask's connections.
    """
    import dask
    from dask.utils import parse_timedelta

    if timeout is None:
        timeout = dask.config.get("distributed.comm.timeouts.connect", "30s")
    seconds = float(parse_timedelta(timeout, "s"))
    limit = time.monotonic() + seconds
    if not os.fspath(path):
        return  # it will not come
    if not os.path.lexists(path):
        say(f"waiting up to {seconds:g} s for the scheduler file {os.fspath(path)!r}")
    while not os.path.lexists(path) and time.monotonic() < limit:
        time.sleep(POLL)


def read_scheduler_file(path: str | os.PathLike[str]) -> Target:
    """Read a scheduler file, ours or distributed's; raises an InputError.

    A file that another user may have written is an error, since a client runs the code of the scheduler to which it connects.
    """
    name = repr(os.fspath(path))
    try:
        content = json.loads(read_trusted(path))
        address = content["address"]
        if not _ADDRESS.fullmatch(address):
            raise ValueError(address)
        ours = content.get(CREDENTIALS_KEY, {})
        host = str(ours.get("host", socket.gethostname()))
        config = ours.get("config", {}).items()
        config = {key: value for key, value in config if key.startswith(_CONNECTION_KEYS)}
        dashboard = ours.get("dashboard")
        if dashboard and not _LINK.fullmatch(dashboard):
            raise ValueError(dashboard)
    except FileNotFoundError:
        raise InputError(
            f"no scheduler file {name}",
            fix="start the cluster with --scheduler-file first, and wait for the file",
        ) from None
    except UntrustedFileError as error:
        raise InputError(f"the scheduler file {name} is not used: {error}") from None
    except OSError as error:
        raise InputError(
            f"the scheduler file {name} can't be read ({error.strerror})", fix="a file that you may read"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            f"{name} is not a scheduler file",
            expected='JSON with an "address"',
            fix="the file that the cluster has written (--scheduler-file)",
        ) from None
    if "://127." in address and host != socket.gethostname():
        raise InputError(
            f"the cluster of {name} listens on {address} of host {host}, which can't be reached from "
            f"{socket.gethostname()}",
            fix=f"start it with an interface that others reach (--interface), or connect from {host}",
        )
    return Target(address, config, dashboard)


def require_credentials(target: Target, path: str | os.PathLike[str]) -> None:
    """Raise an InputError if a client of the cluster of this scheduler file would have no certificate."""
    if _lacks_certificate(target):
        raise InputError(
            f"the scheduler file {os.fspath(path)!r} has no credentials for {target.address}",
            expected="the file of a cluster of this package, or distributed.comm.tls in Dask's configuration",
        )


def _lacks_certificate(target: Target) -> bool:
    import dask.config

    configured = target.config or dask.config.get("distributed.comm.tls.ca-file", None)
    return target.protocol is Protocol.TLS and not configured


def read_target(options: Options) -> Target:
    """The cluster of ``scheduler=False``, by its address or its file.

    Raises an InputError if the file is invalid or not trusted, if this package has no workers for the cluster's protocol, or if
    the user requires encryption and the cluster has none.
    """
    target = _target(options)
    if target.protocol is None:
        raise InputError(
            f"unsupported protocol of the running cluster: {target.address}",
            expected=f"one of {', '.join(Protocol)}",
            fix="start that cluster with one of these",
        )
    if not target.protocol.encrypts:
        _check_open_cluster(target, options)
    return target


def _target(options: Options) -> Target:
    if options.scheduler_file:
        target = read_scheduler_file(options.scheduler_file)
        require_credentials(target, options.scheduler_file)
        return (
            target if options.scheduler_address is None else Target(options.scheduler_address, target.config)
        )
    assert options.scheduler_address is not None  # `options.resolve` requires one of the two
    address = options.scheduler_address
    if "://" not in address:
        # Dask's default, unless the user requests another protocol.
        protocol = options.protocol if options.explicit & {"protocol", "security"} else Protocol.TCP
        address = f"{protocol}://{address}"
    target = Target(address)
    if _lacks_certificate(target):
        raise InputError(
            f"{address} requires certificates, and none are configured",
            fix="use the cluster's scheduler file instead (--scheduler-file), which carries them",
        )
    return target


def _check_open_cluster(target: Target, options: Options) -> None:
    """Reject a cluster without encryption if the user requires it; warn of it if the user has set nothing."""
    wanted = options.protocol.encrypts and options.explicit & {"protocol", "security"}
    if wanted and options.scheduler_file:
        raise InputError(
            f"the cluster of {options.scheduler_file!r} is not encrypted ({target.address}), but {_origin(options)} requests "
            "encryption",
            fix="start that cluster with TLS, or join it with --no-security on a network that you trust",
        )
    if options.protocol.encrypts:
        where = "this node" if "://127." in target.address else "the network"
        say(
            f"warning: the cluster at {target.address} is not encrypted: everyone on {where} can reach it and run code as you. "
            "Fix: start it with TLS, or set --no-security on a network that you trust"
        )


def _origin(options: Options) -> str:
    if "security" in options.explicit:
        return "security=True (--security)"
    name = UCX if options.worker_ucx is WorkerUcx.ALL else Protocol.TLS
    return f"protocol={name!r} (--protocol {name})"
