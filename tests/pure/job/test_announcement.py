"""What is printed when a cluster is up; and a session's card, in which nothing is markup of somebody else's."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.job import announcement
from dask_gpu_mpi.job.announcement import all_warnings, announce, card, open_warnings
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.startup.messages import Cluster
from support.mocks.inputs import plan_of, worker_plan

#: A batch script of Slurm, without a launcher.
SLURM = {"SLURM_JOB_ID": "7"}


def test_what_came_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [worker_plan(n, device, host=f"n{min(n, 1)}") for n, device in enumerate(("u", "v", None))]
    cluster = Cluster("tls://h:1", "http://d", plan_of(*workers, warnings=("of the plan",)), "TLS")
    options = Options(warnings=("of options",))  # type: ignore[arg-type]
    joined: Any = SimpleNamespace(cluster=cluster, options=options, environ={}, world=World(), size=3)

    def said() -> list[str]:
        announce(joined, 2.0)
        return [text.removeprefix("dask_gpu_mpi: ") for text in capsys.readouterr().err.splitlines()]

    monkeypatch.setattr(announcement, "version_warnings", lambda *, gpus: [f"of versions, {gpus}"])
    warnings = [f"warning: {of}" for of in ("of options", "of the plan", "of versions, True")]
    line = "3 workers on 2 hosts, 2 GPUs, ready after 2.0 s"
    assert said() == [line, *warnings, "transport: TLS", "dashboard at http://d"]
    monkeypatch.setattr(announcement.importlib.util, "find_spec", lambda _: None)
    joined.cluster = replace(cluster, dashboard=None, transport="")
    assert said()[4].startswith("no dashboard: bokeh is not installed")


@pytest.mark.parametrize(
    ("is_open", "environ", "tolerated", "warned"),
    [
        (True, {}, 0, ["MPI: the script's ranks are MPI processes"]),
        (False, {}, 0, []),
        (
            False,
            {"PMI_RANK": "0", "PMI_SIZE": "2", "HYDI_CONTROL_FD": "7"},
            1,
            ["lost ranks: "],
        ),
        (False, {"PMI_RANK": "0", "PMI_SIZE": "2", "HYDI_CONTROL_FD": "7"}, 0, []),
        (False, {}, 1, []),
        (
            False,
            SLURM | {"SLURM_JOB_NUM_NODES": "2"},
            0,
            ["nodes: the job of Slurm has 2, and this cluster uses one"],
        ),
        (False, SLURM | {"SLURM_JOB_NUM_NODES": "1"}, 0, []),
        (False, SLURM | {"SLURM_JOB_NUM_NODES": "two"}, 0, []),
    ],
)
def test_warnings_about_mpi_and_its_launcher(
    is_open: bool, environ: dict[str, str], tolerated: int, warned: list[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(announcement, "version_warnings", lambda *, gpus: [])
    joined: Any = SimpleNamespace(
        cluster=Cluster("tls://h:1", None, plan_of(worker_plan())),
        options=Options(tolerate_lost_ranks=tolerated),
        environ=environ,
        world=SimpleNamespace(is_open=is_open, library="MPICH Version: 5.0.2"),
    )
    warnings = all_warnings(joined)
    assert [text.startswith(begin) for text, begin in zip(warnings, warned, strict=True)] == [True] * len(
        warned
    )


SPILLS = {"rmm_pool_size": 0.8, "enable_cudf_spill": True, "rmm_async": False, "lifetime": "1 hour"}


@pytest.mark.parametrize(
    ("given", "device", "warned"),
    [
        ({"worker_options": SPILLS}, None, ["rmm_pool_size, enable_cudf_spill: no effect"]),
        (
            {"worker_options": SPILLS, "gpus_per_worker": 2},
            None,
            ["rmm_pool_size, enable_cudf_spill, gpus_per_worker (--gpus"],
        ),
        ({"worker_options": SPILLS, "gpus_per_worker": 2}, "GPU-a", []),
        ({"worker_options": {"lifetime": "1 hour"}, "gpus_per_worker": 1}, None, []),
    ],
)
def test_options_for_gpus_in_a_job_without(
    given: dict[str, Any], device: str | None, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command runs on a laptop, so it is no error."""
    monkeypatch.setattr(announcement, "version_warnings", lambda *, gpus: [])
    joined: Any = SimpleNamespace(
        cluster=Cluster("tls://h:1", None, plan_of(worker_plan(0, device))), environ={}, world=World()
    )
    for source in (frozenset(given), frozenset[str]()):
        joined.options = Options(**given, given=source)
        expected = warned if source else []  # those of a site
        warnings = all_warnings(joined)
        assert [text.startswith(begin) for text, begin in zip(warnings, expected, strict=True)] == [
            True
        ] * len(expected)


@pytest.mark.parametrize("gpus", [False, True])
def test_warnings_about_versions(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of dask-cuda are for GPU workers."""
    found = {"distributed": "2026.9.0", "dask-cuda": "26.12.0"}
    monkeypatch.setattr(importlib.metadata, "version", found.__getitem__)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["distributed==2026.1.1"])
    begin = ["distributed 2026.9.0 is newer"]
    if gpus:
        begin += ["dask-cuda 26.12.0 is newer", "distributed 2026.9.0 does not match dask-cuda 26.12.0"]
    warnings = map(str, announcement.version_warnings(gpus=gpus))
    assert all(text.startswith(start) for text, start in zip(warnings, begin, strict=True))


@pytest.mark.parametrize(
    ("address", "scheduler", "where"),
    [
        ("tcp://10.0.0.1:1", True, "the network"),
        ("tls://10.0.0.1:1", True, None),
        ("tcp://127.0.0.1:1", True, "this node"),
        ("tcp://10.0.0.1:1", False, None),  # and so has who joins
    ],
)
def test_a_cluster_that_is_open(address: str, scheduler: bool, where: str | None) -> None:
    found = open_warnings(address, Options(protocol=Protocol.TCP, security=False, scheduler=scheduler))
    assert [f"everyone on {where} can reach" in line for line in found] == [True] * (where is not None)


def test_the_card_of_a_session() -> None:
    """Its link has the token, its text has not; nothing in it is markup of somebody else's."""
    plan = plan_of(*(worker_plan(number, host=f"<n{number}>") for number in range(5)))
    link = "http://localhost:8787/status?token=abc&theme=dark"
    shown = card(plan, "tls://<h>:1", link, closed=False, seconds_left=3725.0)
    for part in (
        "5 (&lt;n0&gt;, &lt;n1&gt;, &lt;n2&gt;, &lt;n3&gt;, ...)",
        "tls://&lt;h&gt;:1",
        'href="http://localhost:8787/status?token=abc&amp;theme=dark"',
        ">http://localhost:8787/status</a>",
        "1:02:05",
    ):
        assert part in shown
    assert "abc" not in card(plan, "tls://h:1", link, closed=True, seconds_left=None)
    assert "<a" not in card(plan, "tls://h:1", "javascript:alert(1)", closed=False, seconds_left=None)


def test_the_file_with_the_link_is_removed_by_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the script has forked may end earlier, as Python does."""
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(announcement, "is_public", lambda _: True)
    joined: Any = SimpleNamespace(
        environ={},
        options=Options(log_directory=str(tmp_path)),
        agent=SimpleNamespace(scratch=None),
        host="n1",
    )
    announcement._link_for_output(joined, "http://localhost:8787/status?token=x")
    (file,) = tmp_path.iterdir()
    ((function, *arguments),) = at_exit
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        function(*arguments)
    assert file.exists()
    function(*arguments)
    assert not file.exists()
