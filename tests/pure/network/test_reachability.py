from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dask_gpu_mpi.network import reachability
from dask_gpu_mpi.network.reachability import Listener, Tokens, connect_to, is_elsewhere, port_problem

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
        found = connect_to("127.0.0.1", server.getsockname()[1], TOKENS, timeout=1.0)
        thread.join()
    assert found.error == "something else answers there"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = port_problem("127.0.0.1", port)
        assert taken is not None
        assert (taken.strerror, is_elsewhere(taken)) == ("Address already in use", False)
        # takes connections, and says nothing
        assert connect_to("127.0.0.1", port, TOKENS, timeout=0.1).error == "no answer within 0.1 s"
    assert port_problem("127.0.0.1", port) is None
    for address in ("203.0.113.7", "node.invalid"):  # TEST-NET-3, and no name: nobody's
        elsewhere = port_problem(address, port)
        assert elsewhere is not None
        assert is_elsewhere(elsewhere)
    assert connect_to("127.0.0.1", port, TOKENS).error == "Connection refused"


def test_port_in_use(listener: Listener) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", listener.port, TOKENS)


def test_silent_and_slow_strangers_are_hung_up_on(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "CONNECT_TIMEOUT", 0.5)
    place = ("127.0.0.1", listener.port)
    with socket.create_connection(place, 10) as silent, socket.create_connection(place, 10) as slow:
        for _ in range(20):
            time.sleep(0.1)
            try:
                slow.sendall(b"x")
            except OSError:
                break
        else:
            pytest.fail("still listened to after 2 s")
        assert silent.recv(1) == b""
    assert connect_to(*place, TOKENS).error == ""


def test_a_crowd_of_strangers_is_one_thread(listener: Listener) -> None:
    threads = threading.active_count()
    place = ("127.0.0.1", listener.port)
    strangers = [socket.create_connection(place, 10) for _ in range(2 * reachability.MOST_ASKING)]
    try:
        assert connect_to(*place, TOKENS).error == ""
        assert threading.active_count() == threads
        assert len(listener._asking) <= reachability.MOST_ASKING
        assert strangers[0].recv(1) == b""  # who has waited for longest
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("length", [1, 31, 32, 33, 1000, 65536])
def test_garbage_is_told_nothing(listener: Listener, length: int) -> None:
    told = b""
    place = ("127.0.0.1", listener.port)
    # it does not read all of that
    with contextlib.suppress(OSError), socket.create_connection(place, 10) as stranger:
        stranger.sendall(b"g" * length)
        stranger.shutdown(socket.SHUT_WR)
        told = stranger.recv(1000)
    assert told == b""
    assert connect_to("127.0.0.1", listener.port, TOKENS).error == ""


def test_a_rank_that_was_hung_up_on_asks_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            server.accept()[0].close()
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(TOKENS.answer.encode() + b"\0" * 8)

        thread = threading.Thread(target=serve)
        thread.start()
        assert connect_to("127.0.0.1", server.getsockname()[1], TOKENS).error == ""
        thread.join()


WITHOUT_DESCRIPTORS = """
import contextlib, os, resource, socket, time
from dask_gpu_mpi.network.reachability import Listener, Tokens
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
listener = Listener("127.0.0.1", 0, Tokens())
client = socket.socket()
own = []
with contextlib.suppress(OSError):
    while True:
        own.append(os.open("/dev/null", os.O_RDONLY))
client.connect(("127.0.0.1", listener.port))
spent = time.process_time()
time.sleep(1.0)
print(time.process_time() - spent < 0.5)
for fd in own:
    os.close(fd)
client.sendall(b"x" * 32)
print(client.recv(1))
listener.close()
"""


def test_no_descriptors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=30
    )
    assert (done.stdout.splitlines(), done.stderr) == (["True", "b''"], "")
