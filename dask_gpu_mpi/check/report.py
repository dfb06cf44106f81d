"""What `check` works with: what all ranks found (`Evidence`), and what is said of it (`Finding`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.options.protocols import Protocol
from dask_gpu_mpi.plan.plan import Plan

from .kernel import KernelResult
from .observations import Facts

__all__ = ["Evidence", "Finding", "Level", "Listening", "Outcome", "Report"]

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    level : {"ok", "warning", "error"}
        Green, yellow, red.
    what : str
        What was looked at.
    found : str
        What was found.
    remedy : str
        How to mend it; of an error never empty.
    ranks : tuple of int
        Whom it concerns; empty: the job.
    hosts : tuple of str
        Where these run.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listening:
    """What the scheduler's rank says of its ports.

    Attributes
    ----------
    port : int
        Where it listens; 0: nowhere.
    error : str
        Why not.
    dashboard : str
        Why the dashboard's port can't be used; empty: it can, or it is not wanted.
    """

    port: int = 0
    error: str = ""
    dashboard: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a rank's tests gave."""

    reach: Reach | None = None
    kernels: tuple[KernelResult, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Everything that the judgement needs.

    Attributes
    ----------
    size : int
        Number of ranks.
    facts : mapping
        By rank.
    doing : mapping
        By rank: its host, and what it was at when it was last heard of.
    plan : Plan or None
        Who would work where.
    plan_problem : str
        Why there is no plan.
    network_problem : str
        Why no addresses could be chosen.
    scheduler_rank, address, port : int, str, int
        Where the scheduler would listen; port 0: any.
    dashboard_address : str
        Where the dashboard would.
    listening : Listening or None
        What became of that.
    tests : mapping
        By rank.
    silent : tuple of int
        Ranks that did not answer in time.
    kernel : bool
        Whether kernels were to be run.
    protocol : Protocol
        Dask's.
    expect_gpus : int or None
        GPUs that each host is to have; None: as many as the batch system says, if it does.
    """

    size: int
    facts: Mapping[int, Facts] = field(default_factory=dict)
    doing: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    plan: Plan | None = None
    plan_problem: str = ""
    network_problem: str = ""
    scheduler_rank: int = 0
    address: str = ""
    port: int = 0
    dashboard_address: str = ""
    listening: Listening | None = None
    tests: Mapping[int, Outcome] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    kernel: bool = True
    protocol: Protocol = Protocol.TLS
    expect_gpus: int | None = None

    def host(self, rank: int) -> str:
        """Where a rank runs, as far as it is known."""
        return self.facts[rank].host if rank in self.facts else self.doing.get(rank, ("", ""))[0]

    def by_host(self) -> dict[tuple[str, str], list[Facts]]:
        """What the ranks of each host found, in the order of ranks."""
        hosts: dict[tuple[str, str], list[Facts]] = {}
        for _, facts in sorted(self.facts.items()):
            hosts.setdefault((facts.host, facts.boot_id), []).append(facts)
        return hosts


@dataclass(frozen=True)
class Report:
    """The end of a check.

    Attributes
    ----------
    evidence : Evidence
        What was found.
    findings : tuple of Finding
        What it means.
    seconds : float
        From the start of MPI.
    """

    evidence: Evidence
    findings: tuple[Finding, ...]
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
