"""The lines that are printed when a cluster is up."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.job import announcement
from dask_gpu_mpi.job.announcement import announce, announce_waiting, open_warnings
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import Protocol


@pytest.mark.parametrize(
    ("devices", "nodes", "line"),
    [
        (["u"], ["a"], "1 worker on 1 host, 1 GPU, ready after 2.0 s"),
        (["u", "v", ""], ["a", "b"], "3 workers on 2 hosts, 2 GPUs, ready after 2.0 s"),
        (["u v"], ["a"], "1 worker on 1 host, 2 GPUs, ready after 2.0 s"),
        ([""], ["a"], "1 worker on 1 host, 0 GPUs, ready after 2.0 s"),
    ],
)
def test_what_came_up(
    devices: list[str],
    nodes: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [SimpleNamespace(kind="gpu" if of else "cpu", devices=tuple(of.split())) for of in devices]
    plan = SimpleNamespace(
        scheduler=SimpleNamespace(host="n1"), workers=workers, hosts=nodes, warnings=("of the plan",)
    )
    joined: Any = SimpleNamespace(
        cluster=SimpleNamespace(plan=plan, dashboard="http://d", address="tls://h:1", transport="TLS"),
        options=SimpleNamespace(
            warnings=("of options",), dashboard=True, scheduler=True, tolerate_lost_ranks=0
        ),
        environ={},
    )
    monkeypatch.setattr(announcement, "version_warnings", lambda *, gpus: [f"of versions, {gpus}"])
    announce(joined, 2.0)
    assert capsys.readouterr().err.splitlines() == [
        f"dask_gpu_mpi: {line}",
        "dask_gpu_mpi: warning: of options",
        "dask_gpu_mpi: warning: of the plan",
        f"dask_gpu_mpi: warning: of versions, {any(devices)}",
        "dask_gpu_mpi: transport: TLS",
        "dask_gpu_mpi: dashboard at http://d",
    ]
    monkeypatch.setattr(announcement.importlib.util, "find_spec", lambda _: None)
    joined.cluster.dashboard, joined.cluster.transport = None, ""
    announce(joined, 2.0)
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("dask_gpu_mpi: no dashboard: bokeh is not installed")
    )
    joined.options.dashboard = False
    announce(joined, 2.0)
    assert "dashboard" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (Options(), "or a client calls shutdown(). To connect to it: start it with --scheduler-file FILE"),
        (Options(scheduler_file="/s.json"), "To connect to it: dask_gpu_mpi.connect('/s.json')"),
        (
            Options(scheduler=False, scheduler_file="s.json"),
            "the cluster that they have joined ends, or this job is cancelled",
        ),
    ],
)
def test_what_a_job_without_a_script_waits_for(
    options: Options, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announce_waiting(options)
    line = capsys.readouterr().err
    assert line.startswith("dask_gpu_mpi: no script: ")
    assert line.endswith(end + "\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("installed", "gpus", "expected"),
    [
        ({"distributed": "2026.9.0"}, False, ["distributed 2026.9.0 is newer"]),
        ({"distributed": "2026.8.0", "dask-cuda": "26.12.0"}, False, []),
        (
            {"distributed": "2026.8.0", "dask-cuda": "26.12.0"},
            True,
            ["dask-cuda 26.12.0 is newer", "distributed 2026.8.0 does not match dask-cuda 26.12.0"],
        ),
        ({"distributed": "2026.1.1", "dask-cuda": "26.6.0"}, True, []),
        ({"distributed": "2026.1.1"}, True, []),
        ({}, True, []),
    ],
)
def test_warnings_about_versions(
    installed: dict[str, str], gpus: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["distributed==2026.1.1"])
    found = [*map(str, announcement.version_warnings(gpus=gpus))]
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("address", "scheduler", "where"),
    [
        ("tcp://127.0.0.1:1", True, "this node"),
        ("tcp://10.0.0.1:1", True, "the network"),
        ("tls://10.0.0.1:1", True, None),
        ("ucx://127.0.0.1:1", True, "the network"),  # UCX listens on all interfaces
        ("tcp://10.0.0.1:1", False, None),  # and so has who joins
    ],
)
def test_a_cluster_that_is_open(address: str, scheduler: bool, where: str | None) -> None:
    found = open_warnings(address, Options(protocol=Protocol.TCP, security=False, scheduler=scheduler))
    assert [f"everyone on {where} can reach" in line for line in found] == [True] * (where is not None)
