"""What comes of trying UCX on a node, with a mock of it; tests/ucx and tests/gpu have UCX itself."""

from __future__ import annotations

import asyncio
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from dask_gpu_mpi.check.ucx import UcxOrder, UcxPeer, UcxTrial, _Trial
from dask_gpu_mpi.network.ucx_endpoint import Ucx
from support.mocks.preflights import environ_with


@pytest.mark.parametrize(
    ("ucxx", "says"),
    [
        ("raise ImportError('no libucp.so.0')", "no libucp.so.0"),
        ("import os; os.write(2, b'loading\\nBus error\\n'); os._exit(7)", "exit code 7: Bus error"),
        ("import os; os._exit(7)", "exit code 7: no error output"),
    ],
)
def test_what_went_wrong_is_reported(tmp_path: Path, ucxx: str, says: str) -> None:
    trial = UcxTrial(UcxOrder("", peers=1), environ_with("ucxx", ucxx, tmp_path), 60.0)
    ((host, error),) = trial.result().items()
    assert host == ""
    assert says in error
    assert trial.address == b""
    trial.introduce(UcxPeer("h2", b"there"))  # to nobody


def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    trial = UcxTrial(UcxOrder(""), environ_with("ucxx", "import time; time.sleep(600)", tmp_path), 1.0)
    assert trial.address is None
    assert trial.result() == {"": "no result within 1 s"}
    assert trial._child.wait(10.0) < 0
    trial._reader.join()


def test_it_is_tried_as_the_worker_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("loopback", "leads", "warned", "devices"):
        monkeypatch.setattr(Ucx, name, getattr(Ucx, name))  # given back at the end
    monkeypatch.setattr(Ucx, "begin", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(_Trial(UcxOrder("", peers=1, devices="mlx5_0:1"), 60.0).run())
    assert (Ucx.loopback, Ucx.leads, Ucx.devices) == (False, True, "mlx5_0:1")


needs_ucx = pytest.mark.skipif(
    find_spec("distributed_ucxx") is None,
    reason="distributed-ucxx is not installed; tests/ucx runs this with it",
)


@needs_ucx
def test_ucx_itself() -> None:
    assert UcxTrial(UcxOrder(""), os.environ, 60.0).result() == {}


def address_of(trial: UcxTrial) -> bytes:
    while (address := trial.address) is None:
        time.sleep(0.05)
    return address


@needs_ucx
def test_two_nodes() -> None:
    one, two = (UcxTrial(UcxOrder("", peers=1), os.environ, 60.0) for _ in range(2))
    one.introduce(UcxPeer("h2", address_of(two), 11, 12))
    two.introduce(UcxPeer("h1", address_of(one), 12, 11))
    assert (one.result(), two.result()) == ({}, {})


@needs_ucx
def test_a_node_that_does_not_answer() -> None:
    """The other's child is there, but is never told of this one."""
    one, two = (UcxTrial(UcxOrder("", peers=1), os.environ, 12.0) for _ in range(2))
    one.introduce(UcxPeer("h2", address_of(two), 11, 12))
    assert one.result() == {"h2": "no data came over UCX in time"}
    two.introduce(UcxPeer("h1", b""))
    two.result()


@needs_ucx
def test_a_node_whose_ucx_does_not_work_is_not_waited_for() -> None:
    one = UcxTrial(UcxOrder("", peers=1), os.environ, 60.0)
    one.introduce(UcxPeer("h2", b""))
    assert one.result() == {}
