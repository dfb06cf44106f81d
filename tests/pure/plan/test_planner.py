"""From inventories to the plan: examples first, then properties over random jobs."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.errors import InputError, PlacementError, WorldTooSmallException
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import synthetic
from dask_gpu_mpi.plan.planner import make_plan
from support.mocks.inputs import (
    GIB,
    gpu,
    names,
    one_host,
    plan,
    rank,
)

#: Nodes of the size that the expectations below are for.
hypothetical_job = partial(synthetic.hypothetical_job, memory_per_node=256 * GIB)

# -- examples


@pytest.mark.parametrize("visible", ["all", "per-rank"])
def test_four_hosts_of_four_gpus(visible: Any) -> None:
    found = plan(hypothetical_job(4, 1, 4, visible))
    assert names(found) == [f"{r}-{g}" for r in range(4) for g in range(4)]
    assert {(w.kind, w.nthreads, w.memory_limit) for w in found.workers} == {("gpu", 1, 64 * GIB)}
    assert all(w.resources == {"GPU": 1.0} for w in found.workers)
    assert (found.scheduler.rank, found.client.rank, found.scheduler.host) == (0, 0, "h1")
    assert found.warnings == ()
    assert [w.name for w in found.for_rank(2)] == ["2-0", "2-1", "2-2", "2-3"]
    assert found.for_rank(9) == ()


@pytest.mark.parametrize("visible", ["all", "per-rank"])
def test_a_rank_per_gpu(visible: Any) -> None:
    found = plan(hypothetical_job(2, 4, 4, visible))
    assert names(found) == ["0-0", "1-1", "2-2", "3-3", "4-0", "5-1", "6-2", "7-3"]
    assert [w.cpus[0] for w in found.workers] == [0, 0, 32, 32] * 2


def test_no_gpu_anywhere() -> None:
    found = plan(hypothetical_job(2, 2, 0, cpus_per_node=8))
    assert names(found) == [0, 1, 2, 3]
    assert {(w.kind, w.nthreads, w.device, w.gpu_index) for w in found.workers} == {("cpu", 4, None, None)}
    assert found.workers[0].resources == {"CPU": 4.0}


def test_one_rank() -> None:
    assert names(plan(hypothetical_job(1, 1, 0))) == [0]
    assert names(plan(hypothetical_job(1, 1, 2))) == ["0-0", "0-1"]


def test_layout_exclusive_is_dask_mpis_role_map() -> None:
    found = plan(hypothetical_job(1, 4, 4), layout="exclusive")
    assert (found.scheduler.rank, found.client.rank) == (0, 1)
    assert names(found) == ["2-0", "2-1", "3-2", "3-3"]
    assert found.warnings == ()


def test_warnings_of_the_ranks_are_told_once() -> None:
    assert plan(one_host((gpu(0),), (gpu(0),), warnings=("GPU 1 is lost",))).warnings[0] == "GPU 1 is lost"
    assert len(plan(one_host((), (), warnings=("x",))).warnings) == 1


def test_worker_kind() -> None:
    cpu = plan(hypothetical_job(1, 2, 2), worker_class="distributed.Nanny")
    assert names(cpu) == [0, 1]
    assert cpu.hosts[0].gpus == ()
    assert names(plan(hypothetical_job(1, 2, 2), worker_class="dask_cuda.CUDAWorker")) == ["0-0", "1-1"]
    with pytest.raises(PlacementError, match=r"none of the ranks .* sees a GPU \(ranks 0-3 on h\[1-2\]\)"):
        plan(hypothetical_job(2, 2, 0), worker_class="dask_cuda.CUDAWorker")


# -- properties

CPUS = st.sets(st.integers(0, 7), min_size=1).map(lambda cpus: tuple(sorted(cpus)))


@st.composite
def jobs(draw: st.DrawFn, *, tidy: bool = False) -> list[Inventory]:
    """Draw a job: hosts with GPUs, ranks anywhere, each seeing some of its host's GPUs (tidy: in disjoint groups)."""
    hosts = []
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 5))
        gpus = [
            gpu(
                i,
                uuid=f"GPU-{number}-{i}",
                pci=draw(st.sampled_from(["", "0A", "0B"])),
                cpus=draw(st.one_of(st.just(()), CPUS)),
                processes=draw(st.sampled_from([(), (), ((999, GIB),)])),
            )
            for i in range(count)
        ]
        cut = draw(st.integers(0, count))
        hosts.append(
            (draw(st.sampled_from(["n1", "n2"])), f"boot{number}", gpus, (gpus[:cut], gpus[cut:], gpus[:0]))
        )
    size = draw(st.integers(1, 8))
    found = []
    for number in range(size):
        host, boot, gpus, groups = draw(st.sampled_from(hosts))
        subset = (
            st.sampled_from(groups)
            if tidy
            else st.one_of(st.just(gpus), st.sampled_from(groups), _some(gpus))
        )
        found.append(
            rank(
                number,
                size,
                tuple(draw(st.permutations(draw(subset)))),
                host=host,
                boot_id=boot,
                cpus=draw(CPUS),
                memory=draw(st.integers(GIB, 64 * GIB)),
                visible=draw(st.sampled_from([None, "0,1"])),
            )
        )
    return found


def _some(gpus: list[Gpu]) -> st.SearchStrategy[list[Gpu]]:
    return st.lists(st.sampled_from(gpus), unique=True) if gpus else st.just([])


@st.composite
def all_options(draw: st.DrawFn) -> Options:
    return Options(
        layout=draw(st.sampled_from(["shared", "shared", "exclusive"])),
        cpu_workers=draw(st.integers(0, 2)),
        nthreads=draw(st.sampled_from([None, None, 2])),
        worker_class=draw(st.sampled_from(["auto", "auto", "distributed.Nanny", "dask_cuda.CUDAWorker"])),
        name=draw(st.sampled_from([None, "x"])),
    )


def overlapping(inventories: list[Inventory], working: set[int]) -> bool:
    """Tell, in the plainest way, whether two ranks of a host see some but not all of the same GPUs."""
    return any(
        a.boot_id == b.boot_id
        and a.host == b.host
        and seen[a.rank] != seen[b.rank]
        and seen[a.rank] & seen[b.rank]
        for seen in [{found.rank: {g.uuid for g in found.gpus} for found in inventories}]
        for a in inventories
        for b in inventories
        if {a.rank, b.rank} <= working
    )


@settings(max_examples=100, deadline=None)
@given(jobs(), all_options())
def test_every_visible_gpu_has_one_worker_or_the_error_says_who_saw_what(
    inventories: list[Inventory], options: Options
) -> None:
    working = set(range(2 if options.layout == "exclusive" else 0, len(inventories)))
    try:
        found = make_plan(inventories, options)
    except WorldTooSmallException:
        assert options.layout == "exclusive"
        assert len(inventories) < 3
        return
    except PlacementError as error:
        message = str(error)
        assert "\n" not in message
        if "see overlapping" in message:
            assert overlapping(inventories, working)
            assert "saw GPU" in message
        else:
            assert options.worker_kind == "gpu"
            assert not any(inventories[number].gpus for number in working)
        return
    visible = {gpu.uuid: inventories[r].boot_id for r in working for gpu in inventories[r].gpus}
    on_gpus = bool(visible) and options.worker_kind != "cpu"
    if on_gpus:
        assert not overlapping(inventories, working)
    devices = Counter(w.device for w in found.workers if w.kind == "gpu")
    assert devices == (dict.fromkeys(visible, 1) if on_gpus else {})
    for worker in found.workers:
        own = inventories[worker.rank]
        assert worker.rank in working
        assert worker.nthreads >= 1
        assert set(worker.cpus) <= set(own.cpus)
        assert worker.cpus
        if worker.kind == "gpu":
            assert worker.device in {gpu.uuid for gpu in own.gpus}
            host = next(host for host in found.hosts if worker.rank in host.ranks)
            assert host.gpus[worker.gpu_index or 0].uuid == worker.device
            assert str(worker.name).endswith(f"{worker.rank}-{worker.gpu_index}")
    if not on_gpus:
        assert sum(w.kind == "cpu" and "cpu" not in str(w.name) for w in found.workers) == len(working)


@settings(max_examples=60, deadline=None)
@given(jobs(tidy=True), all_options(), st.randoms(use_true_random=False))
def test_names_memory_and_order(
    inventories: list[Inventory], options: Options, shuffler: random.Random
) -> None:
    shuffled = list(inventories)
    shuffler.shuffle(shuffled)
    try:
        found = make_plan(inventories, options)
    except InputError as error:
        message = str(error)
        with pytest.raises(InputError) as caught:
            make_plan(shuffled, options)
        assert str(caught.value) == message
        return
    assert make_plan(shuffled, options) == found
    assert len({str(w.name) for w in found.workers}) == len(found.workers)
    assert len({h.host for h in found.hosts}) == len(found.hosts)
    assert sorted(r for h in found.hosts for r in h.ranks) == list(range(len(inventories)))
    for host in found.hosts:
        limits = [w.memory_limit for w in found.workers if w.host == host.host]
        assert all(limit > 0 for limit in limits)
        assert sum(limits) <= host.memory == min(inventories[r].memory for r in host.ranks)
    assert [w.rank for w in found.workers] == sorted(w.rank for w in found.workers)
    assert found.table()
    assert json.dumps(found.as_json())


@settings(max_examples=60, deadline=None)
@given(st.lists(CPUS, min_size=1, max_size=6), st.lists(CPUS, min_size=1, max_size=8))
def test_shares_differ_by_one_at_most_however_ranks_are_bound(
    masks: list[tuple[int, ...]], near: list[tuple[int, ...]]
) -> None:
    gpus = tuple(gpu(i, cpus=cpus) for i, cpus in enumerate(near))
    found = plan([rank(i, len(masks), gpus, cpus=mask) for i, mask in enumerate(masks)])
    shares = [len(found.for_rank(number)) for number in range(len(masks))]
    assert sum(shares) == len(gpus)
    assert max(shares) - min(shares) <= 1
