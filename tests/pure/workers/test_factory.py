"""Workers from their lines of the plan: real Nannies and Workers, and classes of the user's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Nanny, Worker
from distributed.diagnostics import nvml

from dask_gpu_mpi.options.model import Options, Transport, WorkerUcx
from dask_gpu_mpi.plan import Start, WorkerPlan
from dask_gpu_mpi.workers.factory import UNMEASURED, make_worker
from dask_gpu_mpi.workers.plugins import Label, offer_ucx
from dask_gpu_mpi.workers.worker_options import read_worker_options
from support.mocks.inputs import worker_plan

CPU = worker_plan("a", nthreads=2, memory_limit=10**9, cpus=(0,))
GPU = replace(CPU, kind="gpu", gpu_index=0, device="GPU-x")
START = Start("tcp://127.0.0.1:1", "tcp", "127.0.0.1", (), {})


async def make(
    plan: WorkerPlan,
    worker_class: str | type,
    scratch: Path,
    /,
    *,
    gpus: bool = False,
    ucx: WorkerUcx = WorkerUcx.OFF,
    start: Start = START,
    **options: Any,
) -> Any:
    start = replace(start, beside_gpus=gpus, transport=Transport(ucx))
    read = read_worker_options(worker_class, options)
    given = Options(worker_class=worker_class, worker_options=read, interface="ib0", startup_timeout=5.0)
    worker, nannies = make_worker(plan, start, given, str(scratch))
    assert nannies == ([worker] if isinstance(worker, Nanny) else [])
    return worker


@pytest.mark.parametrize(
    ("plan", "ucx", "beside_gpus", "host_frames"),
    [
        (GPU, WorkerUcx.OFF, True, None),
        (GPU, WorkerUcx.AUTO, True, 0),
        (GPU, WorkerUcx.ALL, True, 65536),
        (CPU, WorkerUcx.AUTO, True, None),
        (CPU, WorkerUcx.ALL, True, None),
        (CPU, WorkerUcx.ALL, False, 65536),
    ],
)
@pytest.mark.parametrize(
    ("address", "host", "loopback"),
    [
        ("tcp://127.0.0.1:1", "127.0.0.1", True),
        ("tls://127.0.0.1:1", None, True),  # the job has joined a cluster
        ("tls://10.0.0.1:1", "10.0.0.2", False),
    ],
)
async def test_who_offers_ucx(
    plan: WorkerPlan, ucx: WorkerUcx, beside_gpus: bool, host_frames: int | None,
    address: str, host: str | None, loopback: bool, tmp_path: Path,
) -> None:  # fmt: skip
    """Not CPU workers beside GPU workers, which must not touch their devices."""
    start = replace(START, address=address, listen=host)
    nanny = await make(plan, Nanny, tmp_path, gpus=beside_gpus, ucx=ucx, start=start)
    offers = [each for each in nanny.worker_kwargs["plugins"] if getattr(each, "function", None) is offer_ucx]
    expected = [] if host_frames is None else [(host_frames, loopback)]
    assert [(*each.arguments, each.named["loopback"]) for each in offers] == expected


class MyNanny(Nanny):
    pass


@pytest.mark.parametrize(
    ("plan", "cls", "measures"), [(CPU, Nanny, False), (CPU, MyNanny, True), (GPU, Nanny, True)]
)
async def test_a_nanny_measures_nothing_and_its_worker_what_is_configured(
    plan: WorkerPlan, cls: type, measures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU worker asks nothing of GPUs: its metrics would ask RMM, which initialises CUDA."""
    monkeypatch.setattr(nvml, "NVML_STATE", nvml.NVMLState.UNINITIALIZED)
    nanny = await make(plan, cls, tmp_path, config={"probe": 1})
    assert isinstance(nanny, cls)
    assert nvml.NVML_STATE == nvml.NVMLState.DISABLED_CONFIG
    for name in ("tick", "ticks", "monitor"):
        assert nanny.periodic_callbacks[name].callback_time > 1e9
    assert "memory_monitor" in nanny.periodic_callbacks  # of its worker
    expected = {key: dask.config.get(key) for key in UNMEASURED}
    assert expected["distributed.diagnostics.nvml"] is True
    assert not {*map(str, UNMEASURED.values())} & {*map(str, expected.values())}
    expected |= {"probe": 1, "distributed.diagnostics.nvml": measures}
    assert nanny.config.items() >= expected.items()
    assert nanny.worker_kwargs.get("metrics") == (None if measures else {})


async def test_a_nanny_as_planned(tmp_path: Path) -> None:
    plan = replace(CPU, resources={"CPU": 2})
    mine = Label("mine")
    own = {"resources": {"FOO": 1}, "env": {"MINE": "1"}, "lifetime": "1h", "plugins": (mine,)}
    nanny = await make(plan, "auto", tmp_path, **own)
    assert (nanny.nthreads, nanny.memory_manager.memory_limit) == (2, 10**9)
    assert nanny.resources == {"CPU": 2, "FOO": 1}
    with dask.config.set({"distributed.worker.resources": {"JOB": 3}}):
        assert (await make(plan, "auto", tmp_path)).resources == {"JOB": 3, "CPU": 2}
    assert nanny.env["MINE"] == "1"
    assert nanny.worker_kwargs["dashboard"] is False
    assert nanny.worker_kwargs["lifetime"] == "1h"
    assert nanny.death_timeout == 5.0
    assert Path(nanny.local_directory).parent == tmp_path
    labels = {one for one in nanny.worker_kwargs["plugins"] if isinstance(one, Label)}
    assert {label.text for label in labels} == {"mine", "[raised by worker a, rank 0 on host h]"}
    assert (await make(CPU, Nanny, tmp_path, start=replace(START, limit=400.0))).death_timeout == 400.0
    unlimited = await make(replace(CPU, memory_limit=0), Nanny, tmp_path)
    assert unlimited.memory_manager.memory_limit is None
    assert (
        "CUDA_VISIBLE_DEVICES" not in unlimited.env
    )  # a job without GPUs: it keeps the devices that it sees


async def test_options_of_cudaworker_are_not_for_cpu_workers(tmp_path: Path) -> None:
    """``auto``: GPU workers get them on other ranks. What the class below a Nanny takes, CPU workers get as well."""

    class Deep(Worker):
        def __init__(self, *args: Any, deep: int = 1, **kwargs: Any) -> None: ...

    nanny = await make(CPU, "auto", tmp_path, rmm_pool_size=0.5, worker_class=Deep, deep=2, lifetime="1h")
    assert "rmm_pool_size" not in nanny.worker_kwargs
    assert (nanny.worker_kwargs["deep"], nanny.worker_kwargs["lifetime"]) == (2, "1h")
    assert nanny.Worker is Deep


async def test_a_worker_in_the_agent_has_no_environment_of_its_own(tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    class Mine(Worker):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given.update(kwargs, address=args[0])

    await make(replace(CPU, resources={"CPU": 2}), Mine, tmp_path, ucx=WorkerUcx.ALL)
    assert given.keys().isdisjoint({"env", "metrics"})
    assert not any(getattr(each, "function", None) is offer_ucx for each in given["plugins"])
    assert (given["address"], given["protocol"]) == ("tcp://127.0.0.1:1", "tcp")
    assert given["resources"] == {"CPU": 2}


async def test_a_class_of_the_users_gets_what_dask_mpi_gives(tmp_path: Path) -> None:
    class Mine:
        __await__ = Nanny.__await__

        def __init__(self, **given: Any) -> None:
            self.given = given

    assert (await make(CPU, Mine, tmp_path, nthreads=3, own="x")).given == {
        "name": "a", "nthreads": 3, "memory_limit": 10**9, "local_directory": str(tmp_path), "protocol": "tcp",
        "interface": "ib0", "own": "x",
    }  # fmt: skip
