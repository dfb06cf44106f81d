"""The table in colour."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from dask_gpu_mpi.base.tables import show
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.plan.nodes import display
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.synthetic import hypothetical_job
from support.mocks.inputs import GIB, one_host, plan

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def shown(found: Plan, width: int = 120) -> str:
    stream = io.StringIO()
    show(
        display(found, terminal=True),
        Console(
            file=stream,
            force_terminal=True,
            color_system="standard",
            width=width,
            highlight=False,
            _environ={},
        ),
    )
    return stream.getvalue()


def test_colours() -> None:
    text = shown(plan(hypothetical_job(2, 1, 2), cpu_workers=1))
    assert "\x1b[1;34mscheduler\x1b[0m" in text
    assert "\x1b[32m0-0\x1b[0m" in text
    assert "\x1b[36m0-cpu-0\x1b[0m" in text
    assert "\x1b[1;31m" not in text


def test_warnings_idle_gpus_and_those_in_use_are_red() -> None:
    job = list(hypothetical_job(3, 2, 4, "per-rank"))
    job[4] = replace(job[4], gpus=tuple(replace(gpu, processes=((9, GIB),)) for gpu in job[4].gpus))
    text = shown(plan(job, layout="exclusive"))
    assert "\x1b[1;31m  without a worker: GPU 0-3 of h1\x1b[0m" in text
    assert "\x1b[1;31m  in use by others: GPU 0-1 of h3\x1b[0m" in text
    assert text.count("\x1b[1;31mwarning\x1b[0m") == 3


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for line in ESCAPES.sub("", shown(plan(hypothetical_job(20, 1, 4)), width)).splitlines():
        assert len(line) <= width


def test_names_are_text() -> None:
    """Neither markup of Rich nor escape codes of a terminal."""
    job = one_host((), host="h[red]1\x1b[2J", warnings=(Problem("[/] \x1b]0;title\x07"),))
    text = shown(plan(job))
    assert "h[red]1\ufffd[2J" in text
    assert "\x1b" not in ESCAPES.sub("", text)
