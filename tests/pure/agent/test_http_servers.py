"""Who listens for HTTP: schedulers and workers that have routes, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from distributed.node import ServerNode

from dask_gpu_mpi.agent.dashboard_gate import listen_where_routes_are

#: In a process of its own, since Dask leaves threads: the services of a scheduler and of a worker, a client's link, a result.
CLUSTER = """
import asyncio, json, sys
import dask
from distributed import Client, Scheduler, Worker
from dask_gpu_mpi.agent.dashboard_gate import NO_SCHEDULER_ROUTES, NO_WORKER_ROUTES, listen_where_routes_are, report_no_server

async def run(served):
    here = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    async with Scheduler(port=0, protocol="tcp", dashboard=False, **here) as scheduler:
        if not served:
            report_no_server(scheduler)
        async with Worker(scheduler.address, **here) as worker, Client(scheduler.address, asynchronous=True) as client:
            result = await client.submit(sum, [1, 2])
            return scheduler.identity()["services"], worker.service_ports, client.dashboard_link, result

listen_where_routes_are()
served = sys.argv[1] == "served"
if not served:
    dask.config.set({**NO_SCHEDULER_ROUTES, **NO_WORKER_ROUTES, "distributed.dashboard.link": ""})
print(json.dumps(asyncio.run(run(served))))
"""


def cluster(what: str) -> Any:
    done = subprocess.run([sys.executable, "-c", CLUSTER, what], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_routes_there_is_no_server() -> None:
    assert cluster("closed") == [{"dashboard": 0}, {}, "", 3]


def test_with_routes_there_is_one() -> None:
    of_scheduler, of_worker, link, result = cluster("served")
    assert of_scheduler["dashboard"] > 0
    assert of_worker["dashboard"] > 0
    assert (link, result) == (f"http://127.0.0.1:{of_scheduler['dashboard']}/status", 3)


def test_it_is_replaced_once_and_needs_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerNode, "start_http_server", ServerNode.start_http_server)
    listen_where_routes_are()
    once = ServerNode.start_http_server
    listen_where_routes_are()
    assert ServerNode.start_http_server is once
    monkeypatch.delattr(ServerNode, "start_http_server")
    listen_where_routes_are()
    assert not hasattr(ServerNode, "start_http_server")
