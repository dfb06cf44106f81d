"""Answers of ranks, gathered until a deadline, from a mailbox without MPI."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.errors import PlacementError
from dask_gpu_mpi.mpi.gathering import FAIL, gather, report_to_all
from dask_gpu_mpi.mpi.mailbox import Mail


class Mails:
    """A mailbox that has one batch of messages for each look."""

    def __init__(self, *batches: list[Mail]) -> None:
        self.batches = list(batches)
        self.sent: list[tuple[str, Any]] = []
        self.flushed = False

    def receive(self) -> list[Mail]:
        return self.batches.pop(0) if self.batches else []

    def send_all(self, kind: str, payload: Any = None) -> None:
        self.sent.append((kind, payload))

    def flush(self, timeout: float) -> bool:
        self.flushed = True
        return True


def soon() -> float:
    return time.monotonic() + 30


def test_all_answers_are_gathered() -> None:
    others: list[Mail] = []
    looks: list[int] = []
    mailbox: Any = Mails(
        [Mail(1, "fact", "b"), Mail(2, "doing", "x")], [], [Mail(0, "fact", "a")], [Mail(2, "fact", "late")]
    )
    found = gather(mailbox, "fact", (0, 1), soon(), on_other=others.append, meanwhile=lambda: looks.append(1))
    assert found == {0: "a", 1: "b"}
    assert others == [Mail(2, "doing", "x")]
    assert len(looks) == 3
    assert mailbox.batches == [[Mail(2, "fact", "late")]]


def test_who_is_silent_has_no_answer() -> None:
    mailbox: Any = Mails([Mail(1, "fact", "b")])
    assert gather(mailbox, "fact", (0, 1), time.monotonic() + 0.05) == {1: "b"}


def test_nobody_is_waited_for_after_the_deadline_or_without_ranks() -> None:
    mailbox: Any = Mails([Mail(1, "fact", "b")])
    assert gather(mailbox, "fact", (1,), time.monotonic()) == {}
    assert gather(mailbox, "fact", (), soon()) == {}
    assert len(mailbox.batches) == 1


def test_one_report_reaches_all(capsys: pytest.CaptureFixture[str]) -> None:
    mailbox: Any = Mails()
    error = PlacementError("no GPU")
    report_to_all(mailbox, error)
    assert capsys.readouterr().err == "dask_gpu_mpi: error: no GPU\n"
    assert error.reported
    assert mailbox.sent == [(FAIL, Failure("no GPU", 2, "PlacementError"))]
    assert type(mailbox.sent[0][1].error(reported=True)) is PlacementError
    assert mailbox.flushed
