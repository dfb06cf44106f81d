"""Links with a token, and what Dask makes its own of."""

from __future__ import annotations

import dask
import pytest
from distributed.utils import format_dashboard_link

from dask_gpu_mpi.network.credentials import DASKS_TEMPLATE, add_token, link_template, make_token, ssh_line


def test_tokens_differ_and_need_no_quoting() -> None:
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 43 and token.replace("-", "").replace("_", "").isalnum() for token in tokens)


def test_the_template_is_dasks() -> None:
    dask.config.refresh()
    assert dask.config.get("distributed.dashboard.link") == DASKS_TEMPLATE


@pytest.mark.parametrize(
    ("template", "link"),
    [
        (DASKS_TEMPLATE, "http://localhost:8788/status?token=abc"),
        ("https://hub/{port}/status", "https://hub/8787/status?token=abc"),
        ("https://hub/{port}/status?user={HUB_USER}", "https://hub/8787/status?user=me&token=abc"),
    ],
)
def test_what_dask_makes_of_it(template: str, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_USER", "me")
    ours = add_token("http://localhost:8788/status", "abc")
    with dask.config.set({"distributed.dashboard.link": link_template(ours, template)}):
        assert format_dashboard_link("10.0.0.1", 8787) == link


def test_no_dashboard_has_no_link() -> None:
    assert link_template("", "https://hub/{port}/status") == ""


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
        ({"PBS_JOBID": "1", "PBS_O_HOST": "login"}, TUNNEL + "-J login n1"),
        ({"LSB_JOBID": "1", "LSB_SUB_HOST": "login"}, TUNNEL + "-J login n1"),
        ({"FLUX_JOB_ID": "f1"}, TUNNEL + "n1"),
        # a batch system within another's allocation
        ({"FLUX_JOB_ID": "f1", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "login"}, TUNNEL + "-J login n1"),
        ({"PBS_JOBID": "1", "PBS_O_HOST": "-oProxyCommand=x"}, TUNNEL + "n1"),
        ({"PBS_JOBID": "1", "PBS_O_HOST": "a; rm"}, TUNNEL + "n1"),
    ],
)
def test_ssh_line(environ: dict[str, str], line: str) -> None:
    assert ssh_line(LINK, "n1#2", environ) == line


def test_no_ssh_line_where_it_would_not_lead_there() -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "login"}
    assert ssh_line("http://10.0.0.1:8787/status?token=abc", "n1", job) == ""
    assert ssh_line(LINK, "-v", job) == ""
