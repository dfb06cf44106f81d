"""The examples in the modules' docstrings, as they stand there."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from support import ROOT

PACKAGE = ROOT / "dask_gpu_mpi"


def has_examples(text: str) -> bool:
    """Whether there is one that is not skipped; those that need a cluster are, and tests/mpi has what they show."""
    return any(">>> " in line and "+SKIP" not in line for line in text.splitlines())


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if has_examples(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_examples(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0, capsys.readouterr().out
