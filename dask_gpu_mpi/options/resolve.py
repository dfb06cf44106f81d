"""Reads the settings of the program, the command line and Dask's configuration into `Options`, and makes them agree.

Two options that contradict each other are an error if both are set in the same place. If one is set in the program (or on the
command line) and the other in the configuration, the first wins, as it does for a single option.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from dask_gpu_mpi.errors import OptionError, Problem
from dask_gpu_mpi.options.convert import convert, defaults_of, import_config, show, suggest
from dask_gpu_mpi.options.model import (
    AUTO,
    DASHBOARD_ADDRESS,
    OPTIONS,
    SWITCHES,
    UCX,
    Option,
    Options,
    Protocol,
    Source,
    WorkerUcx,
)

#: Settings of Dask at which workers spill, pause or restart. With others each worker logs an error again and again.
MEMORY, THRESHOLDS = "distributed.worker.memory", ("target", "spill", "pause", "terminate")


def resolve(
    given: Mapping[str, Any], *, source: Literal["keyword", "command line"], continues: bool = False
) -> Options:
    """Combine the user's settings: keyword or command line first (`given`), then environment, Dask's YAML, defaults.

    `continues`: the program continues on all ranks after the cluster (``exit=False``, ``execute``).

    Raises an OptionError for the first option that is unknown, of the wrong type, or contradicts another.

    >>> options = resolve({"nthreads": "2", "protocol": "tcp"}, source="command line")
    >>> options.nthreads, options.protocol, options.security
    (2, 'tcp', False)
    """
    explicit: dict[str, Any] = {}
    for name, value in given.items():  # first: its errors are nearest to the user
        if name not in OPTIONS:
            raise OptionError(f"{source}: unknown option {show(name)}{suggest(name, OPTIONS)}")
        explicit[name] = convert(OPTIONS[name], value, _origin(OPTIONS[name], source), source)
    values: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
    origins: dict[str, str] = {}
    for option, value, origin in _configured(source):
        converted = convert(option, value, origin, "configuration")
        if converted != option.default:
            values[option.name], origins[option.name] = converted, origin
    values |= explicit
    origins |= {name: _origin(OPTIONS[name], source) for name in explicit}
    settings = _Settings(values, origins, frozenset(given), source)
    if values["tolerate_lost_ranks"] and continues:
        raise OptionError(
            f"{origins['tolerate_lost_ranks']}: can't be combined with exit=False or execute()",
            expected="ranks that end with the cluster: as an MPI program they can't continue without a lost one",
            fix="initialize() without exit=False, or tolerate_lost_ranks=0",
        )
    settings.agree()
    own = os.environ.get("DASK_CONFIG", "")
    # a path below /proc is of `job.child_processes`, and ends with its job
    if own and not own.startswith("/proc/") and not os.path.exists(own):
        warning = Problem(
            f"environment DASK_CONFIG: Dask ignores {own!r}, which does not exist", fix="correct or unset it"
        )
        settings.warnings.append(warning)
    if values["interface"] == "auto":
        values["interface"] = None
    values["dashboard_address"] = values["dashboard_address"] or DASHBOARD_ADDRESS
    values["worker_options"] = values["worker_options"] or {}
    for name, option in OPTIONS.items():
        if option.kind == "path" and values[name] is not None:
            values[name] = os.path.abspath(values[name])  # the script may change to another directory
    notes = tuple(settings.warnings)
    return Options(**values, warnings=notes, explicit=frozenset(origins), given=frozenset(explicit))


def _configured(source: Source) -> Iterator[tuple[Option, Any, str]]:
    """Each option that is set in Dask's configuration (files and environment), with its value and its place for messages."""
    for variable in os.environ:
        start, _, rest = variable.partition("DASK_GPU_MPI_")
        if not start and rest.lower() in OPTIONS:
            # Dask reads it as another key, which has no effect.
            raise OptionError(
                f"environment {variable}: no effect", fix=f"two underscores after MPI, DASK_GPU_MPI__{rest}"
            )
    config = import_config(alone=source == "command line")
    register_defaults(config)
    for key, value, variable in settings_of(config, "gpu-mpi"):
        if key == "jobscript":
            continue  # a separate section: cli/job_request
        name = str(key).replace("-", "_").lower()
        origin = f"environment {variable}" if variable else f"configuration gpu-mpi.{key}"
        if name not in OPTIONS:
            spelling = {o.name: o.variable if variable else o.key for o in OPTIONS.values() if o.config}
            raise OptionError(f"{origin}: unknown option{suggest(name, spelling, spelling.__getitem__)}")
        if not OPTIONS[name].config:
            raise OptionError(
                f"{origin}: {name} can't be configured", fix="set it in the program or on the command line"
            )
        yield OPTIONS[name], value, origin
    for key, value, variable in settings_of(config, MEMORY):
        if key in THRESHOLDS and not (isinstance(value, Real) or (key == "target" and value is None)):
            raise OptionError(
                f"{f'environment {variable}' if variable else f'configuration {MEMORY}.{key}'}: invalid value {show(value)}",
                expected="a fraction of the worker's memory limit, such as 0.7, or false",
            )


def settings_of(config: Any, section: str) -> Iterator[tuple[Any, Any, str]]:
    """Each key in a section of Dask's configuration, its value, and the environment variable that has set it (empty: none)."""
    prefix = f"DASK_{section.replace('-', '_').replace('.', '__')}__".upper()
    for key, value in section_of(config, section).items():
        wanted = prefix + str(key).replace("-", "_").upper()
        variable = next((each for each in os.environ if each.upper() == wanted), "")
        if variable:
            guessed = config.interpret_value(os.environ[variable])
            if isinstance(guessed, str) and isinstance(value, Mapping):
                # Dask merges mappings into existing values, so a mapping of a YAML file replaces a JSON text.
                value = guessed
            elif guessed != value:
                variable = ""  # the program has set it since, by dask.config.set
        yield key, value, variable


def register_defaults(config: Any) -> None:
    """Add the defaults of ``gpu-mpi.yaml`` to those of `dask.config`, so that ``dask.config.refresh`` keeps them; once."""
    import yaml

    if "gpu-mpi" not in defaults_of(config):
        for key in ("gpu-mpi", "gpu-mpi.jobscript"):  # the defaults would replace a value that is no section
            section_of(config, key)
        text = Path(__file__).parents[1].joinpath("gpu-mpi.yaml").read_text(encoding="utf-8")
        config.update_defaults(yaml.safe_load(text))


def section_of(config: Any, key: str) -> Mapping[Any, Any]:
    """A section of Dask's configuration; an OptionError if it is none."""
    section = config.get(key, None) or {}
    if not isinstance(section, Mapping):
        raise OptionError(f"configuration {key}: invalid value {show(section)}", expected="names and values")
    return section


def _origin(option: Option, source: Source) -> str:
    if source == "command line" and option.flags:
        return f"command line: {option.flags[0]}"
    return f"{source} {option.name}"


# How options depend on each other: synonyms, defaults that follow from other options, and contradictions.


class _Settings:
    """The options while they are made to agree, in place. If two contradict each other, there is an OptionError."""

    def __init__(
        self, values: dict[str, Any], origins: dict[str, str], given: frozenset[str], source: Source
    ) -> None:
        #: Every option by name; the synonyms ``nanny`` and ``exclusive_workers`` are removed.
        self.values = values
        #: The place at which each is set, for messages; options that have their defaults are not there.
        self.origins = origins
        #: Those that are set in the program or on the command line; `source` is which of both.
        self.given = given
        self.source = source
        #: For the user.
        self.warnings: list[Problem] = []

    def agree(self) -> None:
        """Make all options agree, in an order in which each step finds what it needs."""
        self._nanny()
        self._layout()
        self._scheduler()
        self._lost_ranks()
        self._protocol()
        self._dashboard()
        self._ucx_switches()

    def _nanny(self) -> None:
        """dask-mpi's deprecated switch becomes a class, unless a class is set. (In dask-mpi it has become an error.)"""
        nanny, origin = self.values.pop("nanny"), self.origins.pop("nanny", "")
        if nanny is None:
            return
        cls = "distributed.Nanny" if nanny else "distributed.Worker"
        if "worker_class" in self.origins:
            found, fix = f"{origin}: deprecated, and ignored, since worker_class is set", "leave it out"
        else:
            self.values["worker_class"], self.origins["worker_class"] = cls, origin
            found = f"{origin}: deprecated"
            fix = f"worker_class={cls!r}" if self.source == "keyword" else f"--worker-class {cls}"
        self.warnings.append(Problem(found, fix=fix))

    def _layout(self) -> None:
        """dask-mpi's name for the layout."""
        exclusive, origin = self.values.pop("exclusive_workers"), self.origins.pop("exclusive_workers", "")
        if exclusive is None:
            return
        layout, other = "exclusive" if exclusive else "shared", self.values["layout"]
        if "layout" in self.given and other != layout:
            raise OptionError(
                f"{origin}: {exclusive} is the layout {layout!r}, but {self.origins['layout']} is {other!r}",
                fix="set one of them",
            )
        self.values["layout"], self.origins["layout"] = layout, origin

    def _scheduler(self) -> None:
        """A job starts a scheduler, or it attaches to a running one."""
        values, origins = self.values, self.origins
        address = values["scheduler_address"]
        if values["scheduler"] and address is not None:
            if "scheduler" not in self.given or "scheduler_address" in self.given:
                raise OptionError(
                    f"{origins['scheduler_address']}: {show(address)} is a running scheduler, but this job starts its own",
                    fix="scheduler=False (--no-scheduler) as well, or no scheduler_address",
                )
            values["scheduler_address"] = None
        if not values["scheduler"] and address is None and values["scheduler_file"] is None:
            raise OptionError(
                f"{origins['scheduler']}: no scheduler is started, and no running one is set",
                fix="scheduler_address (--scheduler-address) or scheduler_file (--scheduler-file) of the cluster to attach to",
            )

    def _lost_ranks(self) -> None:
        """Ranks can be lost only if rank 0, which leads the end, has scheduler and script: without these the job is over."""
        needed = {
            "layout": ("shared",),
            "scheduler_rank": (0,),
            "client_rank": (None, 0),
            "scheduler": (True,),
        }
        others = [
            self.origins[name] for name, possible in needed.items() if self.values[name] not in possible
        ]
        if self.values["tolerate_lost_ranks"] and others:
            raise OptionError(
                f"{self.origins['tolerate_lost_ranks']}: can't be combined with {' and '.join(others)}",
                expected="the scheduler and the script on rank 0",
                fix="leave one of them out",
            )

    def _protocol(self) -> None:
        """`protocol` and `security` set the same thing; a setting of the program wins over the configuration."""
        values, origins = self.values, self.origins
        wanted, security = values["protocol"], values["security"]
        if wanted == AUTO:  # as if it were not set
            wanted = None
            origins.pop("protocol", None)
        chosen = None if wanted is None else Protocol.TLS if wanted == UCX else Protocol(wanted)
        if "://" in (values["scheduler_address"] or ""):
            chosen = self._protocol_of_address(chosen)
            self.given |= {"protocol"}
        if wanted == UCX and chosen is Protocol.TLS and security is not None:
            raise self._ucx_and_security()
        if security and not values["data_encryption"]:
            raise OptionError(
                f"{origins['security']} and {origins['data_encryption']} contradict each other",
                expected="all data encrypted, or not",
                fix="leave one of them out",
            )
        protocol = self._tls_or_tcp(chosen)
        values["worker_ucx"] = WorkerUcx.OFF
        if protocol is Protocol.TLS and wanted == UCX:
            values["worker_ucx"] = WorkerUcx.ALL
        elif protocol is Protocol.TLS and wanted is None and security is None:
            values["worker_ucx"] = WorkerUcx.AUTO
        values["protocol"], values["security"] = protocol, protocol.encrypts

    def _protocol_of_address(self, chosen: Protocol | None) -> Protocol:
        """The protocol of the running scheduler, with which the user's must agree."""
        values, origins = self.values, self.origins
        address = values["scheduler_address"]
        scheme = Protocol.of(address)
        if scheme is None:
            raise OptionError(
                f"{origins['scheduler_address']}: unsupported protocol {address.partition('://')[0]!r}",
                expected=f"one of {', '.join(Protocol)}",
            )
        if chosen not in (None, scheme) and "protocol" in self.given:
            raise OptionError(
                f"{origins['protocol']}: {str(values['protocol'])!r} is not the protocol of the scheduler at {address!r}",
                fix=f"protocol={scheme!r}, or none",
            )
        if values["security"] and not scheme.encrypts and "security" not in self.given:
            # An error wherever it is set: encryption that the user requests is never dropped silently.
            raise OptionError(
                f"{origins['scheduler_address']}: the scheduler at {address!r} is not encrypted, but {origins['security']} "
                "requests encryption",
                fix="a cluster with TLS, or security=False (--no-security) on a network that you trust",
            )
        if chosen is Protocol.TLS and not scheme.encrypts and values["security"] is None:
            found = (
                f"{origins['protocol']}: no effect: the scheduler at {address!r} is not encrypted, and everyone on the network "
                "can reach it and run code as you"
            )
            self.warnings.append(Problem(found, fix="a cluster with TLS"))
        origins["protocol"] = origins["scheduler_address"]
        return scheme

    def _ucx_and_security(self) -> OptionError:
        """``protocol="ucx"`` is TLS, with data between workers over UCX, which authenticates and does not encrypt."""
        protocol, security = self.origins["protocol"], self.origins["security"]
        if self.values["security"]:
            return OptionError(
                f"{protocol}: 'ucx' can't encrypt, but {security} requests encryption",
                fix="protocol='tls'; or leave security out, for data between workers that is authenticated and not encrypted",
            )
        return OptionError(
            f"{protocol}: 'ucx' needs TLS, but {security} is False",
            fix="leave security out (UCX together with TLS), or use protocol='tcp' (--protocol tcp) on a network that you trust",
        )

    def _tls_or_tcp(self, chosen: Protocol | None) -> Protocol:
        """TLS or TCP, which follows from `protocol` (`chosen`) and `security`."""
        security, given = self.values["security"], self.given
        if chosen is not None and security is not None and security != chosen.encrypts:
            if ("protocol" in given) == ("security" in given):
                fact = "is encrypted" if chosen.encrypts else "is not encrypted"
                raise OptionError(
                    f"{self.origins['protocol']}: {chosen!r} {fact}, but {self.origins['security']} is {security}",
                    fix="set one of them, security=True (--security) with 'tls', security=False (--no-security) with 'tcp'",
                )
            if "security" in given:
                chosen = None
        if chosen is None:
            return Protocol.TCP if security is False else Protocol.TLS
        return chosen

    def _dashboard(self) -> None:
        """Warn if the dashboard is opened to the network."""
        values, address = self.values, self.values["dashboard_address"]
        if not (values["dashboard"] and values["scheduler"]) or address is None or _is_loopback(address):
            return
        port = address.rpartition(":")[2]
        tunnel = f"ssh -N -L {port}:127.0.0.1:{port} NODE"
        what = "everyone there can read it"
        if values["security"]:
            what = "the token that opens it crosses that in clear"
        origin = self.origins["dashboard_address"]
        found = f"{origin}: {address!r} opens the dashboard to the network by plain HTTP: {what}"
        self.warnings.append(Problem(found, fix=f"leave the option out, and use a tunnel ({tunnel})"))

    def _ucx_switches(self) -> None:
        """Warn of CUDAWorker's switches of UCX that have no effect."""
        options, protocol = self.values["worker_options"] or {}, self.values["protocol"]
        on = [switch for switch in SWITCHES if options.get(switch)]
        # If only a scheduler file is set, the file has the protocol.
        is_known = self.values["scheduler"] or "protocol" in self.origins
        if on and is_known and self.values["worker_ucx"] is WorkerUcx.OFF:
            found = (
                f"{self.origins['worker_options']}: {', '.join(on)}: no effect with the protocol {protocol!r}"
            )
            self.warnings.append(Problem(found, fix="protocol='ucx' (--protocol ucx), or leave it out"))


def _is_loopback(address: str) -> bool:
    """Whether ``HOST:PORT`` is reached from its own node only.

    >>> [_is_loopback(address) for address in ("127.0.0.1:8787", "[::1]:0", "localhost:8787", ":8787", "node1:8787")]
    [True, True, True, False, False]
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
