"""The data of `check`: the evidence, the rules' findings and the report, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dask_gpu_mpi.base.tables import MANY_NODES, styled, table, widths_of
from dask_gpu_mpi.base.text import counted, fold_names, fold_numbers, format_bytes, grouped, ranks_text
from dask_gpu_mpi.check.tasks import KernelResult, Observations
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.gpus import near
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.network.interfaces import host_and_port
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.model import HostPlan, WorkerPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Level = Literal["ok", "warning", "error"]
#: A fix that several rules share.
LEAVE_OUT = "leave the node out of the job and inform the operators of the cluster"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    #: Green, yellow, red.
    level: Level
    #: The subject that was inspected.
    what: str
    found: str
    #: Of an error never empty.
    fix: str = ""
    #: The ranks that it concerns; empty: the job.
    ranks: tuple[int, ...] = ()
    #: The hosts of these ranks.
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, level: Level, what: str, problem: Problem, default_fix: str = "", ranks: tuple[int, ...] = ()
    ) -> Finding:
        """The line of a problem."""
        return cls(level, what, problem.text, problem.fix or default_fix, ranks)


@dataclass(frozen=True)
class Transfer:
    """Data that one worker has sent to another."""

    sender: WorkerPlan
    receiver: WorkerPlan
    #: Bytes.
    size: int
    #: Whether they were in the memory of GPUs.
    on_device: bool = False
    #: None: unknown.
    seconds: float | None = None
    #: Why it failed; empty: it did not.
    error: str = ""

    @property
    def between_nodes(self) -> bool:
        """Whether the workers are on two nodes."""
        return self.sender.host != self.receiver.host

    @property
    def rate(self) -> float | None:
        """Bytes per second; None: unknown."""
        return None if self.error or not self.seconds else self.size / self.seconds


@dataclass(frozen=True)
class Evidence:
    """All that the rules need of a job that has started. Mappings are by rank, in the order of ranks."""

    plan: Plan
    #: Of the client's rank.
    options: Options = field(default_factory=Options)
    #: Of the scheduler.
    address: str = ""
    #: Link to the dashboard; None: there is none.
    dashboard_link: str | None = None
    #: How workers exchange data, as a job prints it; empty: that is not worth a line.
    transport: str = ""
    #: The warnings that a job prints at its start.
    start_warnings: tuple[str, ...] = ()
    #: The MPI library; empty: unknown.
    library: str = ""
    #: Of the start.
    ready_seconds: float = 0.0
    #: Of each rank that has a worker and has responded.
    observations: Mapping[int, Observations] = field(default_factory=dict)
    #: Why the worker of a rank has not observed its node.
    silent: Mapping[int, str] = field(default_factory=dict)
    #: By the name of the GPU worker.
    kernels: Mapping[str | int, tuple[KernelResult, ...]] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    #: Seconds by which clocks are ahead of the scheduler's.
    clocks: Mapping[int, float] = field(default_factory=dict)
    #: The addresses with which the last worker of a rank that was asked has not used UCX, with the reasons.
    without_ucx: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    #: Whether kernels run (``--kernel``).
    kernel: bool = True
    #: GPUs that the user expects on each node; None: as many as the batch system reports as allocated.
    expect_gpus: int | None = None

    def host(self, rank: int) -> str:
        """The host of a rank; empty: unknown."""
        return next((host.host for host in self.plan.hosts if rank in host.ranks), "")

    def of_host(self, host: HostPlan) -> dict[int, Observations]:
        """The observations of the ranks of a host."""
        return {rank: self.observations[rank] for rank in host.ranks if rank in self.observations}

    @property
    def results(self) -> dict[str, KernelResult]:
        """The result of each GPU's kernel, by UUID."""
        return {result.uuid: result for results in self.kernels.values() for result in results}


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    findings: tuple[Finding, ...]
    #: None: the start has failed.
    evidence: Evidence | None = None
    seconds: float = 0.0

    @property
    def level(self) -> Level:
        """The worst of the findings."""
        levels = {finding.level for finding in self.findings}
        return "error" if "error" in levels else "warning" if "warning" in levels else "ok"

    @property
    def exit_code(self) -> int:
        """1 with a red line, else 0."""
        return int(self.level == "error")


def merge(evidence: Evidence, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, those that differ in their ranks alone as one; each with the hosts of its ranks."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return tuple(
        replace(finding, ranks=tuple(of), hosts=tuple(dict.fromkeys(filter(None, map(evidence.host, of)))))
        for finding, of in ranks.items()
    )


# The report, as a table for people and as plain data for programs; many nodes that are alike share an entry.

#: Lines of one level about one thing that the table shows; the JSON has them all.
MOST_LINES = 12
#: Each level's label and colour; the labels are enough without colours.
_LABELS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
_HEADER = ("GPU", "name", "UUID", "memory", "cores", "in use", "ECC", "kernel")


def as_data(report: Report) -> dict[str, Any]:
    """Plain data, for JSON: sizes in bytes, times in seconds, ``null`` for unknown values."""
    data: dict[str, Any] = {
        "level": report.level,
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "world_size": None,
        "mpi_library": None,
        "scheduler": None,
        "findings": [
            {
                "level": finding.level,
                "what": finding.what,
                "found": finding.found,
                "remedy": finding.fix,
                "ranks": list(finding.ranks),
                "hosts": list(finding.hosts),
            }
            for finding in report.findings
        ],
        "hosts": [],
        "transfers": [],
        "versions": [],
    }
    if (evidence := report.evidence) is None:
        return data
    plan = evidence.plan
    return data | {
        "world_size": plan.world_size,
        "mpi_library": evidence.library or None,
        "scheduler": {
            **vars(plan.scheduler),
            "address": host_and_port(evidence.address.rpartition("://")[2])[0],
        },
        "hosts": [_host_data(evidence, host) for host in plan.hosts],
        "transfers": [
            {
                "from": transfer.sender.name,
                "to": transfer.receiver.name,
                "between_nodes": transfer.between_nodes,
                "gpu_memory": transfer.on_device,
                "bytes": transfer.size,
                "rate": None if transfer.rate is None else round(transfer.rate),
                "error": transfer.error or None,
            }
            for transfer in evidence.transfers
        ],
        "versions": [
            {"ranks": [rank for rank, _ in alike], "versions": dict(alike[0][1].versions)}
            for alike in grouped(evidence.observations.items(), lambda one: tuple(one[1].versions.items()))
        ],
    }


def _host_data(evidence: Evidence, host: HostPlan) -> dict[str, Any]:
    observed, results = evidence.of_host(host), evidence.results
    ecc = _ecc(observed.values())
    gpus = []
    for gpu in host.gpus:
        kernel = results.get(gpu.uuid)
        gpus.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memory": gpu.memory,
                "cpus": list(gpu.cpus),
                "pci": gpu.pci,
                "numa": gpu.numa if gpu.numa >= 0 else None,
                "nics": gpu.nics,
                "in_use": gpu.busy,
                "ecc_uncorrected": ecc.get(gpu.uuid),
                "kernel": None if kernel is None else kernel.kind or "ok",
                "kernel_seconds": None if kernel is None else round(kernel.seconds, 3),
            }
        )
    return {
        "host": host.host,
        "ranks": list(host.ranks),
        "cpus": _cpus(evidence, host),
        "memory": host.memory or None,
        "driver": _driver(observed.values()) or None,
        "gpus": gpus,
        "scratch": [
            {
                "ranks": [rank for rank, one in observed.items() if one.scratch.path == scratch.path],
                "path": scratch.path,
                "filesystem": scratch.filesystem or None,
                "free": scratch.free if scratch.free >= 0 else None,
            }
            for scratch in {one.scratch.path: one.scratch for one in observed.values()}.values()
        ],
        "clock_ahead": _ahead(evidence, host),
    }


def display(report: Report, *, terminal: bool = False) -> Iterator[RenderableType]:
    """A report as lines and tables: the findings, then each node with its GPUs; on a terminal, tables are folded to its width."""
    evidence = report.evidence
    if evidence is not None:
        ranks, nodes = counted(evidence.plan.world_size, "rank"), counted(len(evidence.plan.hosts), "node")
        yield f"check of {ranks} on {nodes}, {report.seconds:.1f} s"
        yield ""
    yield table(("", "", ""), _finding_rows(report))
    if evidence is not None:
        yield from _nodes(evidence, terminal=terminal)
    counts = Counter(finding.level for finding in report.findings)
    yield ""
    summary = f": {counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}"
    yield styled(*_LABELS[report.level]).append(summary)


def _nodes(evidence: Evidence, *, terminal: bool) -> Iterator[RenderableType]:
    groups = [[host] for host in evidence.plan.hosts]
    if len(groups) > MANY_NODES:
        groups = grouped(evidence.plan.hosts, lambda host: _look(evidence, host))
    tables = [_rows(evidence, group) for group in groups]
    widths = () if terminal else widths_of([_HEADER, *(row for rows in tables for row in rows)])
    for group, rows in zip(groups, tables, strict=True):
        yield ""
        yield styled(_title(evidence, group))
        if rows:
            yield table(_HEADER, rows, widths=widths)


def _finding_rows(report: Report) -> Iterator[tuple[str | Text, str, str]]:
    size = 0 if report.evidence is None else report.evidence.plan.world_size
    counts: Counter[tuple[Level, str]] = Counter()
    for finding in report.findings:
        counts[finding.level, finding.what] += 1
        if counts[finding.level, finding.what] <= MOST_LINES:
            yield _label(finding.level), finding.what, f"{_where(finding, size)}{finding.found}"
            if finding.fix:
                yield "", "", f"Fix: {finding.fix}"
    for (level, what), count in counts.items():
        if count > MOST_LINES:
            yield _label(level), what, f"{count - MOST_LINES} more like these; --json has them all"


def _label(level: Level) -> Text:
    text, colour = _LABELS[level]
    return styled(f"{text:7}", colour)


def _where(finding: Finding, size: int) -> str:
    """The ranks of a finding and their nodes; empty if it concerns all ranks, or the job."""
    if not finding.ranks or len(finding.ranks) == size:
        return ""
    hosts = f" on {fold_names(finding.hosts)}" if finding.hosts else ""
    return f"{ranks_text(finding.ranks)}{hosts}: "


def _cpus(evidence: Evidence, host: HostPlan) -> list[int]:
    """The cores of the workers of a node."""
    return sorted({cpu for rank in host.ranks for one in evidence.plan.for_rank(rank) for cpu in one.cpus})


def _ecc(observed: Iterable[Observations]) -> dict[str, int]:
    return {uuid: count for one in observed for uuid, count in one.ecc.items()}


def _driver(observed: Iterable[Observations]) -> str:
    return next((one.driver for one in observed if one.driver), "")


def _ahead(evidence: Evidence, host: HostPlan) -> float | None:
    return next((round(evidence.clocks[rank], 4) for rank in host.ranks if rank in evidence.clocks), None)


def _look(evidence: Evidence, host: HostPlan) -> Hashable:
    """A value that is equal if two nodes share an entry: all data but names, UUIDs, free bytes and the first rank."""
    offsets = tuple(rank - host.ranks[0] for rank in host.ranks)
    # the rows of a group of two nodes have no UUIDs
    return offsets, tuple(_facts(evidence, [host], free=False)), tuple(_rows(evidence, [host, host]))


def _facts(evidence: Evidence, group: Sequence[HostPlan], *, free: bool) -> Iterator[str]:
    """The nodes of a group in words; `free`: with the free bytes of their scratch directories."""
    first, observed = group[0], evidence.of_host(group[0])
    if cpus := _cpus(evidence, first):
        yield f"cores {fold_numbers(cpus)}"
    yield format_bytes(first.memory) if first.memory else "memory unknown"
    if driver := _driver(observed.values()):
        yield f"driver {driver}"
    for scratch in [one.scratch for one in observed.values()][:1]:
        least = min((_scratch(evidence, host).free for host in group), default=-1)
        space = f", {format_bytes(least)} free" if free and least >= 0 else ""
        yield f"scratch {scratch.path} ({scratch.filesystem or 'unknown'}{space})"


def _scratch(evidence: Evidence, host: HostPlan) -> Scratch:
    return next((one.scratch for one in evidence.of_host(host).values()), Scratch(""))


def _title(evidence: Evidence, group: Sequence[HostPlan]) -> str:
    parts = ", ".join(_facts(evidence, group, free=True))
    every = ranks_text(rank for host in group for rank in host.ranks)
    if len(group) == 1:
        ahead = _ahead(evidence, group[0])
        clock = f", clock {ahead:+.3f} s" if ahead is not None else ""
        return f"node {group[0].host}: {every}, {parts}{clock}"
    return f"{len(group)} nodes {fold_names(host.host for host in group)}: {every}; on each {parts}"


def _rows(evidence: Evidence, group: Sequence[HostPlan]) -> list[tuple[str, ...]]:
    results, ecc = evidence.results, _ecc(evidence.of_host(group[0]).values())
    rows: list[tuple[str, ...]] = []
    for gpu in group[0].gpus:
        kernel = results.get(gpu.uuid)
        rows.append(
            (
                str(gpu.index) if gpu.slice < 0 else f"{gpu.index}:{gpu.slice}",
                gpu.name,
                gpu.uuid if len(group) == 1 else "-",
                format_bytes(gpu.memory) if gpu.memory else "-",
                near(gpu.cpus, gpu.numa, gpu.nics) or "-",
                "-" if not gpu.processes else "some" if gpu.busy is None else format_bytes(gpu.busy),
                str(ecc.get(gpu.uuid, "-")),
                "-" if kernel is None or not kernel.ran else "FAILED" if kernel.kind else "ok",
            )
        )
    return rows
