"""Listeners that prove who they are, and which nodes connect to which."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from dask_gpu_mpi.network import reachability
from dask_gpu_mpi.network.reachability import (
    MOST_PARTS,
    MOST_PEERS,
    Listener,
    Node,
    connect_to,
    connect_to_peers,
    connection_report,
    is_elsewhere,
    listen_for_peers,
    listener_token,
    peers_by_rank,
    worker_ports,
)
from dask_gpu_mpi.options.model import Options

TOKEN = listener_token()


def port_problem(address: str, port: int) -> OSError | None:
    """The error of listening there; None: it is possible."""
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as error:
        return error
    return None


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", 0, TOKEN)
    yield made
    made.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_reaches_and_compares_clocks(address: str) -> None:
    made = Listener(address, 0, TOKEN)
    found = connect_to(address, made.port, TOKEN)
    made.close()
    assert found.error == ""
    assert abs(found.ahead) <= found.round_trip


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of another program, which serves in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        yield server.getsockname()[1]
        thread.join()


@pytest.mark.parametrize("echo", [True, False])
def test_somebody_elses_listener(echo: bool) -> None:
    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            got = connection.recv(4096)
            if echo:
                connection.sendall(got + b"\0" * 8)

    with serving(serve) as port:
        assert connect_to("127.0.0.1", port, TOKEN, timeout=1.0).error == "something else answers there"


def test_a_rank_that_was_hung_up_on_asks_again() -> None:
    def serve(server: socket.socket) -> None:
        server.accept()[0].close()
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(TOKEN[64:].encode() + b"\0" * 8)

    with serving(serve) as port:
        assert connect_to("127.0.0.1", port, TOKEN).error == ""


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = port_problem("127.0.0.1", port)
        assert taken is not None
        assert (taken.strerror, is_elsewhere(taken)) == ("Address already in use", False)
        # takes connections, and says nothing
        assert connect_to("127.0.0.1", port, TOKEN, timeout=0.1).error == "no answer within 0.1 s"
    assert port_problem("127.0.0.1", port) is None
    for address in ("203.0.113.7", "node.invalid"):  # TEST-NET-3, and no name: nobody's
        elsewhere = port_problem(address, port)
        assert elsewhere is not None
        assert is_elsewhere(elsewhere)
    assert connect_to("127.0.0.1", port, TOKEN).error == "Connection refused"


@pytest.mark.parametrize("length", [1, 127, 128, 129, 65536])
def test_garbage_is_told_nothing(listener: Listener, length: int) -> None:
    told = b""
    place = ("127.0.0.1", listener.port)
    # it does not read all of that
    with contextlib.suppress(OSError), socket.create_connection(place, 10) as stranger:
        stranger.sendall(b"g" * length)
        stranger.shutdown(socket.SHUT_WR)
        told = stranger.recv(1000)
    assert told == b""
    assert connect_to("127.0.0.1", listener.port, TOKEN).error == ""


def test_a_crowd_of_strangers_is_one_thread(listener: Listener) -> None:
    threads = threading.active_count()
    place = ("127.0.0.1", listener.port)
    strangers = [socket.create_connection(place, 10) for _ in range(2 * reachability.MOST_ASKING)]
    try:
        assert connect_to(*place, TOKEN).error == ""
        assert threading.active_count() == threads
        assert len(listener._asking) <= reachability.MOST_ASKING
        assert strangers[0].recv(1) == b""  # who has waited for longest
    finally:
        for stranger in strangers:
            stranger.close()


def test_no_descriptors(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers wait in the queue of the kernel, and the thread does not keep a core busy meanwhile."""
    select = Mock(wraps=listener._selector.select)
    monkeypatch.setattr(listener._selector, "select", select)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            client.connect(("127.0.0.1", listener.port))
            time.sleep(1.0)
            assert select.call_count < 50
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.settimeout(10)
        client.sendall(TOKEN[:64].encode())
        assert client.recv(1000).startswith(TOKEN[64:].encode())


def nodes(number: int) -> list[Node]:
    return [Node(f"h{i}", 2 * i, f"10.0.0.{i}", "qa", port=1 + i) for i in range(number)]


def pairs(number: int) -> Counter[tuple[int, int]]:
    return Counter(
        (rank, peer.rank) for rank, peers in peers_by_rank(nodes(number)).items() for peer in peers
    )


@pytest.mark.parametrize("number", [2, 3, 16, MOST_PEERS + 1])
def test_of_few_nodes_all_pairs_in_both_directions(number: int) -> None:
    found = pairs(number)
    ranks = range(0, 2 * number, 2)
    assert found == Counter((a, b) for a in ranks for b in ranks if a != b)


@pytest.mark.parametrize("more", [2, 3, 4, 1000])
def test_of_many_nodes_a_ring_and_a_sample(more: int) -> None:
    number = MOST_PEERS + more
    found = pairs(number)
    assert set(found.values()) == {1}
    assert all((b, a) in found for a, b in found), "both directions"
    assert all(a != b for a, b in found)
    assert all((2 * i, 2 * ((i + 1) % number)) in found for i in range(number)), "the ring"
    # as many to each node as from it: what bounds its sockets
    for side in (0, 1):
        assert set(Counter(pair[side] for pair in found).values()) == {MOST_PEERS}
    assert found == pairs(number), "the same in every run"


def test_nobodys_peers() -> None:
    """One node alone, and one that can't listen."""
    assert peers_by_rank(nodes(1)) == {0: ()}
    assert connect_to_peers(()) == {}
    first, second, third = nodes(3)
    found = peers_by_rank([first, second, replace(third, port=0)])
    assert found == {0: (second,), 2: (first,), 4: (first, second)}


def test_connects_to_all_peers_at_once() -> None:
    """Each node has a text of its own: what another answers in its place does not count."""
    peers = [Node(f"h{i}", i, "127.0.0.1") for i in range(64)]
    listeners = [listen_for_peers(peer.address, (0,), peer.token) for peer in peers]
    try:
        up = [
            Node(p.host, p.rank, p.address, p.token, of.port) for p, of in zip(peers, listeners, strict=True)
        ]
        assert connect_to_peers(up) == {}
        other = Node("h99", 99, "127.0.0.1", port=up[0].port)
        assert connect_to_peers([up[1], other]) == {"something else answers there": ["h99"]}
    finally:
        for listener in listeners:
            listener.close()
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        port = server.getsockname()[1]
        silent = [Node(peer.host, peer.rank, peer.address, port=port) for peer in peers]
        assert connect_to_peers(silent, 0.3).keys() == {"no answer within 0.3 s"}
    assert time.monotonic() - started < 5, "and waits for all of them at once"


def test_the_report_names_pairs_and_is_bounded() -> None:
    silent = "no answer within 5 s"
    several = connection_report({"a": {silent: ["h1", "h2"], "refused": ["h3"]}})
    assert several == f"from a to h[1-2] ({silent}), from a to h3 (refused)"
    many = connection_report({f"h{i}": {silent: [f"h{100 + i}"]} for i in range(40)})
    assert many.count("from ") == MOST_PARTS
    assert many.endswith(", and 34 more of this kind")


@pytest.mark.parametrize(
    ("options", "ports"),
    [
        ({"worker_port": 4000}, [4000]),
        ({"worker_port": "4000:4002"}, [4000, 4001, 4002]),
        ({"worker_port": "4002:4000"}, [0]),
        ({"worker_port": "x"}, [0]),
        ({"worker_port": "65535:65536"}, [0]),
        ({"worker_port": -1}, [0]),
        ({"worker_port": 10**5000}, [0]),
        ({"worker_port": "65535"}, [65535]),
        ({"port": 4000}, [0]),  # the nanny's
    ],
)
def test_ports_that_the_user_allows_workers(options: dict[str, Any], ports: list[int]) -> None:
    assert list(worker_ports(Options(worker_options=options))) == ports
    without_nanny = Options(worker_class="distributed.Worker", worker_options={"port": 4000})
    assert list(worker_ports(without_nanny)) == [4000]


def test_listens_on_the_first_port_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listener: Listener = listen_for_peers("127.0.0.1", (port, 0), listener_token())
        assert listener.port not in (0, port)
        listener.close()
        with pytest.raises(OSError, match="in use"):
            listen_for_peers("127.0.0.1", (port, port), listener_token())
