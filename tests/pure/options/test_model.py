"""What options are."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.options.model import Option
from support.mocks.inputs import keywords

pytestmark = pytest.mark.usefixtures("unconfigured")


def test_the_names_of_an_option() -> None:
    option = Option("str", "log_level", "x", "")
    assert (option.key, option.variable) == ("log-level", "DASK_GPU_MPI__LOG_LEVEL")
    assert not option.allows_none
    assert Option("str", "log_level", None, "").allows_none
    assert Option("str", "log_level", "x", "", nullable=True).allows_none


class CUDAWorker: ...


class Mine(CUDAWorker): ...


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        ("auto", "auto"), ("dask_cuda.CUDAWorker", "gpu"), ("CUDAWorker", "gpu"), (Mine, "gpu"), ("distributed.Nanny", "cpu"),
        ("distributed.worker.Worker", "cpu"), ("dask.distributed.Worker", "cpu"), ("mine.Worker", "auto"), (dict, "auto"),
    ],
)  # fmt: skip
def test_worker_kind(cls: Any, kind: str) -> None:
    assert keywords(worker_class=cls).worker_kind == kind


@pytest.mark.parametrize(("timeout", "seconds"), [(1.0, 0.5), (4.0, 2.0), (60.0, 2.0)])
def test_workers_close_well_within_the_deadline(timeout: float, seconds: float) -> None:
    assert keywords(shutdown_timeout=timeout).grace == seconds


def test_worker_kind_of_dasks_own_classes() -> None:
    import distributed

    assert keywords(worker_class=distributed.Nanny).worker_kind == "cpu"
    assert keywords(worker_class=type("Mine", (distributed.Nanny,), {})).worker_kind == "auto"
