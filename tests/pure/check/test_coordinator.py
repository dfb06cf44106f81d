"""Rank 0 of a check, by messages that other ranks would have sent."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.check.coordinator import CheckCoordinator, _dashboard
from dask_gpu_mpi.check.rank import CheckingRank, Kind
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.mpi.gathering import FAIL
from dask_gpu_mpi.mpi.mailbox import Mail
from dask_gpu_mpi.options.model import Options


class Mailbox:
    rank, size = 0, 2

    def __init__(self) -> None:
        self.mails: list[Mail] = []
        self.to_all: list[tuple[str, Any]] = []

    def receive(self) -> list[Mail]:
        mails, self.mails = self.mails, []
        return mails

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        self.mails.append(Mail(rank, kind, payload))

    def send_all(self, kind: str, payload: Any = None) -> None:
        self.to_all.append((kind, payload))

    def flush(self, timeout: float) -> bool:
        return True


def test_bad_options_of_a_rank_end_the_check_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    mailbox: Any = Mailbox()
    rank = CheckingRank(mailbox, {}, "a")
    error = OptionError("--nthreads: invalid")
    rank.look(error, "", ())
    mailbox.mails += [Mail(1, Kind.DOING, ("b", "its options")), Mail(1, Kind.FACTS, Failure.of(error))]
    head = CheckCoordinator(mailbox, rank, error, False, None, True, time.monotonic())
    try:
        with pytest.raises(OptionError, match="^--nthreads: invalid$") as caught:
            head.run(lambda report: pytest.fail("there is nothing to show"))
    finally:
        rank.close()
    assert caught.value.reported
    assert capsys.readouterr().err == "dask_gpu_mpi: error: --nthreads: invalid\n"
    assert mailbox.to_all == [(FAIL, Failure("--nthreads: invalid", 2))]


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1:8787", ("127.0.0.1", 8787)),
        (":8787", ("", 8787)),
        ("[::1]:8787", ("::1", 8787)),
        ("127.0.0.1:0", None),
        ("127.0.0.1", None),
    ],
)
def test_where_the_dashboard_would_listen(address: str, place: tuple[str, int] | None) -> None:
    assert _dashboard(Options(dashboard_address=address)) == place
    assert _dashboard(Options(dashboard_address=address, dashboard=False)) is None
