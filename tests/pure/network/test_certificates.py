"""When a certificate is valid, with certificates that were made at other times."""

from __future__ import annotations

import socket
import ssl
import threading
import time

import pytest

from dask_gpu_mpi.network.credentials import (
    BACKDATED,
    MARGIN,
    VALID_DAYS,
    Credentials,
    certificate_validity,
    clock_problem,
    ending_soon,
    make_credentials,
    time_of_warning,
)

NOW = 1_800_000_000.0
DAY = 86400.0


@pytest.mark.parametrize(
    ("job_end", "until"),
    [
        (None, NOW + VALID_DAYS * DAY),
        (NOW + 600, NOW + 600 + MARGIN),
        (NOW + 200 * DAY, NOW + 200 * DAY + MARGIN),
        (NOW - 600, NOW + VALID_DAYS * DAY),  # of another job
        (1e14, NOW + 3660 * DAY + MARGIN),
    ],
    ids=["unknown", "soon", "after months", "past", "never"],
)
def test_as_long_as_the_job_may_run(job_end: float | None, until: float) -> None:
    config = make_credentials(job_end=job_end, now=NOW).dask_config()
    assert certificate_validity(config) == (NOW - BACKDATED, until)


def test_no_certificate() -> None:
    assert certificate_validity({}) is None
    assert certificate_validity({"distributed.comm.tls.ca-file": "/etc/ca.pem"}) is None


def test_the_warning_comes_in_time() -> None:
    begin, end = NOW - BACKDATED, NOW + VALID_DAYS * DAY
    assert time_of_warning(begin, end) == end - DAY
    # with a walltime not before that
    for hours in (1, 24, 48):
        job_end = NOW + hours * 3600
        assert job_end < time_of_warning(begin, job_end + MARGIN) < job_end + MARGIN
    assert "2027-01-15 08:00:00 UTC" in ending_soon(NOW)


def error_of(credentials: Credentials) -> str:
    """What a client with these credentials says of a server with the same."""
    security = credentials.security()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(10)

    def serve() -> None:
        try:
            security.get_listen_args("scheduler")["ssl_context"].wrap_socket(ours, server_side=True).close()
        except OSError:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with security.get_connection_args("client")["ssl_context"].wrap_socket(theirs):
            return ""
    except ssl.SSLError as error:
        return str(error)
    finally:
        theirs.close()
        thread.join(10)


@pytest.mark.parametrize(
    ("age", "problem"),
    [
        (0.0, ""),
        (-BACKDATED + 60, ""),  # this clock is behind, but less than an hour
        (-BACKDATED - 60, "is not valid yet by the clock of"),
        (VALID_DAYS * DAY + 60, "has expired by the clock of"),
    ],
)
def test_a_clock_that_is_wrong_is_named(age: float, problem: str) -> None:
    found = clock_problem(error_of(make_credentials(now=time.time() - age)))
    assert problem in found
    if problem:
        assert socket.gethostname() in found
        assert time.strftime("%Y-%m-%d", time.gmtime()) in found
    else:
        assert found == ""
