"""How ranks handle each other's answers: rank 0 gathers them until a deadline, and reports for all what failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from dask_gpu_mpi.base.failures import Failure, report_error
from dask_gpu_mpi.errors import DaskGpuMpiError

from .mailbox import Mail, Mailbox

__all__ = ["FAIL", "FLUSH", "TICK", "gather", "report_to_all"]

#: Kind of the message with which rank 0 ends a command or a start: every rank raises the failure that it carries.
FAIL = "fail"
#: Seconds between polls of the mailbox.
TICK = 0.01
#: Seconds for the last messages of a command or a start to leave.
FLUSH = 2.0


def gather(
    mailbox: Mailbox,
    kind: str,
    ranks: Iterable[int],
    deadline: float,
    *,
    on_other: Callable[[Mail], object] = lambda mail: None,
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[int, Any]:
    """Wait for a message of this kind from each of these ranks.

    Parameters
    ----------
    mailbox : Mailbox
        Of this rank.
    kind : str
        What they are to send.
    ranks : iterable of int
        Who is to send it.
    deadline : float
        ``time.monotonic()`` until which to wait.
    on_other : callable, optional
        Is given the messages of other kinds.
    meanwhile : callable, optional
        Called after each poll.

    Returns
    -------
    dict
        What they have sent, by rank; of those that have sent nothing in time there is nothing.
    """
    answers: dict[int, Any] = {}
    expected = set(ranks)
    while expected - answers.keys() and time.monotonic() < deadline:
        for mail in mailbox.receive():
            if mail.kind == kind:
                answers[mail.source] = mail.payload
            else:
                on_other(mail)
        meanwhile()
        time.sleep(TICK)
    return answers


def report_to_all(mailbox: Mailbox, error: DaskGpuMpiError) -> None:
    """Print the one report, and have all other ranks raise it.

    Printed before any other rank can exit: a launcher ends all ranks when one fails.
    """
    report_error(error)
    mailbox.send_all(FAIL, Failure.of(error))
    mailbox.flush(FLUSH)
