"""The variables of a member: which, what the user has set stays, and what was there before comes back."""

from __future__ import annotations

import os

import pytest

from dask_gpu_mpi.gang.gang import Candidate, GangMember
from dask_gpu_mpi.gang.member import applied, device_of, variables_of

MEMBER = GangMember(5, Candidate("1-1", "tls://10.0.0.2:1", "10.0.0.2"), 1, 4, 1, 2)


def test_names_and_values() -> None:
    assert variables_of(MEMBER, 8, "10.0.0.1", 4000, "ib0") == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4000",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:4000",
        "JAX_NUM_PROCESSES": "8",
        "JAX_PROCESS_ID": "5",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0",
    }
    assert variables_of(MEMBER, 8, "fd00::1", 4000, None)["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:4000"
    assert "NCCL_SOCKET_IFNAME" not in variables_of(MEMBER, 8, "10.0.0.1", 4000, None)


def test_they_are_there_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "of the user")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    with applied(variables_of(MEMBER, 8, "10.0.0.1", 4000, "ib0")):
        assert os.environ["RANK"] == "5"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
        del os.environ["MASTER_ADDR"]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("resources", "visible", "device"),
    [
        ({"GPU": 2}, "GPU-1,GPU-2", 0),
        ({"CPU": 4}, "0", None),
        ({}, "1,0", 0),
        ({"mine": 1}, "0", 0),
        ({}, "", None),
        ({}, "-1", None),
        ({"GPU": 0}, "0", None),
    ],
)
def test_device(resources: dict[str, float], visible: str, device: int | None) -> None:
    assert device_of(resources, {"CUDA_VISIBLE_DEVICES": visible}) == device
