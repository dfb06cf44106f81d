"""What the user should know about the GPUs of a job."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.plan import synthetic
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


def test_gpus_that_only_the_scheduler_sees_are_told() -> None:
    found = plan(hypothetical_job(1, 4, 4, "per-rank"), layout="exclusive")
    assert names(found) == ["2-2", "3-3"]
    assert any("2 GPUs get no worker" in w and "2 on h1" in w for w in map(str, found.warnings))
    # and if nobody else sees one, there are CPU workers
    found = plan(one_host((gpu(0),), (gpu(1),), ()), layout="exclusive")
    assert names(found) == [2]
    assert any("2 GPUs get no worker" in w for w in map(str, found.warnings))


def test_a_job_on_cpus_uses_no_gpu() -> None:
    """Where all workers are CPU workers, no GPU is counted, neither as used nor as unused."""
    assert plan(hypothetical_job(2, 1, 4), worker_class="distributed.Nanny").warnings == ()


def test_a_rank_that_sees_none_starts_none() -> None:
    found = plan(one_host((gpu(0),), ()))
    assert names(found) == ["0-0"]
    assert any("rank 1 on h1 gets none and starts no GPU worker" in w for w in map(str, found.warnings))


def test_busy_gpus_are_told() -> None:
    (warning,) = map(str, plan(one_host((gpu(0), gpu(1, processes=((999, 3 * GIB),))))).warnings)
    assert "host h1: GPU 1 " in warning
    assert str(3 * GIB) in warning


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


def test_processes_whose_memory_is_not_told() -> None:
    ranks = one_host((gpu(0), gpu(1, processes=((999, None),))))
    words = (
        r"host h1: GPU 1 \(GPU-0001\) has memory in use by other processes \(NVML does not report how much\)"
    )
    (warning,) = map(str, plan(ranks).warnings)
    assert re.search(words, warning)
    with pytest.raises(PlacementError, match=words):
        plan(ranks, require_idle_gpus=True)


def test_warnings_of_a_large_job_stay_short() -> None:
    (warning,) = map(str, plan(hypothetical_job(500, 8, 4)).warnings)
    assert "and 492 more get none, and these 2000 ranks" in warning
    assert len(warning) < 400


@pytest.mark.parametrize(
    ("places", "words"), [(8, "rank 7 on h8 (GPU 0). Fix"), (9, "rank 7 on h8 (GPU 0) and 1 more. Fix")]
)
def test_eight_places_are_named_and_the_others_counted(places: int, words: str) -> None:
    ranks = [replace(rank, contexts=("GPU 0",)) for rank in hypothetical_job(places, 1, 0)]
    (warning,) = map(str, plan(ranks).warnings)
    assert words in warning
