"""A worker's options, made right for its own device."""

from __future__ import annotations

import os

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.workers import device_bytes, visible_device

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("default", int(10 * GIB * 0.8)),
        ("auto", 10 * GIB),
        (0.5, 5 * GIB),
        ("0.5", 5 * GIB),
        (1.0, 10 * GIB),
        (1, 1),
        ("1", 1),
        ("2 GiB", 2 * GIB),
        (3 * GIB, 3 * GIB),
        (0, 0),
        (None, None),
    ],
)
def test_fractions_are_of_the_workers_own_device(value: object, expected: object) -> None:
    assert device_bytes(value, 10 * GIB, 1, "x") == expected


def test_a_pool_is_aligned() -> None:
    assert device_bytes(0.333, 10 * GIB, 256, "x") % 256 == 0


def test_more_than_the_device_has_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"rmm_pool_size of worker 0-0: '20 GiB' is more than its device has"
    ):
        device_bytes("20 GiB", 10 * GIB, 256, "rmm_pool_size of worker 0-0")


@pytest.mark.parametrize("before", [None, "0,1"])
def test_the_environment_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with visible_device("GPU-x"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
