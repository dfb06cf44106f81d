"""Inventories of allocations that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.plan.synthetic import pretend


@pytest.mark.parametrize(
    ("shape", "words"),
    [((0, 1, 1), "nodes"), ((1, 0, 1), "ranks"), ((1, 1, -1), "gpus"), ((1, 1, 1, "x"), "visible")],
)
def test_pretended_jobs_are_checked(shape: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        pretend(*shape)


def test_pretended_ranks_see_blocks() -> None:
    assert [len(found.gpus) for found in pretend(1, 3, 4, "per-rank")] == [2, 1, 1]
    assert [found.visible for found in pretend(1, 3, 4, "per-rank")] == ["0,1", "2", "3"]
    assert len({g.uuid for found in pretend(3, 2, 2) for g in found.gpus}) == 6
