"""What tests of job scripts and of `launch` have in common."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.mocks.batch import FakeBatch


@pytest.fixture
def batch() -> Iterator[FakeBatch]:
    with tempfile.TemporaryDirectory() as folder:
        made = FakeBatch(Path(folder))
        (made.directory / "nodes").write_text("h1\nh2\n")
        yield made
