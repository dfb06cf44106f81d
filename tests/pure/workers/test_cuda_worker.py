"""What is put right of CUDAWorker: one that only notes what it is given, and is otherwise treated as the real one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Start
from dask_gpu_mpi.workers import factory
from dask_gpu_mpi.workers.factory import make_worker
from dask_gpu_mpi.workers.plugins import BeforeWorker, InWorker
from dask_gpu_mpi.workers.worker_options import read_worker_options
from support.mocks.inputs import worker_plan

plugins = pytest.importorskip("dask_cuda.plugins", exc_type=ImportError)
cuda_worker = pytest.importorskip("dask_cuda.cuda_worker", exc_type=ImportError)

PLAN = worker_plan("0-1", "GPU-x,GPU-y", gpu_index=1, cpus=(2, 3), resources={"GPU": 1})
GB = 10**9


class CUDAWorker:
    """Makes one nanny, with the plugin that sets the cores next to its GPU."""

    __await__: Any = None  # it has to have one

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.visible = os.environ["CUDA_VISIBLE_DEVICES"]
        own = {plugins.CPUAffinity([0, 1]), plugins.CUDFSetup(given.get("enable_cudf_spill", False), 0)}
        given = {"env": {"OWN": "1"}, "config": {"probe": 1}, "plugins": own, "more": 2}
        self.nannies = [cuda_worker.Nanny("tls://h:1", **given)]


class Noted:
    """A nanny that notes what it is given."""

    def __init__(self, address: str, **given: Any) -> None:
        assert (address, given["more"]) == ("tls://h:1", 2)
        self.env, self.config, self.plugins = given["env"], given["config"], given["plugins"]


CUDAWorker.__module__ = "dask_cuda.cuda_worker"


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(factory, "WatchedNanny", Noted)


def made(memory: int = 80 * GB, /, **options: Any) -> Any:
    start = Start("tls://h:1", "tls", "10.0.0.1", (), {}, beside_gpus=True)
    options = read_worker_options("dask_cuda.CUDAWorker", options)
    given = Options(
        worker_class=CUDAWorker, worker_options=options, log_directory="/logs", startup_timeout=5.0
    )
    before = cuda_worker.Nanny
    worker, nannies = make_worker(replace(PLAN, device_memory=memory), start, given, "/scratch")
    assert nannies == worker.nannies
    assert cuda_worker.Nanny is before
    return worker


def test_a_worker_as_planned() -> None:
    worker = made()
    assert worker.given == {
        "name": "0-1", "nthreads": 1, "memory_limit": None, "local_directory": "/scratch", "scheduler": "tls://h:1",
        "host": "10.0.0.1", "protocol": "tls", "resources": "GPU=1", "dashboard": False, "dashboard_address": "127.0.0.1:0",
        "death_timeout": 5.0, "device_memory_limit": 64 * GB,
    }  # fmt: skip
    # made with one device, by which it counts; its process sees them all
    assert worker.visible == "GPU-x"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    (nanny,) = worker.nannies
    assert nanny.env == {"OWN": "1", "CUDA_VISIBLE_DEVICES": "GPU-x,GPU-y"}
    # variables of the user are the nanny's: CUDAWorker gives its nannies an `env` of its own
    worker = made(env={"MINE": "2", "CUDA_VISIBLE_DEVICES": "7"})
    assert "env" not in worker.given
    assert worker.nannies[0].env == nanny.env | {"MINE": "2"}


def test_the_plans_cores_and_our_plugins() -> None:
    (nanny,) = made().nannies
    found = {type(plugin).__name__: plugin for plugin in nanny.plugins}
    ours = {"FailedTransfers", "Figures", "KeylessDump", "Label", "InWorker", "BeforeWorker"}
    assert found.keys() == ours | {"CPUAffinity"}
    assert found["CPUAffinity"].cores == [2, 3]
    tick = "distributed.admin.tick.interval"
    assert (nanny.config["probe"], nanny.config[tick]) == (1, dask.config.get(tick))
    calls = {each.function.__name__: each.arguments for each in nanny.plugins if isinstance(each, InWorker)}
    assert calls.keys() == {"end_as_python", "log_to_file", "use_streams_between_workers"}
    assert calls["log_to_file"][0] == "/logs"


def test_cudf_is_imported_at_the_start_only_if_it_is_to_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "find_spec", lambda name: True)
    for spills in (False, True):
        (nanny,) = made(enable_cudf_spill=spills).nannies
        assert any(isinstance(each, plugins.CUDFSetup) for each in nanny.plugins) is spills
        (streams,) = [each for each in nanny.plugins if isinstance(each, BeforeWorker)]
        assert streams.named["has_gpu"]  # RMM is installed, too


def test_the_users_options_win() -> None:
    mine = {"nthreads": 4, "memory_limit": "1GB", "death_timeout": 60, "host": "h.example"}
    given = made(**mine, resources={"FOO": 2}).given
    assert given.items() >= mine.items()
    assert given["resources"] == "GPU=1 FOO=2"  # those are added to the plan's
    with dask.config.set({"distributed.worker.resources": {"JOB": 3}}):
        assert made().given["resources"] == "JOB=3 GPU=1"


def test_sizes_are_bytes_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "find_spec", lambda name: True)
    for memory, limit, pool in ((0, "default", 0.5), (80 * GB, 64 * GB, 40 * GB)):  # 0: unknown
        given = made(memory, rmm_pool_size=0.5).given
        assert (given["device_memory_limit"], given["rmm_pool_size"]) == (limit, pool)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found = {"cupy"}
    monkeypatch.setattr(factory, "find_spec", lambda name: name if name in found else None)
    return found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rmm_pool_size": "1GB"}, ["rmm_pool_size of worker 0-1 on h", "'rmm'", "dask-gpu-mpi[cuda12]"]),
        ({"enable_cudf_spill": True}, ["enable_cudf_spill", "'cudf'", "Fix: install cudf"]),
        ({"pre_import": "cupy,torch.nn"}, ["pre_import", "'torch.nn'"]),
        ({"rmm_allocator_external_lib_list": "cupy"}, ["rmm_allocator_external_lib_list", "'rmm'"]),
    ],
)  # fmt: skip
def test_modules_that_are_not_installed(
    installed: set[str], options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        made(**options)
    assert [word for word in words if word not in str(caught.value)] == []
    made(**{"rmm_async": False} | dict.fromkeys(options))  # off: no module is needed
    installed |= {"rmm", "cudf", "torch"}
    made(**options)


def test_the_directory_of_rmms_logs_is_made(tmp_path: Path, installed: set[str]) -> None:
    installed.add("rmm")
    for _ in range(2):
        made(rmm_log_directory=str(tmp_path / "a" / "b"), rmm_async=True)
    assert (tmp_path / "a" / "b").is_dir()


class OtherNannies(CUDAWorker):
    """Its processes would see other GPUs than those of the plan."""

    def __init__(self, **given: Any) -> None:
        self.nannies = [SimpleNamespace()]


class Refuses(CUDAWorker):
    def __init__(self, **given: Any) -> None:
        raise ValueError("a maximum pool without a pool")


@pytest.mark.parametrize(
    ("cls", "error", "says"),
    [
        (OtherNannies, RuntimeError, "does not make its nannies as CUDAWorker does"),
        (Refuses, ValueError, "a maximum pool without a pool"),
    ],
)
def test_a_class_that_fails_leaves_its_module_as_before(cls: type, error: type[Exception], says: str) -> None:
    before = cuda_worker.Nanny
    with pytest.raises(error, match=says):
        factory.make_cuda_worker(cls, replace(PLAN, device="GPU-x"), {}, ["label"])
    assert cuda_worker.Nanny is before
