"""What every rank of a check does, by messages that rank 0 would have sent; with MPI: tests/mpi/test_check.py."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.check import rank as module
from dask_gpu_mpi.check.observations import Observations
from dask_gpu_mpi.check.rank import CheckingRank, Kind, ListenOrder, RankTest
from dask_gpu_mpi.check.report import Listening, Outcome
from dask_gpu_mpi.errors import InputError, OptionError, StartupError
from dask_gpu_mpi.mpi.gathering import FAIL
from dask_gpu_mpi.mpi.mailbox import Mail
from dask_gpu_mpi.network.node_pairs import Lost, Node
from dask_gpu_mpi.network.reachability import Tokens
from dask_gpu_mpi.options.model import Options
from preflights import MockMailbox


@pytest.fixture
def mailbox() -> Any:
    return MockMailbox(rank=1)


@pytest.fixture
def rank(mailbox: Any) -> Iterator[CheckingRank]:
    made = CheckingRank(mailbox, dict(os.environ), "h2")
    yield made
    made.close()


def test_what_is_observed(rank: CheckingRank, mailbox: Any, tmp_path: Path) -> None:
    options = Options(worker_class="distributed.Nanny", local_directory=str(tmp_path))
    assert rank.step == "reading its options"
    rank.observe(options, "MPI 9", [("launcher", "wrong")])
    kinds = [kind for _, kind, _ in mailbox.sent]
    assert kinds == [Kind.STEP, Kind.STEP, Kind.STEP, Kind.OBSERVED]
    assert {to for to, _, _ in mailbox.sent} == {0}
    steps = [payload for _, kind, payload in mailbox.sent if kind == Kind.STEP]
    assert [host for host, _ in steps] == ["h2"] * 3
    assert [step.partition(" ")[0] for _, step in steps] == ["inspecting", "inspecting", "reading"]
    assert (steps[1][1], rank.step) == (f"inspecting the local directory {str(tmp_path)!r}", steps[2][1])
    observed = mailbox.sent[-1][2]
    assert isinstance(observed, Observations)
    assert (observed.rank, observed.host, observed.problems) == (
        1,
        socket.gethostname(),
        (("launcher", "wrong"),),
    )
    assert observed.inventory is not None
    assert (observed.inventory.world_size, observed.inventory.gpus) == (2, ())
    assert (observed.scratch.path, observed.scratch.error) == (str(tmp_path), "")


def test_options_that_can_not_be_used(rank: CheckingRank, mailbox: Any) -> None:
    error = OptionError("--nthreads: invalid")
    rank.observe(error, "", ())
    assert mailbox.sent == [(0, Kind.OBSERVED, Failure.of(error))]


def test_listener_and_test_of_the_schedulers_rank(rank: CheckingRank, mailbox: Any) -> None:
    tokens = Tokens()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dashboard = taken.getsockname()
        order = ListenOrder("127.0.0.1", (tokens, 0, dashboard), (tokens, (0,)))
        rank.on_mail(Mail(0, Kind.LISTEN, order))
    listening: Listening = mailbox.sent[-1][2]
    assert (mailbox.sent[-1][:2], listening.error) == ((0, Kind.LISTENING), "")
    assert listening.port > 0
    assert listening.workers not in (0, listening.port)
    assert "in use" in listening.dashboard
    peers = tuple(
        Node(host, 0, "127.0.0.1", of, listening.workers) for host, of in (("h1", tokens), ("h3", Tokens()))
    )
    rank.on_mail(Mail(0, Kind.TEST, RankTest("127.0.0.1", listening.port, tokens, (), 10.0, peers)))
    assert rank.step.startswith("running a kernel")
    deadline = time.monotonic() + 10
    while mailbox.sent[-1][1] != Kind.TESTED and time.monotonic() < deadline:
        rank.poll()
        time.sleep(0.01)
    rank.poll()  # once is enough
    ((to, outcome),) = [(to, payload) for to, kind, payload in mailbox.sent if kind == Kind.TESTED]
    assert to == 0
    assert (outcome.reach.error, outcome.kernels) == ("", ())
    assert outcome.lost == (Lost("h3", "something else answers there"),)
    # a rank with no address to connect to
    assert rank._test(RankTest("", 0, tokens, (), 10.0)) == Outcome(None, ())


def test_port_that_is_taken(rank: CheckingRank, mailbox: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        order = ListenOrder("127.0.0.1", (Tokens(), port, None), (Tokens(), (port,)))
        rank.on_mail(Mail(0, Kind.LISTEN, order))
    assert mailbox.sent == [(0, Kind.LISTENING, Listening(0, "Address already in use", ""))]


def test_tests_get_half_of_the_time_to_connect(rank: CheckingRank, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []
    monkeypatch.setattr(module, "connect_to", lambda address, port, tokens, timeout: timeouts.append(timeout))
    for seconds in (4.0, 10.0, 12.0):
        rank._test(RankTest("h1", 1, Tokens(), (), seconds))
    assert timeouts == [2.0, 5.0, 5.0]


def test_a_rank_serves_until_it_has_the_exit_code(rank: CheckingRank, mailbox: Any) -> None:
    mailbox.mails += [Mail(0, Kind.TEST, RankTest("", 0, Tokens(), (), 1.0)), Mail(0, Kind.DONE, 1)]
    assert rank.serve(time.monotonic() + 10) == 1
    mailbox.mails.append(Mail(0, FAIL, Failure("--nthreads: invalid", 2)))
    with pytest.raises(InputError, match="--nthreads: invalid") as caught:
        rank.serve(time.monotonic() + 10)
    assert caught.value.reported


@pytest.mark.parametrize("number", [1, 2])
def test_rank_0_that_does_not_respond(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(module, "abort", codes.append)
    mailbox: Any = MockMailbox(rank=number, size=3)
    rank = CheckingRank(mailbox, {}, "h2")
    with pytest.raises(StartupError, match="^rank 0: no response; "):
        rank.serve(time.monotonic() + 0.05)
    assert codes == [1]
    # one rank reports it
    assert capsys.readouterr().err.count("dask_gpu_mpi: error: rank 0: no response") == (number == 1)
