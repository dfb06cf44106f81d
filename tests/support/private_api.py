"""What this package uses of other packages that these do not promise: one table, and nothing of the kind is used beside it.

Such names may go with any release: `without` says what happens then. The test of this module looks up every name in what is
installed, and fails by that name. It reads the package for private names and for assignments to what others own that are not
here. contributing/upstream.md has for each name the public way that is missing.

>>> [entry.without for entry in TABLE if entry.name == "_run_module_as_main"]
['-m MODULE, a folder and a zip file end with an AttributeError']
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABLE", "PrivateName"]


@dataclass(frozen=True)
class PrivateName:
    """A name of another package: private, undocumented, or public but replaced by us."""

    #: The module that has it.
    module: str
    #: Its name there; after a class, an attribute of the class or of its instances.
    name: str
    #: Modules of this package that use it.
    used_in: tuple[str, ...]
    #: Versions that have it.
    seen: str
    #: What it is needed for.
    why: str
    #: What happens where it is gone.
    without: str
    #: Whether this package assigns it, or an item of it: the owner's code then runs into ours.
    replaced: bool = False


_PYTHON = "Python 3.11 to 3.13"
_DISTRIBUTED = "distributed 2025.9.1 to 2026.8.0"
_DASK_CUDA = "dask-cuda 25.10 to 26.10"


def _of(
    module: str, names: str, used_in: str, seen: str, *, why: str, without: str, replaced: bool = False
) -> tuple[PrivateName, ...]:
    """An entry for each of these names, which are used together."""
    users = tuple(used_in.split())
    return tuple(PrivateName(module, name, users, seen, why, without, replaced) for name in names.split())


#: All of them, package by package.
TABLE: tuple[PrivateName, ...] = (
    *_of(
        "multiprocessing.forkserver",
        "main",
        "agent/forkserver",
        _PYTHON,
        why="the agent forks itself into the fork server",
        without="the agent does not start, and the job ends with one line that says so",
    ),
    *_of(
        "multiprocessing.forkserver",
        "connect_to_new_process",
        "agent/forkserver",
        _PYTHON,
        why="processes of multiprocessing are children of the fork server that the agent has forked",
        without="multiprocessing starts a fork server, in which nothing is imported yet",
        replaced=True,
    ),
    *_of(
        "multiprocessing.resource_tracker",
        "_resource_tracker main",
        "agent/forkserver",
        _PYTHON,
        why="the resource tracker is a fork of the agent as well, and removes the scratch of an agent that was killed",
        without="the agent does not start, and the job ends with one line that says so",
    ),
    *_of(
        "multiprocessing.resource_tracker",
        "_resource_tracker._fd",
        "agent/forkserver",
        _PYTHON,
        why="as above",
        without="as above",
        replaced=True,
    ),
    *_of(
        "runpy",
        "_run_module_as_main",
        "job/program",
        _PYTHON,
        why="-m MODULE, a folder and a zip file run as Python's main program runs them, in a __main__ that stays",
        without="-m MODULE, a folder and a zip file end with an AttributeError",
    ),
    *_of(
        "libc",
        "__cxa_atexit",
        "base/signals",
        "glibc and musl",
        why="the exit code of a rank although Python ends already, with another one",
        without="SIGTERM while Python ends has the exit code of the script",
    ),
    *_of(
        "threading",
        "_SHUTTING_DOWN",
        "base/signals",
        _PYTHON,
        why="it tells that the main program has ended and that Python waits for threads, where it drops what a signal raises",
        without="SIGTERM during that wait has the exit code 0 where the main program had it",
    ),
    *_of(
        "distributed.utils",
        "_forkserver_preload_set",
        "agent/main",
        _DISTRIBUTED,
        why="distributed would import every optional package it knows before it uses a fork server, which is there already",
        without="a second more before the first worker",
        replaced=True,
    ),
    *_of(
        "distributed.versions",
        "error_message",
        "agent/scheduler",
        _DISTRIBUTED,
        why="a worker that registers is compared with each set of versions once",
        without="it is compared with every worker, 5 ms with 3,000 of them",
        replaced=True,
    ),
    *_of(
        "distributed",
        "Client.shutdown",
        "job/dask_client",
        _DISTRIBUTED,
        why="it does nothing on a client that is closed, and requests the report's record before",
        without="a script that ends its cluster twice gets Dask's error; the report lacks its last minute",
        replaced=True,
    ),
    *_of(
        "distributed",
        "Client.__init__ LocalCluster.__init__",
        "job/dask_client",
        _DISTRIBUTED,
        why="a script that starts a cluster beside the job's is warned, and a client on a rank that has none is refused",
        without="neither happens",
        replaced=True,
    ),
    *_of(
        "distributed",
        "Client.status",
        "job/dask_client",
        _DISTRIBUTED,
        why="a client whose close has failed half way does not try again when Python ends, and wait forever",
        without="such a script does not end",
        replaced=True,
    ),
    *_of(
        "distributed.core",
        "Server.handlers",
        "agent/scheduler gang/scheduler_plugin view/job_watch workers/plugins",
        _DISTRIBUTED,
        why="the scheduler answers clients, members of gangs, `top` and the report; its registration of workers, its broadcast, "
        "and the dump of a worker's state are replaced; a worker forgets data that it can't receive",
        without="the scheduler does not start, and the job ends with one line that says so",
        replaced=True,
    ),
    *_of(
        "distributed.core",
        "Server.stream_handlers",
        "agent/scheduler gang/group",
        _DISTRIBUTED,
        why="graphs wait until the scheduler has imported the libraries of the script; the scheduler tells the workers of a "
        "gang that it is over",
        without="as `Server.handlers`",
        replaced=True,
    ),
    *_of(
        "distributed.nanny",
        "Nanny.process",
        "workers/lifecycle",
        _DISTRIBUTED,
        why="the exit code of a process",
        without="the start fails, and says so",
    ),
    *_of(
        "distributed.nanny",
        "WorkerProcess.worker_dir",
        "workers/lifecycle",
        _DISTRIBUTED,
        why="a worker's directory goes with the scratch, and not while the event loop waits",
        without="the end of a job takes longer by the removal of the directory",
        replaced=True,
    ),
    *_of(
        "distributed.nanny",
        "Nanny.pid",
        "workers/factory workers/lifecycle",
        _DISTRIBUTED,
        why="a worker that dies again and again is removed; the process whose last output is reported",
        without="the start fails, and says so",
    ),
    *_of(
        "distributed.worker",
        "Worker.transfer_incoming_log",
        "check/tasks workers/plugins",
        _DISTRIBUTED,
        why="`top` and the report show what workers send each other, `check` how fast; distributed's metrics have no totals",
        without="workers do not start",
    ),
    *_of(
        "distributed.worker",
        "Worker.transfer_outgoing_bytes_total",
        "workers/plugins",
        _DISTRIBUTED,
        why="`top` and the report show what workers send each other, and distributed's own metrics have no totals",
        without="workers do not start",
    ),
    *_of(
        "distributed.worker",
        "Worker.metrics",
        "workers/plugins",
        _DISTRIBUTED,
        why="as above: a plugin adds the figures",
        without="workers do not start",
        replaced=True,
    ),
    *_of(
        "distributed.worker_state_machine",
        "TaskErredMsg",
        "workers/plugins",
        _DISTRIBUTED,
        why="a task whose data can't be received fails; with distributed alone it waits forever",
        without="workers do not start",
    ),
    *_of(
        "distributed.worker_state_machine",
        "TaskState.startstops",
        "workers/plugins",
        _DISTRIBUTED,
        why="the report shows the bytes of each transfer; a key is added to each",
        without="it does not",
        replaced=True,
    ),
    *_of(
        "distributed.scheduler",
        "TaskState.worker_restrictions",
        "agent/scheduler",
        _DISTRIBUTED,
        why="with --default-workers gpu, tasks without restrictions run on GPU workers",
        without="a submission of tasks fails",
        replaced=True,
    ),
    *_of(
        "dask_cuda.device_host_file",
        "DeviceHostFile.host_buffer",
        "workers/plugins",
        _DASK_CUDA,
        why="how much device memory a CUDAWorker keeps in host memory, which distributed sends as 0",
        without="`top` does not show it",
    ),
    *_of(
        "dask_cuda.cuda_worker",
        "Nanny",
        "workers/factory",
        _DASK_CUDA,
        why="replaced while a CUDAWorker is made, which takes neither environment nor plugins for its nannies",
        without="the worker is not made, and the job ends with one line that says so",
        replaced=True,
    ),
    *_of(
        "distributed.comm.registry",
        "backends",
        "network/listeners network/reachability network/worker_comm",
        _DISTRIBUTED,
        why="a listener of tls with a deadline for handshakes, connections that can offer streams or UCX, and one connection to "
        "a scheduler or worker, without Dask's further tries",
        without="as `TLSListener._prepare_stream`",
        replaced=True,
    ),
    *_of(
        "distributed.comm.tcp",
        "TLSListener._prepare_stream",
        "network/listeners",
        _DISTRIBUTED,
        why="the handshake has a deadline",
        without="the agent does not start, and the job ends with one line that says so",
    ),
    *_of(
        "distributed.dashboard.scheduler",
        "connect",
        "agent/scheduler",
        _DISTRIBUTED,
        why="the dashboard's pages come up once the cluster has",
        without="no dashboard, and a warning that says why",
    ),
    *_of(
        "distributed.dashboard.scheduler",
        "template_variables",
        "agent/scheduler",
        _DISTRIBUTED,
        why="the dashboard's navigation names the page of the GPUs, which the scheduler's process does not see",
        without="as `connect`",
    ),
    *_of(
        "distributed.node",
        "HTTPServer",
        "agent/dashboard_gate",
        _DISTRIBUTED,
        why="replaced by a subclass: the gate that asks for the token, and a deadline for each request",
        without="the scheduler does not start, and the job ends with one line that says so",
        replaced=True,
    ),
    *_of(
        "distributed.node",
        "ServerNode.start_http_server",
        "network/listeners",
        _DISTRIBUTED,
        why="without routes there is no HTTP server, which every user of the node could ask",
        without="servers without any page listen on the loopback interface, and on the dashboard's address",
        replaced=True,
    ),
    *_of(
        "distributed",
        "Scheduler.services",
        "agent/scheduler network/listeners",
        _DISTRIBUTED,
        why="the HTTP server with its port; and clients look up the port there, where there is none too",
        without="the scheduler does not start; `Client.dashboard_link` of a job without a dashboard raises KeyError",
        replaced=True,
    ),
    *_of(
        "distributed.protocol.core",
        "pickle",
        "view/snapshot",
        _DISTRIBUTED,
        why="what a stranger at the address of a cluster without encryption sends `top` is not unpickled",
        without="the test of this module fails",
        replaced=True,
    ),
    *_of(
        "distributed.protocol.serialize",
        "Serialize.data",
        "workers/plugins",
        _DISTRIBUTED,
        why="an exception of a task gets a note that names its worker, host and GPU, before it is sent",
        without="it has none",
        replaced=True,
    ),
    *_of(
        "distributed_ucxx.ucxx",
        "init_once",
        "network/ucx_endpoint",
        "ucxx and distributed-ucxx 0.46 to 0.52",
        why="UCX starts in each worker as Dask configures it",
        without="what workers send each other stays on TLS, and one line says so",
    ),
    *_of(
        "distributed_ucxx.ucxx",
        "synchronize_stream",
        "network/ucx_endpoint",
        "ucxx and distributed-ucxx 0.46 to 0.52",
        why="UCX between workers waits for the GPU as distributed-ucxx does",
        without="what workers send each other stays on TLS, and one line says so",
    ),
    *_of(
        "ucxx.core",
        "_get_ctx",
        "network/ucx_endpoint",
        "ucxx and distributed-ucxx 0.46 to 0.52",
        why="UCX makes progress while a frame is under way, and keeps no core busy between",
        without="what workers send each other stays on TLS, and one line says so",
    ),
    *_of(
        "ucxx._lib.libucxx",
        "UCXContext",
        "network/ucx_endpoint",
        "ucxx and distributed-ucxx 0.46 to 0.52",
        why="replaced while UCX starts: no active messages, which read any address of the process for a peer",
        without="what workers send each other stays on TLS, and one line says so",
        replaced=True,
    ),
)
