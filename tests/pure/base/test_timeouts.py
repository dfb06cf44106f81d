"""The order of the timeouts: each side waits longer than the one that it waits for."""

from __future__ import annotations

import itertools

from dask_gpu_mpi.base import timeouts as t
from dask_gpu_mpi.options.model import Options


def test_after_the_startup_deadline_whoever_knows_more_reports_first() -> None:
    reports = [
        t.NAME_MISSING,  # each rank, of its host
        t.NAME_MISSING + t.RANK_0_GRACE,  # another rank, for rank 0
        t.NAME_STOPPED,  # agents, of ranks inside MPI_Init
        t.MPI_GRACE,  # agents end their ranks
        t.HANGING + t.ALIVE,  # rank 0's watchdog
        t.RANK_0_LOST,  # the other ranks give rank 0 up
    ]
    assert reports == sorted(reports)
    # Each report has time to be printed and forwarded before the next.
    assert all(later - earlier >= 0.5 for earlier, later in itertools.pairwise(reports))


def test_check_reports_once_and_within_20_seconds() -> None:
    assert (
        t.OBSERVE_TIMEOUT + t.LISTEN_TIMEOUT + t.KERNEL_MARGIN < t.REPORT_TIMEOUT
    )  # time for the tests themselves
    assert t.UCX_MARGIN + t.KERNEL_MARGIN < t.REPORT_TIMEOUT - t.OBSERVE_TIMEOUT - t.LISTEN_TIMEOUT
    assert t.ALIVE < t.CHECK_HANGING < t.CHECK_RANK_0_LOST
    assert t.REPORT_TIMEOUT + t.CHECK_RANK_0_LOST < 20


def test_a_connection_without_ucx_stays_on_tls_before_it_is_given_up() -> None:
    assert t.UCX_START + t.UCX_PROOF < t.UCX_AGREEMENT


def test_a_gang_of_all_workers_waits_for_those_that_another_gang_has_ended() -> None:
    assert t.GANG_KILL < t.GANG_RETURN
    assert t.GANG_KILL + t.GANG_RETURN < t.GANG_LOST


def test_rank_0_has_the_first_word() -> None:
    assert 0 < t.INTERRUPTED_GRACE < t.GATHER_FAILURES < t.FLUSH
    assert 0 < t.FAILED_GRACE < t.FAILED_TIMEOUT


def test_a_rank_whose_options_are_invalid_waits_no_longer_than_the_others() -> None:
    assert Options().startup_timeout >= t.WITHOUT_OPTIONS


def test_at_the_end_rank_0_answers_before_the_others_give_up() -> None:
    assert t.ANSWER_TIMEOUT < t.FAILED_TIMEOUT < t.LAST_MESSAGES_TIMEOUT
    assert t.FREE_TIMEOUT < t.FAILED_TIMEOUT  # a rank in `free` is not taken for one that waits forever
    assert t.FLUSH < t.CLOSING_SLACK


def test_the_scripts_finally_has_longer_than_the_report_of_why_it_ends() -> None:
    assert t.REASON_TIMEOUT < t.TERM_GRACE <= t.LOST_GRACE


def test_what_is_killed_is_waited_for_less_than_what_ends_by_itself() -> None:
    assert t.KILLING < t.TERM_GRACE < t.LAUNCHER_PATIENCE < t.UNCONFIGURED
