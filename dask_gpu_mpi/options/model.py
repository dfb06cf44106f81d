"""What an option is (`Option`), and what all options of a rank are (`Options`): plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .protocols import Protocol, WorkerUcx

__all__ = ["DASHBOARD_ADDRESS", "Kind", "Option", "Options", "Setting", "Source"]

#: What an option's value may be:
#:
#: - ``path``: a text or `os.PathLike`;
#: - ``json``: an object of names and values;
#: - ``class``: a class or its dotted path;
#: - ``duration``: seconds, or a text such as "5 minutes";
#: - ``memory``: bytes, a fraction, "4GB" or "auto";
#: - ``listen``: "HOST:PORT", ":PORT" for all interfaces, or a port for the loopback interface;
#: - ``object``: anything, unchecked.
Kind = Literal[
    "str", "path", "int", "bool", "choice", "json", "class", "duration", "memory", "listen", "object"
]
#: Where an option is set. Environment variables reach us by Dask's configuration.
Source = Literal["keyword", "command line", "configuration"]

#: Where Dask's dashboard listens by default: on the loopback interface, since it lets everyone run code.
DASHBOARD_ADDRESS = "127.0.0.1:8787"


@dataclass(frozen=True)
class Setting:
    """What a value may be: of an option, or of a worker option whose type is known."""

    #: Of an option the Python keyword; the configuration key is the same with ``-`` for ``_``.
    name: str
    kind: Kind
    #: What a ``choice`` may be.
    choices: tuple[str, ...] = field(default=(), kw_only=True)
    #: Bounds of an ``int``, both allowed.
    minimum: int | None = field(default=None, kw_only=True)
    maximum: int | None = field(default=None, kw_only=True)
    #: Regular expression that a ``str`` must match as a whole; "" allows every text without control characters.
    pattern: str = field(default="", kw_only=True)
    #: What `pattern` asks for, in words.
    expected: str = field(default="", kw_only=True)
    #: Whether None is a value.
    nullable: bool = field(default=False, kw_only=True)

    @property
    def allows_none(self) -> bool:
        """Whether None is a value."""
        return self.nullable


@dataclass(frozen=True)
class Option(Setting):
    """One option: its name, what it may be, and where it may be set."""

    #: Its value where it is set nowhere. Where it is None, the user may set None as well: "let dask_gpu_mpi choose".
    default: Any
    #: One or two sentences, for ``--help`` and the documentation.
    help: str
    #: Its spelling on the command line; a switch has both, as click writes it: ``"--dashboard/--no-dashboard"``.
    flags: tuple[str, ...] = ()
    #: Whether it exists on the command line.
    cli: bool = True
    #: Whether it exists in the configuration and the environment.
    config: bool = True

    @property
    def allows_none(self) -> bool:
        """Whether None is a value: for a default of None it always is."""
        return self.nullable or self.default is None

    @property
    def key(self) -> str:
        """Its key below ``gpu-mpi`` in Dask's configuration."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that Dask reads it from."""
        return f"DASK_GPU_MPI__{self.name.upper()}"


@dataclass(frozen=True)
class Options:
    """The options of a rank, with every default filled in; times in seconds.

    The fields are the options of `dask_gpu_mpi.options.table.OPTIONS`, except ``nanny`` (which has become the `worker_class`) and
    ``exclusive_workers`` (the `layout`). `security` and `protocol` agree with each other; `protocol` is what all processes speak,
    and `worker_ucx` what workers use beside it.
    """

    interface: str | None = None
    nthreads: int | None = None
    local_directory: str | None = None
    memory_limit: int | float | str | None = "auto"
    dashboard: bool = True
    dashboard_address: str = DASHBOARD_ADDRESS
    protocol: Protocol = Protocol.TLS
    worker_ucx: WorkerUcx = WorkerUcx.AUTO
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
    default_workers: str = "all"
    gpus_per_worker: int = 1
    require_idle_gpus: bool = False
    startup_timeout: float = 300.0
    shutdown_timeout: float = 10.0
    walltime_signal: str | None = None
    log_level: str = "warning"
    log_directory: str | None = None
    report: str | None = None
    #: Warnings for the user, to be printed once, on rank 0.
    warnings: tuple[str, ...] = ()
    #: Names of the options that the user has set, in the program, on the command line or in the configuration.
    explicit: frozenset[str] = frozenset()

    @property
    def grace(self) -> float:
        """Seconds that workers get to close politely, well within the shutdown deadline."""
        return min(2.0, self.shutdown_timeout / 2)

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
