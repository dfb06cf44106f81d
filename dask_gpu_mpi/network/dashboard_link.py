"""The link to the dashboard: where it is, and the token that opens it (`agent.dashboard_gate`), as Jupyter has it."""

from __future__ import annotations

import secrets
from urllib.parse import parse_qs, urlsplit

__all__ = ["TOKEN", "add_token", "link_template", "make_token"]

#: Name of the token in the link.
TOKEN = "token"
#: What Dask makes its links of where the user has configured nothing (``distributed.dashboard.link``).
DASKS_TEMPLATE = "{scheme}://{host}:{port}/status"
#: Bytes of a token.
SIZE = 32


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
        To the dashboard, with its token; empty: there is none, and so are Dask's links, which its pages leave out.
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
    return add_token(template, token)
