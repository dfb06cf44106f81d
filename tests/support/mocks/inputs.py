"""Inventories of ranks, options from keywords, and the plan made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.resolve import resolve
from dask_gpu_mpi.plan import HostPlan, Plan, Role, WorkerPlan
from dask_gpu_mpi.plan.planner import make_plan

GIB = 1024**3


def parse_run(arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters of the command `run`, without running it; or Click's exception, such as Exit for ``--help``."""
    with cli.commands["run"].make_context("run", list(arguments)) as context:
        return dict(context.params)


def command(*words: str, rc: int = 0) -> str:
    """Run the command line in this process: its output, or what it says on standard error where it fails."""
    done = CliRunner().invoke(cli, [*words])
    assert done.exit_code == rc, done.output
    return done.stdout if rc == 0 else done.stderr


def gpu(index: int, **more: Any) -> Gpu:
    return Gpu(**{"uuid": f"GPU-{index:04}", "index": index, "name": "A100", "memory": 40 * GIB, **more})


def rank(number: int, world: int, gpus: tuple[Gpu, ...] = (), **more: Any) -> Inventory:
    fixed = {
        "host": "h1",
        "boot_id": "b",
        "pid": 1,
        "cpus": (0, 1),
        "memory": 64 * GIB,
        "visible": None,
    }
    return Inventory(**{**fixed, **more, "rank": number, "world_size": world, "gpus": gpus})


def one_host(*seen: tuple[Gpu, ...], **more: Any) -> list[Inventory]:
    return [rank(number, len(seen), gpus, **more) for number, gpus in enumerate(seen)]


def names(plan: Plan) -> list[str | int]:
    return [worker.name for worker in plan.workers]


def plan(inventories: Any, *, has_client: bool = True, **options: Any) -> Plan:
    return make_plan(inventories, Options(**options), has_client=has_client)


def worker_plan(name: str | int = "0-0", device: str | None = None, **more: Any) -> WorkerPlan:
    """A worker of rank 0 on host ``h``, of GPUs where `device` is given."""
    fixed = {
        "rank": 0,
        "host": "h",
        "kind": "cpu" if device is None else "gpu",
        "gpu_index": None,
        "nthreads": 1,
        "memory_limit": 0,
        "cpus": (),
        "resources": {},
    }
    return WorkerPlan(**{"name": name, "device": device, **fixed, **more})


def plan_of(*workers: WorkerPlan, warnings: tuple[Any, ...] = ()) -> Plan:
    """A plan of these workers; the place of each one's first GPU is its `gpu_index`."""
    hosts: dict[str, dict[int, Gpu]] = {worker.host: {} for worker in workers}
    for worker in workers:
        for place, uuid in enumerate(worker.devices, worker.gpu_index or 0):
            hosts[worker.host][place] = gpu(place, uuid=uuid)
    planned = tuple(
        HostPlan(host, (0,), tuple(gpus.get(n, gpu(n)) for n in range(max(gpus, default=-1) + 1)), 0)
        for host, gpus in hosts.items()
    )
    role = Role(0, workers[0].host)
    return Plan("shared", 1, role, role, planned, workers, warnings)


def keywords(**given: Any) -> Options:
    return resolve(given, source="keyword")


def refused(given: dict[str, Any], source: Any = "keyword") -> str:
    with pytest.raises(OptionError) as caught:
        resolve(given, source=source)
    message = str(caught.value)
    assert "\n" not in message
    return message
