"""What the options say together: synonyms, defaults that depend on each other, and contradictions.

Two options that contradict each other are an error when they were said in the same place. When one was said in the
program (or on the command line) and the other in the configuration, the first wins, as it does for a single option.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from dask_gpu_mpi.errors import OptionError

from .protocols import Protocol
from .types import Source, show

__all__ = ["SWITCHES", "settle"]

#: CUDAWorker's switches of UCX, less the one that only says how connections are made (``enable_rdmacm``).
SWITCHES = ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")


def settle(
    values: dict[str, Any], origins: dict[str, str], spoken: frozenset[str], source: Source
) -> tuple[str, ...]:
    """Make the options agree, in place.

    Parameters
    ----------
    values : dict
        Every option by name; ``nanny`` and ``exclusive_workers`` leave it.
    origins : dict
        Where each option was said that somebody said, in words.
    spoken : frozenset of str
        Names of those that were said in the program or on the command line.
    source : {"keyword", "command line"}
        Which of the two.

    Returns
    -------
    tuple of str
        What to tell the user.

    Raises
    ------
    OptionError
        Two options contradict each other.
    """
    notes = _nanny(values, origins, source)
    _layout(values, origins, spoken)
    _scheduler(values, origins, spoken)
    return (*notes, *_security(values, origins, spoken), *_ucx(values, origins))


def _nanny(values: dict[str, Any], origins: dict[str, str], source: Source) -> list[str]:
    """dask-mpi's deprecated switch becomes a class, unless a class is given. (In dask-mpi it has become an error.)"""
    nanny = values.pop("nanny")
    if nanny is None:
        origins.pop("nanny", None)
        return []
    cls = "distributed.Nanny" if nanny else "distributed.Worker"
    instead = f"use worker_class={cls!r}" if source == "keyword" else f"use --worker-class {cls}"
    origin = origins.pop("nanny")
    if "worker_class" in origins:
        instead = "it is ignored, since worker_class is given"
    else:
        values["worker_class"], origins["worker_class"] = cls, origin
    message = f"{origin} is deprecated: {instead}"
    if source == "keyword":
        # In Python a deprecation is for the program's author; on a command line it is for the user, who sees ours.
        warnings.warn(message, DeprecationWarning, stacklevel=_stacklevel() - 1)
        return []
    return [message]


def _stacklevel() -> int:
    """How far up the caller of this package is, as `warnings.warn` counts, seen from here."""
    package = __name__.partition(".")[0]
    frame: FrameType | None = sys._getframe() if hasattr(sys, "_getframe") else None
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


def _layout(values: dict[str, Any], origins: dict[str, str], spoken: frozenset[str]) -> None:
    exclusive = values.pop("exclusive_workers")
    if exclusive is not None:
        layout = "exclusive" if exclusive else "shared"
        if "layout" in spoken and values["layout"] != layout:
            raise OptionError(
                f"{origins['exclusive_workers']}={exclusive} means the layout {layout!r}, {origins['layout']} says "
                f"{values['layout']!r}; needed: one of them"
            )
        values["layout"], origins["layout"] = layout, origins.pop("exclusive_workers")


def _scheduler(values: dict[str, Any], origins: dict[str, str], spoken: frozenset[str]) -> None:
    address, file = values["scheduler_address"], values["scheduler_file"]
    if values["scheduler"]:
        if address is not None and "scheduler" in spoken and "scheduler_address" not in spoken:
            values["scheduler_address"] = None
        elif address is not None:
            raise OptionError(
                f"{origins['scheduler_address']}: {show(address)} is a running scheduler to join, but this job starts its "
                "own; needed: scheduler=False (--no-scheduler) as well, or no scheduler_address"
            )
        return
    if address is None and file is None:
        raise OptionError(
            f"{origins['scheduler']}: no scheduler is started and none is named; needed: scheduler_address "
            "(--scheduler-address) or scheduler_file (--scheduler-file) of the cluster to join"
        )


def _security(values: dict[str, Any], origins: dict[str, str], spoken: frozenset[str]) -> list[str]:
    """`protocol` and `security` say one thing; what was said in the program wins over what was configured."""
    said, security = values["protocol"], values["security"]
    protocol = None if said is None else Protocol(said)
    scheme, separator, _ = (values["scheduler_address"] or "").partition("://")
    if separator:
        if scheme not in list(Protocol):
            raise OptionError(
                f"{origins['scheduler_address']}: unknown protocol {scheme!r}; needed: one of {', '.join(Protocol)}"
            )
        if protocol not in (None, scheme) and "protocol" in spoken:
            raise OptionError(
                f"{origins['protocol']}: {protocol!r} is not the protocol of the scheduler at "
                f"{values['scheduler_address']!r}; needed: protocol={scheme!r}, or none"
            )
        protocol, origins["protocol"] = Protocol(scheme), origins["scheduler_address"]
        spoken = spoken | {"protocol"}
    where = origins.get("security", "")
    notes: list[str] = []
    if protocol is Protocol.UCX:
        # Refused whoever said it last: encryption that was asked for is never dropped without a word.
        if security:
            raise OptionError(
                f"{origins['protocol']}: 'ucx' was asked for, and encryption too ({where}), but it cannot encrypt; "
                "needed: protocol='tls', or security=False (--no-security) on a network that you trust"
            )
        if security is None:
            notes.append(
                "the protocol 'ucx' can't encrypt: everyone on the network can reach this cluster and run code as you"
            )
    elif protocol is not None and security is not None and security != protocol.encrypts:
        if ("protocol" in spoken) == ("security" in spoken):
            fact = "is encrypted" if protocol.encrypts else "is not encrypted"
            raise OptionError(
                f"{origins['protocol']}: {protocol!r} {fact}, but {where} is {security}; needed: one of them, "
                "security=True (--security) with 'tls', security=False (--no-security) with 'tcp'"
            )
        if "security" in spoken:
            protocol = None
    if protocol is None:
        protocol = Protocol.TCP if security is False else Protocol.TLS
    values["protocol"], values["security"] = protocol, protocol.encrypts
    return notes


def _ucx(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """CUDAWorker's switches of UCX that nobody will look at."""
    options = values["worker_options"] or {}
    on = [switch for switch in (*SWITCHES, "enable_rdmacm") if options.get(switch)]
    if not on:
        return []
    where = origins["worker_options"]
    if not values["scheduler"] and "protocol" not in origins:
        return []  # the scheduler file says which protocol it is
    if values["protocol"] is not Protocol.UCX:
        return [
            f"{where}: {', '.join(on)}: no effect with the protocol {values['protocol']!r}; needed: protocol='ucx' "
            "(--protocol ucx), or leave it out"
        ]
    # dask_cuda.utils.get_ucx_config: one that is switched off, and none on, switches the others on
    said = [options.get(switch) for switch in SWITCHES]
    infiniband = options.get("enable_infiniband")
    others_on = infiniband is None and not any(said) and any(one is False for one in said)
    if "enable_rdmacm" in on and not infiniband and not others_on:
        return [
            f"{where}: enable_rdmacm is for connections over InfiniBand, which is not switched on; needed: enable_infiniband "
            "as well, or leave it out"
        ]
    return []
