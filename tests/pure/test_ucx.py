"""What UCX is told, process by process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi import ucx, workers
from dask_gpu_mpi.bringup import _may_be_client
from dask_gpu_mpi.options import Options
from dask_gpu_mpi.ucx import connection_config, hide_gpus, shown_transports, without_cuda

PRIORITY = "distributed-ucxx.environment"


@pytest.mark.parametrize(
    ("options", "priority"),
    [
        ({}, None),
        ({"enable_nvlink": None, "rmm_pool_size": 0.5}, None),
        ({"enable_nvlink": True}, "tcp"),
        ({"enable_infiniband": False}, "tcp"),  # which switches the other two on
        ({"enable_infiniband": True, "enable_rdmacm": True}, "rdmacm"),
        ({"enable_rdmacm": True}, None),  # without InfiniBand it has no meaning
    ],
)
def test_everybody_connects_as_the_workers_do(options: dict[str, Any], priority: str | None) -> None:
    expected = {} if priority is None else {PRIORITY: {"sockaddr-tls-priority": priority}}
    # and clients do not fetch GPU data by way of the scheduler
    assert connection_config(options) == {"distributed.client.direct-to-workers": True, **expected}


@pytest.mark.parametrize(
    ("transports", "left"),
    [
        ("all", "all"),
        ("tcp,cuda_copy,cuda_ipc", "tcp"),
        ("rc,sm,cuda", "rc,sm"),
        ("cuda_ipc", "tcp"),
        ("^cuda_ipc,sm", "^cuda_ipc,sm"),
    ],
)
def test_transports_without_a_context(transports: str, left: str) -> None:
    assert without_cuda(transports) == left


@given(st.lists(st.sampled_from(["tcp", "rc", "sm", "cuda_copy", "cuda_ipc", "cuda"]), min_size=1))
def test_no_list_of_transports_asks_for_a_context(names: list[str]) -> None:
    left = without_cuda(",".join(names))
    # distributed_ucxx.ucxx.init_once makes a context where it finds the word
    assert "cuda" not in left
    assert left


def test_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "_transports", None)
    assert shown_transports() == {}
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "UCX_TLS": "tcp,cuda_copy", "UCX_LOG_LEVEL": "warn"}
    hide_gpus(environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "", "UCX_TLS": "tcp", "UCX_LOG_LEVEL": "warn"}
    assert shown_transports() == {"UCX_TLS": "tcp,cuda_copy"}


def test_the_agent_keeps_its_own_configuration() -> None:
    import dask

    with dask.config.set({"distributed-ucxx": {"environment": {"a": 1}}}):
        with workers._kept_ucx_config():
            dask.config.get("distributed-ucxx")["create-cuda-context"] = (
                True  # as dask_cuda.utils.get_ucx_config does
            )
            dask.config.set({"distributed-ucxx.nvlink": True})
        assert dask.config.get("distributed-ucxx") == {"environment": {"a": 1}}
    with workers._kept_ucx_config():
        dask.config.config["distributed-ucxx"] = {"tcp": True}
    assert dask.config.get("distributed-ucxx", None) is None


@pytest.mark.parametrize(
    ("environ", "options", "loads"),
    [
        ({}, Options(), True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, Options(), True),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Options(), False),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Options(layout="exclusive"), True),
    ],
)
def test_only_the_client_rank_loads_ucx(environ: dict[str, str], options: Options, loads: bool) -> None:
    assert _may_be_client(options, environ) == loads
