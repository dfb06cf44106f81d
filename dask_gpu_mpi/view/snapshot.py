"""From what the scheduler knows to rows: one for each GPU, and for each worker without one. Pure functions of plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dask_gpu_mpi.base.text import natural, printable
from dask_gpu_mpi.base.timeline import METRIC
from dask_gpu_mpi.view.heartbeat import gpus_of, integer, mapping, number, spilled_of
from dask_gpu_mpi.view.job_facts import JobFacts, PlannedRow, RunWarning

__all__ = ["Row", "Snapshot", "as_json", "snapshot_of", "with_rates"]

#: States of a task on its worker that is running, or that has yet to.
RUNNING, WAITING = ("executing", "long-running"), ("waiting", "ready", "constrained")
#: Number of the schema of `as_json`.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A GPU with its worker, or a worker without one; None: not known. Memory is in bytes, rates in bytes per second.

    What belongs to the worker stands in the row of its first GPU alone, so that sums are right.
    """

    node: str
    worker: str
    #: Of the worker; None: it is not there.
    address: str | None = None
    #: distributed's word (``"running"``, ``"paused"``...); if it is gone ``"lost"``, or ``"closed"`` where that was asked for.
    status: str = "lost"
    gpu_index: int | None = None
    device: str | None = None
    #: Percent.
    gpu_use: float | None = None
    gpu_memory: int | None = None
    gpu_memory_total: int | None = None
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
    #: Of the run, the oldest first.
    events: tuple[RunWarning, ...] = ()

    @property
    def time_left(self) -> float | None:
        """Seconds until the batch system ends the job; None: not known."""
        return None if self.end is None else max(0.0, self.end - self.time)


def snapshot_of(identity: Mapping[str, Any], job: Mapping[str, Any] | None, now: float) -> Snapshot:
    """A snapshot.

    Parameters
    ----------
    identity : mapping
        ``Scheduler.identity()``, all workers included.
    job : mapping or None
        The answer of `JobWatch`; None: the scheduler is not one of ours.
    now : float
        Seconds since the epoch.
    """
    facts = JobFacts() if job is None else JobFacts.from_data(job)
    workers = {str(worker["name"]): (address, worker) for address, worker in identity["workers"].items()}
    retired = set(job.get("retired", ())) if job is not None else set()
    planned: dict[str, list[PlannedRow]] = {}
    for row in facts.rows:
        planned.setdefault(row.worker, []).append(row)
    rows: list[Row] = []
    for name, places in planned.items():
        rows += _rows_of(
            places, *workers.pop(name, (None, None)), absent="closed" if name in retired else "lost"
        )
    joined: list[Row] = []
    for name, (address, worker) in workers.items():  # from another job, or not started by us
        joined += _rows_of([PlannedRow(name, str(worker.get("host", "")), "")], address, worker)
    rows += sorted(joined, key=lambda row: (row.node, natural(row.worker)))
    job = job or {}
    return Snapshot(
        time=job.get("now", now),
        scheduler=printable(str(identity.get("address", ""))),
        rows=tuple(rows),
        end=job.get("end"),
        notes=tuple(map(printable, facts.warnings)),
        events=tuple(RunWarning(moment, printable(text)) for moment, text in job.get("events", ())),
    )


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
    return replace(
        row,
        received_rate=_rate(row.received, old.received, seconds),
        sent_rate=_rate(row.sent, old.sent, seconds),
    )


def _rate(new: int | None, old: int | None, seconds: float) -> float | None:
    return None if new is None or old is None else max(0, new - old) / seconds


def _rows_of(
    places: Sequence[PlannedRow], address: str | None, worker: Any, absent: str = "lost"
) -> Iterator[Row]:
    own = _of_worker(worker) if address is not None else {}
    gpus = _gpus_of(worker) if address is not None else []
    for position, place in enumerate(places):
        yield Row(
            node=printable(place.host),
            worker=printable(place.worker),
            address=None if address is None else printable(address),
            status=printable(str(worker.get("status", "running"))) if address is not None else absent,
            gpu_index=place.gpu_index,
            device=place.device,
            **(own if position == 0 else {}),
            **(gpus[position] if position < len(gpus) and place.kind != "cpu" else {}),
        )


def _of_worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    metrics = mapping(worker.get("metrics"))
    ours, rmm = mapping(metrics.get(METRIC)), mapping(metrics.get("rmm"))
    tasks, spilled = metrics.get("task_counts"), spilled_of(metrics)
    return {
        "rmm_used": integer(rmm.get("rmm-used")),
        "rmm_total": integer(rmm.get("rmm-total")),
        "host_memory": integer(metrics.get("memory")),
        "host_limit": integer(worker.get("memory_limit")) or None,
        "running": _sum(tasks, RUNNING),
        "waiting": _sum(tasks, WAITING),
        "received": integer(ours.get("received")),
        "sent": integer(ours.get("sent")),
        "measured": number(ours.get("time")),
        "spilled": spilled.to_disk if spilled.from_gpu is None else spilled.from_gpu,
    }


def _gpus_of(worker: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of each GPU of a worker, as fields of `Row`."""
    return [
        {"gpu_use": gpu.use, "gpu_memory": gpu.memory, "gpu_memory_total": gpu.memory_total}
        for gpu in gpus_of(mapping(worker.get("metrics")), worker.get("gpu"))
    ]


def _sum(tasks: Any, states: Sequence[str]) -> int | None:
    if not isinstance(tasks, Mapping):
        return None
    return sum(integer(tasks.get(state)) or 0 for state in states)


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """As plain data, in the schema of ``top --json`` (docs/json.md)."""
    return {
        "version": VERSION,
        "time": snapshot.time,
        "scheduler": snapshot.scheduler,
        "time_left": snapshot.time_left,
        "rows": [asdict(row) for row in snapshot.rows],
        "notes": list(snapshot.notes),
        "warnings": [asdict(warning) for warning in snapshot.events],
    }
