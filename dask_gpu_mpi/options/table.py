"""Every option, once: its names, default, help and type; and how keyword, environment and configuration add up.

The table `OPTIONS` is what ``initialize()``, ``execute()``, the command line, ``gpu-mpi.yaml`` and the documentation are checked
against or made from. `resolve` gives one frozen `Options`, or one line that says what is wrong, where, and what was meant.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dask_gpu_mpi.errors import OptionError

from .dask_config import import_config
from .protocols import Protocol
from .rules import settle
from .types import Option, Source, convert, show, suggest

__all__ = ["OPTIONS", "Option", "Options", "parse_text", "register_defaults", "resolve", "suggest"]

#: Where Dask listens for the dashboard when nobody says: on the loopback interface, since it lets everyone run code.
DASHBOARD_ADDRESS = "127.0.0.1:8787"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"

# fmt: off
_TABLE = (
    # dask-mpi's arguments, with their meaning. Changed on purpose: nthreads (1), worker_class (distributed.Worker or
    # Nanny), dashboard_address (":8787", all interfaces), exclusive_workers (True) and the command line's name ("dask_mpi").
    Option("interface", "str", None,
           "Network interface, such as ib0 or hsn0. Default, or auto: loopback if the job has one host, else a fast one "
           "that all hosts have, else that of the default route.",
           ("--interface",), pattern=r"[^\s/]+", needs="the name of a network interface, such as 'ib0'"),
    Option("nthreads", "int", None,
           "Threads of each worker. Default: 1 with a GPU, else the rank's fair share of the host's "
           "cores.",
           ("--nthreads",), minimum=1),
    Option("local_directory", "path", None,
           "Directory for the workers' scratch files, node-local and short.",
           ("--local-directory",)),
    Option("memory_limit", "memory", "auto",
           "Memory of each worker: bytes, a text such as 4GB, a fraction of the host's memory, 0 for no "
           "limit, or auto: the host's memory divided by its workers.",
           ("--memory-limit",), nullable=True),
    Option("nanny", "bool", None,
           "Deprecated: say --worker-class distributed.Nanny or distributed.Worker.",
           ("--nanny/--no-nanny",), config=False),
    Option("dashboard", "bool", True,
           "Whether the scheduler serves the dashboard.",
           ("--dashboard/--no-dashboard",)),
    Option("dashboard_address", "listen", None,
           f"HOST:PORT of the dashboard. Default: {DASHBOARD_ADDRESS}, for ssh tunnels; :8787 is all "
           "interfaces, open to everyone on the network.",
           ("--dashboard-address",)),
    Option("protocol", "choice", None,
           "Network protocol of Dask: tls (the default), tcp (open to everyone on the network) or ucx "
           "(GPU to GPU, and open as well).",
           ("--protocol",), choices=tuple(Protocol)),
    Option("worker_class", "class", "auto",
           "Class of the workers, as a dotted path. Default: auto, which is dask_cuda.CUDAWorker on "
           "GPUs, distributed.Nanny without.",
           ("--worker-class",)),
    Option("worker_options", "json", None,
           "Further options of the workers' class, as a JSON object.",
           ("--worker-options",)),
    Option("comm", "object", None,
           "mpi4py communicator to use instead of COMM_WORLD.",
           cli=False, config=False),
    Option("exit", "bool", True,
           "Whether ranks other than the client's end in initialize().",
           cli=False, config=False),
    Option("scheduler", "bool", True,
           "Whether to start a scheduler; without one the workers join a running cluster.",
           ("--scheduler/--no-scheduler",)),
    Option("scheduler_address", "str", None,
           "Address of the running scheduler to join, with --no-scheduler; its credentials come from a scheduler file.",
           ("--scheduler-address",), pattern=r"([a-z]+://)?[^\s/]+",
           needs="an address such as 'tls://10.0.0.1:8786'"),
    Option("scheduler_file", "path", None,
           "File by which others find the scheduler and its credentials: written, or read with --no-"
           "scheduler.",
           ("--scheduler-file",)),
    Option("scheduler_port", "int", None,
           "Port of the scheduler. Default: a random one.",
           ("--scheduler-port",), minimum=0, maximum=65535),
    Option("scheduler_rank", "int", 0,
           "MPI rank whose host carries the scheduler.",
           ("--scheduler-rank",), minimum=0),
    Option("client_rank", "int", None,
           "MPI rank that runs the client script. Default: 0, in the layout exclusive 1.",
           ("--client-rank",), minimum=0),
    Option("exclusive_workers", "bool", None,
           "dask-mpi's name for --layout exclusive and --layout shared.",
           ("--exclusive-workers/--inclusive-workers",), config=False),
    Option("name", "str", None,
           "Prefix of the workers' names, which become PREFIX-RANK.",
           ("--name",), pattern=_NAME,
           needs="letters, digits and . _ + - (the name becomes part of file names)"),
    # ours
    Option("security", "bool", None,
           "Whether connections are encrypted and authenticated, with certificates made for this job. "
           "Default: yes, unless the protocol can't.",
           ("--security/--no-security",)),
    Option("layout", "choice", "shared",
           "shared: every rank has workers. exclusive: one rank for the scheduler, one for the client if there is a script, "
           "as in dask-mpi.",
           ("--layout",), choices=("shared", "exclusive")),
    Option("cpu_workers", "int", 0,
           "CPU workers on every host, beside those of the GPUs.",
           ("--cpu-workers",), minimum=0),
    Option("gpus_per_worker", "int", 1,
           "GPUs that each GPU worker sees: neighbours, for models that need several.",
           ("--gpus-per-worker",), minimum=1),
    Option("require_idle_gpus", "bool", False,
           "Whether to refuse GPUs on which other processes hold memory. By default there is a warning.",
           ("--require-idle-gpus/--no-require-idle-gpus",)),
    Option("startup_timeout", "duration", 300.0,
           "Seconds (or 5m) until all workers must be there, else the job fails.",
           ("--startup-timeout",)),
    Option("shutdown_timeout", "duration", 10.0,
           "Seconds until a rank's processes are killed at the end. Workers get half of it, and at most two.",
           ("--shutdown-timeout",)),
    Option("walltime_signal", "choice", None,
           "Signal that the batch system sends before the walltime, beside TERM, for Session.on_walltime.",
           ("--walltime-signal",), choices=("USR1", "USR2")),
    Option("log_level", "choice", "warning",
           "Least severity of the messages that Dask logs.",
           ("--log-level",), choices=("debug", "info", "warning", "error", "critical")),
    Option("log_directory", "path", None,
           "Directory for a log file of each rank, instead of the standard error; and an empty file 'ended' at the job's end.",
           ("--log-directory",)),
    Option("timeline", "path", None,
           "File, written by rank 0, with the time of each step of the start and the end on every rank, for "
           "Perfetto or chrome://tracing.",
           ("--timeline",)),
)
# fmt: on

#: All options by name, in the order of ``--help``.
OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}


@dataclass(frozen=True)
class Options:
    """What the user wants, with every default filled in. Times are in seconds.

    The fields are the options of `OPTIONS`, less ``nanny`` (which has become the `worker_class`) and ``exclusive_workers``
    (the `layout`); `security` and `protocol` agree with each other.

    Attributes
    ----------
    warnings : tuple of str
        What to tell the user, once, on the head rank.
    explicit : frozenset of str
        Names of the options that somebody said, whether in the program, on the command line or in the configuration.
    """

    interface: str | None = None
    nthreads: int | None = None
    local_directory: str | None = None
    memory_limit: int | float | str | None = "auto"
    dashboard: bool = True
    dashboard_address: str = DASHBOARD_ADDRESS
    protocol: Protocol = Protocol.TLS
    worker_class: str | type = "auto"
    worker_options: dict[str, Any] = field(default_factory=dict)
    comm: Any = None
    exit: bool = True
    scheduler: bool = True
    scheduler_address: str | None = None
    scheduler_file: str | None = None
    scheduler_port: int | None = None
    scheduler_rank: int = 0
    client_rank: int | None = None
    name: str | None = None
    security: bool = True
    layout: str = "shared"
    cpu_workers: int = 0
    gpus_per_worker: int = 1
    require_idle_gpus: bool = False
    startup_timeout: float = 300.0
    shutdown_timeout: float = 10.0
    walltime_signal: str | None = None
    log_level: str = "warning"
    log_directory: str | None = None
    timeline: str | None = None
    warnings: tuple[str, ...] = ()
    explicit: frozenset[str] = frozenset()

    @property
    def worker_kind(self) -> Literal["auto", "cpu", "gpu"]:
        """What the class is for: CUDAWorker needs GPUs, Nanny and Worker leave them alone, others take what there is."""
        cls = self.worker_class
        bases = cls.__mro__ if isinstance(cls, type) else ()
        paths = [f"{base.__module__}.{base.__name__}" for base in bases] or [str(cls)]
        if any(path.rpartition(".")[2] == "CUDAWorker" for path in paths):
            return "gpu"
        package, _, name = paths[0].rpartition(".")
        # A subclass of Nanny is the user's own, and may well be made for GPUs: only Dask's two are certain.
        if name in ("Nanny", "Worker") and package.split(".")[0] in ("distributed", "dask"):
            return "cpu"
        return "auto"


def parse_text(option: Option, text: str) -> Any:
    """Read an option from the command line.

    Raises
    ------
    OptionError
        The text is no value of this option.
    """
    return convert(option, text, _origin(option, "command line"), "command line")


def register_defaults() -> None:
    """Add the defaults of ``gpu-mpi.yaml`` to Dask's configuration, where ``dask.config.refresh`` keeps them; once."""
    import dask.config
    import yaml

    if not any("gpu-mpi" in known for known in dask.config.defaults):
        text = Path(__file__).parent.with_name("gpu-mpi.yaml").read_text(encoding="utf-8")
        dask.config.update_defaults(yaml.safe_load(text))


def resolve(
    given: Mapping[str, Any],
    *,
    source: Literal["keyword", "command line"],
    environ: Mapping[str, str] | None = None,
) -> Options:
    """Add up what was said: keyword or command line, then environment, Dask's YAML, defaults.

    Parameters
    ----------
    given : Mapping
        What the user said explicitly, by Python name, and nothing else. Command line: texts, or what `parse_text` made of them.
    source : {"keyword", "command line"}
        Where `given` comes from.
    environ : Mapping, optional
        The environment, to say in a message that a value came from it; its values come through Dask. Default: the
        process's.

    Returns
    -------
    Options

    Raises
    ------
    OptionError
        An option is unknown, of the wrong type, or contradicts another. The first one found is named.

    Examples
    --------
    >>> options = resolve({"nthreads": "2", "protocol": "tcp"}, source="command line")
    >>> options.nthreads, options.protocol, options.security
    (2, 'tcp', False)
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
    origins: dict[str, str] = {}
    for option, value, origin in _configured(environ):
        converted = convert(option, value, origin, "configuration")
        if converted != option.default:
            values[option.name], origins[option.name] = converted, origin
    spoken = set()
    for name, value in given.items():
        if name not in OPTIONS:
            raise OptionError(f"{source}: unknown option {show(name)}{suggest(name, OPTIONS)}")
        origin = _origin(OPTIONS[name], source)
        values[name], origins[name] = convert(OPTIONS[name], value, origin, source), origin
        spoken.add(name)
    if values["interface"] == "auto":
        values["interface"] = None
    notes = settle(values, origins, frozenset(spoken), source)
    if values["dashboard_address"] is None:
        values["dashboard_address"] = DASHBOARD_ADDRESS
    values["worker_options"] = values["worker_options"] or {}
    for name, option in OPTIONS.items():
        if option.kind == "path" and values[name] is not None:
            # The script may change to another directory. In one that is gone, whoever uses the path says so.
            with contextlib.suppress(OSError):
                values[name] = os.path.abspath(values[name])
    return Options(**values, warnings=notes, explicit=frozenset(origins))


def _origin(option: Option, source: Source) -> str:
    if source == "command line" and option.flags:
        return f"command line: {option.flags[0]}"
    return f"{source} {option.name}"


def _configured(environ: Mapping[str, str]) -> list[tuple[Option, Any, str]]:
    """What Dask's configuration says, from files and environment alike, with the place of each for messages."""
    for variable in environ:
        start, _, rest = variable.partition("DASK_GPU_MPI_")
        if not start and rest.lower() in OPTIONS:
            # Dask reads it as another key of its own, and nobody would ever know.
            raise OptionError(
                f"environment: {variable} has no effect; needed: two underscores, DASK_GPU_MPI__{rest}"
            )
    config = import_config()
    register_defaults()
    section = config.get("gpu-mpi", {}) or {}
    if not isinstance(section, Mapping):
        raise OptionError(f"configuration gpu-mpi: {show(section)} can't be used; needed: names and values")
    found = []
    for key, value in section.items():
        if key == "jobscript":
            continue  # a section of its own: jobscript_command
        name = str(key).replace("-", "_").lower()
        variable = next((v for v in environ if v.upper() == f"DASK_GPU_MPI__{name.upper()}"), "")
        if variable:
            said = config.interpret_value(environ[variable])
            if isinstance(said, str) and isinstance(value, Mapping):
                # Dask merges mappings into what is already there, so that one of a YAML file replaces a JSON text.
                value = said
            elif said != value:
                variable = ""  # the program has set it since, by dask.config.set
        origin = f"environment {variable}" if variable else f"configuration gpu-mpi.{key}"
        if name not in OPTIONS:
            spelling = {o.name: o.variable if variable else o.key for o in OPTIONS.values() if o.config}
            hint = suggest(name, spelling, spelling.__getitem__)
            raise OptionError(f"{origin}: unknown option{hint}")
        if not OPTIONS[name].config:
            raise OptionError(
                f"{origin}: {name} can't be configured; needed: say it in the program or on the command line"
            )
        found.append((OPTIONS[name], value, origin))
    return found
