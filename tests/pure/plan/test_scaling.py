from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dask.config
import pytest
from distributed import comm  # registers distributed's defaults  # noqa: F401

from dask_gpu_mpi.plan import scaling as crowd


def test_small_clusters_keep_dasks_defaults() -> None:
    assert crowd.connection_settings(500) == {}
    assert crowd.start_delay(255, 256) == 0.0


def test_defaults_are_distributeds() -> None:
    with dask.config.set({}):
        assert dask.config.get(crowd.CONNECT) == f"{crowd.DEFAULT_CONNECT:g}s"
        assert dask.config.get(crowd.BACKLOG) == crowd.DEFAULT_BACKLOG


def test_the_workers_of_distributed_3691() -> None:
    assert crowd.connection_settings(1300) == {crowd.CONNECT: "65s", crowd.BACKLOG: 5200}


@pytest.mark.parametrize("workers", [513, 4096, 65536, 10**6])
def test_settings_grow_and_are_bounded(workers: int) -> None:
    settings = crowd.connection_settings(workers)
    more = crowd.connection_settings(2 * workers)
    assert crowd.DEFAULT_BACKLOG < settings[crowd.BACKLOG] <= more[crowd.BACKLOG] <= 65535
    seconds = [float(each.get(crowd.CONNECT, "30s").rstrip("s")) for each in (settings, more)]
    assert 30 <= seconds[0] <= seconds[1] <= crowd.LONGEST_CONNECT


def test_what_the_user_configured_is_left_alone() -> None:
    assert set(crowd.connection_settings(5000, 0.0, {crowd.CONNECT})) == {crowd.BACKLOG}
    assert set(crowd.connection_settings(5000, 0.0, {crowd.BACKLOG})) == {crowd.CONNECT}
    with dask.config.set({crowd.CONNECT: "30s", crowd.BACKLOG: 2048}):
        assert crowd.configured_keys() == frozenset()
    with dask.config.set({crowd.CONNECT: "7s"}):
        assert crowd.configured_keys() == {crowd.CONNECT}


def test_ranks_start_one_after_the_other_within_the_limit() -> None:
    delays = [crowd.start_delay(before, 4000) for before in range(0, 4000, 4)]
    assert delays == sorted(delays)
    assert len(set(delays)) == len(delays)
    assert delays[-1] < crowd.start_limit(4000)


def test_many_workers_on_few_cores_may_take_longer() -> None:
    def workers(host: str, count: int, cores: int) -> list[Any]:
        return [SimpleNamespace(host=host, cpus=tuple(range(cores))) for _ in range(count)]

    assert crowd.workers_per_core([]) == 0
    # a laptop, and a host with a worker for each core: Dask's defaults
    laptop = crowd.workers_per_core(workers("a", 4, 2))
    assert (laptop, crowd.connection_settings(4, laptop)) == (2, {})
    # the host that is worst off counts
    crowded = crowd.workers_per_core([*workers("a", 128, 2), *workers("b", 64, 64)])
    assert (crowded, crowd.connection_settings(192, crowded)) == (64, {crowd.CONNECT: "256s"})
    assert crowd.start_limit(192, crowded) > 256
