"""What workers send each other over UCX, chosen from the plan and from what the ranks can; and timeouts for many workers."""

from __future__ import annotations

from dataclasses import replace

import dask.config
import pytest
from distributed import comm  # registers distributed's defaults  # noqa: F401
from distributed.scheduler import heartbeat_interval

from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.model import Options, WorkerUcx
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.startup import transport
from dask_gpu_mpi.startup.transport import choose_transport, ucx_ability
from support import ROOT
from support.mocks.inputs import gpu, one_host, plan, rank

OFF, AUTO, ALL = WorkerUcx.OFF, WorkerUcx.AUTO, WorkerUcx.ALL
NO_GPUS = plan(one_host((), ()))
GPUS = plan(one_host((gpu(0),), (gpu(1),)))
ONE_GPU = plan(one_host((gpu(0),)))
MISSING = Problem("distributed-ucxx is not installed", fix="pip install it")


NO_RDMA = UcxAbility(between_nodes="no RDMA device")
CAN_NOT = UcxAbility(MISSING)


def nodes(*gpus: int) -> Plan:
    """A rank on each node, with so many GPUs."""
    return plan(
        [
            rank(number, len(gpus), tuple(map(gpu, range(each))), host=f"h{number}", boot_id=f"b{number}")
            for number, each in enumerate(gpus)
        ]
    )


MIXED = plan(one_host((gpu(0),)), cpu_workers=1)
APART = replace(MIXED, workers=tuple(replace(w, rank=int(w.kind == "cpu")) for w in MIXED.workers))


@pytest.mark.parametrize(
    ("wanted", "of", "abilities", "chosen", "words"),
    [
        (AUTO, GPUS, {}, AUTO, "TLS, and UCX for GPU memory between workers (authenticated, not encrypted)"),
        (AUTO, GPUS, {1: CAN_NOT}, OFF, "No UCX: rank 1: distributed-ucxx"),
        (AUTO, GPUS, {0: CAN_NOT, 1: CAN_NOT}, OFF, "No UCX: distributed-ucxx"),
        (AUTO, NO_GPUS, {0: CAN_NOT, 1: CAN_NOT}, OFF, ""),
        (AUTO, ONE_GPU, {}, OFF, ""),
        (ALL, ONE_GPU, {}, OFF, ""),
        (AUTO, ONE_GPU, {0: CAN_NOT}, OFF, ""),
        (OFF, GPUS, {}, OFF, ""),
        (ALL, NO_GPUS, {}, ALL, "TLS, and UCX for large data between workers (authenticated, not encrypted)"),
        # a rank that works without a GPU has all use TLS
        (AUTO, MIXED, {}, AUTO, "UCX for GPU memory"),
        (AUTO, APART, {}, OFF, "rank 1 without a GPU"),
        # between nodes UCX takes RDMA and nothing else, which nobody misses within one
        (AUTO, nodes(2, 2), {}, AUTO, "between workers (authenticated, not encrypted)"),
        (AUTO, nodes(2), {0: NO_RDMA}, AUTO, "between workers (authenticated, not encrypted)"),
        (
            AUTO,
            nodes(2, 2),
            {0: NO_RDMA, 1: NO_RDMA},
            AUTO,
            "Between nodes encrypted streams: no RDMA device",
        ),
        (AUTO, nodes(2, 2), {1: NO_RDMA}, AUTO, "Between nodes encrypted streams: rank 1: no RDMA device"),
        (AUTO, nodes(1, 1), {0: NO_RDMA, 1: NO_RDMA}, OFF, "UCX leads to no other node: no RDMA device"),
        (ALL, nodes(1, 1), {0: NO_RDMA, 1: NO_RDMA}, OFF, "UCX leads to no other node: no RDMA device"),
    ],
)
def test_what_is_chosen_and_why(wanted, of, abilities, chosen, words) -> None:  # type: ignore[no-untyped-def]
    found, line, warning, between_nodes = choose_transport(wanted, of, abilities)
    assert (found, warning) == (chosen, None)
    assert between_nodes is (NO_RDMA not in abilities.values()) or chosen is OFF
    assert bool(str(line)) == bool(words)
    assert words in str(line)


@pytest.mark.parametrize(
    ("wanted", "worker_class", "gpus", "expected"),
    [
        (OFF, "auto", True, ""),
        (AUTO, "auto", False, ""),
        (AUTO, "auto", True, "asked for GPUs"),
        (AUTO, "dask_cuda.CUDAWorker", True, "asked for GPUs"),
        (AUTO, "my.Class", True, "worker_class is not dask_cuda.CUDAWorker"),
        (ALL, "distributed.Nanny", False, "asked without GPUs"),
        (ALL, "distributed.Worker", False, "run in the agent"),
        (ALL, "auto", True, "asked for GPUs"),  # their memory needs RMM
    ],
)
def test_what_keeps_a_rank_from_ucx_is_asked_where_it_matters(
    wanted: WorkerUcx, worker_class: str, gpus: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*, device_memory: bool) -> Problem:
        return Problem("asked for GPUs" if device_memory else "asked without GPUs")

    monkeypatch.setattr(transport, "missing_ucx", missing)
    obstacle = ucx_ability(Options(worker_ucx=wanted, worker_class=worker_class), gpus=gpus).obstacle
    text = "" if obstacle is None else obstacle.text
    assert expected in text
    assert bool(expected) == bool(text)


def test_ucx_that_is_asked_for_and_can_not_be_had_is_an_error() -> None:
    words = "protocol 'ucx': rank 1: distributed-ucxx is not installed. Fix: pip install it"
    with pytest.raises(InputError, match=words):
        choose_transport(ALL, GPUS, {1: CAN_NOT})


def test_a_port_that_the_user_opens_is_warned_of() -> None:
    """Workers that attach have others to exchange data with, even one alone."""
    for found in (
        choose_transport(AUTO, nodes(2), {0: UcxAbility(opened_by="UCX_TLS")}),
        choose_transport(ALL, ONE_GPU, {0: UcxAbility(opened_by="UCX_TLS")}, attaches=True),
    ):
        assert found.ucx is not OFF
        assert "UCX_TLS has UCX open a TCP port" in str(found.warning)


def test_what_a_rank_can_do_follows_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "missing_ucx", lambda **_: None)
    monkeypatch.setattr(transport, "way_between_nodes", lambda _, **more: ("no RDMA device", ""))
    options = Options(worker_ucx=AUTO)
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert ucx_ability(options, gpus=True) == NO_RDMA
    switched = Options(worker_ucx=AUTO, worker_options={"enable_nvlink": True})
    assert ucx_ability(switched, gpus=True).opened_by == "worker_options['enable_nvlink']"
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert ucx_ability(options, gpus=True) == UcxAbility(opened_by="UCX_TLS")


def test_a_ucx_of_the_system_is_named() -> None:
    able = UcxAbility(system="UCX 1.20.0 in /opt/ucx/lib")
    found = choose_transport(AUTO, nodes(2), {0: able, 1: able})
    assert found.ucx is AUTO
    assert str(found.line).endswith("; UCX 1.20.0 in /opt/ucx/lib, which has RDMA")


# -- settings of connections, by the number of workers


def test_defaults_are_distributeds() -> None:
    with dask.config.set({}):
        assert dask.config.get(transport.CONNECT) == f"{transport.DEFAULT_CONNECT:g}s"
        assert dask.config.get(transport.BACKLOG) == transport.DEFAULT_BACKLOG


def per_core(*hosts: tuple[int, int], quota: float | None = None) -> float:
    """Of a plan of hosts with so many CPU workers and cores each."""
    ranks = [
        replace(rank, host=f"h{number}", boot_id=f"b{number}", cpu_quota=quota)
        for number, (workers, cores) in enumerate(hosts)
        for rank in hypothetical_job(1, workers, 0, cpus_per_node=cores)
    ]
    numbered = [replace(rank, rank=number, world_size=len(ranks)) for number, rank in enumerate(ranks)]
    return transport.workers_per_core(plan(numbered))


def test_many_workers_on_few_cores_may_take_longer() -> None:
    # a laptop, and a host with a worker for each core: Dask's defaults
    laptop = per_core((4, 2))
    assert (laptop, transport.connection_settings(4, laptop)) == (2, {})
    # the host with the most workers for its cores counts
    crowded = per_core((64, 64), (128, 2), (4, 4))
    assert (crowded, transport.connection_settings(192, crowded)) == (64, {transport.CONNECT: "256s"})
    assert transport.start_limit(192, crowded) == 512


def test_cores_of_a_node() -> None:
    # a container's quota, although its affinity mask has all cores of the machine (`machine.cgroups.cpu_quota`)
    assert [per_core((4, 8), quota=quota) for quota in (8.0, 2.0, 0.5)] == [0.5, 2.0, 8.0]
    # those of workers that overlap count once, and unknown ones as one
    one, two = hypothetical_job(1, 2, 0, cpus_per_node=4)
    assert transport.workers_per_core(plan([replace(one, cpus=(0, 1, 2)), replace(two, cpus=(2, 3))])) == 0.5
    (unknown,) = hypothetical_job(1, 1, 0)
    assert transport.workers_per_core(plan([replace(unknown, cpus=())], cpu_workers=2)) == 3
    # and a node without a worker does not count
    assert (
        transport.workers_per_core(plan(hypothetical_job(3, 1, 0, cpus_per_node=2), layout="exclusive"))
        == 0.5
    )


@pytest.mark.parametrize(
    ("workers", "cores", "connect", "backlog"),
    [
        (512, 7.5, None, None),
        (513, 0.0, None, 2052),
        (600, 0.0, None, 2400),
        (601, 0.0, "30.05s", 2404),
        (1300, 1.0, "65s", 5200),  # distributed#3691
        (1, 7.75, "31s", None),
        (12000, 0.0, "600s", 48000),
        (12001, 0.0, "600s", 48004),
        (16383, 0.0, "600s", 65532),
        (16384, 0.0, "600s", 65535),
        (1, 1000.0, "600s", None),
    ],
)
def test_settings_at_their_bounds(
    workers: int, cores: float, connect: str | None, backlog: int | None
) -> None:
    settings = transport.connection_settings(workers, cores)
    assert (settings.get(transport.CONNECT), settings.get(transport.BACKLOG)) == (connect, backlog)


def test_limits_and_delays() -> None:
    assert (transport.start_limit(1000, 0.0), transport.start_limit(10, 2.0)) == (100.0, 16.0)
    assert transport.start_delay(255, 256) == 0.0
    assert transport.start_delay(250, 257) == 1.0


def test_the_table_of_the_documentation() -> None:
    """Of our values and of distributed's, `Scheduler.check_worker_ttl` among them."""
    text = (ROOT / "contributing" / "design.md").read_text()
    for workers in (64, 600, 1000, 3000, 8192, 27648):
        ours = transport.connection_settings(workers, 0.0)
        connect = round(float(ours.get(transport.CONNECT, "30s").rstrip("s")))
        backlog = ours.get(transport.BACKLOG, transport.DEFAULT_BACKLOG)
        beat = heartbeat_interval(workers)
        row = f"{workers:,} | {connect} s | {backlog:,} | {beat:.0f} s | {max(300, 10 * beat):,.0f} s | {3 * workers:,}"
        assert f"| {row} |" in text, row
