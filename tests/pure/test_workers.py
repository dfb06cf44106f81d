"""Workers from their lines of the plan."""

from __future__ import annotations

import os

import pytest

from dask_gpu_mpi.workers import visible_device


@pytest.mark.parametrize("before", [None, "0,1"])
def test_the_environment_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with visible_device("GPU-x"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
