"""What is printed when a cluster is up; and a session's card, in which nothing is markup of somebody else's."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.job import announcement
from dask_gpu_mpi.job.announcement import announce, card, open_warnings
from dask_gpu_mpi.options.model import Options, Protocol


@pytest.mark.parametrize(
    ("devices", "nodes", "line"),
    [
        (["u", "v", ""], "ab", "3 workers on 2 hosts, 2 GPUs, ready after 2.0 s"),
        ([""], "a", "1 worker on 1 host, 0 GPUs, ready after 2.0 s"),
    ],
)
def test_what_came_up(
    devices: list[str],
    nodes: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [SimpleNamespace(devices=tuple(of.split())) for of in devices]
    scheduler = SimpleNamespace(host="n1")
    plan = SimpleNamespace(scheduler=scheduler, workers=workers, hosts=nodes, warnings=("of the plan",))
    cluster = SimpleNamespace(plan=plan, dashboard="http://d", address="tls://h:1", transport="TLS")
    options = Options(warnings=("of options",))  # type: ignore[arg-type]
    joined: Any = SimpleNamespace(cluster=cluster, options=options, environ={})

    def said() -> list[str]:
        announce(joined, 2.0)
        return [text.removeprefix("dask_gpu_mpi: ") for text in capsys.readouterr().err.splitlines()]

    monkeypatch.setattr(announcement, "version_warnings", lambda *, gpus: [f"of versions, {gpus}"])
    warnings = [f"warning: {of}" for of in ("of options", "of the plan", f"of versions, {any(devices)}")]
    assert said() == [line, *warnings, "transport: TLS", "dashboard at http://d"]
    monkeypatch.setattr(announcement.importlib.util, "find_spec", lambda _: None)
    cluster.dashboard, cluster.transport = None, ""
    assert said()[4].startswith("no dashboard: bokeh is not installed")


@pytest.mark.parametrize(
    ("installed", "gpus", "expected"),
    [
        ("distributed 2026.9.0", False, ["distributed 2026.9.0 is newer"]),
        (
            "distributed 2026.8.0 dask-cuda 26.12.0",
            True,
            ["dask-cuda 26.12.0 is newer", "distributed 2026.8.0 does not match dask-cuda 26.12.0"],
        ),
        ("", True, []),
    ],
)
def test_warnings_about_versions(
    installed: str, gpus: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dict(zip(installed.split()[::2], installed.split()[1::2], strict=True))

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["distributed==2026.1.1"])
    warnings = map(str, announcement.version_warnings(gpus=gpus))
    assert all(text.startswith(start) for text, start in zip(warnings, expected, strict=True))


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


def test_the_card_of_a_session() -> None:
    """Its link has the token, its text has not; nothing in it is markup of somebody else's."""
    plan: Any = SimpleNamespace(
        hosts=[SimpleNamespace(host=f"<n{number}>") for number in range(5)], workers=[]
    )
    link = "http://localhost:8787/status?token=abc&theme=dark"
    shown = card(plan, "tls://<h>:1", link, closed=False, seconds_left=3725.0)
    assert "5 (&lt;n0&gt;, &lt;n1&gt;, &lt;n2&gt;, &lt;n3&gt;, ...)" in shown
    assert "tls://&lt;h&gt;:1" in shown
    assert 'href="http://localhost:8787/status?token=abc&amp;theme=dark"' in shown
    assert ">http://localhost:8787/status</a>" in shown
    assert "1:02:05" in shown
    assert "abc" not in card(plan, "tls://h:1", link, closed=True, seconds_left=None)
    assert "<a" not in card(plan, "tls://h:1", "javascript:alert(1)", closed=False, seconds_left=None)
