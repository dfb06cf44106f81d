"""From inventories to the plan: examples first, then properties over random jobs."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.errors import InputError, OptionError, PlacementError, WorldTooSmallException
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.plan import synthetic
from dask_gpu_mpi.plan.planner import PlacementOptions, make_plan
from inventories import GIB, gpu, names, one_host, plan, rank

#: Nodes of the size that the expectations below are for.
pretend = partial(synthetic.pretend, memory_per_node=256 * GIB)

# -- names, roles, hosts


@pytest.mark.parametrize("visible", ["all", "per-rank"])
def test_four_hosts_of_four_gpus(visible: Any) -> None:
    found = plan(pretend(4, 1, 4, visible))
    assert names(found) == [f"{r}-{g}" for r in range(4) for g in range(4)]
    assert {(w.kind, w.nthreads, w.memory_limit) for w in found.workers} == {("gpu", 1, 64 * GIB)}
    assert all(w.resources == {"GPU": 1.0} for w in found.workers)
    assert (found.scheduler.rank, found.client.rank, found.scheduler.host) == (0, 0, "h1")
    assert found.warnings == ()
    assert [w.name for w in found.for_rank(2)] == ["2-0", "2-1", "2-2", "2-3"]
    assert found.for_rank(9) == ()


@pytest.mark.parametrize("visible", ["all", "per-rank"])
def test_a_rank_per_gpu(visible: Any) -> None:
    found = plan(pretend(2, 4, 4, visible))
    assert names(found) == ["0-0", "1-1", "2-2", "3-3", "4-0", "5-1", "6-2", "7-3"]
    assert [w.cpus[0] for w in found.workers] == [0, 0, 32, 32] * 2


def test_no_gpu_anywhere() -> None:
    found = plan(pretend(2, 2, 0, cpus_per_node=8))
    assert names(found) == [0, 1, 2, 3]
    assert {(w.kind, w.nthreads, w.device, w.gpu_index) for w in found.workers} == {("cpu", 4, None, None)}
    assert found.workers[0].resources == {"CPU": 4.0}


def test_prefix() -> None:
    assert names(plan(pretend(1, 1, 1), name="job", cpu_workers=1)) == ["job-0-0", "job-0-cpu-0"]
    assert names(plan(pretend(1, 2, 0), name="job")) == ["job-0", "job-1"]


def test_one_rank() -> None:
    assert names(plan(pretend(1, 1, 0))) == [0]
    assert names(plan(pretend(1, 1, 2))) == ["0-0", "0-1"]


def test_cpu_workers_come_once_on_every_host() -> None:
    found = plan(pretend(2, 2, 2, cpus_per_node=8), cpu_workers=2)
    assert names(found) == ["0-0", "0-cpu-0", "0-cpu-1", "1-1", "2-0", "2-cpu-0", "2-cpu-1", "3-1"]
    extra = found.workers[1]
    assert (extra.kind, extra.nthreads, extra.cpus, extra.memory_limit) == (
        "cpu",
        4,
        tuple(range(8)),
        64 * GIB,
    )
    assert extra.resources == {"CPU": 4.0}


def test_cpu_workers_in_a_job_without_gpus_share_the_cores() -> None:
    found = plan(pretend(1, 2, 0, cpus_per_node=8), cpu_workers=2)
    assert [(w.name, w.nthreads) for w in found.workers] == [(0, 2), ("0-cpu-0", 2), ("0-cpu-1", 2), (1, 2)]


def test_layout_exclusive_is_dask_mpis_role_map() -> None:
    found = plan(pretend(1, 4, 4), layout="exclusive")
    assert (found.scheduler.rank, found.client.rank) == (0, 1)
    assert names(found) == ["2-0", "2-1", "3-2", "3-3"]
    assert found.warnings == ()


def test_gpus_that_only_the_scheduler_sees_are_told() -> None:
    found = plan(pretend(1, 4, 4, "per-rank"), layout="exclusive")
    assert names(found) == ["2-2", "3-3"]
    assert any("2 GPUs get no worker" in w and "2 on h1" in w for w in found.warnings)
    # and if nobody else sees one, there are CPU workers
    found = plan(one_host((gpu(0),), (gpu(1),), ()), layout="exclusive")
    assert names(found) == [2]
    assert any("2 GPUs get no worker" in w for w in found.warnings)


def test_hosts_of_one_name_are_told_apart() -> None:
    inventories = [rank(i, 3, boot_id=boot, host="node") for i, boot in enumerate(["x", "y", "x"])]
    found = plan(inventories)
    assert [(h.host, h.ranks) for h in found.hosts] == [("node", (0, 2)), ("node#2", (1,))]
    assert [w.host for w in found.workers] == ["node", "node#2", "node"]


def test_one_machine_under_two_names_must_not_share_a_gpu() -> None:
    inventories = [rank(i, 2, (gpu(0),), host=host) for i, host in enumerate(["c1", "c2"])]
    with pytest.raises(PlacementError, match=r"GPU-0000\) is seen by rank 0 on c1 and by rank 1 on c2"):
        plan(inventories)
    # other boot ids: other machines
    assert len(plan([inventories[0], replace(inventories[1], boot_id="z")]).workers) == 2


# -- who gets which GPU


def test_a_rank_that_sees_none_starts_none() -> None:
    found = plan(one_host((gpu(0),), ()))
    assert names(found) == ["0-0"]
    assert any("rank 1 on h1 gets none and starts no GPU worker" in w for w in found.warnings)


def test_index_order_is_pci_index_slice_uuid() -> None:
    a = gpu(0, pci="00000000:90:00.0")
    b = gpu(1, pci="00000000:10:00.0", parent="GPU-b", slice=1, uuid="MIG-1")
    c = gpu(1, pci="00000000:10:00.0", parent="GPU-b", slice=0, uuid="MIG-2")
    found = plan(one_host((a, b, c)))
    assert [(w.name, w.device) for w in found.workers] == [
        ("0-0", "MIG-2"),
        ("0-1", "MIG-1"),
        ("0-2", "GPU-0000"),
    ]


def test_under_cgroups_every_rank_has_index_0() -> None:
    found = plan(one_host(*((gpu(0, uuid=f"GPU-{i}", pci=f"{i}"),) for i in range(3))))
    assert [(w.name, w.device) for w in found.workers] == [
        ("0-0", "GPU-0"),
        ("1-1", "GPU-1"),
        ("2-2", "GPU-2"),
    ]


def test_cores_of_gpu_workers() -> None:
    near = gpu(0, cpus=(1, 2, 3))
    assert plan([rank(0, 1, (near,), cpus=(0, 1, 2))]).workers[0].cpus == (1, 2)
    unknown = plan([rank(0, 1, (gpu(0),), cpus=(0, 1))])
    assert (unknown.workers[0].cpus, unknown.warnings) == ((0, 1), ())


def test_busy_gpus_are_told() -> None:
    (warning,) = plan(one_host((gpu(0), gpu(1, processes=((999, 3 * GIB),))))).warnings
    assert "host h1: GPU 1 " in warning
    assert str(3 * GIB) in warning


def test_ranks_of_a_host_are_no_other_processes() -> None:
    ranks = [
        rank(0, 3, (gpu(0, processes=((11, GIB), (12, None))), gpu(1)), pid=10),
        rank(1, 3, (gpu(0, processes=((10, GIB), (12, GIB))), gpu(1)), pid=11),
        rank(2, 3, (), pid=12),
    ]
    found = plan(ranks, require_idle_gpus=True)
    assert not any("in use" in warning for warning in found.warnings)
    # a number of another host's rank is no rank here
    elsewhere = [*ranks[:2], rank(2, 3, (), pid=12, host="h2", boot_id="c")]
    assert any(f"{GIB} bytes (1.00 GiB) in use" in warning for warning in plan(elsewhere).warnings)
    with pytest.raises(PlacementError, match=f"host h1: GPU 0 .* has {GIB} bytes"):
        plan(elsewhere, require_idle_gpus=True)


def test_processes_whose_memory_is_not_told() -> None:
    ranks = one_host((gpu(0), gpu(1, processes=((999, None),))))
    words = r"host h1: GPU 1 \(GPU-0001\) has memory in use by other processes \(how much, the driver does not report\)"
    (warning,) = plan(ranks).warnings
    assert re.search(words, warning)
    with pytest.raises(PlacementError, match=words):
        plan(ranks, require_idle_gpus=True)


def test_warnings_of_the_ranks_are_told_once() -> None:
    assert plan(one_host((gpu(0),), (gpu(0),), warnings=("GPU 1 is lost",))).warnings[0] == "GPU 1 is lost"
    assert len(plan(one_host((), (), warnings=("x",))).warnings) == 1


def test_worker_kind() -> None:
    cpu = plan(pretend(1, 2, 2), worker_kind="cpu")
    assert names(cpu) == [0, 1]
    assert cpu.hosts[0].gpus == ()
    assert names(plan(pretend(1, 2, 2), worker_kind="gpu")) == ["0-0", "1-1"]
    with pytest.raises(PlacementError, match=r"none of the ranks .* sees a GPU \(ranks 0-3 on h\[1-2\]\)"):
        plan(pretend(2, 2, 0), worker_kind="gpu")


# -- threads and memory


def test_threads_given() -> None:
    assert {w.nthreads for w in plan(pretend(1, 2, 2), nthreads=3, cpu_workers=1).workers} == {3}


def test_the_smallest_memory_of_a_hosts_ranks_counts() -> None:
    found = plan([rank(0, 2, memory=8 * GIB), rank(1, 2, memory=6 * GIB)])
    assert found.hosts[0].memory == 6 * GIB
    assert [w.memory_limit for w in found.workers] == [3 * GIB] * 2


def test_a_cpu_quota_limits_the_threads_of_cpu_workers() -> None:
    """The smallest that a rank of the host is told, as of memory; other hosts and the cores stay."""
    ranks = list(pretend(2, 2, 0, cpus_per_node=16))
    ranks[0] = replace(ranks[0], cpu_quota=6.0)
    ranks[1] = replace(ranks[1], cpu_quota=4.0)
    found = plan(ranks)
    assert [worker.nthreads for worker in found.workers] == [2, 2, 8, 8]
    assert {worker.cpus for worker in found.workers} == {tuple(range(16))}
    assert {worker.nthreads for worker in plan(ranks, nthreads=5).workers} == {5}


@pytest.mark.parametrize(
    ("limit", "each", "warned"),
    [
        ("auto", 128 * GIB, False),
        ("4GB", 4 * 10**9, False),
        (4e9, 4 * 10**9, False),
        ("4000000000", 4 * 10**9, False),
        (0.25, 64 * GIB, False),
        ("0.25", 64 * GIB, False),
        (1, 256 * GIB, True),
        ("200 GiB", 200 * GIB, True),
        (0, 0, False),
        ("0", 0, False),
        (None, 0, False),
    ],
)
def test_memory_limits(limit: Any, each: int, warned: bool) -> None:
    found = plan(pretend(1, 2, 0), memory_limit=limit)
    assert [w.memory_limit for w in found.workers] == [each, each]
    assert any("on h1, 2 workers" in w and "256.00 GiB" in w for w in found.warnings) == warned


def test_unknown_memory_is_no_limit() -> None:
    assert plan([rank(0, 1, memory=0)]).workers[0].memory_limit == 0


@pytest.mark.parametrize("limit", ["much", "", -1, "-4GB", float("nan"), "4 XB", [1]])
def test_memory_limits_that_mean_nothing(limit: Any) -> None:
    with pytest.raises(OptionError, match="memory_limit"):
        plan(pretend(1, 1, 0), memory_limit=limit)


# -- many ranks


def test_warnings_of_a_large_job_stay_short() -> None:
    (warning,) = plan(pretend(500, 8, 4)).warnings
    assert "and 492 more get none, and these 2000 ranks" in warning
    assert len(warning) < 400


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
def all_options(draw: st.DrawFn) -> PlacementOptions:
    return PlacementOptions(
        layout=draw(st.sampled_from(["shared", "shared", "exclusive"])),
        cpu_workers=draw(st.integers(0, 2)),
        nthreads=draw(st.sampled_from([None, None, 2])),
        worker_kind=draw(st.sampled_from(["auto", "auto", "cpu", "gpu"])),
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


@settings(max_examples=300, deadline=None)
@given(jobs(), all_options())
def test_every_visible_gpu_has_one_worker_or_the_error_says_who_saw_what(
    inventories: list[Inventory], options: PlacementOptions
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


@settings(max_examples=200, deadline=None)
@given(jobs(tidy=True), all_options(), st.randoms(use_true_random=False))
def test_names_memory_and_order(
    inventories: list[Inventory], options: PlacementOptions, shuffler: random.Random
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


@settings(max_examples=200, deadline=None)
@given(st.lists(CPUS, min_size=1, max_size=6), st.lists(CPUS, min_size=1, max_size=8))
def test_shares_differ_by_one_at_most_however_ranks_are_bound(
    masks: list[tuple[int, ...]], near: list[tuple[int, ...]]
) -> None:
    gpus = tuple(gpu(i, cpus=cpus) for i, cpus in enumerate(near))
    found = plan([rank(i, len(masks), gpus, cpus=mask) for i, mask in enumerate(masks)])
    shares = [len(found.for_rank(number)) for number in range(len(masks))]
    assert sum(shares) == len(gpus)
    assert max(shares) - min(shares) <= 1
