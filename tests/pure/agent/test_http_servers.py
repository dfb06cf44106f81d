"""Who listens for HTTP: schedulers and workers that have routes, and no other."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler, Worker
from distributed.node import ServerNode

from dask_gpu_mpi.agent.http_servers import (
    NO_SCHEDULER_ROUTES,
    NO_WORKER_ROUTES,
    listen_where_routes_are,
    show_none,
)


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerNode, "start_http_server", ServerNode.start_http_server)
    listen_where_routes_are()


def cluster(**config: Any) -> tuple[dict[str, int], dict[str, int], str | None, int]:
    """The services of a scheduler and of a worker, what a client makes of the former's, and a result."""

    async def run() -> tuple[dict[str, int], dict[str, int], str | None, int]:
        async with Scheduler(
            host="127.0.0.1", port=0, protocol="tcp", dashboard=False, dashboard_address="127.0.0.1:0"
        ) as scheduler:
            if not config.get("wanted"):
                show_none(scheduler)
            async with (
                Worker(scheduler.address, host="127.0.0.1", dashboard_address="127.0.0.1:0") as worker,
                Client(scheduler.address, asynchronous=True) as client,
            ):
                result = await client.submit(sum, [1, 2])
                return scheduler.identity()["services"], worker.service_ports, client.dashboard_link, result

    with dask.config.set({} if config.get("wanted") else {**NO_SCHEDULER_ROUTES, **NO_WORKER_ROUTES}):
        return asyncio.run(asyncio.wait_for(run(), 30))


def test_without_routes_there_is_no_server() -> None:
    with dask.config.set({"distributed.dashboard.link": ""}):
        assert cluster() == ({"dashboard": 0}, {}, "", 3)


def test_with_routes_there_is_one() -> None:
    of_scheduler, of_worker, link, result = cluster(wanted=True)
    assert of_scheduler["dashboard"] > 0
    assert of_worker["dashboard"] > 0
    assert (link, result) == (f"http://127.0.0.1:{of_scheduler['dashboard']}/status", 3)


def test_it_is_replaced_once_and_needs_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    once = ServerNode.start_http_server
    listen_where_routes_are()
    assert ServerNode.start_http_server is once
    monkeypatch.delattr(ServerNode, "start_http_server")
    listen_where_routes_are()
    assert not hasattr(ServerNode, "start_http_server")
