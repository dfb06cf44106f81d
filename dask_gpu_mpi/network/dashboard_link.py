"""The link to the dashboard: where it is, and the token that opens it (`agent.dashboard_gate`), as Jupyter has it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from dask_gpu_mpi.sites.batch import login_host

__all__ = ["TOKEN", "add_token", "link_template", "make_token", "ssh_line"]

#: Name of the token in the link.
TOKEN = "token"
#: What Dask makes its links of where the user has configured nothing (``distributed.dashboard.link``).
DASKS_TEMPLATE = "{scheme}://{host}:{port}/status"
#: Bytes of a token.
SIZE = 32

#: What is pasted into a shell must be a name, and no option of ssh.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def make_token() -> str:
    """A new token: 32 random bytes, as text that a link may have in it."""
    return secrets.token_urlsafe(SIZE)


def add_token(link: str, token: str) -> str:
    """A link, or a template of one, with the token in its query.

    >>> add_token("http://localhost:8787/status", "abc")
    'http://localhost:8787/status?token=abc'
    >>> add_token("/proxy/{port}/status?theme=dark#top", "abc")
    '/proxy/{port}/status?theme=dark&token=abc#top'
    """
    page, mark, fragment = link.partition("#")
    return f"{page}{'&' if '?' in page else '?'}{TOKEN}={token}{mark}{fragment}"


def link_template(link: str, template: str) -> str:
    """What Dask is to make its clients' links of (``Client.dashboard_link``), so that they lead where ours does.

    Parameters
    ----------
    link : str
        To the dashboard, with its token, if it has one; empty: there is none, and so are Dask's links, which its pages leave out.
    template : str
        What is configured. The user's own, by way of a proxy for example, stays, and is given the token.

    Examples
    --------
    >>> link_template("http://localhost:8788/status?token=abc", "{scheme}://{host}:{port}/status")
    'http://localhost:8788/status?token=abc'
    >>> link_template("http://localhost:8788/status?token=abc", "{JUPYTERHUB_SERVICE_PREFIX}/proxy/{port}/status")
    '{JUPYTERHUB_SERVICE_PREFIX}/proxy/{port}/status?token=abc'
    >>> link_template("", "{scheme}://{host}:{port}/status")
    ''
    """
    if not link:
        return ""
    if template == DASKS_TEMPLATE:
        return link
    (token,) = parse_qs(urlsplit(link).query).get(TOKEN, [""])
    return add_token(template, token) if token else template


def ssh_line(link: str, node: str, environ: Mapping[str, str]) -> str:
    """The command by which a link that leads to ``localhost`` opens on the user's computer.

    Parameters
    ----------
    link : str
        To the dashboard.
    node : str
        The scheduler's; a plan tells nodes of one name apart by ``#2``.
    environ : mapping
        The job's environment.

    Returns
    -------
    str
        Empty: this is no job of a batch system, or the dashboard does not listen on the loopback interface.

    Examples
    --------
    >>> ssh_line("http://localhost:8787/status?token=abc", "n1", {"PBS_JOBID": "1", "PBS_O_HOST": "login2"})
    'ssh -N -L 8787:127.0.0.1:8787 -J login2 n1'
    """
    target, name = urlsplit(link), node.partition("#")[0]
    login = login_host(environ)
    if login is None or target.hostname != "localhost" or not _HOST.fullmatch(name):
        return ""
    # who submits from within an allocation has the node itself, perhaps by its long name
    is_other = _HOST.fullmatch(login) and login.partition(".")[0] != name.partition(".")[0]
    jump = f"-J {login} " if is_other else ""
    # not by the name of the loopback interface: somebody else may listen on its other address, ::1
    return f"ssh -N -L {target.port}:127.0.0.1:{target.port} {jump}{name}"
