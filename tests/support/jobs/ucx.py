"""What tests with UCX's packages share."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_ucx = pytest.mark.skipif(
    find_spec("distributed_ucxx") is None,
    reason="distributed-ucxx is not installed: ci/ucx.sh installs it, on GPUs pip install 'dask-gpu-mpi[cuda13]'",
)
