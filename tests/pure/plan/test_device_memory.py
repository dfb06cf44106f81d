"""Sizes of device memory: fractions of the worker's own device, and what can't be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.base.text import parse_bytes
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.machine.inventory import Inventory
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.device_memory import DEVICE_SIZES, device_bytes, device_options, device_sizes
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.plan.synthetic import hypothetical_job

GIB = 1 << 30


@pytest.mark.parametrize("value", [0.5, "0.5", 1.0, 1, "1", "2 GiB", 3 * GIB, "5e9", 2e9])
def test_sizes_are_read_as_dask_cuda_reads_them(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("dask_cuda.utils", exc_type=ImportError)
    monkeypatch.setattr(utils, "get_device_total_memory", lambda index: 10 * GIB)
    monkeypatch.setattr(utils, "has_device_memory_resource", lambda index=0: True)
    assert device_bytes(value, 10 * GIB, 256) == utils.parse_device_bytes(value, alignment_size=256)


def job(*free: int) -> list[Inventory]:
    """One rank and one GPU of 80 GiB on each host, with so much free."""
    return [
        replace(rank, gpus=tuple(replace(gpu, free=number) for gpu in rank.gpus))
        for rank, number in zip(hypothetical_job(len(free), 1, 1), free, strict=True)
    ]


def check(ranks: list[Inventory], **options: Any) -> Plan:
    return make_plan(ranks, Options(cpu_workers=1, worker_options=options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rmm_pool_size": "60 GiB"}, ("rmm_pool_size", "'60 GiB' (60.00 GiB), more than is free", "expected '45 GiB' at most")),
        ({"rmm_pool_size": 0.7}, ("0.7 (56.00 GiB), more than is free", "expected '45 GiB'")),
        ({"rmm_pool_size": "60 GiB", "rmm_maximum_pool_size": "20 GiB"}, ("more than is free", "expected '20 GiB'")),
        ({"rmm_pool_size": "30 GiB", "rmm_maximum_pool_size": "20 GiB"},
         ("'30 GiB' (30.00 GiB), more than rmm_maximum_pool_size, '20 GiB'", "expected '20 GiB'")),
        ({"rmm_maximum_pool_size": "81 GiB", "rmm_pool_size": 1},
         ("rmm_maximum_pool_size", "more than its GPU has", "'80 GiB'")),
        ({"device_memory_limit": 81 * GIB}, ("device_memory_limit", "more than its GPU has", "'80 GiB'")),
    ],
)  # fmt: skip
def test_what_can_not_be_had_names_the_gpu_and_its_free_memory(options: Any, words: Any) -> None:
    with pytest.raises(OptionError) as caught:
        check(job(50 * GIB), **options)
    message = str(caught.value)
    gpu = "GPU 0 (GPU-00000000-0000-0000-0000-000000000000)"
    for word in ("of worker 0-0 on h1", gpu, f"free: {50 * GIB} bytes (50.00 GiB)", *words):
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("free", "size", "words"),
    [
        (-1, "81 GiB", r"more than its GPU has: .* free: unknown \(expected '72 GiB' at most\)"),
        (0, "1 GiB", r"free: 0 bytes \(0 B\)\. Fix: end what uses this GPU"),
    ],
)
def test_unknown_memory_and_a_full_gpu(free: int, size: str, words: str) -> None:
    check(job(-1), rmm_pool_size="80 GiB")
    with pytest.raises(OptionError, match=words):
        check(job(free), rmm_pool_size=size)


def test_the_same_trouble_on_many_hosts_is_one_line_with_what_fits_all() -> None:
    with pytest.raises(OptionError, match=r"worker 1-0 on h2 \(and 1 more\).*expected '18 GiB' at most"):
        check(job(80 * GIB, 30 * GIB, 20 * GIB), rmm_pool_size="40 GiB")


def test_ranks_may_ask_for_different_sizes() -> None:
    ranks = job(80 * GIB, 10 * GIB)
    asked = {0: {"rmm_pool_size": "70 GiB"}, 1: {"rmm_pool_size": "9 GiB"}}
    plan = make_plan(ranks, Options(), device_options=asked)
    assert [worker.device_sizes["rmm_pool_size"] for worker in plan.workers] == [70 * GIB, 9 * GIB]
    asked[1] = {"rmm_pool_size": "11 GiB"}
    with pytest.raises(OptionError, match="worker 1-0 on h2"):
        make_plan(ranks, Options(), device_options=asked)


@given(
    st.integers(1, 80 * GIB), st.one_of(st.floats(0.01, 1.0), st.integers(2, 100 * GIB), st.just("30 GiB"))
)
def test_what_a_message_proposes_does_fit(free: int, size: Any) -> None:
    ranks = job(free)
    try:
        check(ranks, rmm_pool_size=size)
    except OptionError as error:
        _, _, proposal = str(error).partition("expected '")
        if proposal:
            assert 0 < parse_bytes(proposal.partition("'")[0]) <= free
            check(ranks, rmm_pool_size=proposal.partition("'")[0])
    else:
        assert device_bytes(size, 80 * GIB, 256) <= free


def test_the_plan_has_bytes() -> None:
    asked = {
        "rmm_pool_size": 0.5,
        "rmm_maximum_pool_size": "10GB",
        "rmm_release_threshold": None,
        "nthreads": 1,
    }
    gpu, cpu = check(job(-1), **(asked | {"rmm_pool_size": "8 GB"})).workers
    assert gpu.device_sizes == {
        "device_memory_limit": int(0.8 * 80 * GIB),
        "rmm_pool_size": 8 * 10**9,
        "rmm_maximum_pool_size": 10**10,
    }
    assert cpu.device_sizes == {}
    assert device_sizes({"device_memory_limit": None, "rmm_pool_size": 0}, 80 * GIB) == {"rmm_pool_size": 0}
    (unknown,) = hypothetical_job(1, 1, 1)
    unknown = replace(unknown, gpus=tuple(replace(gpu, memory=0) for gpu in unknown.gpus))
    assert check([unknown], **asked).workers[0].device_sizes == {}


def test_options_that_cudaworker_may_have() -> None:
    asked = {"rmm_pool_size": "1 GiB", "rmm_managed_memory": True, "nthreads": 2, "device_memory_limit": None}
    expected = {"rmm_pool_size": "1 GiB", "rmm_managed_memory": True, "device_memory_limit": None}
    # a class of the user's may be made from CUDAWorker
    for cls in ("auto", "dask_cuda.CUDAWorker", "somebody.Else"):
        assert device_options(Options(worker_options=asked, worker_class=cls)) == expected
    assert device_options(Options(worker_options=asked, worker_class="distributed.Nanny")) == {}


@pytest.mark.parametrize(
    "value", ["much", [1], {}, True, object(), float("nan"), float("inf"), "1e400", 10**400, -1, "1e30GB"]
)
def test_what_is_no_size_is_for_the_check_of_worker_options(value: Any) -> None:
    asked = device_options(Options(worker_options={"rmm_pool_size": value}))
    assert device_sizes(asked, 80 * GIB) == {"device_memory_limit": 64 * GIB}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        # RMM rounds down to 256 bytes, the limit of the device is exact
        ({"rmm_pool_size": 50 * GIB + 255}, False),
        ({"rmm_pool_size": 50 * GIB + 256}, True),
        ({"rmm_maximum_pool_size": 80 * GIB + 255}, False),
        ({"rmm_maximum_pool_size": 80 * GIB + 256}, True),
        ({"device_memory_limit": 80 * GIB}, False),
        ({"device_memory_limit": "auto", "rmm_pool_size": None}, False),
        # more than the device has is what managed memory is for
        ({"rmm_pool_size": "200 GiB", "device_memory_limit": "100 GiB", "rmm_managed_memory": True}, False),
        ({"rmm_async": True, "rmm_release_threshold": "100 GiB"}, False),
        ({"device_memory_limit": 80 * GIB + 1}, True),
        ({"rmm_pool_size": "1 GiB", "rmm_maximum_pool_size": "1 GiB"}, False),
        ({"rmm_pool_size": "1 GiB", "rmm_maximum_pool_size": GIB - 1}, True),
    ],
)
def test_sizes_at_their_bounds(options: Any, refused: bool) -> None:
    if refused:
        with pytest.raises(OptionError) as caught:
            check(job(50 * GIB), **options)
        assert "more)" not in str(caught.value)
    else:
        check(job(50 * GIB), **options)
    assert DEVICE_SIZES["rmm_release_threshold"] == 256


@pytest.mark.parametrize(
    ("maximum", "proposed"),
    [
        (2 * GIB, "(expected '2 GiB' at most)"),
        (2 * GIB - 256, "(expected '2047 MiB' at most)"),
        (1 << 20, "(expected '1 MiB' at most)"),
        ((1 << 20) - 256, ". Fix: end what uses this GPU, or leave the option out"),
    ],
)
def test_a_proposal_is_a_round_number(maximum: int, proposed: str) -> None:
    with pytest.raises(OptionError) as caught:
        check(job(50 * GIB), rmm_pool_size="40 GiB", rmm_maximum_pool_size=maximum)
    assert str(caught.value).endswith(proposed)


def test_of_several_gpus_the_first_has_the_pool() -> None:
    (rank,) = hypothetical_job(1, 1, 2)
    gpus = tuple(replace(gpu, free=(gpu.index + 1) * GIB) for gpu in rank.gpus)
    ranks = [replace(rank, gpus=gpus)]
    make_plan(ranks, Options(gpus_per_worker=2, worker_options={"rmm_pool_size": "1 GiB"}))
    with pytest.raises(OptionError, match=r"GPU 0 .*free: 1073741824 bytes"):
        make_plan(ranks, Options(gpus_per_worker=2, worker_options={"rmm_pool_size": "1.5 GiB"}))
