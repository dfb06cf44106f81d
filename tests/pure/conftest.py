"""Fixtures of the tests without MPI."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from dask_gpu_mpi.base import files
from dask_gpu_mpi.base.signals import LOST, Action
from support import ROOT
from support.mocks.batch import FakeBatch

YAML = ROOT / "dask_gpu_mpi" / "gpu-mpi.yaml"


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
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a program of this name, by default one that does nothing, in the first folder of PATH."""

    def made(name: str, text: str = "#!/bin/sh\n") -> Path:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return tmp_path / name

    return made


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


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has Dask's configuration for itself, without what this machine's user has configured."""
    import dask

    for name in [name for name in os.environ if name.startswith("DASK_GPU_MPI_")]:
        monkeypatch.delenv(name)
    with dask.config.set({"gpu-mpi": yaml.safe_load(YAML.read_text())["gpu-mpi"]}):
        yield


@pytest.fixture
def batch() -> Iterator[FakeBatch]:
    """The commands of batch systems and launchers, on two nodes."""
    with tempfile.TemporaryDirectory() as folder:
        made = FakeBatch(Path(folder))
        (made.directory / "nodes").write_text("h1\nh2\n")
        yield made
