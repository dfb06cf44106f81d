"""What a session sets in Dask's configuration, and takes back."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import dask
import pytest

from dask_gpu_mpi.job.dask_client import DaskSettings

SETTINGS = {
    "scheduler-address": "tls://h:1",
    "distributed.probe.a": 1,
    "distributed.probe.b": 2,
    "gpu-probe": 3,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    config, defaults = copy.deepcopy(dask.config.config), list(dask.config.defaults)
    yield
    dask.config.config.clear()
    dask.config.config.update(config)
    dask.config.defaults[:] = defaults


def test_taken_back() -> None:
    dask.config.set({"gpu-probe": "mine"})
    config, defaults = copy.deepcopy(dask.config.config), copy.deepcopy(dask.config.defaults)
    for _ in range(2):
        settings = DaskSettings(SETTINGS)
        assert {key: dask.config.get(key) for key in SETTINGS} == SETTINGS
        settings.take_back()
        settings.take_back()
        assert dask.config.config == config
        assert dask.config.defaults == defaults


def test_a_refresh_keeps_them_until_then() -> None:
    settings = DaskSettings(SETTINGS)
    dask.config.refresh()
    assert dask.config.get("scheduler-address") == "tls://h:1"
    settings.take_back()
    dask.config.refresh()
    for key in SETTINGS:
        assert dask.config.get(key, None) is None


def test_what_the_script_has_set_since_stays() -> None:
    settings = DaskSettings(SETTINGS)
    dask.config.set({"scheduler-address": "tcp://mine:2"})
    settings.take_back()
    assert dask.config.get("scheduler-address") == "tcp://mine:2"
    assert dask.config.get("distributed.probe", None) is None
