"""The scheduler's part of gangs, with a scheduler that is not there: starts that come late, lost workers and the end of members.

All else: tests/mpi/test_spmd.py, its script gangs_that_fail.py, and tests/faults/test_gangs.py.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dask_gpu_mpi.base.timeline import JOB_PLUGIN
from dask_gpu_mpi.gang import scheduler_plugin
from dask_gpu_mpi.gang.group import LEAVE, Reply
from dask_gpu_mpi.gang.scheduler_plugin import Gangs

LIMITS: dict[str, Any] = {"timeout": None, "start_timeout": 60.0, "grace": 60.0}


class Cluster:
    """What the plugin uses of a scheduler, whose nannies can't end their workers."""

    def __init__(self, *names: str) -> None:
        self.handlers: dict[str, Any] = {}
        self.plugins: dict[str, Any] = {}
        self.clients = {"client": object()}
        self.workers: dict[str, Any] = {}
        self.plugin = Gangs()
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        host = f"10.0.0.{name}"
        address = f"tls://{host}:1"
        self.workers[address] = SimpleNamespace(
            name=name, address=address, host=host, nanny=f"nanny-{name}", resources={}
        )
        if self.handlers:  # the plugin has started
            self.plugin.add_worker(self, address)  # type: ignore[arg-type]

    def remove(self, name: str) -> None:
        address = next(address for address, worker in self.workers.items() if worker.name == name)
        del self.workers[address]
        self.plugin.remove_worker(self, address)  # type: ignore[arg-type]

    def worker_send(self, address: str, message: dict[str, Any]) -> None:
        pass

    def rpc(self, nanny: str) -> Any:
        async def kill(**_: Any) -> None:
            raise TimeoutError

        return SimpleNamespace(kill=kill)

    async def begin(self) -> Gangs:
        await self.plugin.start(self)  # type: ignore[arg-type]
        return self.plugin

    async def running(self, gang: str, *ranks: int, **limits: Any) -> Gangs:
        """The plugin, with a gang whose members have all joined."""
        plugin = await self.begin()
        await self.opened(gang, **limits)
        await asyncio.gather(*self.joining(gang, *ranks))
        return plugin

    async def opened(self, gang: str, *workers: str, **limits: Any) -> dict[str, Any]:
        wanted = list(workers) or None
        return await asyncio.wait_for(self.plugin.open(gang, "client", wanted, **{**LIMITS, **limits}), 10)

    def joining(self, gang: str, *ranks: int) -> list[asyncio.Task[dict[str, Any]]]:
        return [asyncio.create_task(self.plugin.join(gang, rank, f"h{rank}")) for rank in ranks]


def quick_return() -> AbstractContextManager[Any]:
    """Workers that do not come back are not waited for long."""
    return patch.object(scheduler_plugin, "GANG_RETURN", 0.1)


async def test_one_that_does_not_start_in_time_frees_the_place() -> None:
    cluster = Cluster("1", "2")
    await cluster.begin()
    await cluster.opened("first", "1")
    late = await cluster.opened("late", start_timeout=0.05)
    assert (late["state"], late["late"]) == (Reply.OVER, True)
    assert late["why"].startswith(
        "not started within 0.05 s: another gang has its workers, the caller's perhaps. Fix: "
    )
    assert (await cluster.opened("third", "2"))["state"] == Reply.GOOD


async def test_a_line_says_that_a_worker_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler_plugin, "WAITS_SILENTLY", 0.05)
    cluster = Cluster("1", "2")
    await cluster.begin()
    await cluster.opened("first", "1")
    await cluster.opened("waits", "1", start_timeout=0.1)  # for the first, which is no news
    assert capsys.readouterr().err == ""
    await cluster.opened("misses", "2", "zz", start_timeout=0.1)
    said = "warning: spmd: no worker zz; it waits for 0.1 s (start_timeout). Fix: correct `workers`"
    assert capsys.readouterr().err.splitlines() == [f"dask_gpu_mpi: {said}"]


async def test_a_worker_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    cluster = Cluster("1", "2")
    plugin = await cluster.begin()
    await cluster.opened("g")
    with quick_return():
        cluster.remove("2")
        why = (await plugin.watch("g"))["why"]
        assert why == "rank 1 (worker 2 on 10.0.0.2) died before the gang started"
        await plugin.close_gang("g")
    assert len((await cluster.opened("next"))["workers"]) == 1


async def test_a_member_that_can_not_be_ended_is_told() -> None:
    cluster = Cluster("1", "2")
    plugin = await cluster.running("g", 0, 1, grace=0.01)
    with quick_return():
        plugin.fail("g", "raised ValueError()", 0)
        plugin.log_event("another", {})
        plugin.log_event(LEAVE, {"gang": "g", "rank": 0, "spoilt": False})
        closed = await plugin.close_gang("g")
    note = "spmd: rank 1 (worker 2 on h1) could not be ended; it may still use its GPU"
    assert closed == {"notes": [note], "died": []}


async def test_all_workers_are_also_those_that_were_lost_a_moment_ago() -> None:
    cluster = Cluster("1")
    lost = [("2", "cpu"), ("3", "gpu")]
    cluster.plugins[JOB_PLUGIN] = SimpleNamespace(recently_lost=lambda seconds: lost)
    plugin = await cluster.begin()
    opening = asyncio.create_task(cluster.opened("g"))
    for _ in range(2):
        await asyncio.sleep(0.1)
        assert not opening.done()
        lost.pop()  # it is back, or is waited for no longer
    assert len((await opening)["workers"]) == 1
    lost.append(("2", "cpu"))
    next(iter(cluster.workers.values())).resources["GPU"] = 1
    opening = asyncio.create_task(cluster.opened("of GPUs"))  # CPU workers are not waited for
    await asyncio.sleep(0.01)
    assert plugin._gangs["of GPUs"].waits_for == "another gang has its workers, the caller's perhaps"
    named = await cluster.opened("named", "1", start_timeout=0.05)
    assert named["why"].count("another gang has its workers") == 1


async def test_a_client_that_is_gone_takes_its_gangs_with_it() -> None:
    cluster = Cluster("1")
    plugin = await cluster.begin()
    await cluster.opened("g")
    waiting = asyncio.create_task(cluster.opened("waits"))
    await asyncio.sleep(0.01)
    plugin.remove_client(cluster, "another")  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert not waiting.done()
    plugin.remove_client(cluster, "client")  # type: ignore[arg-type]
    assert (await waiting)["why"] == "its client is gone"
    assert (await cluster.opened("next"))["state"] == Reply.GOOD
    del cluster.clients["client"]
    assert (await cluster.opened("gone"))["state"] == Reply.REFUSED


async def test_a_member_that_has_stopped_waiting() -> None:
    """Who comes later must not meet another call of the one that has gone on: epochs would be mixed up."""
    cluster = Cluster("1", "2")
    plugin = await cluster.running("g", 0, 1, grace=0.0)
    late = await plugin.exchange("g", 0, 0, "barrier", b"", 0.01)
    assert late == {"state": Reply.LATE, "missing": [1]}
    over = await plugin.exchange("g", 1, 0, "barrier", b"", 60)
    assert over["state"] == Reply.OVER
    assert "rank 0 has stopped waiting" in over["why"]
