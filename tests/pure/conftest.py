"""Fixtures of the tests without MPI."""

from __future__ import annotations

import asyncio
import copy
import inspect
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base import files
from dask_gpu_mpi.base.signals import LOST, Action


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it runs in an event loop of its own, for a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, 60))
    return True


@pytest.fixture
def links_are_strangers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Call it to let everyone write `tmp_path`, as in /tmp, and to take every symbolic link for another user's."""

    def call() -> None:
        tmp_path.chmod(0o1777)
        monkeypatch.setattr(files, "is_ours", lambda status: not stat.S_ISLNK(status.st_mode))

    return call


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals are afterwards what they were."""
    actions = [Action.now(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, LOST)]
    yield
    for action in actions:
        action.restore()


@pytest.fixture
def dask_config() -> Iterator[None]:
    """Dask's configuration, its defaults and its paths are afterwards what they were."""
    import dask

    lists = [(each, list(each)) for each in (dask.config.defaults, dask.config.paths)]
    config = copy.deepcopy(dask.config.config)
    yield
    dask.config.config.clear()
    dask.config.config.update(config)
    for each, before in lists:
        each[:] = before
