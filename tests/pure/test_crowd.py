from __future__ import annotations

import dask.config
import pytest
from distributed import comm  # registers distributed's defaults  # noqa: F401

from dask_gpu_mpi import crowd


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
    assert set(crowd.connection_settings(5000, {crowd.CONNECT})) == {crowd.BACKLOG}
    assert set(crowd.connection_settings(5000, {crowd.BACKLOG})) == {crowd.CONNECT}
    with dask.config.set({crowd.CONNECT: "30s", crowd.BACKLOG: 2048}):
        assert crowd.configured_keys() == frozenset()
    with dask.config.set({crowd.CONNECT: "7s"}):
        assert crowd.configured_keys() == {crowd.CONNECT}


def test_ranks_start_one_after_the_other_within_the_limit() -> None:
    delays = [crowd.start_delay(before, 4000) for before in range(0, 4000, 4)]
    assert delays == sorted(delays)
    assert len(set(delays)) == len(delays)
    assert delays[-1] < crowd.start_limit(4000)
