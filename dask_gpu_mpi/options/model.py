"""Every option, once: its type, default and help (`OPTIONS`), and all values of a rank (`Options`); the network protocols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from dask_gpu_mpi.errors import Problem

#: Further values of the option `protocol`: TLS, with UCX for GPU memory if every rank can; TLS, with UCX for all large data.
AUTO, UCX = "auto", "ucx"


class _Word(StrEnum):
    def __repr__(self) -> str:
        """The same as of a text, for messages."""
        return repr(self.value)


class Protocol(_Word):
    """A protocol; equal to its name in Dask, messages and files.

    >>> Protocol("tls").encrypts, Protocol.TCP.encrypts
    (True, False)
    >>> f"{Protocol.TCP}://h1:8786"
    'tcp://h1:8786'
    """

    TLS = "tls"
    TCP = "tcp"

    @property
    def encrypts(self) -> bool:
        """Whether connections are encrypted, and both ends show the job's certificate: there are credentials to make and send."""
        return self is Protocol.TLS

    @classmethod
    def of(cls, address: str) -> Protocol | None:
        """The protocol of an address; None: one of distributed's others, or none.

        >>> Protocol.of("tcp://h1:8786"), Protocol.of("ws://h1:8786"), Protocol.of("h1:8786")
        ('tcp', None, None)
        """
        scheme, separator, _ = address.partition("://")
        return cls(scheme) if separator and scheme in list(cls) else None


class WorkerUcx(_Word):
    """The data that goes over UCX between workers with TLS (`network.worker_comm`): authenticated, not encrypted."""

    #: Nothing.
    OFF = "no"
    #: GPU memory, if every rank can. It never contains code.
    AUTO = "auto"
    #: Everything large, including host memory; a rank that can't is an error.
    ALL = "yes"


class Transport(NamedTuple):
    """How the workers of a job exchange data; rank 0 chooses it."""

    ucx: WorkerUcx = WorkerUcx.OFF
    #: The line for the user, with the way to change it; empty: nothing to exchange, or no GPU.
    line: Problem = Problem("")
    #: A warning that a setting of the user's opens a port; None: no setting does.
    warning: Problem | None = None
    #: Whether UCX may be used between nodes.
    between_nodes: bool = False


#: The kinds of values:
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
#: The place at which an option is set. Environment variables are a part of Dask's configuration.
Source = Literal["keyword", "command line", "configuration"]

#: The address at which Dask's dashboard listens by default: the loopback interface, since it lets everyone run code.
DASHBOARD_ADDRESS = "127.0.0.1:8787"
#: CUDAWorker's switches of UCX, except ``enable_rdmacm``, which only chooses how connections are made.
SWITCHES = ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"


@dataclass(frozen=True)
class Setting:
    """The allowed values of an option, or of a worker option whose type is known."""

    kind: Kind
    #: The values of a ``choice``.
    choices: tuple[str, ...] = field(default=(), kw_only=True)
    #: Bounds of an ``int``, both allowed.
    minimum: int | None = field(default=None, kw_only=True)
    maximum: int | None = field(default=None, kw_only=True)
    #: Regular expression that a ``str`` must match as a whole; "" allows every text without control characters.
    pattern: str = field(default="", kw_only=True)
    #: The meaning of `pattern`, in words.
    expected: str = field(default="", kw_only=True)
    #: Whether None is a value.
    nullable: bool = field(default=False, kw_only=True)

    @property
    def allows_none(self) -> bool:
        """Whether None is a value."""
        return self.nullable


@dataclass(frozen=True)
class Option(Setting):
    """One option: its name, its values, and the places at which it may be set."""

    #: The Python keyword; the configuration key is the same with ``-`` for ``_``.
    name: str
    #: Its value if it is not set. If that is None, the user may set None as well: "let dask_gpu_mpi choose".
    default: Any
    #: One or two sentences, for ``--help`` and the documentation.
    help: str
    #: Its spelling on the command line; a switch has both, as click writes it: ``"--dashboard/--no-dashboard"``.
    flags: tuple[str, ...] = ()
    #: Its heading in ``--help-all``.
    topic: str = ""
    #: Whether all ranks must have set the same.
    same: bool = False
    #: Whether the command ``plan`` has it: it shapes the plan.
    plan: bool = False
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


def option(
    kind: Kind, default: Any, help: str, flags: tuple[str, ...] = (), *, resolved: Any = ..., **more: Any
) -> Any:
    """A field of `Options`, with the arguments of its `Option`; the name of both is the same.

    `resolved` is its value if it is not set and `default` is None, which means "let dask_gpu_mpi choose".
    """
    metadata = {"kind": kind, "default": default, "help": help, "flags": flags, **more}
    if resolved is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default if resolved is ... else resolved, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """The options of a rank, with every default filled in; times in seconds. Each is declared here, and nowhere else.

    ``initialize()``, ``execute()``, the command line, ``gpu-mpi.yaml`` and the documentation are made from these fields, or
    checked against them (`OPTIONS`). `security` and `protocol` agree with each other; all processes use `protocol`.
    """

    # Names and meanings are dask-mpi's if it has the option. Changed on purpose: its defaults of nthreads (1), worker_class
    # (distributed.Worker or Nanny), dashboard_address (":8787", all interfaces), exclusive_workers (True), and of the command
    # line's name ("dask_mpi").
    # fmt: off
    nthreads: int | None = option("int", None,
        "Threads of each worker. Default: 1 with a GPU, else a share of its rank's cores.",
        ("--nthreads",), topic="Workers", same=True, plan=True, minimum=1)
    memory_limit: int | float | str | None = option("memory", "auto",
        "Memory of each worker: bytes, 4GB, a fraction of the node's memory, or 0 for no limit. "
        "auto: the node's memory divided by its workers.",
        ("--memory-limit",), topic="Workers", plan=True, nullable=True)
    worker_class: str | type = option("class", "auto",
        "Class of the workers, as a dotted path. auto: dask_cuda.CUDAWorker on GPUs, else distributed.Nanny.",
        ("--worker-class",), topic="Workers", plan=True)
    worker_options: dict[str, Any] = option("json", None,
        "Options of the workers' class, as a JSON object.",
        ("--worker-options",), topic="Workers", resolved=dict, plan=True)
    gpus_per_worker: int = option("int", 1,
        "GPUs that each GPU worker sees, for models that need several.",
        ("--gpus-per-worker",), topic="Workers", same=True, plan=True, minimum=1)
    cpu_workers: int = option("int", 0,
        "Additional CPU workers of each node.",
        ("--cpu-workers",), topic="Workers", same=True, plan=True, minimum=0)
    default_workers: str = option("choice", "all",
        "Workers for tasks that request no worker and no resource. gpu: the GPU workers, if the cluster has any.",
        ("--default-workers",), topic="Workers", same=True, choices=("all", "gpu"))
    name: str | None = option("str", None,
        "Prefix of the workers' names: PREFIX-RANK, on a GPU PREFIX-RANK-GPU.",
        ("--name",), topic="Workers", same=True, plan=True,
        pattern=_NAME, expected="letters, digits and . _ + - (the name becomes part of file names)")
    local_directory: str | None = option("path", None,
        "Directory for the workers' scratch files, node-local and short. "
        "Default: Dask's temporary-directory, else $TMPDIR or /tmp.",
        ("--local-directory",), topic="Workers")
    require_idle_gpus: bool = option("bool", False,
        "Refuse GPUs on which other processes hold memory, instead of a warning.",
        ("--require-idle-gpus/--no-require-idle-gpus",), topic="Workers", same=True, plan=True)
    layout: str = option("choice", "shared",
        "shared: every rank may have workers. exclusive: one rank for the scheduler, one for the client if there is a script, "
        "as in dask-mpi.",
        ("--layout",), topic="Ranks", same=True, plan=True, choices=("shared", "exclusive"))
    scheduler_rank: int = option("int", 0,
        "Rank on whose node the scheduler runs.",
        ("--scheduler-rank",), topic="Ranks", same=True, plan=True, minimum=0)
    client_rank: int | None = option("int", None,
        "Rank that runs the client script. Default: 0; exclusive: 1, or 0 if the scheduler is on 1.",
        ("--client-rank",), topic="Ranks", same=True, plan=True, minimum=0)
    startup_timeout: float = option("duration", 300.0,
        "Seconds (or 5m) within which all workers have to be up.",
        ("--startup-timeout",), topic="Ranks")
    shutdown_timeout: float = option("duration", 10.0,
        "Seconds until a rank's processes are killed at the end. Workers get half of it, at most 2 s.",
        ("--shutdown-timeout",), topic="Ranks")
    tolerate_lost_ranks: int = option("int", 0,
        "Ranks that may be lost before the job ends, if the launcher continues as well (docs/exit-codes.md).",
        ("--tolerate-lost-ranks",), topic="Ranks", same=True, minimum=0)
    walltime_signal: str | None = option("choice", None,
        "Signal before the walltime that calls Session.on_walltime, as TERM also does. "
        "Default with launch under Slurm, LSF and Flux: USR1.",
        ("--walltime-signal",), topic="Ranks", choices=("USR1", "USR2"))
    interface: str | None = option("str", None,
        "Network interface, such as ib0 or hsn0. Default, or auto: loopback if the job has one node, else a fast one "
        "that all nodes have, else mostly that of the default route.",
        ("--interface",), topic="Network and security",
        pattern=r"[^\s/]+", expected="the name of a network interface, such as 'ib0'")
    protocol: Protocol = option("choice", None,
        "Network protocol of Dask. auto (the default): tls, with GPU memory going from GPU to GPU over UCX if "
        "every rank can. tls: no UCX. ucx: tls, with large NumPy arrays and GPU memory between workers over "
        "UCX; between nodes only with RDMA. tcp: open to everyone who can reach it.",
        ("--protocol",), topic="Network and security", resolved=Protocol.TLS, same=True, choices=(AUTO, *Protocol, UCX))
    #: The use of UCX between workers; follows from `protocol` and `security`.
    worker_ucx: WorkerUcx = WorkerUcx.AUTO
    security: bool = option("bool", None,
        "Encrypt and authenticate connections, with certificates made for this job. Default: yes, but data over UCX "
        "are not encrypted. --security: no UCX. --no-security: no.",
        ("--security/--no-security",), topic="Network and security", resolved=True)
    data_encryption: bool = option("bool", True,
        "Encrypt large arrays between workers where UCX does not carry them. --no-data-encryption: only their connections are "
        "authenticated, which is faster, for networks that nobody else can reach.",
        ("--data-encryption/--no-data-encryption",), topic="Network and security", same=True)
    scheduler_port: int | None = option("int", None,
        "Port of the scheduler. Default: a random one.",
        ("--scheduler-port",), topic="Network and security", minimum=0, maximum=65535)
    dashboard: bool = option("bool", True,
        "Serve the dashboard. --no-dashboard: nothing listens for HTTP.",
        ("--dashboard/--no-dashboard",), topic="Dashboard, logs and report")
    dashboard_address: str = option("listen", None,
        f"HOST:PORT of the dashboard. Default: {DASHBOARD_ADDRESS} or a free port, for ssh tunnels; :8787 is all "
        "interfaces, and the token crosses the network in clear.",
        ("--dashboard-address",), topic="Dashboard, logs and report", resolved=DASHBOARD_ADDRESS)
    log_level: str = option("choice", "warning",
        "Least severity of the messages that Dask logs. debug: the report has the texts of errors as well.",
        ("--log-level",), topic="Dashboard, logs and report",
        choices=("debug", "info", "warning", "error", "critical"))
    log_directory: str | None = option("path", None,
        "Directory for a log file of the scheduler, of each rank and of each worker: for log records, not for prints. Existing "
        "files get more lines.",
        ("--log-directory",), topic="Dashboard, logs and report")
    report: str | None = option("path", None,
        "Report of the job, written when the script ends, even by an exception: FILE.html for a browser (needs bokeh), FILE.json "
        "its figures.",
        ("--report",), topic="Dashboard, logs and report")
    summary: bool = option("bool", False,
        "End the job's output with the report's summary: were the GPUs busy, where did the time go, what to change.",
        ("--summary/--no-summary",), topic="Dashboard, logs and report")
    scheduler_file: str | None = option("path", None,
        "File by which others find the scheduler and its credentials: written, or "
        "read with --no-scheduler.",
        ("--scheduler-file",), topic="Other clusters")
    scheduler: bool = option("bool", True,
        "Start a scheduler. Without one, the workers attach to a running cluster.",
        ("--scheduler/--no-scheduler",), topic="Other clusters", same=True)
    scheduler_address: str | None = option("str", None,
        "Address of the running scheduler to attach to, with --no-scheduler; its credentials come from a scheduler file.",
        ("--scheduler-address",), topic="Other clusters",
        pattern=r"([a-z]+://)?(\[[^\s\[\]]+\]|[^\s/:\[\]]+):[0-9]{1,5}",
        expected="an address with its port, such as 'tls://10.0.0.1:8786'")
    comm: Any = option("object", None,
        "mpi4py communicator to use instead of COMM_WORLD.",
        cli=False, config=False)
    exit: bool = option("bool", True,
        "End all ranks but the client's in initialize().",
        cli=False, config=False)
    # fmt: on
    #: Warnings for the user, to be printed once, on rank 0.
    warnings: tuple[Problem, ...] = ()
    #: Names of the options that the user has set, in the program, on the command line or in the configuration.
    explicit: frozenset[str] = frozenset()
    #: Those of them that are set for this job: in the program or on the command line.
    given: frozenset[str] = frozenset()

    @property
    def recorded(self) -> bool:
        """Whether the job's work is recorded from the start."""
        return self.report is not None or self.summary

    @property
    def survives(self) -> bool:
        """Whether the job goes on if it loses a rank."""
        return self.tolerate_lost_ranks > 0

    @property
    def grace(self) -> float:
        """Seconds that workers get to close politely, well within the shutdown deadline."""
        return min(2.0, self.shutdown_timeout / 2)

    @property
    def script_rank(self) -> int:
        """The rank that runs the script: the user's choice, else 0; in the layout exclusive the first without the scheduler."""
        if self.client_rank is not None:
            return self.client_rank
        scheduler = self.scheduler_rank if self.scheduler else 0
        return int(self.layout == "exclusive" and scheduler != 1)

    @property
    def worker_kind(self) -> Literal["auto", "cpu", "gpu"]:
        """The kind of the class: CUDAWorker needs GPUs, Nanny and Worker use none, others use those that there are."""
        cls = self.worker_class
        bases = cls.__mro__ if isinstance(cls, type) else ()
        paths = [f"{base.__module__}.{base.__name__}" for base in bases] or [str(cls)]
        if any(path.rpartition(".")[2] == "CUDAWorker" for path in paths):
            return "gpu"
        package, _, name = paths[0].rpartition(".")
        # A subclass of Nanny may be made for GPUs: only Dask's two classes are certain.
        if name in ("Nanny", "Worker") and package.split(".")[0] in ("distributed", "dask"):
            return "cpu"
        return "auto"


# fmt: off
#: Names that set another option: `options.resolve` turns them into the layout and the class of the workers.
_SYNONYMS = (
    Option("bool", "exclusive_workers", None,
        "dask-mpi's name for --layout exclusive and --layout shared.",
        ("--exclusive-workers/--inclusive-workers",), topic="As in dask-mpi", config=False),
    Option("bool", "nanny", None,
        "Deprecated: use --worker-class distributed.Nanny or distributed.Worker.",
        ("--nanny/--no-nanny",), topic="As in dask-mpi", config=False),
)
# fmt: on

#: All options by name, in the order of ``--help-all``.
OPTIONS: Mapping[str, Option] = {
    **{each.name: Option(name=each.name, **each.metadata) for each in fields(Options) if each.metadata},
    **{each.name: each for each in _SYNONYMS},
}
