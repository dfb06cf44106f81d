"""Every option, once: its names, default, help and kind.

``initialize()``, ``execute()``, the command line, ``gpu-mpi.yaml`` and the documentation are checked against this table or made
from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .model import DASHBOARD_ADDRESS, Option
from .protocols import AUTO, Protocol

__all__ = ["OPTIONS"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"

# fmt: off
_TABLE = (
    # dask-mpi's arguments, with their meaning. Changed on purpose: nthreads (1), worker_class (distributed.Worker or
    # Nanny), dashboard_address (":8787", all interfaces), exclusive_workers (True) and the command line's name ("dask_mpi").
    Option("interface", "str", None,
           "Network interface, such as ib0 or hsn0. Default, or auto: loopback if the job has one node, else a fast one "
           "that all nodes have, else that of the default route.",
           ("--interface",), pattern=r"[^\s/]+", expected="the name of a network interface, such as 'ib0'"),
    Option("nthreads", "int", None,
           "Threads of each worker. Default: 1 with a GPU, else the rank's fair share of the node's "
           "cores.",
           ("--nthreads",), minimum=1),
    Option("local_directory", "path", None,
           "Directory for the workers' scratch files, node-local and short.",
           ("--local-directory",)),
    Option("memory_limit", "memory", "auto",
           "Memory of each worker: bytes, a text such as 4GB, a fraction of the node's memory, 0 for no "
           "limit, or auto: the node's memory divided by its workers.",
           ("--memory-limit",), nullable=True),
    Option("nanny", "bool", None,
           "Deprecated: use --worker-class distributed.Nanny or distributed.Worker.",
           ("--nanny/--no-nanny",), config=False),
    Option("dashboard", "bool", True,
           "Whether the scheduler serves the dashboard, which the token in the printed link opens. If not, nothing "
           "listens for HTTP.",
           ("--dashboard/--no-dashboard",)),
    Option("dashboard_address", "listen", None,
           f"HOST:PORT of the dashboard. Default: {DASHBOARD_ADDRESS}, for ssh tunnels; :8787 is all "
           "interfaces, and the token crosses the network in clear.",
           ("--dashboard-address",)),
    Option("protocol", "choice", None,
           "Network protocol of Dask. auto (the default): tls, with GPU memory going from GPU to GPU over UCX where "
           "every rank can. tls: everything encrypted. ucx: tls, with large NumPy arrays and GPU memory between workers over "
           "UCX; between nodes only with RDMA. tcp: open to everyone on the network.",
           ("--protocol",), choices=(AUTO, *Protocol)),
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
           "Whether to start a scheduler; without one the workers attach to a running cluster.",
           ("--scheduler/--no-scheduler",)),
    Option("scheduler_address", "str", None,
           "Address of the running scheduler to attach to, with --no-scheduler; its credentials come from a scheduler file.",
           ("--scheduler-address",), pattern=r"([a-z]+://)?(\[[^\s\[\]]+\]|[^\s/:\[\]]+):[0-9]{1,5}",
           expected="an address with its port, such as 'tls://10.0.0.1:8786'"),
    Option("scheduler_file", "path", None,
           "File by which others find the scheduler and its credentials: written, or read with --no-"
           "scheduler.",
           ("--scheduler-file",)),
    Option("scheduler_port", "int", None,
           "Port of the scheduler. Default: a random one.",
           ("--scheduler-port",), minimum=0, maximum=65535),
    Option("scheduler_rank", "int", 0,
           "MPI rank on whose node the scheduler runs.",
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
           expected="letters, digits and . _ + - (the name becomes part of file names)"),
    # dask-gpu-mpi's own
    Option("security", "bool", None,
           "Whether connections are encrypted and authenticated, with certificates made for this job. Default: authenticated "
           "always, encrypted but for data that goes over UCX; --security: encrypted always, --no-security: neither.",
           ("--security/--no-security",)),
    Option("layout", "choice", "shared",
           "shared: every rank has workers. exclusive: one rank for the scheduler, one for the client if there is a script, "
           "as in dask-mpi.",
           ("--layout",), choices=("shared", "exclusive")),
    Option("cpu_workers", "int", 0,
           "CPU workers on every node, in addition to those of the GPUs.",
           ("--cpu-workers",), minimum=0),
    Option("default_workers", "choice", "all",
           "Where tasks run that ask for no worker and no resource. gpu: on the GPU workers, where there are any. all: on any "
           "worker, CPU workers too.",
           ("--default-workers",), choices=("all", "gpu")),
    Option("gpus_per_worker", "int", 1,
           "GPUs that each GPU worker sees: neighbours, for models that need several.",
           ("--gpus-per-worker",), minimum=1),
    Option("require_idle_gpus", "bool", False,
           "Whether to refuse GPUs on which other processes hold memory. By default there is a warning.",
           ("--require-idle-gpus/--no-require-idle-gpus",)),
    Option("startup_timeout", "duration", 300.0,
           "Seconds (or 5m) within which all workers have to be up, else the job fails.",
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
    Option("report", "path", None,
           "File with what the job has done: FILE.html is one page for a browser (needs bokeh), FILE.json its figures. "
           "Written on the client rank when the script ends, however it ends.",
           ("--report",)),
)
# fmt: on

#: All options by name, in the order of ``--help``.
OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}
