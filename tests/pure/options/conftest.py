"""Options as this machine's user has not configured them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dask.config
import pytest
import yaml

import dask_gpu_mpi

YAML = Path(dask_gpu_mpi.__file__).with_name("gpu-mpi.yaml")


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each test has Dask's configuration for itself, without what this machine's user has configured."""
    for name in [name for name in os.environ if name.startswith("DASK_GPU_MPI_")]:
        monkeypatch.delenv(name)
    with dask.config.set({"gpu-mpi": yaml.safe_load(YAML.read_text())["gpu-mpi"]}):
        yield
