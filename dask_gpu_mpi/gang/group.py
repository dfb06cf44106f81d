"""The `Group` that the function of a gang gets, the task that calls it in a worker, and the names of their protocol.

`spmd` sends a task, `run_member`, to the worker of each member. It joins the gang, makes a `Group`, and calls the function.
The operations of a group are calls to the scheduler's plugin (`scheduler_plugin`), which answers when all members have called.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.streams import environment
from dask_gpu_mpi.base.text import one_line
from dask_gpu_mpi.errors import GangCancelledError
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.network.interfaces import as_host, list_interfaces

if TYPE_CHECKING:
    from distributed import Worker

#: Most seconds of a limit, three years: all clocks and timers support them.
MOST_SECONDS = 100_000_000
#: Bytes of a pickled object of `Group.broadcast` and `Group.allgather` at most: it passes through the scheduler.
MAX_OBJECT = 1 << 20
#: Default seconds for which a member waits for the others in one operation.
OPERATION_TIMEOUT = 1800.0


class Group:
    """One member's view of its gang: the first argument of the function that `spmd` runs.

    Attributes
    ----------
    rank : int
        This member, from 0.
    size : int
        Number of members.
    local_rank, local_size : int
        The same among the members on this node.
    node_rank : int
        This node among the nodes of the gang, from 0.
    hosts : tuple of str
        The host name of each member, in rank order.
    device : int or None
        The index of this worker's GPU in its process, for ``torch.cuda.set_device``: 0, since each GPU worker sees its own GPU
        first. None on a CPU worker.
    master_addr : str
        Address of rank 0's node, on the cluster's network.
    master_port : int
        A TCP port there that was free when all members had joined.

    Examples
    --------
    >>> def members(group):  # doctest: +SKIP
    ...     return group.allgather((group.rank, group.hosts[group.rank]))
    >>> session.spmd(members)[0]  # doctest: +SKIP
    [(0, 'node1'), (1, 'node1'), (2, 'node2'), (3, 'node2')]
    """

    def __init__(
        self,
        rank: int,
        hosts: tuple[str, ...],
        call: Callable[[str, float, dict[str, Any]], dict[str, Any]],
        cancelled: threading.Event,
        *,
        place: Mapping[str, int],
        device: int | None,
        master_addr: str,
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.local_rank = place["local_rank"]
        self.local_size = place["local_size"]
        self.node_rank = place["node_rank"]
        self.hosts = hosts
        self.device = device
        self.master_addr = master_addr
        #: Set by `_agree_on_port`, before the function is called.
        self.master_port = 0
        self._call = call
        self._cancelled = cancelled
        #: The number of the next operation: all members count the same.
        self._round = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"<Group rank={self.rank}({self.size}) local_rank={self.local_rank}({self.local_size}) "
            f"host={self.hosts[self.rank]} device={self.device} master={self.master_addr}:{self.master_port}>"
        )

    @property
    def cancelled(self) -> bool:
        """Whether the gang is over: a loop that checks this, and returns, saves its worker a restart."""
        return self._cancelled.is_set()

    def barrier(self, timeout: float = OPERATION_TIMEOUT) -> None:
        """Wait until all members have called this.

        Parameters
        ----------
        timeout : float
            Seconds.

        Raises
        ------
        GangCancelledError
            Another member has failed, or the gang is over for another reason.
        TimeoutError
            Some members have not called it in time.
        """
        self._exchange("barrier", b"", timeout)

    def broadcast(self, obj: Any = None, root: int = 0, timeout: float = OPERATION_TIMEOUT) -> Any:
        """Send an object of one member to all; all call this, and wait for all.

        The id of a NCCL communicator, for example: ``group.broadcast(nccl.get_unique_id() if group.rank == 0 else None)``.

        Parameters
        ----------
        obj : object
            The object of `root`, pickled 1 MiB at most; ignored on the others.
        root : int
            The rank that sends its object.
        timeout : float
            Seconds.

        Returns
        -------
        object
            That of `root`.

        Raises
        ------
        ValueError
            The object is too large, or there is no such rank.
        GangCancelledError, TimeoutError
            As `barrier`.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast: no rank {root} (expected 0 to {self.size - 1})")
        part = _pickled(obj, "broadcast") if self.rank == root else b""
        return pickle.loads(self._exchange(f"broadcast from rank {root}", part, timeout)[root])

    def allgather(self, obj: Any, timeout: float = OPERATION_TIMEOUT) -> list[Any]:
        """Send the objects of all members to all.

        Parameters
        ----------
        obj : object
            Of this member, pickled 1 MiB at most.
        timeout : float
            Seconds.

        Returns
        -------
        list
            The objects in rank order.

        Raises
        ------
        ValueError
            The object is too large.
        GangCancelledError, TimeoutError
            As `barrier`.
        """
        parts = self._exchange("allgather", _pickled(obj, "allgather"), timeout)
        return [pickle.loads(part) for part in parts]

    def _agree_on_port(self, host: str) -> None:
        """Let rank 0 choose a free port at its address `host`, as late as possible: another program may use the port first."""
        port = str(free_port(host)).encode() if self.rank == 0 else b""
        self.master_port = int(self._exchange("start", port, AGREEING)[0])

    def _exchange(self, operation: str, part: bytes, timeout: float) -> list[bytes]:
        """Send this member's part of an operation to the scheduler; returns the parts of all members, in rank order."""
        if not (is_number(timeout) and 0 < timeout <= MOST_SECONDS):
            raise ValueError(
                f"{operation}: invalid timeout {timeout!r} (expected seconds above 0, at most {MOST_SECONDS})"
            )
        with self._lock:
            number, self._round = self._round, self._round + 1
            content = {"number": number, "operation": operation, "part": part, "timeout": timeout}
            answer = self._call(Call.EXCHANGE, timeout, content)
        match answer["state"]:
            case Reply.GOOD:
                parts: list[bytes] = answer["parts"]
                return parts
            case Reply.LATE:
                missing = ", ".join(map(str, answer["missing"]))
                raise TimeoutError(f"{operation}: rank(s) {missing} have not come within {timeout:g} s")
        self._cancelled.set()
        raise GangCancelledError(f"{operation}: the gang is cancelled: {answer['why']}")


def _pickled(obj: Any, operation: str) -> bytes:
    """Pickle an object, by value if it is of the script's ``__main__``."""
    import cloudpickle

    data: bytes = cloudpickle.dumps(obj)
    if len(data) > MAX_OBJECT:
        raise ValueError(
            f"{operation}: the object has {len(data)} bytes (expected {MAX_OBJECT} at most: it passes through the scheduler). "
            "Fix: pass it through torch.distributed, NCCL, or a Dask future"
        )
    return data


# The task that runs in a member's worker.

#: Seconds after the scheduler's own limit in which its answer must arrive. A busy scheduler is late, as it is for Dask's own
#: messages; one that is lost closes its connections, which ends the wait.
ANSWER_SLACK = 600.0
#: Seconds for the first operation of a gang, before those of the function.
AGREEING = 60.0
#: By gang, the events that end the members in this process: `run_member` adds its own, and `_on_cancel` sets them.
_cancelled: dict[str, threading.Event] = {}


def run_member(gang: str, rank: int, start_timeout: float, fn: Callable[..., Any], *args: Any) -> Any:
    """Wait for the other members, run `fn`, report its end, and return its result.

    An exception of `fn` is sent to the scheduler, which knows those of the other members, and not raised; the result is
    `no_result` then.
    """
    from distributed import get_worker
    from distributed.comm.addressing import get_address_host

    worker: Any = get_worker()
    call = _Calls(worker, gang, rank)
    cancelled = _cancelled[gang] = threading.Event()

    worker.stream_handlers[CANCEL] = _on_cancel
    try:
        host = get_address_host(worker.address)
        joined = call(Call.JOIN, start_timeout, {"host": socket.gethostname()})
        if joined["state"] != Reply.GOOD:
            return no_result(gang)
        group = Group(
            rank,
            tuple(joined["hosts"]),
            call,
            cancelled,
            place=joined["place"],
            device=device_of(worker.state.total_resources, os.environ),
            master_addr=joined["master_addr"],
        )

        def run() -> Any:
            group._agree_on_port(host)
            with environment(variables_of(group, joined["place"]["nodes"], interface_of(host))):
                return fn(group, *args)

        has_returned, result = _run(run, group, call.fail)
        # In the stream by which Dask reports the task's result next, so that the scheduler has it before the result.
        worker.log_event(LEAVE, {"gang": gang, "rank": rank, "spoilt": torch_is_initialised()})
        return result if has_returned else no_result(gang)
    finally:
        call.close()
        _cancelled.pop(gang, None)


def _run(
    function: Callable[[], Any], group: Group, failed: Callable[[BaseException], None]
) -> tuple[bool, Any]:
    """Whether a member's function has returned, and its result; its exception is passed to `failed`."""
    try:
        return True, function()
    except BaseException as error:  # includes SystemExit: a member that exits has failed
        if not (isinstance(error, GangCancelledError) and group.cancelled):  # then another member has failed
            # Report it at once: afterwards the function's objects are freed, and an object that waits for other members may hang.
            failed(error)
        return False, None


def variables_of(group: Group, nodes: int, interface: str | None) -> dict[str, str]:
    """The variables by which torch, JAX and NCCL find each other: torchrun's and JAX's names, and the cluster's interface."""
    variables = {
        "RANK": group.rank,
        "WORLD_SIZE": group.size,
        "LOCAL_RANK": group.local_rank,
        "LOCAL_WORLD_SIZE": group.local_size,
        "GROUP_RANK": group.node_rank,
        "GROUP_WORLD_SIZE": nodes,
        "NODE_RANK": group.node_rank,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "JAX_COORDINATOR_ADDRESS": f"{as_host(group.master_addr)}:{group.master_port}",
        "JAX_NUM_PROCESSES": group.size,
        "JAX_PROCESS_ID": group.rank,
    }
    if interface is not None:
        # "=": exactly this name; otherwise NCCL uses any that begins with it
        defaults = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        # the user's own values stay
        variables |= {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in variables.items()}


def device_of(resources: Mapping[str, float], environ: Mapping[str, str]) -> int | None:
    """The index of a worker's GPU in its process: the first visible one, or None without a GPU.

    Workers of this package have a resource for it; those of another cluster have a GPU if one is visible.

    >>> device_of({"GPU": 1}, {}), device_of({"CPU": 4}, {"CUDA_VISIBLE_DEVICES": "0"}), device_of({}, {})
    (0, None, None)
    """
    if "GPU" in resources or "CPU" in resources:
        return 0 if resources.get("GPU") else None
    return 0 if environ.get(VISIBLE_DEVICES, "").strip() not in ("", "-1", "NoDevFiles", "void") else None


def free_port(host: str) -> int:
    """A TCP port that is free now at this address of this node."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def interface_of(host: str) -> str | None:
    """The network interface of this node with this address."""
    return next((found.name for found in list_interfaces() if found.address == host), None)


def torch_is_initialised() -> bool:
    """Whether this process is in a process group of PyTorch, so that a later gang can't make another.

    The members of a failed gang can't leave it: with NCCL ``destroy_process_group()`` waits for all of them.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())
    except AttributeError:  # its import has failed half way
        return True


def _on_cancel(gang: str) -> None:
    """Handle the scheduler's message, in the worker's event loop."""
    if (event := _cancelled.get(gang)) is not None:
        event.set()


class _Calls:
    """Calls of a member to the scheduler, from the task's thread."""

    def __init__(self, worker: Worker, gang: str, rank: int) -> None:
        from distributed import rpc

        self._loop: Any = worker.loop
        self._sender: dict[str, Any] = {"gang": gang, "rank": rank}
        # `Worker.scheduler` would not wait long enough for a connection to a busy scheduler
        self._scheduler = rpc(
            worker.scheduler.address, timeout=ANSWER_SLACK, connection_args=worker.connection_args
        )

    def __call__(self, operation: str, timeout: float, content: dict[str, Any]) -> dict[str, Any]:
        """Call, and wait for the answer; `timeout` is the scheduler's own limit."""
        limit = timeout + ANSWER_SLACK

        async def answer() -> Any:
            async with asyncio.timeout(limit):
                return await getattr(self._scheduler, operation)(**self._sender, **content)

        answering = asyncio.run_coroutine_threadsafe(answer(), self._loop.asyncio_loop)
        result: dict[str, Any] = answering.result(limit + ANSWER_SLACK)
        return result

    def fail(self, error: BaseException) -> None:
        """Report an exception of this member."""
        text, data = packed(error)
        self(Call.FAIL, 0.0, {"text": f"raised {one_line(text)}", "error": data})

    def close(self) -> None:
        """Close the connections."""
        self._loop.add_callback(self._scheduler.close_rpc)


# The protocol between clients, members and the scheduler.

#: The scheduler's plugin.
PLUGIN = "dask_gpu_mpi-gangs"
#: The message of the scheduler to a member's worker when the gang is over.
CANCEL = "dask_gpu_mpi_gang_cancel"
#: The event that a member's worker logs when the function has ended.
LEAVE = "dask_gpu_mpi_gang_leave"


class Call(StrEnum):
    """Operations of the scheduler, for clients and members."""

    OPEN = "gang_open"
    WATCH = "gang_watch"
    FAIL = "gang_fail"
    CLOSE = "gang_close"
    JOIN = "gang_join"
    EXCHANGE = "gang_exchange"


class Reply(StrEnum):
    """The entry ``state`` of an answer of the scheduler."""

    #: The gang has its workers; it has started; a round is complete.
    GOOD = "good"
    #: The gang can't be made, for example of a worker without a nanny.
    REFUSED = "refused"
    #: The gang is over; the answer has the reason.
    OVER = "over"
    #: This one wait was too long; the gang continues.
    LATE = "late"


def no_result(gang: str) -> str:
    """The result of a member's task if its function has failed or the gang is over."""
    return f"__dask_gpu_mpi_no_result__{gang}"


def is_number(value: Any) -> bool:
    """Whether it is a finite number.

    >>> [is_number(value) for value in (1, 0.5, True, None, float("nan"))]
    [True, True, False, False, False]
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def packed(error: BaseException) -> tuple[str, bytes]:
    """An exception's text, and the exception itself with its traceback and causes, pickled.

    One that can't be pickled, or is too large for the scheduler, is replaced by one with its text; and a traceback of
    hundreds of frames, too deep for pickle, is left out.
    """
    import cloudpickle
    from tblib import pickling_support  # type: ignore[import-untyped] # distributed depends on it

    try:
        text = repr(error)
    except Exception:  # the user's class fails to give its text
        text = type(error).__name__
    instead = Exception(one_line(text)).with_traceback(error.__traceback__)
    for each in (error, instead):
        pickling_support.install(each)
        with contextlib.suppress(Exception):
            data: bytes = cloudpickle.dumps(each)
            pickle.loads(data)
            if len(data) <= MAX_OBJECT:
                return text, data
    return text, cloudpickle.dumps(instead.with_traceback(None))
