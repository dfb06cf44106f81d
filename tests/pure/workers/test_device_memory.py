"""Sizes of device memory: fractions of the worker's own device, and what can't be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.base.text import parse_bytes
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.workers.worker_options import DEVICE_SIZES, device_bytes, device_sizes
from support.mocks.inputs import worker_plan

GIB = 1 << 30
WORKER = worker_plan("0-0", "GPU-x", gpu_index=3, host="h1", device_memory=80 * GIB)


def sizes(free: int, **options: Any) -> dict[str, int]:
    """Of a worker on a GPU of 80 GiB with so much free."""
    return device_sizes(options, replace(WORKER, device_free=free))


@pytest.mark.parametrize("value", [0.5, "0.5", 1.0, 1, "1", "2 GiB", 3 * GIB, "5e9", 2e9])
def test_sizes_are_read_as_dask_cuda_reads_them(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("dask_cuda.utils", exc_type=ImportError)
    monkeypatch.setattr(utils, "get_device_total_memory", lambda index: 10 * GIB)
    monkeypatch.setattr(utils, "has_device_memory_resource", lambda index=0: True)
    assert device_bytes(value, 10 * GIB, 256) == utils.parse_device_bytes(value, alignment_size=256)


FREE = f"free: {50 * GIB} bytes (50.00 GiB)"


@pytest.mark.parametrize(
    ("free", "options", "words"),
    [
        (50 * GIB, {"rmm_pool_size": "60 GiB"},
         ("rmm_pool_size", "'60 GiB' (60.00 GiB), more than is free", FREE, "expected '45 GiB' at most")),
        (50 * GIB, {"rmm_pool_size": 0.7}, ("0.7 (56.00 GiB), more than is free", "expected '45 GiB'")),
        (50 * GIB, {"rmm_pool_size": "60 GiB", "rmm_maximum_pool_size": "20 GiB"}, ("more than is free", "expected '20 GiB'")),
        (50 * GIB, {"rmm_pool_size": "30 GiB", "rmm_maximum_pool_size": "20 GiB"},
         ("'30 GiB' (30.00 GiB), more than rmm_maximum_pool_size, '20 GiB'", "expected '20 GiB'")),
        (50 * GIB, {"rmm_maximum_pool_size": "81 GiB", "rmm_pool_size": 1},
         ("rmm_maximum_pool_size", "more than its GPU has", "'80 GiB'")),
        (50 * GIB, {"device_memory_limit": 81 * GIB}, ("device_memory_limit", "more than its GPU has", "'80 GiB'")),
        # unknown memory, and a full GPU
        (-1, {"rmm_pool_size": "80 GiB"}, ()),
        (-1, {"rmm_pool_size": "81 GiB"}, ("more than its GPU has: ", " free: unknown (expected '72 GiB' at most)")),
        (0, {"rmm_pool_size": "1 GiB"}, ("free: 0 bytes (0 B). Fix: end what uses this GPU",)),
        # at the bounds: RMM rounds down to 256 bytes, the limit of the device is exact
        (50 * GIB, {"rmm_pool_size": 50 * GIB + 255}, ()),
        (50 * GIB, {"rmm_pool_size": 50 * GIB + 256}, ("more than is free",)),
        (50 * GIB, {"rmm_maximum_pool_size": 80 * GIB + 255}, ()),
        (50 * GIB, {"rmm_maximum_pool_size": 80 * GIB + 256}, ("more than its GPU has",)),
        (50 * GIB, {"device_memory_limit": 80 * GIB}, ()),
        (50 * GIB, {"device_memory_limit": 80 * GIB + 1}, ("more than its GPU has",)),
        (50 * GIB, {"device_memory_limit": "auto", "rmm_pool_size": None}, ()),
        (50 * GIB, {"rmm_pool_size": "1 GiB", "rmm_maximum_pool_size": "1 GiB"}, ()),
        (50 * GIB, {"rmm_pool_size": "1 GiB", "rmm_maximum_pool_size": GIB - 1}, ("more than rmm_maximum_pool_size",)),
        # more than the device has is what managed memory is for
        (50 * GIB, {"rmm_pool_size": "200 GiB", "device_memory_limit": "100 GiB", "rmm_managed_memory": True}, ()),
        (50 * GIB, {"rmm_async": True, "rmm_release_threshold": "100 GiB"}, ()),
        # a proposal is a round number
        *((50 * GIB, {"rmm_pool_size": "40 GiB", "rmm_maximum_pool_size": maximum}, (proposed,)) for maximum, proposed in [
            (2 * GIB, "(expected '2 GiB' at most)"),
            (2 * GIB - 256, "(expected '2047 MiB' at most)"),
            (1 << 20, "(expected '1 MiB' at most)"),
            ((1 << 20) - 256, ". Fix: end what uses this GPU, or leave the option out"),
        ]),
    ],
)  # fmt: skip
def test_what_can_not_be_had_names_the_gpu_and_its_free_memory(free: int, options: Any, words: Any) -> None:
    if not words:
        sizes(free, **options)
        return
    with pytest.raises(OptionError) as caught:
        sizes(free, **options)
    message = str(caught.value)
    for word in ("of worker 0-0 on h1", "GPU 3 (GPU-x)", *words):
        assert word in message
    assert "\n" not in message


@given(
    st.integers(1, 80 * GIB), st.one_of(st.floats(0.01, 1.0), st.integers(2, 100 * GIB), st.just("30 GiB"))
)
def test_what_a_message_proposes_does_fit(free: int, size: Any) -> None:
    try:
        found = sizes(free, rmm_pool_size=size)
    except OptionError as error:
        _, _, proposal = str(error).partition("expected '")
        if proposal:
            assert 0 < parse_bytes(proposal.partition("'")[0]) <= free
            sizes(free, rmm_pool_size=proposal.partition("'")[0])
    else:
        assert found["rmm_pool_size"] <= free


def test_sizes_in_bytes() -> None:
    asked = {
        "rmm_pool_size": "8 GB",
        "rmm_maximum_pool_size": "10GB",
        "rmm_release_threshold": None,
        "nthreads": 1,
    }
    found = {
        "device_memory_limit": int(0.8 * 80 * GIB),
        "rmm_pool_size": 8 * 10**9,
        "rmm_maximum_pool_size": 10**10,
    }
    assert sizes(-1, **asked) == found
    assert sizes(-1, device_memory_limit=None, rmm_pool_size=0) == {"rmm_pool_size": 0}
    assert device_sizes(asked, replace(WORKER, device_memory=0)) == {}
    assert DEVICE_SIZES["rmm_release_threshold"] == 256


@pytest.mark.parametrize(
    "value", ["much", [1], {}, object(), float("nan"), float("inf"), "1e400", -1, "-1 GB"]
)
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(
        OptionError, match=r"^worker_options: rmm_pool_size: invalid value .* \(expected bytes"
    ):
        sizes(-1, rmm_pool_size=value)
