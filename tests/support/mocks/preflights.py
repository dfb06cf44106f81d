"""What the ranks of a preflight have observed, all well or nearly so, and what the rules make of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dask_gpu_mpi.base.plain_data import from_plain, pack, unpack
from dask_gpu_mpi.check.kernel import KernelResult
from dask_gpu_mpi.check.observations import DISTRIBUTIONS, MPI_LIBRARY, NOT_INSTALLED, PYTHON, Observations
from dask_gpu_mpi.check.report import Evidence, Finding
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.run import PAYLOADS
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.mpi.mailbox import Event
from dask_gpu_mpi.network.reachability import Node, Reach
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.startup import messages
from dask_gpu_mpi.startup.messages import Listening

__all__ = [
    "GIB",
    "GREEN",
    "VERSIONS",
    "MockMailbox",
    "bad",
    "environ_with",
    "evidence",
    "gpu",
    "nodes",
    "observed",
    "only",
    "reaching",
]

GIB = 2**30


VERSIONS = {
    **dict.fromkeys(DISTRIBUTIONS, NOT_INSTALLED),
    PYTHON: "3.12.9",
    MPI_LIBRARY: "Open MPI v5.0.11",
    "dask": "2026.7.1",
    "distributed": "2026.7.1",
    "dask-cuda": "26.10.0",
    "cuda-bindings": "13.0.0",
    "bokeh": "3.9.2",
}


GREEN = (
    "launcher",
    "versions",
    "known versions",
    "GPUs",
    "placement",
    "kernel",
    "ports",
    "network",
    "clocks",
    "scratch",
)


class MockMailbox:
    """The mailbox of one rank, without MPI: what it sends to itself arrives, `on_send` answers for the others."""

    def __init__(
        self, rank: int = 0, size: int = 2, payloads: Mapping[str, Any] = {**messages.PAYLOADS, **PAYLOADS}
    ) -> None:
        self.rank, self.size = rank, size
        self.hosts = {number: f"h{number + 1}" for number in range(size)}
        self.payloads = payloads
        #: What it receives next.
        self.mails: list[Event] = []
        #: (rank, kind, payload); rank -1: all.
        self.sent: list[tuple[int, str, Any]] = []
        self.on_send: Callable[[int, str, Any], None] = lambda rank, kind, payload: None

    def receive(self) -> list[Event]:
        mails, self.mails = self.mails, []
        return mails

    def _check(self, kind: str, payload: Any) -> None:
        """Whether the payload is one that can be sent as this kind."""
        data = pack(payload)
        assert pack(from_plain(self.payloads[kind], unpack(data))) == data

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self._check(kind, payload)
        self.sent.append((rank, kind, payload))
        if rank == self.rank:
            self.mails.append(Event(rank, kind, payload))
        else:
            self.on_send(rank, kind, payload)

    def send_all(self, kind: str, payload: Any = None) -> None:
        self._check(kind, payload)
        self.sent.append((-1, kind, payload))

    def flush(self, timeout: float) -> bool:
        return True


def gpu(host: str, index: int, **more: Any) -> Gpu:
    uuid = f"GPU-{host}-{index}"
    return Gpu(uuid=uuid, index=index, name="NVIDIA H200", memory=141 * GIB, cpus=(0, 1), **more)


def observed(
    rank: int, *, versions: Mapping[str, str] | None = None, gpus: int = 2, **more: Any
) -> Observations:
    host = f"h{rank + 1}"
    inventory = Inventory(
        rank, 2, host, host, 1, (0, 1), 64 * GIB, tuple(gpu(host, index) for index in range(gpus)), None
    )
    made = Observations(
        rank=rank,
        host=host,
        boot_id=host,
        versions=VERSIONS | dict(versions or {}),
        inventory=inventory,
        interfaces=(),
        wanted_interface=None,
        shared_options=(),
        scratch=Scratch("/scratch", "ext4", "/", 100 * GIB),
        driver="580.1" if gpus else "",
        ecc={f"GPU-{host}-{index}": 0 for index in range(gpus)},
    )
    return replace(made, **more)


def nodes(number: int) -> tuple[Node, ...]:
    """As many nodes, of ranks that listen."""
    return tuple(Node(f"h{rank + 1}", rank, f"10.0.0.{rank + 1}", port=4712) for rank in range(number))


def evidence(*found: Observations, **more: Any) -> Evidence:
    """Two hosts where all is well, unless `more` changes it: fields of the evidence, or options."""
    found = found or (observed(0), observed(1))
    inventories = [one.inventory for one in found if one.inventory is not None]
    names = {one.name for one in fields(Options)} & more.keys()
    options: dict[str, Any] = {"dashboard_address": "127.0.0.1:8787", "worker_ucx": WorkerUcx.OFF}
    options |= {name: more.pop(name) for name in names}
    made = Evidence(
        size=len(found),
        options=Options(**options),
        observations={one.rank: one for one in found},
        plan=make_plan(inventories, Options()) if len(inventories) == 2 else None,
        address="10.0.0.1",
        listening=Listening(4711),
        reached={one.rank: Reach("", 0.01 * one.rank, 0.001) for one in found},
        kernels={
            one.rank: tuple(
                KernelResult(gpu.uuid, seconds=1.0) for gpu in (one.inventory.gpus if one.inventory else ())
            )
            for one in found
        },
    )
    return replace(made, **more)


def bad(found: Evidence) -> list[Finding]:
    """What is not green; whatever is red has a fix."""
    findings = apply_rules(found)
    assert all(finding.fix for finding in findings if finding.level == "error")
    return [finding for finding in findings if finding.level != "ok"]


def only(found: Evidence) -> Finding:
    """The one finding that is not green."""
    findings = bad(found)
    assert len(findings) == 1, findings
    return findings[0]


def reaching(*reaches: Reach, **more: Any) -> Evidence:
    """As `evidence`, with the results of the first ranks."""
    good = evidence(**more)
    return replace(good, reached={**good.reached, **dict(enumerate(reaches))})


def environ_with(package: str, text: str, folder: Path) -> dict[str, str]:
    """An environment in which this package is a mock with this text."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}
