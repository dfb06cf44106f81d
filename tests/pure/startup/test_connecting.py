"""The ports of the reachability test, on one rank; by messages: test_relay."""

from __future__ import annotations

import socket
import time

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.network.credentials import BACKDATED
from dask_gpu_mpi.network.node_pairs import Lost, Node
from dask_gpu_mpi.network.reachability import Listener, Reach, Tokens
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.protocols import Protocol
from dask_gpu_mpi.startup import connecting
from dask_gpu_mpi.startup.connecting import Connecting
from dask_gpu_mpi.startup.messages import Connect, Listen, Listening


def result(rank: Connecting) -> Failure | tuple[Lost, ...]:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        if (found := rank.result()) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("no result")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_listens_where_the_scheduler_and_the_workers_will() -> None:
    scheduler, worker, tokens = free_port(), free_port(), Tokens()
    rank = Connecting(Options(scheduler_port=scheduler, worker_options={"worker_port": worker}))
    assert rank.listen(Listen("127.0.0.1", tokens, tokens)) == Listening(scheduler, worker)
    rank.close()
    for port in (scheduler, worker):
        Listener("127.0.0.1", port, tokens).close()
    rank.close()


def test_any_port_that_is_free() -> None:
    rank = Connecting(Options())
    found = rank.listen(Listen("127.0.0.1", Tokens(), None))
    assert found.scheduler >= 1024  # given by the system
    assert found.workers == 0
    rank.close()


def test_port_of_workers_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rank = Connecting(Options(worker_options={"worker_port": taken.getsockname()[1]}))
        assert rank.listen(Listen("127.0.0.1", None, Tokens())) == Listening(0, 0)


def test_a_scheduler_that_is_not_reached_comes_first() -> None:
    port = free_port()
    rank = Connecting(Options())
    assert rank.result() is None
    rank.connect(
        Connect(f"127.0.0.1:{port}", "of another job", None, (Node("h2", 1, "127.0.0.1", port=port),))
    )
    found = result(rank)
    assert isinstance(found, Failure)
    assert "(of another job): Connection refused" in found.text
    assert rank.result() is None


def test_peers_of_a_rank_below_a_running_scheduler() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank = Connecting(Options())
        port = free_port()
        target = f"127.0.0.1:{server.getsockname()[1]}"
        rank.connect(Connect(target, "of another job", None, (Node("h2", 1, "127.0.0.1", port=port),)))
        assert result(rank) == (Lost("h2", "Connection refused"),)


@pytest.mark.parametrize(
    ("ahead", "protocol", "fails"),
    [
        (-BACKDATED - 10.0, Protocol.TLS, True),
        (-BACKDATED + 10.0, Protocol.TLS, False),
        (-BACKDATED - 10.0, Protocol.TCP, False),
        (BACKDATED + 10.0, Protocol.TLS, False),
    ],
)
def test_a_clock_that_is_behind_is_named(
    ahead: float, protocol: Protocol, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "connect_to", lambda *_: Reach("", ahead))
    rank = Connecting(Options(protocol=protocol))
    rank.connect(Connect("10.0.0.1:1", "rank 0 on h1", Tokens()))
    found = result(rank)
    assert isinstance(found, Failure) is fails
    if isinstance(found, Failure):
        assert "the clock of this node is 3610 s behind that of the scheduler's (rank 0 on h1)" in found.text
        assert found.exit_code == 2
