"""The data of `check`: the evidence, the rules' findings and the report, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dask_gpu_mpi.base.text import counted, fold_names, grouped, ranks_text, styled, table
from dask_gpu_mpi.check.tasks import KernelResult, Observations
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.network.interfaces import host_and_port
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import HostPlan, Plan, WorkerPlan
from dask_gpu_mpi.plan.nodes import display as display_plan

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
    #: By the UUID of the GPU.
    kernels: Mapping[str, KernelResult] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    #: Seconds by which clocks are ahead of the scheduler's.
    clocks: Mapping[int, float] = field(default_factory=dict)
    #: The addresses with which the last worker of a rank that was asked has not used UCX, with the reasons.
    without_ucx: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    #: Whether kernels run (``--kernel``).
    kernel: bool = True
    #: GPUs that the user expects on each node; None: as many as the batch system reports as allocated.
    expect_gpus: int | None = None
    #: The variable that has this number, with it; empty: the option.
    expected_by: str = ""

    def host(self, rank: int) -> str:
        """The host of a rank; empty: unknown."""
        return next((host.host for host in self.plan.hosts if rank in host.ranks), "")

    def of_host(self, host: HostPlan) -> dict[int, Observations]:
        """The observations of the ranks of a host."""
        return {rank: self.observations[rank] for rank in host.ranks if rank in self.observations}


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


# The report, as plain data for programs and as lines for people.

#: Lines of one level about one thing that people get; the JSON has them all.
MOST_LINES = 12
#: Each level's label and colour; the labels are enough without colours.
_LABELS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
#: The fields of a GPU that the JSON has as they are.
_OF_GPU = ("index", "uuid", "name", "memory", "cpus", "pci", "numa", "nics")


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
            {"remedy" if name == "fix" else name: value for name, value in vars(finding).items()}
            for finding in report.findings
        ],
        "hosts": [],
        "transfers": [],
        "versions": [],
    }
    if (evidence := report.evidence) is None:
        return data
    scheduler, address = evidence.plan.scheduler, host_and_port(evidence.address.rpartition("://")[2])[0]
    return data | {
        "world_size": evidence.plan.world_size,
        "mpi_library": evidence.library or None,
        "scheduler": {**vars(scheduler), "address": address},
        "hosts": [_host_data(evidence, host) for host in evidence.plan.hosts],
        "transfers": [
            {
                "from": one.sender.name,
                "to": one.receiver.name,
                "between_nodes": one.between_nodes,
                "gpu_memory": one.on_device,
                "bytes": one.size,
                "rate": one.rate and round(one.rate),
                "error": one.error or None,
            }
            for one in evidence.transfers
        ],
        "versions": [
            {"ranks": [rank for rank, _ in alike], "versions": dict(alike[0][1].versions)}
            for alike in grouped(evidence.observations.items(), lambda one: tuple(one[1].versions.items()))
        ],
    }


def _host_data(evidence: Evidence, host: HostPlan) -> dict[str, Any]:
    observed = evidence.of_host(host)
    ecc = {uuid: count for one in observed.values() for uuid, count in one.ecc.items()}
    clocks = [round(evidence.clocks[rank], 4) for rank in host.ranks if rank in evidence.clocks]
    return {
        "host": host.host,
        "ranks": host.ranks,
        "cpus": sorted(
            {cpu for rank in host.ranks for one in evidence.plan.for_rank(rank) for cpu in one.cpus}
        ),
        "memory": host.memory or None,
        "driver": next((one.driver for one in observed.values() if one.driver), None),
        "gpus": [_gpu_data(gpu, evidence.kernels.get(gpu.uuid), ecc.get(gpu.uuid)) for gpu in host.gpus],
        "scratch": [
            {
                "ranks": [rank for rank, _ in alike],
                "path": alike[0][1].scratch.path,
                "filesystem": alike[0][1].scratch.filesystem or None,
                "free": None if alike[0][1].scratch.free < 0 else alike[0][1].scratch.free,
            }
            for alike in grouped(observed.items(), lambda one: one[1].scratch.path)
        ],
        "clock_ahead": clocks[0] if clocks else None,
    }


def _gpu_data(gpu: Gpu, kernel: KernelResult | None, ecc: int | None) -> dict[str, Any]:
    return {name: getattr(gpu, name) for name in _OF_GPU} | {
        "numa": None if gpu.numa < 0 else gpu.numa,
        "in_use": gpu.busy,
        "ecc_uncorrected": ecc,
        "kernel": kernel and (kernel.kind or "ok"),
        "kernel_seconds": kernel and round(kernel.seconds, 3),
    }


def display(report: Report, *, terminal: bool = False) -> Iterator[RenderableType]:
    """A report as lines and tables: the findings, then the nodes with their workers, as `plan` has them."""
    evidence = report.evidence
    if evidence is not None:
        ranks, nodes = counted(evidence.plan.world_size, "rank"), counted(len(evidence.plan.hosts), "node")
        yield f"check of {ranks} on {nodes}, {report.seconds:.1f} s"
        yield ""
    yield table(("", "", ""), _rows(report))
    yield ""
    if evidence is not None:
        # its warnings are findings
        yield from display_plan(replace(evidence.plan, warnings=()), terminal=terminal)
        yield ""
    counts = Counter(finding.level for finding in report.findings)
    summary = f": {counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}"
    yield styled(*_LABELS[report.level]).append(summary)


def _rows(report: Report) -> Iterator[tuple[str | Text, str, str]]:
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
