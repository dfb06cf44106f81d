"""The limit of open descriptors, in processes of their own: it can be lowered only once."""

from __future__ import annotations

import subprocess
import sys

import pytest

RAISE = """
import resource, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from dask_gpu_mpi.base import descriptors
descriptors.MOST = 600
descriptors.raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(100, 500, "500 500"), (100, 700, "600 700"), (650, 700, "650 700"), (500, 500, "500 500")],
    ids=["to the hard limit", "not without end", "never lowered", "nothing to raise"],
)
def test_the_soft_limit_follows_the_hard_one(soft: int, hard: int, raised: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISE, str(soft), str(hard)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == raised
