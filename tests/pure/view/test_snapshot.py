"""From a scheduler, by a connection, and from what it knows, to rows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.base.plain_data import pack
from dask_gpu_mpi.base.timeline import METRIC
from dask_gpu_mpi.errors import ClusterLostError, InputError, Problem
from dask_gpu_mpi.network.scheduler_file import Target
from dask_gpu_mpi.plan import WorkerPlan
from dask_gpu_mpi.view.heartbeat import MOST_GPUS, measured
from dask_gpu_mpi.view.snapshot import Link, NoAnswerError, Snapshot, as_json, snapshot_of, with_rates
from support import ROOT
from support.mocks.inputs import plan_of, worker_plan
from support.mocks.snapshots import GIB, cluster, identity_of, metrics

GPU = worker_plan("0-0", "GPU-a", host="n1", gpu_index=3)


def sampled(
    workers: dict[Any, dict[str, Any]], planned: WorkerPlan = GPU, *, port: int = 1, **answer: Any
) -> Snapshot:
    """A snapshot of a cluster whose workers report these metrics, and whose plan has one worker."""
    plan = plan_of(planned, warnings=(Problem("slow"),))
    job = {"plan": pack(plan), "events": [[5.0, "late"]], "end": 100.0, "now": 40.0, **answer}
    return snapshot_of(identity_of(workers, port=port), job, 7.0)


def test_the_figures_of_a_gpu_and_its_worker() -> None:
    snapshot = sampled({"0-0": metrics(use=50)})
    (row,) = snapshot.rows
    assert {name: value for name, value in vars(row).items() if value is not None} == {
        "node": "n1", "worker": "0-0", "address": "tls://10.0.0.1:10", "status": "running", "gpu_index": 3, "device": "GPU-a",
        "gpu_use": 50, "gpu_memory": 10 * GIB, "gpu_memory_total": 80 * GIB, "rmm_used": GIB, "rmm_total": 40 * GIB,
        "host_memory": 2 * GIB, "host_limit": 64 * GIB, "received": 0, "sent": 0, "measured": 1.0, "spilled": 11,
        "running": 2, "waiting": 7,  # long-running tasks run as well; memory is neither
    }  # fmt: skip
    assert (snapshot.time, snapshot.end, snapshot.time_left) == (40.0, 100.0, 60.0)
    assert (snapshot.notes, snapshot.events) == (("slow",), ((5.0, "late"),))
    (row,) = sampled({"0-0": {}}).rows
    known = {name for name, value in vars(row).items() if value is not None}
    assert known == {"node", "worker", "address", "status", "gpu_index", "device", "host_limit"}


def test_a_metric_named_gpu_does_as_well() -> None:
    """Of a process that had NVML before its worker was made."""
    found = identity_of({"0": {"gpu": {"utilization": 5, "memory-used": 6}}})
    (worker,) = found["workers"].values()
    worker["gpu"] = {"memory-total": 7, "name": "x"}
    (row,) = snapshot_of(found, None, 7.0).rows
    assert (row.gpu_use, row.gpu_memory, row.gpu_memory_total) == (5, 6, 7)


def test_our_figures_come_before_the_monitors() -> None:
    """Of a worker with two GPUs, of which the monitor samples the first; what is the worker's stands in the first row alone."""
    both = worker_plan("0-0", "GPU-0,GPU-1", host="n1", gpu_index=0)
    told = metrics(use=1) | {"gpu_mpi": {"gpus": [[10, 1, 8], [20, None, None]], "spilled": None}}
    one, two = sampled({"0-0": told}, both).rows
    assert (one.gpu_use, one.gpu_memory, two.gpu_use, two.gpu_memory) == (10, 1, 20, None)
    assert (one.running, two.running) == (2, None)
    assert one.spilled is None  # not the zero that distributed sends


def test_a_planned_worker_that_is_not_there_is_lost_and_others_come_last() -> None:
    rows = sampled({"join-1-10": {}, "join-1-9": {}}).rows
    joined = [("join-1-9", "running"), ("join-1-10", "running")]
    assert [(row.worker, row.status) for row in rows] == [("0-0", "lost"), *joined]
    (row,) = sampled({}, retired=["0-0"]).rows
    assert row.status == "closed"


def test_a_cluster_that_is_not_ours() -> None:
    snapshot = snapshot_of(identity_of({0: metrics(use=50)}), None, 7.0)
    (row,) = snapshot.rows
    assert (row.node, row.worker, row.gpu_use) == ("10.0.0.1", "0", 50)
    assert (snapshot.time, snapshot.time_left, snapshot.notes) == (7.0, None, ())


def test_rates_are_between_two_samples() -> None:
    last = None
    for received, sent, at, port, rates in (
        (100, 10, 1.0, 1, (None, None)),
        (300, 10, 3.0, 1, (100.0, 0.0)),
        (300, 10, 3.0, 1, (100.0, 0.0)),  # no heartbeat in between
        (5, 0, 5.0, 2, (None, None)),  # it was restarted
    ):
        told = {"gpu_mpi": {"received": received, "sent": sent, "time": at}}
        last = with_rates(sampled({"0-0": told}, port=port), last)
        assert (last.rows[0].received_rate, last.rows[0].sent_rate) == rates


_FEW = st.lists(st.integers() | st.none(), max_size=4)
_ANY = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | _FEW
_KEYS = st.sampled_from(["gpus", "time", "disk", "executing", "utilization", "rmm-used", "received"])
_NAMES = st.sampled_from(
    ["memory", "task_counts", "spilled_bytes", "gpu", "rmm", "gpu_mpi", "gpu_utilization"]
)


@given(st.dictionaries(_NAMES, _ANY | st.dictionaries(_KEYS, _ANY | st.lists(_ANY, max_size=2))))
@settings(max_examples=300, deadline=None)
def test_metrics_of_others_may_be_anything(told: dict[str, Any]) -> None:
    (row,) = sampled({"0-0": told}).rows
    assert row.worker == "0-0"


def test_the_page_has_every_key_of_the_json() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    _, _, tables = page.partition("## `top --json`")
    named = set(re.findall(r"`(\w+)`", tables))
    told = as_json(snapshot_of(*cluster(1, 1), 7.0))
    assert (told.keys() | told["rows"][0].keys()) - named == set()


# -- what is read of a heartbeat, from all kinds of workers


def test_a_worker_that_spills_device_memory_and_has_two_gpus() -> None:
    told = {
        "memory": 7,
        "spilled_bytes": {"memory": 0, "disk": 0},  # of a store that distributed does not know
        "gpu_utilization": 1,
        METRIC: {"spilled": 5_000, "gpus": [[10, 11, 80, 300.0, 60, 1, 9e6, 5e9, None], [20, 21, 80]]},
    }
    first = {
        "gpu": 10,
        "gpu_memory": 11,
        "gpu_power": 300.0,
        "gpu_temperature": 60,
        "gpu_slowed": 1,
        "gpu_pcie": 5e9,
    }
    assert measured(told) == {"memory": 7, "gpu_spilled": 5_000, **first, "gpu_1": 20, "gpu_memory_1": 21}


@pytest.mark.parametrize(
    "told",
    [
        {"cpu": "much", "memory": True, "spilled_bytes": 7, "rmm": [], "cudf": None, "gpu": 3},
        {"cpu": float("nan"), "memory": float("inf"), "managed_bytes": 10**400},
        {METRIC: {"gpus": [[], ["x", None, 3, "4"]], "spilled": "all"}},
        {METRIC: {"gpus": [7]}},
        {METRIC: 7},
    ],
)
def test_what_is_no_figure_is_left_out(told: dict[str, Any]) -> None:
    assert measured(told) == {}


def test_many_gpus_are_bounded() -> None:
    told = {METRIC: {"gpus": [[1, 2, 3]] * 1_000}}
    assert len(measured(told)) == 2 * MOST_GPUS


# -- the connection to a scheduler; tests/mpi/test_top.py has one to a job


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Any, Link]]:
    scheduler: Any = Scheduler(dashboard=False, dashboard_address="127.0.0.1:0", port=0, host="127.0.0.1")
    async with scheduler:
        with contextlib.closing(Link(Target(scheduler.address))) as link:
            yield scheduler, link


async def test_a_cluster_of_others_is_asked_once_for_what_it_does_not_know() -> None:
    lines: list[str] = []

    async with linked() as (scheduler, link):
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("distributed.core").addHandler(handler)
        try:
            for _ in range(3):
                assert (await link.sample()).scheduler == scheduler.address
        finally:
            logging.getLogger("distributed.core").removeHandler(handler)
    assert lines == ["No handler gpu_mpi_job found in Scheduler"]


@pytest.mark.parametrize("listens", [False, True])
async def test_a_scheduler_that_is_not_there_or_does_not_answer(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dask_gpu_mpi.view.snapshot.TIMEOUT", 0.5)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1] if listens else 1
    link = Link(Target(f"tcp://127.0.0.1:{port}"))
    with pytest.raises(ClusterLostError, match=f"tcp://127.0.0.1:{port} can't be reached"):
        await link.sample()
    link.close()
    server.close()


async def test_a_scheduler_that_is_busy_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as (scheduler, link):
        await link.sample()
        identity = scheduler.handlers["identity"]
        freed = asyncio.Event()

        async def busy(**kwargs: Any) -> Any:
            await freed.wait()
            return identity(**kwargs)

        scheduler.handlers["identity"] = busy
        monkeypatch.setattr("dask_gpu_mpi.view.snapshot.TIMEOUT", 0.2)
        with pytest.raises(NoAnswerError, match=r"no response from the scheduler at .* within 0\.2 s"):
            await link.sample()
        monkeypatch.setattr("dask_gpu_mpi.view.snapshot.TIMEOUT", 30.0)
        freed.set()
        assert (await link.sample()).scheduler == scheduler.address


async def test_the_causes_of_a_lost_connection() -> None:
    """A new connection that is not accepted in time is no end of the cluster; clocks that differ are the user's to set."""
    async with linked() as (_, link):
        assert isinstance(link._lost(OSError("certificate is not yet valid")), InputError)
        await link.sample()
        late = OSError("Timed out trying to connect")
        late.__cause__ = TimeoutError()
        assert isinstance(link._lost(late), NoAnswerError)
        late.__cause__ = ConnectionRefusedError()
        assert not isinstance(link._lost(late), NoAnswerError)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["answer", "exception", "handshake"])
async def test_nothing_that_a_stranger_sends_is_unpickled(how: str, tmp_path: Path) -> None:
    """At the address of a cluster that has ended, say, and was not encrypted."""
    from distributed.comm import listen
    from distributed.protocol import ToPickle, to_serialize

    fuse = tmp_path / "unpickled"

    async def stranger(comm: Any) -> None:
        await comm.read()
        if how == "answer":
            await comm.write({"workers": ToPickle(Bomb(fuse)), "more": to_serialize(Bomb(fuse))})
        else:
            await comm.write({"status": "uncaught-error", "exception": ToPickle(Bomb(fuse)), "text": "x"})

    extra = {"handshake_overrides": {"more": to_serialize(Bomb(fuse))}} if how == "handshake" else {}
    listener: Any = listen("tcp://127.0.0.1:0", stranger, **extra)
    async with listener:
        link = Link(Target(listener.contact_address))
        with pytest.raises((ClusterLostError, InputError)):
            await link.sample()
        link.close()
    assert not fuse.exists()
