"""What `check` works with: what all ranks observed (`Evidence`), and what the rules make of it (`Finding`, `Report`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.network.node_pairs import Lost, Node
from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.protocols import Protocol, WorkerUcx
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.startup.messages import Listening

from .kernel import KernelResult
from .observations import Observations
from .ucx import UcxResult

__all__ = [
    "LEAVE_OUT",
    "Evidence",
    "Finding",
    "Level",
    "Outcome",
    "Report",
    "merge",
    "problems",
    "split_fix",
]

Level = Literal["ok", "warning", "error"]
#: A fix that several rules share.
LEAVE_OUT = "leave the node out of the job and inform the operators of the cluster"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    #: Green, yellow, red.
    level: Level
    #: What was inspected.
    what: str
    found: str
    #: Of an error never empty.
    fix: str = ""
    #: Whom it concerns; empty: the job.
    ranks: tuple[int, ...] = ()
    #: Where these run.
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The results of a rank's tests."""

    reach: Reach | None = None
    kernels: tuple[KernelResult, ...] = ()
    #: Other nodes that it has not reached.
    lost: tuple[Lost, ...] = ()
    #: Whether UCX works; None: it was not tried here.
    ucx: UcxResult | None = None


@dataclass(frozen=True)
class Evidence:
    """All that the rules need. Mappings are by rank, in the order of ranks."""

    #: Number of ranks.
    size: int
    observations: Mapping[int, Observations] = field(default_factory=dict)
    #: Host of each rank, and the step that it was at when rank 0 last heard from it.
    steps: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    plan: Plan | None = None
    #: Why there is no plan.
    plan_problem: str = ""
    #: Why no addresses could be chosen.
    network_problem: str = ""
    scheduler_rank: int = 0
    #: Where the scheduler would listen; port 0: any.
    address: str = ""
    port: int = 0
    #: Where the dashboard would listen.
    dashboard_address: str = ""
    listening: Listening | None = None
    #: Where a rank of each node listens for the others; empty: there is one node, or no address is known.
    nodes: tuple[Node, ...] = ()
    tests: Mapping[int, Outcome] = field(default_factory=dict)
    #: Ranks that did not respond in time.
    silent: tuple[int, ...] = ()
    #: Whether the user wants kernels to run.
    kernel: bool = True
    protocol: Protocol = Protocol.TLS
    #: What the user wants workers to send each other over UCX.
    worker_ucx: WorkerUcx = WorkerUcx.OFF
    #: GPUs that the user expects on each node; None: as many as the batch system has allocated, where it says so.
    expect_gpus: int | None = None

    @property
    def inventories(self) -> list[Inventory]:
        """Of the ranks that could take one."""
        return [observed.inventory for observed in self.observations.values() if observed.inventory]

    @property
    def gpus(self) -> dict[str, Gpu]:
        """All visible GPUs by UUID, each as the last rank saw it."""
        return {gpu.uuid: gpu for inventory in self.inventories for gpu in inventory.gpus}

    @property
    def abilities(self) -> dict[int, UcxAbility]:
        """How far each rank can use UCX."""
        return {rank: observed.ucx for rank, observed in self.observations.items()}

    def host(self, rank: int) -> str:
        """Where a rank runs; empty: unknown."""
        if rank in self.observations:
            return self.observations[rank].host
        return self.steps.get(rank, ("", ""))[0]

    def by_host(self) -> dict[tuple[str, str], list[Observations]]:
        """What the ranks of each node observed, by host name and boot id."""
        hosts: dict[tuple[str, str], list[Observations]] = {}
        for observed in self.observations.values():
            hosts.setdefault((observed.host, observed.boot_id), []).append(observed)
        return hosts


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


def split_fix(text: str, default: str) -> tuple[str, str]:
    """Split a message before its fix; `default` where it has none.

    >>> split_fix("--interface: unknown network 'ib9' (expected eth0; lo). Fix: choose eth0", "")
    ("--interface: unknown network 'ib9' (expected eth0; lo)", 'choose eth0')
    >>> split_fix("no GPU", "leave the node out")
    ('no GPU', 'leave the node out')
    """
    found, _, fix = text.rpartition(" Fix: ")
    if not found and "(expected " not in text:  # the former shape: "found; fix"
        found, _, fix = text.rpartition("; ")
    return (found.removesuffix("."), fix) if found else (text, default)


def problems(evidence: Evidence, what: str, default_fix: str) -> Iterator[Finding]:
    """What ranks found unusable."""
    for rank, observed in evidence.observations.items():
        for line, text in observed.problems:
            if line == what:
                yield Finding("error", what, *split_fix(text, default_fix), (rank,))


def merge(evidence: Evidence, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding where those of several ranks differ in nothing else; each with the hosts of its ranks."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return tuple(
        replace(finding, ranks=tuple(of), hosts=tuple(dict.fromkeys(filter(None, map(evidence.host, of)))))
        for finding, of in ranks.items()
    )
