"""The data of `top`: a row for each GPU and for each worker without one, made of the scheduler's answers.

A `Link` asks the scheduler for its ``identity()`` and for the facts of the job (`view.job_watch`); `snapshot_of` makes the rows,
and `with_rates` their rates. `view.top_view` draws a `Snapshot`, `as_json` prints it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dask.utils import natural_sort_key

from dask_gpu_mpi.base.plain_data import from_plain, unpack
from dask_gpu_mpi.base.text import printable
from dask_gpu_mpi.base.timeline import METRIC
from dask_gpu_mpi.errors import ClusterLostError, InputError
from dask_gpu_mpi.machine.nvidia import reasons_of
from dask_gpu_mpi.network.credentials import clock_problem
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.view.heartbeat import gpus_of, integer, mapping, number, spilled_of
from dask_gpu_mpi.view.job_watch import FACTS_OPERATION

#: Number of the schema of `as_json`.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A GPU with its worker, or a worker without one; None: not known. Memory is in bytes, rates in bytes per second.

    Only the row of its first GPU has the figures of the worker, so that sums are right.
    """

    node: str
    worker: str
    #: Of the worker; None: it is not there.
    address: str | None = None
    #: distributed's word (``"running"``, ``"paused"``...); if it is gone ``"lost"``, or ``"closed"`` if that was requested.
    status: str = "lost"
    #: Its GPU's place on the node, and UUID.
    gpu_index: int | None = None
    device: str | None = None
    #: Percent.
    gpu_use: float | None = None
    gpu_memory: int | None = None
    gpu_memory_total: int | None = None
    #: W, °C, and J since the driver was loaded.
    gpu_power: float | None = None
    gpu_temperature: float | None = None
    gpu_energy: float | None = None
    #: The reasons for which its clocks are lowered, such as ``"power+heat"``; empty: they are not.
    gpu_slowed: str | None = None
    gpu_pcie: float | None = None
    gpu_nvlink: float | None = None
    rmm_used: int | None = None
    rmm_total: int | None = None
    host_memory: int | None = None
    #: None: no limit.
    host_limit: int | None = None
    running: int | None = None
    waiting: int | None = None
    #: Since the worker's start, and the moment of the figure.
    received: int | None = None
    sent: int | None = None
    measured: float | None = None
    received_rate: float | None = None
    sent_rate: float | None = None
    spilled: int | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A cluster at one moment."""

    #: Seconds since the epoch, by the scheduler's clock if it is one of ours.
    time: float
    scheduler: str
    rows: tuple[Row, ...]
    #: When the batch system ends the job; None: not known.
    end: float | None = None
    #: Of the start.
    notes: tuple[str, ...] = ()
    #: Of the run, the oldest first: time in seconds since the epoch, and text.
    events: tuple[tuple[float, str], ...] = ()

    @property
    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None: not known."""
        return None if self.end is None else max(0.0, self.end - self.time)


@functools.lru_cache(maxsize=1)  # it is the same for all samples
def _plan_of(packed: bytes) -> Plan | None:
    plan: Plan | None = from_plain(Plan | None, unpack(packed))
    return plan


def snapshot_of(identity: Mapping[str, Any], job: Mapping[str, Any] | None, now: float) -> Snapshot:
    """A snapshot made of ``Scheduler.identity()`` and the answer of `JobWatch`, None if the scheduler is not one of ours."""
    plan = None if job is None else _plan_of(bytes(job["plan"]))
    job = job or {}
    workers = {str(worker["name"]): (address, worker) for address, worker in identity["workers"].items()}
    rows: list[Row] = []
    if plan is not None:
        places = {(host.host, gpu.uuid): n for host in plan.hosts for n, gpu in enumerate(host.gpus)}
        for planned in plan.workers:
            name = str(planned.name)
            gpus = [(places[planned.host, device], device) for device in planned.devices]
            if name in workers:
                rows += _rows_of(planned.host, name, gpus, *workers.pop(name))
            else:
                status = "closed" if name in job.get("retired", ()) else "lost"
                rows += _rows_without_worker(planned.host, name, gpus, status)
    joined: list[Row] = []
    # from another job, or not started by us: they may have a GPU that we do not know, whose figures are shown
    for name, (address, worker) in workers.items():
        joined += _rows_of(str(worker.get("host", "")), name, [(None, None)], address, worker)
    rows += sorted(joined, key=lambda row: (row.node, natural_sort_key(row.worker)))
    return Snapshot(
        time=job.get("now", now),
        scheduler=printable(str(identity.get("address", ""))),
        rows=tuple(rows),
        end=job.get("end"),
        notes=() if plan is None else tuple(printable(str(warning)) for warning in plan.warnings),
        events=tuple((moment, printable(text)) for moment, text in job.get("events", ())),
    )


def _rows_of(
    node: str,
    name: str,
    gpus: Sequence[tuple[int | None, str | None]],
    address: str,
    worker: Mapping[str, Any],
) -> Iterator[Row]:
    """The rows of a worker with these GPUs: place on the node, and UUID; None: not known. A worker without one has a row, too."""
    figures = _gpus_of(worker)
    for position, (place, device) in enumerate(gpus or [(None, None)]):
        fields = _of_worker(worker) if position == 0 else {}
        if gpus and position < len(figures):
            fields |= figures[position]
        yield Row(
            node=printable(node),
            worker=printable(name),
            address=printable(address),
            status=printable(str(worker.get("status", "running"))),
            gpu_index=place,
            device=device,
            **fields,
        )


def _rows_without_worker(
    node: str, name: str, gpus: Sequence[tuple[int | None, str | None]], status: str
) -> Iterator[Row]:
    """The rows of a worker of the plan that is not there."""
    for place, device in gpus or [(None, None)]:
        yield Row(node=printable(node), worker=printable(name), status=status, gpu_index=place, device=device)


def _of_worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the worker itself, as fields of `Row`."""
    metrics = mapping(worker.get("metrics"))
    ours, rmm = mapping(metrics.get(METRIC)), mapping(metrics.get("rmm"))
    tasks = metrics.get("task_counts")
    to_disk, from_gpu = spilled_of(metrics)
    return {
        "rmm_used": integer(rmm.get("rmm-used")),
        "rmm_total": integer(rmm.get("rmm-total")),
        "host_memory": integer(metrics.get("memory")),
        "host_limit": integer(worker.get("memory_limit")) or None,
        "running": _sum(tasks, "executing", "long-running"),
        "waiting": _sum(tasks, "waiting", "ready", "constrained"),
        "received": integer(ours.get("received")),
        "sent": integer(ours.get("sent")),
        "measured": number(ours.get("time")),
        "spilled": to_disk if from_gpu is None else from_gpu,
    }


def _gpus_of(worker: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of each GPU of a worker, as fields of `Row`."""
    fields = []
    for gpu in gpus_of(mapping(worker.get("metrics")), worker.get("gpu")):
        bits = gpu.get("slowed")
        slowed = None if bits is None else "+".join(reasons_of(bits))
        fields.append({f"gpu_{name}": value for name, value in gpu.items()} | {"gpu_slowed": slowed})
    return fields


def _sum(tasks: Any, *states: str) -> int | None:
    if not isinstance(tasks, Mapping):
        return None
    return sum(integer(tasks.get(state)) or 0 for state in states)


def with_rates(new: Snapshot, old: Snapshot | None) -> Snapshot:
    """The new snapshot with the rates since the old one; of a worker that has sent no new figures, those of the old one."""
    before = {(row.address, row.device): row for row in old.rows} if old is not None else {}
    return replace(
        new, rows=tuple(_with_rate(row, before.get((row.address, row.device))) for row in new.rows)
    )


def _with_rate(row: Row, old: Row | None) -> Row:
    if old is None or row.measured is None or old.measured is None:
        return row
    seconds = row.measured - old.measured
    if seconds <= 0:
        return replace(row, received_rate=old.received_rate, sent_rate=old.sent_rate)

    def rate(new: int | None, before: int | None) -> float | None:
        return None if new is None or before is None else max(0, new - before) / seconds

    return replace(row, received_rate=rate(row.received, old.received), sent_rate=rate(row.sent, old.sent))


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """As plain data, in the schema of ``top --json`` (docs/json.md)."""
    return {
        "version": VERSION,
        "time": snapshot.time,
        "scheduler": snapshot.scheduler,
        "time_left": snapshot.time_left,
        "rows": [asdict(row) for row in snapshot.rows],
        "notes": list(snapshot.notes),
        "warnings": [{"time": moment, "text": text} for moment, text in snapshot.events],
    }


# The one connection of `top`: to the scheduler, which has all figures. It is not a client, so the job does not notice it.

#: Seconds for each answer, and of these for the connection: while it is refused, distributed tries it again until then.
TIMEOUT, CONNECT_TIMEOUT = 10.0, 5.0
#: Only plain data are requested, and nothing is unpickled.
PLAIN = ("msgpack",)


class NoAnswerError(ClusterLostError):
    """A scheduler that has answered before does not answer: it is busy, or can't be reached. Another sample may succeed."""


class Link:
    """A connection that requests snapshots; a target without a configuration is connected to by Dask's."""

    def __init__(self, target: Target) -> None:
        import dask
        from distributed import Security

        self._address = target.address
        with dask.config.set(target.config):
            self._connection = Security().get_connection_args("client")
        self._comm: Any = None
        #: Whether the scheduler is one of ours; None: not known yet.
        self._ours: bool | None = None
        self._last: Snapshot | None = None

    async def sample(self) -> Snapshot:
        """A snapshot, with the rates since the last one.

        NoAnswerError: the scheduler has answered before, and does not within `TIMEOUT`. ClusterLostError: it refuses or
        has closed the connection, or never answered. InputError: its certificate is not valid by this node's clock.
        """
        try:
            async with asyncio.timeout(TIMEOUT):
                identity = await self._ask("identity", n_workers=-1)
                if not isinstance(identity, dict) or "workers" not in identity:
                    raise ValueError("its answer is not a scheduler's")
                # Another scheduler logs a warning of an unknown operation, so this is sent to it only once.
                job = None
                if self._ours is not False:
                    job = await self._ask(FACTS_OPERATION)
            # distributed answers an unknown operation with a status
            self._ours = isinstance(job, dict) and "status" not in job
            snapshot = snapshot_of(identity, job if self._ours else None, time.time())
        except Exception as error:
            self.close()  # a late answer would be read as the next one
            raise self._lost(error) from error
        self._last = with_rates(snapshot, self._last)
        return self._last

    async def _ask(self, operation: str, **arguments: Any) -> Any:
        """The scheduler's answer. Not by distributed's `rpc`, which unpickles the exceptions in answers."""
        from distributed.comm.core import connect

        with _without_pickle():
            if self._comm is None or self._comm.closed():
                self._comm = await connect(
                    self._address, timeout=CONNECT_TIMEOUT, deserialize=False, **self._connection
                )
            await self._comm.write({"op": operation, "reply": True, **arguments}, serializers=PLAIN)
            return await self._comm.read(deserializers=PLAIN)

    def close(self) -> None:
        """Close the connection."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def _lost(self, error: Exception) -> ClusterLostError | InputError:
        if problem := clock_problem(f"{error} {error.__cause__}"):
            return InputError(f"top: {problem}")
        timed_out = any(isinstance(each, TimeoutError) for each in (error, error.__cause__))
        if self._last is not None and timed_out:
            return NoAnswerError(
                f"top: no response from the scheduler at {self._address} within {TIMEOUT:g} s: it is busy, or its node can't be "
                "reached any more. Fix: try again"
            )
        if self._last is not None:
            return ClusterLostError(f"top: the scheduler at {self._address} is gone: the cluster has ended")
        text = "no response" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        reason = printable(text[:200])
        return ClusterLostError(
            f"top: the scheduler at {self._address} can't be reached ({reason})",
            fix="run it where the cluster's network can be reached, such as in the allocation, and only while the "
            "cluster runs",
        )


@contextlib.contextmanager
def _without_pickle() -> Iterator[None]:
    """Keep distributed from unpickling: it unpickles data that are marked so, even if the deserializers do not allow it."""
    from distributed.protocol import core

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("pickled data, which are not accepted")

    protocol: Any = core
    before = protocol.pickle
    protocol.pickle = types.SimpleNamespace(**{**vars(before), "loads": refuse})
    try:
        yield
    finally:
        protocol.pickle = before
