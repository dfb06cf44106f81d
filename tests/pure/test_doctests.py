"""The examples in the docstrings of the pure modules."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import dask_gpu_mpi

PACKAGE = Path(dask_gpu_mpi.__file__).parent
ROOMS = ("plan", "options", "base", "machine")
MODULES = [
    f"dask_gpu_mpi.{path.parent.name}.{path.stem}"
    for room in ROOMS
    for path in sorted((PACKAGE / room).glob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert done.attempted > 0
    assert done.failed == 0


def test_every_pure_room_has_examples() -> None:
    assert {name.split(".")[1] for name in MODULES} == set(ROOMS)
