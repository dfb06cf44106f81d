"""The `Group` that the function of a gang gets, and the protocol between client, scheduler and members."""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.base.text import one_line
from dask_gpu_mpi.errors import GangCancelledError

#: Most seconds of a limit, three years: all clocks and timers support them.
MOST_SECONDS = 100_000_000
#: The scheduler's plugin.
PLUGIN = "dask_gpu_mpi-gangs"
#: The message of the scheduler to a member's worker when the gang is over.
CANCEL = "dask_gpu_mpi_gang_cancel"
#: The event that a member's worker logs when the function has ended.
LEAVE = "dask_gpu_mpi_gang_leave"
#: Bytes of a pickled object of `Group.broadcast` and `Group.allgather` at most: it passes through the scheduler.
MAX_OBJECT = 1 << 20
#: Default seconds for which a member waits for the others in one operation.
OPERATION_TIMEOUT = 1800.0


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
        master: tuple[str, int],
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.local_rank = place["local_rank"]
        self.local_size = place["local_size"]
        self.node_rank = place["node_rank"]
        self.hosts = hosts
        self.device = device
        self.master_addr, self.master_port = master
        self._call = call
        self._cancelled = cancelled
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

    def _exchange(self, operation: str, part: bytes, timeout: float) -> list[bytes]:
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
