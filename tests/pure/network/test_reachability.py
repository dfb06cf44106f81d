from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from dask_gpu_mpi.network.reachability import Listener, Reach, Tokens, connect_to, port_problem

TOKENS = Tokens()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", 0, TOKENS)
    yield made
    made.close()


def test_reaches_and_compares_clocks(listener: Listener) -> None:
    found = connect_to("127.0.0.1", listener.port, TOKENS)
    assert found.error == ""
    assert abs(found.ahead) <= found.round_trip


def test_many_at_once(listener: Listener) -> None:
    errors: list[str] = []
    threads = [
        threading.Thread(target=lambda: errors.append(connect_to("127.0.0.1", listener.port, TOKENS).error))
        for _ in range(100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [""] * 100


def test_listener_tells_strangers_nothing(listener: Listener) -> None:
    assert connect_to("127.0.0.1", listener.port, Tokens()).error == "something else answers there"


@pytest.mark.parametrize("echo", [True, False])
def test_somebody_elses_listener(echo: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                got = connection.recv(4096)
                if echo:
                    connection.sendall(got + b"\0" * 8)

        thread = threading.Thread(target=serve)
        thread.start()
        found = connect_to("127.0.0.1", server.getsockname()[1], TOKENS)
        thread.join()
    assert found.error == "something else answers there"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_problem("127.0.0.1", port) == "Address already in use"
        # takes connections, and says nothing
        assert connect_to("127.0.0.1", port, TOKENS, timeout=0.1).error == "no answer within 0.1 s"
    assert port_problem("127.0.0.1", port) == ""
    assert connect_to("127.0.0.1", port, TOKENS).error == "Connection refused"


def test_port_in_use(listener: Listener) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", listener.port, TOKENS)


def test_a_clock_that_was_not_compared_is_not_behind() -> None:
    assert (Reach().ahead, Reach().round_trip) == (0.0, 0.0)
