"""The messages of a job: what is sent as each kind arrives as it was."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.network.reachability import Node
from dask_gpu_mpi.network.ucx import UcxAbility
from dask_gpu_mpi.options.model import Transport, WorkerUcx
from dask_gpu_mpi.plan import Start
from dask_gpu_mpi.startup.messages import (
    PAYLOADS,
    Cluster,
    Kind,
    Registration,
    SchedulerSettings,
)
from support.mocks.inputs import gpu, plan_of, rank, worker_plan

PLAN = plan_of(worker_plan("0-0", "GPU-a", nics="mlx5_0"), worker_plan(1), warnings=(Problem("old driver"),))
CONFIG = {"distributed.comm.tls.client": {"cert": "C", "key": "K"}, "backlog": 5}
STEPS = [Step("agent", "import", 1.5, 2.5)]
FAILURE = Failure(Problem("no disk", ranks=(1, 2)), 2, "OptionError", (Problem("a"), Problem("b")))
REGISTRATION = Registration(
    "h\udcff",
    rank(3, 4, (gpu(0), gpu(1))),
    (Interface("eth0", "10.0.0.1", "10.0.0.0/24"),),
    "eth0",
    (("layout", "exclusive"), ("nthreads", 2), ("scheduler", None)),
    has_client=False,
    ucx=UcxAbility(Problem("no ucxx"), "no RDMA", "UCX_TLS"),
)
UCX = Transport(WorkerUcx.ALL)
#: For each kind what is sent as it.
SAMPLES: dict[str, list[Any]] = {
    Kind.ENTERED: [(3, True)],
    Kind.STEP: ["importing"],
    Kind.REGISTRATION: [REGISTRATION],
    Kind.SCHEDULER: [SchedulerSettings(None, CONFIG, "token", "GPU-a", PLAN)],
    Kind.ADDRESS: [("tls://h:1", None), ("tls://h:1", "http://localhost:1/status")],
    Kind.START: [Start("a", "tls", None, PLAN.workers, CONFIG, True, True, 0.5, 70.0, UCX, ("cudf",), "h")],
    Kind.READY: [([], ""), (STEPS, "tls://10.0.0.1:5")],
    Kind.CONNECT: [(Node("h", 3, "tls://10.0.0.1:5"),)],
    Kind.REACHED: [{}, {"refused": ["h1"]}],
    Kind.FAILED: [FAILURE],
    Kind.UP: [
        Cluster("tls://h:1", None),
        Cluster("tls://h:1", "link", PLAN, "TLS", (2,), CONFIG, {0: "h"}, {0: STEPS}),
    ],
    Kind.DONE: [1],
    Kind.FAIL: [(FAILURE, True)],
    Kind.CLIENT: [None],
    Kind.WORKER_ENDED: [("0-0", False), (3, True)],
    Kind.WORKERS_ENDED: [True],
    Kind.LOST: [(["0-0"], "rank 0 lost")],
    Kind.SIGNAL: [15],
    Kind.BUSY: [None],
    Kind.OVER: [(True, None, 75), (False, "the scheduler's process ended", 0)],
    Kind.GONE: [None],
    Kind.STOP: [None, "no worker is left"],
    Kind.END: [(75, 15), (0, None)],
    Kind.CLOSED: [None],
    Kind.RELEASE: [None],
}


def test_every_kind_arrives_as_it_was_sent() -> None:
    assert SAMPLES.keys() == PAYLOADS.keys()
    assert len(Kind.__members__) == len(set(Kind))
    for kind, samples in SAMPLES.items():
        for sample in samples:
            assert from_plain(PAYLOADS[kind], unpack(pack(sample))) == sample
        with pytest.raises(PlainDataError):
            from_plain(PAYLOADS[kind], 1.5)


def test_no_secret_is_shown() -> None:
    for sample in (SAMPLES[Kind.SCHEDULER][0], SAMPLES[Kind.START][0], SAMPLES[Kind.UP][1]):
        assert "'K'" not in repr(sample)
        assert "token" not in repr(sample).replace("tokens", "")
