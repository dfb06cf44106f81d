"""Shapes of jobs as sites have them, from what ranks see to the plan: properties, and what they leave open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, hypothetical_job
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.planner import make_plan
from support.mocks.inputs import GIB, gpu, names, rank


@dataclass(frozen=True)
class Shape:
    """One host, and how the launcher and the batch system cut it up."""

    #: GPUs, NUMA nodes, and cores of each node.
    gpus: int = 4
    nodes: int = 2
    cores: int = 8
    #: Ranks on the host.
    ranks: int = 1
    #: all: every rank sees all; own: each its share; isolated: the same, by a cgroup, so that each counts from 0;
    #: subset: all see the same part; none.
    seen: str = "all"
    #: no: each rank may use all cores; node: one node; blocks: its share of the cores.
    bound: str = "no"
    #: MIG instances of each GPU; 0: none.
    slices: int = 0
    #: Whether neighbours by index sit on different nodes.
    scattered: bool = False
    #: Whether PCI order is not NVML's order, and ranks see GPUs in different orders.
    backwards: bool = False
    #: Bytes.
    memory: int = 512 * GIB

    def cores_of(self, node: int) -> tuple[int, ...]:
        """The cores of a node."""
        return tuple(range(node * self.cores, (node + 1) * self.cores))

    def devices(self, host: str) -> list[Gpu]:
        """What NVML lists."""
        found: list[Gpu] = []
        for index in range(self.gpus):
            node = index % self.nodes if self.scattered else index * self.nodes // self.gpus
            pci = f"{self.gpus - index if self.backwards else index:02X}:00.0"
            one = gpu(index, uuid=f"GPU-{index:02x}{host}-0000", cpus=self.cores_of(node), pci=pci)
            parts = range(self.slices)
            found += [
                replace(one, uuid=f"MIG-{index:02x}{part}{host}", parent=one.uuid, slice=part)
                for part in parts
            ] or [one]
        return found

    def visible(self, place: int, host: str) -> list[Gpu]:
        """What a rank sees."""
        devices = self.devices(host)
        if self.seen in ("all", "none"):
            return devices if self.seen == "all" else []
        mine = devices[: (len(devices) + 1) // 2] if self.seen == "subset" else devices[place :: self.ranks]
        if self.seen == "isolated":
            order = list(dict.fromkeys(gpu.pci for gpu in mine))
            mine = [replace(gpu, index=order.index(gpu.pci)) for gpu in mine]
        return mine[::-1] if self.backwards and place % 2 else mine

    def cpus(self, place: int) -> tuple[int, ...]:
        """The cores that a rank may use."""
        part = self.cores * self.nodes // self.ranks
        if self.bound == "node":
            return self.cores_of(place % self.nodes)
        whole = self.bound == "no" or not part
        return tuple(range(self.cores * self.nodes) if whole else range(place * part, (place + 1) * part))


def job(*shapes: Shape) -> list[Inventory]:
    ranks = [
        (f"n{number}", shape, place) for number, shape in enumerate(shapes) for place in range(shape.ranks)
    ]
    return [
        rank(
            number,
            len(ranks),
            tuple(shape.visible(place, host)),
            host=host,
            boot_id=host,
            cpus=shape.cpus(place),
            memory=shape.memory,
        )
        for number, (host, shape, place) in enumerate(ranks)
    ]


def plan(*shapes: Shape, **options: Any) -> Plan:
    return make_plan(job(*shapes), Options(**options))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    nodes = one_of(1, 2, 4)
    return Shape(
        gpus=one_of(0, 1, 2, 3, 4, 6, 8, 16),
        nodes=nodes,
        cores=draw(st.integers(1, 4)),
        ranks=one_of(1, 1, 2, 3, 4, nodes, 9),
        seen=one_of("all", "all", "own", "isolated", "subset", "none"),
        bound=one_of("no", "node", "blocks"),
        slices=one_of(0, 0, 0, 2, 7),
        scattered=draw(st.booleans()),
        backwards=draw(st.booleans()),
        memory=draw(st.integers(GIB, 512 * GIB)),
    )


JOBS = st.lists(shapes(), min_size=1, max_size=4)
OPTIONS = st.builds(
    Options,
    cpu_workers=st.sampled_from([0, 0, 1, 2]),
    gpus_per_worker=st.sampled_from([1, 1, 1, 2, 3, 4]),
)


def full_groups(inventories: Sequence[Inventory], each: int) -> bool:
    """Whether every set of GPUs that ranks of a host see together makes full groups, and none has slices in groups."""
    sets = {frozenset(gpu.uuid for gpu in rank.gpus) for rank in inventories}
    slices = any(gpu.parent for rank in inventories for gpu in rank.gpus)
    return each == 1 or (all(len(seen) % each == 0 for seen in sets) and not slices)


@settings(max_examples=150, deadline=None)
@given(JOBS, OPTIONS)
def test_every_visible_gpu_has_its_one_worker(drawn: list[Shape], options: Options) -> None:
    inventories = job(*drawn)
    each = options.gpus_per_worker
    if not full_groups(inventories, each):
        with pytest.raises(PlacementError, match=r"^host n\d: ranks? [\d,-]+ sees? .*gpus_per_worker"):
            make_plan(inventories, options)
        return
    found = make_plan(inventories, options)
    assert make_plan(reversed(inventories), options) == found
    assert [worker.rank for worker in found.workers] == sorted(worker.rank for worker in found.workers)
    visible = Counter({gpu.uuid: 1 for rank in inventories for gpu in rank.gpus})
    assert Counter(uuid for worker in found.workers for uuid in worker.devices) == visible
    assert len(set(names(found))) == len(found.workers)
    for worker in found.workers:
        rank = inventories[worker.rank]
        host = next(host for host in found.hosts if worker.rank in host.ranks)
        assert worker.host == host.host == rank.host
        if worker.kind == "cpu":
            assert worker.device is None
            assert worker.resources == {"CPU": worker.nthreads}
            continue
        gpus = [gpu for gpu in host.gpus if gpu.uuid in worker.devices]
        assert worker.device == ",".join(gpu.uuid for gpu in gpus)
        assert len(gpus) == each == worker.resources["GPU"]
        # what the rank itself can show to a process
        assert set(worker.devices) <= {gpu.uuid for gpu in rank.gpus}
        assert host.gpus[worker.gpu_index or 0] is gpus[0]
        assert worker.name == f"{worker.rank}-{worker.gpu_index}"
        near = {core for gpu in gpus for core in gpu.cpus} & set(rank.cpus)
        assert set(worker.cpus) == (near or set(rank.cpus))
    for host in found.hosts:
        assert list(host.gpus) == sorted(host.gpus, key=lambda gpu: (gpu.pci, gpu.slice))
        limits = [worker.memory_limit for worker in found.workers if worker.host == host.host]
        assert set(limits) <= {host.memory // max(1, len(limits))}
        if options.cpu_workers:
            assert (
                sum("-cpu-" in str(w.name) for w in found.workers if w.host == host.host)
                == options.cpu_workers
            )


@settings(max_examples=100, deadline=None)
@given(shapes(), st.sampled_from([1, 2, 4]))
def test_a_rank_per_socket_has_the_gpus_of_its_socket(shape: Shape, each: int) -> None:
    assume(shape.gpus and shape.gpus % (shape.nodes * each) == 0)
    shape = replace(shape, seen="all", slices=0, bound="node", ranks=shape.nodes)
    found = plan(shape, gpus_per_worker=each)
    gpus = {gpu.uuid: gpu for gpu in found.hosts[0].gpus}
    for worker in found.workers:
        assert worker.cpus == shape.cores_of(worker.rank)
        assert {gpus[uuid].cpus for uuid in worker.devices} == {worker.cpus}
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("shape", "each", "expected", "devices"),
    [
        (Shape(scattered=True), 2, "0-0 0-1", "02 13"),
        (Shape(gpus=6), 2, "0-0 0-2 0-3", "01 25 34"),
        (Shape(ranks=2, seen="own"), 2, "0-0 1-1", "02 13"),
    ],
)
def test_several_gpus_for_each_worker(shape: Shape, each: int, expected: str, devices: str) -> None:
    found = plan(shape, gpus_per_worker=each)
    assert names(found) == expected.split()
    assert ["".join(uuid[5] for uuid in worker.devices) for worker in found.workers] == devices.split()
    assert {worker.resources["GPU"] for worker in found.workers} == {each}


def test_the_table_shows_all_gpus_of_a_worker() -> None:
    table = plan(Shape(gpus=6), gpus_per_worker=2).table()
    assert " 2,5 A100 GPU-02n0-000 " in table
    many = make_plan(hypothetical_job(20, 1, 4), Options(gpus_per_worker=2)).table()
    assert "20 hosts" in many
    assert " 0-1 GPU " in many


@pytest.mark.parametrize(
    ("shape", "each", "words"),
    [
        (Shape(gpus=3), 2, "host n0: rank 0 sees 3 GPU(s), of which groups of 2 (gpus_per_worker, --gpus-per-worker) would"),
        (Shape(gpus=4, ranks=4, seen="own"), 2, "rank 0 sees 1 GPU(s), of which groups of 2"),
        (Shape(gpus=4, ranks=2), 3, "ranks 0-1 see 4 GPU(s), of which groups of 3"),
        (Shape(gpus=2, slices=2), 2, "the MIG instance MIG-000n0, and CUDA shows a process one MIG instance at most"),
    ],
)  # fmt: skip
def test_groups_that_are_not_full(shape: Shape, each: int, words: str) -> None:
    with pytest.raises(PlacementError) as caught:
        plan(shape, gpus_per_worker=each)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    # and where no GPU worker is asked for, nobody minds
    assert {
        worker.kind for worker in plan(shape, gpus_per_worker=each, worker_class="distributed.Nanny").workers
    } == {"cpu"}
