"""What workers send each other over UCX: chosen from the plan and from what the ranks can, and the line that says so."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import WorkerUcx
from dask_gpu_mpi.startup import transport
from dask_gpu_mpi.startup.transport import choose_ucx, obstacle, probing_workers
from inventories import gpu, one_host, plan, rank

OFF, AUTO, ALL = WorkerUcx.OFF, WorkerUcx.AUTO, WorkerUcx.ALL
NO_GPUS = plan(one_host((), ()))
GPUS = plan(one_host((gpu(0),), (gpu(1),)))
ONE_GPU = plan(one_host((gpu(0),)))
SOME = plan([*one_host((gpu(0),), ())])
MISSING = "distributed-ucxx is not installed. Fix: pip install it"


@pytest.mark.parametrize(
    ("wanted", "of", "obstacles", "chosen", "words"),
    [
        (AUTO, GPUS, {}, AUTO, ["TLS, and UCX for GPU memory", "not encrypted"]),
        (AUTO, GPUS, {0: "", 1: ""}, AUTO, ["UCX for GPU memory"]),
        (AUTO, GPUS, {1: MISSING}, OFF, ["No UCX: rank 1: distributed-ucxx"]),
        (AUTO, GPUS, {0: MISSING, 1: MISSING}, OFF, ["No UCX: distributed-ucxx"]),
        (AUTO, NO_GPUS, {0: MISSING, 1: MISSING}, OFF, []),
        (AUTO, ONE_GPU, {}, OFF, []),
        (AUTO, ONE_GPU, {0: MISSING}, OFF, []),
        (OFF, GPUS, {}, OFF, []),
        (ALL, NO_GPUS, {}, ALL, ["UCX for large data", "not encrypted"]),
        (ALL, GPUS, {}, ALL, ["UCX for large data"]),
    ],
)
def test_what_is_chosen_and_why(wanted, of, obstacles, chosen, words) -> None:  # type: ignore[no-untyped-def]
    found, line = choose_ucx(wanted, of, obstacles)
    assert found is chosen
    assert bool(line) == bool(words)
    for word in words:
        assert word in line


def test_a_rank_that_works_without_a_gpu_has_all_use_tls() -> None:
    mixed = plan(
        [
            *one_host((gpu(0),)),
        ],
        cpu_workers=1,
    )
    assert choose_ucx(AUTO, mixed, {})[0] is AUTO  # its rank has one
    from dataclasses import replace

    alone = replace(mixed, workers=tuple(replace(w, rank=1) if w.kind == "cpu" else w for w in mixed.workers))
    chosen, line = choose_ucx(AUTO, alone, {})
    assert chosen is OFF
    assert "rank 1 without a GPU" in line


@pytest.mark.parametrize(
    ("options", "gpus", "asked"),
    [
        (Options(worker_ucx=OFF), True, None),
        (Options(worker_ucx=AUTO), True, True),
        (Options(worker_ucx=AUTO), False, None),
        (Options(worker_ucx=AUTO, worker_class="dask_cuda.CUDAWorker"), True, True),
        (Options(worker_ucx=ALL, worker_class="distributed.Nanny"), False, False),
        (Options(worker_ucx=ALL), True, True),  # its GPUs' memory needs RMM
    ],
)
def test_what_is_missing_is_asked_where_it_matters(
    options: Options, gpus: bool, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def missing(*, device_memory: bool) -> str:
        calls.append(device_memory)
        return MISSING

    monkeypatch.setattr(transport, "missing_ucx", missing)
    assert obstacle(options, gpus=gpus) == ("" if asked is None else MISSING)
    assert calls == ([] if asked is None else [asked])


def test_a_class_of_the_users_own_has_no_ucx_by_itself() -> None:
    assert "worker_class" in obstacle(Options(worker_ucx=AUTO, worker_class="my.Class"), gpus=True)


def test_workers_in_the_agent_have_none() -> None:
    options = Options(worker_ucx=ALL, worker_class="distributed.Worker")
    assert "run in the agent" in obstacle(options, gpus=False)


def test_ucx_that_is_asked_for_and_can_not_be_had_is_an_error() -> None:
    with pytest.raises(
        InputError, match="protocol 'ucx': rank 1: distributed-ucxx is not installed. Fix: pip install it"
    ):
        choose_ucx(ALL, GPUS, {1: MISSING})


def test_one_worker_alone_has_nobody_to_exchange_data_with_unless_it_attaches() -> None:
    for wanted in (AUTO, ALL):
        assert choose_ucx(wanted, ONE_GPU, {}) == (OFF, "")
        assert choose_ucx(wanted, ONE_GPU, {}, attaches=True)[0] is wanted


def test_one_worker_of_each_node_tries_ucx_to_the_next() -> None:
    assert probing_workers(GPUS) == {}
    nodes = [
        rank(number, 3, (gpu(number),), host=f"h{number // 2}", boot_id=f"b{number // 2}")
        for number in range(3)
    ]
    assert probing_workers(plan(nodes)) == {0: "0-0", 2: "2-0"}
