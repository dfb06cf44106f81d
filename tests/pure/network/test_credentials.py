"""The job's credentials let each other in, and nobody else; its token."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

import dask
import pytest
from cryptography import x509
from distributed import Security
from distributed.utils import format_dashboard_link

from dask_gpu_mpi.network.credentials import (
    BACKDATED,
    DASKS_TEMPLATE,
    MARGIN,
    VALID_DAYS,
    add_token,
    clock_problem,
    link_template,
    make_credentials,
    ssh_line,
)


def certificate(credentials: dict[str, Any]) -> x509.Certificate:
    return x509.load_pem_x509_certificate(credentials["distributed.comm.tls.worker"]["cert"].encode())


NOW = 1_800_000_000.0
DAY = 86400.0


def test_as_long_as_the_job_may_run() -> None:
    """Other ends: the examples of `_end`."""
    made = certificate(make_credentials(job_end=NOW + 200 * DAY, now=NOW))
    assert made.not_valid_before_utc.timestamp() == NOW - BACKDATED
    assert made.not_valid_after_utc.timestamp() == NOW + 200 * DAY + MARGIN
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca, "it is no authority"


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Let two contexts greet each other; returns the first error."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for end in ends * 2:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            return str(error)
    return ""


def contexts(credentials: dict[str, Any]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server and of a client."""
    with dask.config.set(credentials):
        security = Security()
    return (
        security.get_listen_args("scheduler")["ssl_context"],
        security.get_connection_args("client")["ssl_context"],
    )


def test_members_of_one_job_let_each_other_in_and_nobody_else() -> None:
    server, client = contexts(make_credentials())
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does
    assert shake_hands(server, client) == ""
    _, stranger = contexts(make_credentials())
    assert "certificate verify failed" in shake_hands(server, stranger)
    stranger.verify_mode = ssl.CERT_NONE  # the refusal is to be the server's
    assert "certificate verify failed" in shake_hands(server, stranger)


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
    found = clock_problem(shake_hands(*contexts(make_credentials(now=time.time() - age))))
    assert problem in found
    if problem:
        assert socket.gethostname() in found
        assert time.strftime("%Y-%m-%d", time.gmtime()) in found
    else:
        assert found == ""


@pytest.mark.parametrize(
    ("template", "link"),
    [
        (DASKS_TEMPLATE, "http://localhost:8788/status?token=abc"),
        ("https://hub/{port}/status", "https://hub/8787/status?token=abc"),
        ("https://hub/{port}/status?user={HUB_USER}", "https://hub/8787/status?user=me&token=abc"),
    ],
)
def test_what_dask_makes_of_it(template: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dask.config.refresh()
    assert dask.config.get("distributed.dashboard.link") == DASKS_TEMPLATE
    monkeypatch.setenv("HUB_USER", "me")
    ours = add_token("http://localhost:8788/status", "abc")
    with dask.config.set({"distributed.dashboard.link": link_template(ours, template)}):
        assert format_dashboard_link("10.0.0.1", 8787) == link


LINK = "http://localhost:8788/status?token=abc"
TUNNEL = "ssh -N -L 8788:127.0.0.1:8788 "


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({}, ""),
        ({"SLURM_SUBMIT_HOST": "login"}, ""),
        ({"SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "login1.site"}, TUNNEL + "-J login1.site n1"),
        ({"SLURM_JOB_ID": "1"}, TUNNEL + "n1"),
        ({"SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "n1.site"}, TUNNEL + "n1"),
        # a batch system within another's allocation
        ({"FLUX_JOB_ID": "f1", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "login"}, TUNNEL + "-J login n1"),
        ({"PBS_JOBID": "1", "PBS_O_HOST": "-oProxyCommand=x"}, TUNNEL + "n1"),
        ({"PBS_JOBID": "1", "PBS_O_HOST": "a; rm"}, TUNNEL + "n1"),
    ],
)
def test_ssh_line(environ: dict[str, str], line: str) -> None:
    """None where it would not lead there."""
    assert ssh_line(LINK, "n1#2", environ) == line
    for link, host in (("http://10.0.0.1:8787/status?token=abc", "n1"), (LINK, "-v")):
        assert ssh_line(link, host, environ) == ""
