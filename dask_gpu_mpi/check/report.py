"""The data of `check`: the observations of all ranks (`Evidence`), the rules' findings and the report, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dask_gpu_mpi.base.tables import MANY_NODES, styled, table, widths_of
from dask_gpu_mpi.base.text import counted, fold_names, fold_numbers, format_bytes, grouped, ranks_text
from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.observations import Observations
from dask_gpu_mpi.check.ucx import UcxErrors
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host, near
from dask_gpu_mpi.network.reachability import Node, Reach
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.startup.messages import Listening

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
class Evidence:
    """All that the rules need. Mappings are by rank, in the order of ranks."""

    #: Number of ranks.
    size: int
    #: Of rank 0.
    options: Options = field(default_factory=Options)
    observations: Mapping[int, Observations] = field(default_factory=dict)
    #: Host of each rank, and its step in its last message to rank 0.
    steps: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    plan: Plan | None = None
    #: Why there is no plan.
    plan_problem: Problem | None = None
    #: Why no addresses could be chosen.
    network_problem: Problem | None = None
    #: The address of the scheduler.
    address: str = ""
    listening: Listening | None = None
    #: The address at which a rank of each node listens for the others; empty: there is one node, or no address is known.
    nodes: tuple[Node, ...] = ()
    reached: Mapping[int, Reach] = field(default_factory=dict)
    #: The results of the tests of a rank; it has kernels, perhaps none, once it has ended all of them.
    kernels: Mapping[int, tuple[KernelResult, ...]] = field(default_factory=dict)
    #: Of the ranks that have tested UCX.
    ucx: Mapping[int, UcxErrors] = field(default_factory=dict)
    #: Ranks that did not respond in time.
    silent: tuple[int, ...] = ()
    #: Whether kernels run (``--kernel``).
    kernel: bool = True
    #: GPUs that the user expects on each node; None: as many as the batch system reports as allocated.
    expect_gpus: int | None = None

    @property
    def scheduler_rank(self) -> int:
        """The rank of the scheduler."""
        return max(0, min(self.options.scheduler_rank, self.size - 1))

    @property
    def gpus(self) -> dict[str, Gpu]:
        """All visible GPUs by UUID, each as the last rank saw it."""
        inventories = [each.inventory for each in self.observations.values() if each.inventory]
        return {gpu.uuid: gpu for inventory in inventories for gpu in inventory.gpus}

    @property
    def abilities(self) -> dict[int, UcxAbility]:
        """The ability of each rank to use UCX."""
        return {rank: observed.ucx for rank, observed in self.observations.items()}

    def host(self, rank: int) -> str:
        """The host of a rank; empty: unknown."""
        if rank in self.observations:
            return self.observations[rank].host
        return self.steps.get(rank, ("", ""))[0]

    def by_host(self) -> list[list[Observations]]:
        """The observations of the ranks of each node: the same host name and boot id."""
        return grouped(self.observations.values(), lambda observed: (observed.host, observed.boot_id))


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    #: Since the start of MPI.
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


def problems(evidence: Evidence, what: str, default_fix: str) -> Iterator[Finding]:
    """The problems that ranks observed."""
    for rank, observed in evidence.observations.items():
        for problem in observed.problems:
            if problem.what == what:
                yield Finding.of("error", what, problem, default_fix, (rank,))


def merge(evidence: Evidence, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, those that differ in their ranks alone as one; each with the hosts of its ranks."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return tuple(
        replace(finding, ranks=tuple(of), hosts=tuple(dict.fromkeys(filter(None, map(evidence.host, of)))))
        for finding, of in ranks.items()
    )


# The report of `check`, as a table for people and as plain data for programs; many nodes that are alike share an entry.

#: Lines of one level about one thing that the table shows; the JSON has them all.
MOST_LINES = 12
#: Each level's label and colour; the labels are enough without colours.
_LABELS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
_HEADER = ("GPU", "name", "UUID", "memory", "cores", "in use", "ECC", "kernel")


def as_data(report: Report) -> dict[str, Any]:
    """Plain data, for JSON: sizes in bytes, times in seconds, ``null`` for unknown values."""
    evidence = report.evidence
    return {
        "level": report.level,
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "world_size": evidence.size,
        "scheduler": {
            "rank": evidence.scheduler_rank,
            "host": evidence.host(evidence.scheduler_rank),
            "address": evidence.address or None,
        },
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
        "hosts": [_host_data(evidence, ranks) for ranks in evidence.by_host()],
        "versions": [
            {"ranks": [observed.rank for observed in alike], "versions": dict(alike[0].versions)}
            for alike in grouped(evidence.observations.values(), lambda each: tuple(each.versions.items()))
        ],
    }


def _host_data(evidence: Evidence, ranks: Sequence[Observations]) -> dict[str, Any]:
    kernels = _kernels(evidence, ranks)
    inventory = ranks[0].inventory
    gpus = []
    for gpu in _gpus(ranks):
        kernel = kernels.get(gpu.uuid)
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
                "ecc_uncorrected": _ecc(ranks, gpu),
                "kernel": None if kernel is None else kernel.kind or "ok",
                "kernel_seconds": None if kernel is None else round(kernel.seconds, 3),
            }
        )
    return {
        "host": ranks[0].host,
        "ranks": [observed.rank for observed in ranks],
        "cpus": sorted({cpu for observed in ranks if observed.inventory for cpu in observed.inventory.cpus}),
        "memory": inventory.memory if inventory else None,
        "driver": ranks[0].driver or None,
        "gpus": gpus,
        "scratch": [
            {
                "ranks": [observed.rank for observed in ranks if observed.scratch.path == scratch.path],
                "path": scratch.path,
                "filesystem": scratch.filesystem or None,
                "free": scratch.free if scratch.free >= 0 else None,
            }
            for scratch in {observed.scratch.path: observed.scratch for observed in ranks}.values()
        ],
        "clock_ahead": _ahead(evidence, ranks),
    }


def display(report: Report, *, terminal: bool = False) -> Iterator[RenderableType]:
    """A report as lines and tables: the findings, then each node with its GPUs; on a terminal, tables are folded to its width."""
    evidence = report.evidence
    by_host = evidence.by_host()
    if by_host:
        ranks, nodes = counted(evidence.size, "rank"), counted(len(by_host), "node")
        yield f"check of {ranks} on {nodes}, {report.seconds:.1f} s"
        yield ""
    if report.findings:
        yield table(("", "", ""), _finding_rows(report))
    groups = [[observations] for observations in by_host]
    if len(groups) > MANY_NODES:
        groups = grouped(by_host, lambda observations: _look(evidence, observations))
    tables = [_rows(evidence, group) for group in groups]
    widths = () if terminal else widths_of([_HEADER, *(row for rows in tables for row in rows)])
    for group, rows in zip(groups, tables, strict=True):
        yield ""
        yield styled(_title(evidence, group))
        if rows:
            yield table(_HEADER, rows, widths=widths)
    counts = Counter(finding.level for finding in report.findings)
    yield ""
    summary = f": {counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}"
    yield styled(*_LABELS[report.level]).append(summary)


def _finding_rows(report: Report) -> Iterator[tuple[str | Text, str, str]]:
    counts: Counter[tuple[Level, str]] = Counter()
    for finding in report.findings:
        counts[finding.level, finding.what] += 1
        if counts[finding.level, finding.what] <= MOST_LINES:
            where = _where(finding, report.evidence.size)
            yield _label(finding.level), finding.what, f"{where}{finding.found}"
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


def _gpus(ranks: Sequence[Observations]) -> list[Gpu]:
    return gpus_of_host(
        (observed.inventory.pid, observed.inventory.gpus) for observed in ranks if observed.inventory
    )


def _kernels(evidence: Evidence, ranks: Sequence[Observations]) -> dict[str, KernelResult]:
    return {result.uuid: result for each in ranks for result in evidence.kernels.get(each.rank, ())}


def _ecc(ranks: Sequence[Observations], gpu: Gpu) -> int | None:
    return next(
        (observed.ecc[gpu.uuid] for observed in ranks if observed.ecc and gpu.uuid in observed.ecc), None
    )


def _ahead(evidence: Evidence, ranks: Sequence[Observations]) -> float | None:
    for observed in ranks:
        reached = evidence.reached.get(observed.rank)
        if reached is not None and reached.ahead is not None:
            return round(reached.ahead, 4)
    return None


def _look(evidence: Evidence, ranks: Sequence[Observations]) -> Hashable:
    """A value that is equal if two nodes share an entry: all data but names, UUIDs, free bytes and the first rank."""
    offsets = tuple(observed.rank - ranks[0].rank for observed in ranks)
    # the rows of a group of two nodes have no UUIDs
    return offsets, tuple(_facts(ranks, free=-1)), tuple(_rows(evidence, [ranks, ranks]))


def _facts(ranks: Sequence[Observations], free: int) -> Iterator[str]:
    """A node in words; `free`: bytes in its scratch directory, negative if unknown."""
    first = ranks[0]
    if first.inventory is not None:
        cpus = (cpu for observed in ranks if observed.inventory for cpu in observed.inventory.cpus)
        yield f"cores {fold_numbers(cpus)}"
        yield format_bytes(first.inventory.memory) if first.inventory.memory else "memory unknown"
    if first.driver:
        yield f"driver {first.driver}"
    space = f", {format_bytes(free)} free" if free >= 0 else ""
    yield f"scratch {first.scratch.path} ({first.scratch.filesystem or 'unknown'}{space})"


def _title(evidence: Evidence, group: Sequence[Sequence[Observations]]) -> str:
    parts = ", ".join(_facts(group[0], min(ranks[0].scratch.free for ranks in group)))
    every = ranks_text(observed.rank for ranks in group for observed in ranks)
    if len(group) == 1:
        ahead = _ahead(evidence, group[0])
        clock = f", clock {ahead:+.3f} s" if ahead is not None else ""
        return f"node {group[0][0].host}: {every}, {parts}{clock}"
    return f"{len(group)} nodes {fold_names(ranks[0].host for ranks in group)}: {every}; on each {parts}"


def _rows(evidence: Evidence, group: Sequence[Sequence[Observations]]) -> list[tuple[str, ...]]:
    kernels = _kernels(evidence, group[0])
    rows: list[tuple[str, ...]] = []
    for gpu in _gpus(group[0]):
        ecc, kernel = _ecc(group[0], gpu), kernels.get(gpu.uuid)
        place = str(gpu.index) if gpu.slice < 0 else f"{gpu.index}:{gpu.slice}"
        rows.append(
            (
                place,
                gpu.name,
                gpu.uuid if len(group) == 1 else "-",
                format_bytes(gpu.memory) if gpu.memory else "-",
                near(gpu.cpus, gpu.numa, gpu.nics) or "-",
                "-" if not gpu.processes else "some" if gpu.busy is None else format_bytes(gpu.busy),
                "-" if ecc is None else str(ecc),
                "-" if kernel is None else "FAILED" if kernel.kind else "ok",
            )
        )
    return rows
