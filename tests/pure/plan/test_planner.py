"""From inventories to the plan: roles, hosts, and what the user should know. Properties of random jobs: test_geometries."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.errors import PlacementError, WorldTooSmallException
from dask_gpu_mpi.machine import Promise
from dask_gpu_mpi.machine.inventory import hypothetical_job
from support.mocks.inputs import GIB, gpu, names, one_host, plan, rank


@pytest.mark.parametrize("visible", ["all", "per-rank"])
def test_four_hosts_of_four_gpus(visible: Any) -> None:
    found = plan(hypothetical_job(4, 1, 4, visible, memory_per_node=256 * GIB))
    assert names(found) == [f"{r}-{g}" for r in range(4) for g in range(4)]
    assert {(w.kind, w.nthreads, w.memory_limit) for w in found.workers} == {("gpu", 1, 64 * GIB)}
    assert (found.scheduler.rank, found.client.rank, found.scheduler.host) == (0, 0, "h1")
    assert found.warnings == ()
    assert [w.name for w in found.for_rank(2)] == ["2-0", "2-1", "2-2", "2-3"]
    assert found.for_rank(9) == ()
    a_rank_per_gpu = plan(hypothetical_job(2, 4, 4, visible))
    assert names(a_rank_per_gpu) == ["0-0", "1-1", "2-2", "3-3", "4-0", "5-1", "6-2", "7-3"]
    assert [w.cpus[0] for w in a_rank_per_gpu.workers] == [0, 0, 32, 32] * 2


def test_options_about_gpus() -> None:
    some, none = hypothetical_job(1, 2, 2), hypothetical_job(2, 2, 0)
    cpu = plan(some, worker_class="distributed.Nanny")
    assert (names(cpu), cpu.hosts[0].gpus, cpu.warnings) == ([0, 1], (), ())
    assert names(plan(some, worker_class="dask_cuda.CUDAWorker")) == ["0-0", "1-1"]
    with pytest.raises(PlacementError, match=r"none of the ranks .* sees a GPU \(ranks 0-3 on h\[1-2\]\)"):
        plan(none, worker_class="dask_cuda.CUDAWorker")
    idle = r"idle GPUs are required, but none .* or --no-require-idle-gpus"
    with pytest.raises(PlacementError, match=idle):
        plan(none, require_idle_gpus=True, given=frozenset({"require_idle_gpus"}))
    assert names(plan(none, require_idle_gpus=True)) == [0, 1, 2, 3]  # as the default of a site
    assert names(plan(none, require_idle_gpus=True, worker_class="distributed.Nanny")) == [0, 1, 2, 3]
    [warning] = plan(none, default_workers="gpu").warnings
    assert "default_workers=gpu has no effect" in str(warning)
    assert plan(hypothetical_job(1, 1, 2), default_workers="gpu").warnings == ()


# -- scheduler and client


@pytest.mark.parametrize(
    ("size", "options", "scheduler", "client", "workers"),
    [
        (4, {}, 0, 1, [2, 3]),  # as in dask-mpi
        # without a script no rank is kept for it
        (2, {"has_client": False}, 0, 0, [1]),
        (2, {"has_client": False, "scheduler_rank": 1}, 1, 1, [0]),
        # nor for a scheduler that is there already
        (1, {"has_client": False, "scheduler": False}, 0, 0, [0]),
        (2, {"has_client": False, "scheduler": False, "scheduler_rank": 7}, 0, 0, [0, 1]),
        (3, {"scheduler": False, "scheduler_rank": 1}, 0, 1, [0, 2]),
        (3, {"scheduler_rank": 1}, 1, 0, [2]),
        # both on one rank
        (3, {"scheduler_rank": 2, "client_rank": 2}, 2, 2, [0, 1]),
        (2, {"client_rank": 0}, 0, 0, [1]),
    ],
)
def test_layout_exclusive_keeps_ranks_for_what_there_is(
    size: int, options: dict[str, Any], scheduler: int, client: int, workers: list[int]
) -> None:
    found = plan(hypothetical_job(1, size, 0), layout="exclusive", **options)
    assert (found.scheduler.rank, found.client.rank, names(found)) == (scheduler, client, workers)


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (2, {"layout": "exclusive"}, "needs at least 3 ranks, found 2. Fix: start more ranks, or take layout 'shared'"),
        (1, {"layout": "exclusive", "has_client": False}, "with the scheduler on rank 0 needs at least 2 ranks, found 1"),
        (1, {"layout": "exclusive", "client_rank": 0}, "the scheduler on rank 0 and the client on rank 0 needs at least 2 ranks"),
        (1, {"layout": "exclusive", "scheduler": False}, "with the client on rank 1 needs at least 2 ranks"),
        (3, {"client_rank": 3}, "needs at least 4 ranks, found 3"),
        (2, {"scheduler_rank": 2}, "found 2. Fix: start more ranks, or lower scheduler_rank and"),
        (2, {"scheduler": False, "has_client": False, "client_rank": 5}, "with client_rank=5 needs at least 6"),
    ],
)  # fmt: skip
def test_too_few_ranks(size: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(WorldTooSmallException, match=re.escape(words)):
        plan(hypothetical_job(1, size, 0), **options)


@pytest.mark.parametrize("ranks", [[0, 2], [0, 1, 1], [-1, 0]])
def test_every_rank_answers_once(ranks: list[int]) -> None:
    with pytest.raises(PlacementError, match=r"inventories of ranks .* \(expected one of each rank\)"):
        plan([rank(number, 3) for number in ranks])


# -- hosts


@pytest.mark.parametrize(
    ("given", "found"),
    [
        # hosts of one name are told apart by their boot ids
        (["n x", "n y", "n x"], {"n": (0, 2), "n#2": (1,)}),
        (["n x", "n#2 y", "n z", "n w"], {"n": (0,), "n#2": (1,), "n#3": (2,), "n#4": (3,)}),
        # a name stays with the host that has it already
        (["n x", "n v", "n#2 y", "n b"], {"n": (0,), "n#3": (1,), "n#2": (2,), "n#4": (3,)}),
    ],
)
def test_names_of_hosts(given: list[str], found: dict[str, tuple[int, ...]]) -> None:
    hosts = [text.split() for text in given]
    made = plan([rank(n, len(hosts), host=name, boot_id=boot) for n, (name, boot) in enumerate(hosts)])
    assert {host.host: host.ranks for host in made.hosts} == found
    assert {worker.rank: worker.host for worker in made.workers} == {
        number: name for name, ranks in found.items() for number in ranks
    }


def test_one_machine_under_two_names_must_not_share_a_gpu() -> None:
    inventories = [rank(i, 2, (gpu(0),), host=host) for i, host in enumerate(["c1", "c2"])]
    with pytest.raises(PlacementError, match=r"GPU-0000\) is seen by rank 0 on c1 and by rank 1 on c2"):
        plan(inventories)
    # other boot ids: other machines
    assert len(plan([inventories[0], replace(inventories[1], boot_id="z")]).workers) == 2


def test_the_least_memory_and_quota_of_those_that_are_known() -> None:
    ranks = [rank(0, 3, memory=0), rank(1, 3, memory=7, cpu_quota=2.5), rank(2, 3, memory=8, cpu_quota=1.5)]
    (host,) = plan(ranks).hosts
    assert (host.memory, host.cpu_quota) == (7, 1.5)
    (host,) = plan([rank(0, 1, memory=0)]).hosts
    assert (host.memory, host.cpu_quota) == (0, None)


# -- what the user should know


def test_gpus_that_nobody_sees() -> None:
    promise = Promise(4, "SLURM_GPUS_ON_NODE=4", "run nvidia-smi there")
    blind = [replace(one, gpus=(), promise=promise) for one in hypothetical_job(3, 1, 4)]
    expected = (
        "although SLURM_GPUS_ON_NODE=4: no GPU worker starts there. Fix: run nvidia-smi there; or set CUDA_VISIBLE_DEVICES='' "
        "if the job is to do without GPUs"
    )
    assert [*map(str, plan(blind).warnings)] == [f"no GPU is visible on h[1-3], {expected}"]
    assert plan(blind, worker_class="distributed.Nanny").warnings == ()
    (seeing,) = hypothetical_job(1, 1, 4)
    some = [replace(seeing, world_size=3, promise=promise), *blind[1:]]
    assert [*map(str, plan(some).warnings)] == [f"no GPU is visible on h[2-3], {expected}"]
    unrequested = [replace(one, promise=Promise(0, "the node has GPUs", "request them")) for one in blind]
    (warning,) = plan(unrequested).warnings
    assert "although the node has GPUs: no GPU worker starts there. Fix: request them; or set CUDA_" in str(
        warning
    )


def test_more_gpus_than_the_job_has() -> None:
    (one,) = hypothetical_job(1, 1, 4)
    (warning,) = plan([replace(one, promise=Promise(1, "DGM_PBS_GPUS=1", is_shared=True))]).warnings
    told = "4 GPUs are visible on h1, although DGM_PBS_GPUS=1: other jobs may use them. Fix: "
    assert str(warning).startswith(told)
    assert plan([replace(one, promise=Promise(1, "CUDA_VISIBLE_DEVICES=0"))]).warnings == ()


@pytest.mark.parametrize(
    ("ranks", "layout", "workers", "words"),
    [
        # GPUs that only the scheduler sees
        (hypothetical_job(1, 4, 4, "per-rank"), "exclusive", ["2-2", "3-3"], "2 GPUs get no worker, .* 2 on h1. Fix"),
        (one_host((gpu(0),), (gpu(1),), ()), "exclusive", [2], "2 GPUs get no worker, .* 2 on h1. Fix"),
        (one_host((gpu(0),), ()), "shared", ["0-0"], "rank 1 on h1 gets none and starts no GPU worker"),
        (one_host((gpu(0),), (gpu(0),), warnings=("GPU 1 is lost",)), "shared", ["0-0"], "^GPU 1 is lost$"),
        (one_host((), (), warnings=("told once",)), "shared", [0, 1], "^told once$"),
        # a large job has a short line
        (hypothetical_job(500, 8, 4), "shared", None, "^.{0,300} and 492 more get none, and these 2000 ranks .{0,100}$"),
    ],
)  # fmt: skip
def test_warnings(ranks: Any, layout: str, workers: list[Any] | None, words: str) -> None:
    found = plan(ranks, layout=layout)
    assert workers in (names(found), None)
    assert sum(bool(re.search(words, str(warning))) for warning in found.warnings) == 1


def test_ranks_of_a_host_are_no_other_processes() -> None:
    ranks = [
        rank(0, 3, (gpu(0, processes=((11, GIB), (12, None))), gpu(1)), pid=10),
        rank(1, 3, (gpu(0, processes=((10, GIB), (12, GIB))), gpu(1)), pid=11),
        rank(2, 3, (), pid=12),
    ]
    found = plan(ranks, require_idle_gpus=True)
    assert not any("in use" in warning for warning in map(str, found.warnings))
    # a number of another host's rank is no rank here
    elsewhere = [*ranks[:2], rank(2, 3, (), pid=12, host="h2", boot_id="c")]
    assert any(f"{GIB} bytes (1.00 GiB) in use" in warning for warning in map(str, plan(elsewhere).warnings))
    with pytest.raises(PlacementError, match=f"host h1: GPU 0 .* has {GIB} bytes"):
        plan(elsewhere, require_idle_gpus=True)


def test_gpus_in_use_can_be_refused() -> None:
    busy = one_host((gpu(0), gpu(1, processes=((999, None),))))
    words = "host h1: GPU 1 (GPU-0001) has memory in use by other processes (NVML does not report how much)"
    (warning,) = map(str, plan(busy).warnings)
    assert words in warning
    with pytest.raises(PlacementError, match=f"{re.escape(words)}.*--require-idle-gpus"):
        plan(busy, require_idle_gpus=True)
    # GPUs that get no worker, and a job without GPUs
    spare = one_host((gpu(0, processes=((999, GIB),)),), (gpu(1),), (gpu(2),))
    plan(spare, require_idle_gpus=True, layout="exclusive")
    plan(busy, require_idle_gpus=True, worker_class="distributed.Nanny")


@pytest.mark.parametrize(
    ("places", "words"), [(8, "rank 7 on h8 (GPU 0). Fix"), (9, "rank 7 on h8 (GPU 0) and 1 more. Fix")]
)
def test_eight_places_with_contexts_are_listed_and_the_others_counted(places: int, words: str) -> None:
    ranks = [replace(rank, contexts=("GPU 0",)) for rank in hypothetical_job(places, 1, 0)]
    (warning,) = map(str, plan(ranks).warnings)
    assert words in warning
