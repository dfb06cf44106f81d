"""The gate in front of the scheduler's HTTP server: without the job's token, every answer is 403.

Dask's dashboard has no login, and shows every user of the node the keys, tracebacks and call stacks of tasks. Here it needs the
token of the link, as in Jupyter: in the query of the first page, which sets a cookie; then in that cookie; or as
``Authorization: Bearer TOKEN``, for Prometheus.

The scheduler's process calls `guard_servers` before it makes the scheduler. Distributed then makes a `GuardedServer`, which gives
each request to the gate (`TokenGate`) instead of the application. The gate passes it on to that, or answers by itself.
So it comes before all routes: pages, static files, websockets, and those that are added later. A connection has half a minute for
each request.

A cluster without encryption is open to everyone, and so is its dashboard: then there is no token. The rest is the same.

Requests without the token are not logged. The token is not logged either: code behind the gate never receives it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Awaitable, Mapping
from http.client import responses
from typing import Any
from urllib.parse import unquote_plus, urlsplit

from distributed import node
from tornado.httpserver import HTTPServer
from tornado.httputil import (
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerRequest,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.routing import Router

from dask_gpu_mpi.network.credentials import TOKEN

#: Seconds for the head of a request, from the connection or the request before it. Browsers connect again by themselves.
REQUEST_TIMEOUT = 30.0
REFUSED = (
    403,
    "dask_gpu_mpi: this dashboard opens with the token of its job only. Fix: use the whole link that the job has printed, with "
    "?token=...\n",
)
#: A route of distributed, for one page (individual-cluster-map.html). A request for it that does not become a websocket leaves a
#: plugin behind that fails at every later transition of a task (distributed 2025.9.1 to 2026.8.0). So it is closed to everyone.
EVENT_STREAM = "/eventstream"
CLOSED = (
    404,
    "dask_gpu_mpi: the event stream is closed, since it can stop the scheduler. Fix: use the other pages of the dashboard\n",
)


def guard_servers(token: str) -> None:
    """Make distributed use `GuardedServer` for the HTTP servers that it creates in this process from now on."""
    node.HTTPServer = functools.partial(GuardedServer, token=token)  # type: ignore[assignment, attr-defined]


class GuardedServer(HTTPServer):
    """An HTTP server with the gate in front of its `application`, which gets more routes later."""

    def initialize(self, application: Router, *, token: str, **options: Any) -> None:  # type: ignore[override]
        """Called by tornado's constructor with its arguments."""
        self.application = application
        super().initialize(TokenGate(application, token), idle_connection_timeout=REQUEST_TIMEOUT, **options)


class TokenGate(Router):
    """The gate: an `HTTPServer` calls it instead of `application`. An empty token lets everyone in."""

    def __init__(self, application: Router, token: str) -> None:
        self._application = application
        self._token = token.encode()
        #: The cookie's name. A browser sends cookies to all ports of a host, so each job's cookie has another name.
        self._cookie = f"dask-gpu-mpi-{hashlib.sha256(self._token).hexdigest()[:12]}"

    def start_request(self, server_conn: object, request_conn: Any) -> HTTPMessageDelegate:
        """Called by tornado with the connection of a request, before `find_handler`."""
        return super().start_request(server_conn, _AddingHeaders(request_conn))  # type: ignore[arg-type]

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate | None:
        """Return the object that answers this request; called by tornado when it has the headers."""
        if self._token and not self._admits(request):
            return _Answer(request, *REFUSED)
        if request.path == EVENT_STREAM:
            return _Answer(request, *CLOSED)
        return self._application.find_handler(request, **kwargs)

    def _admits(self, request: HTTPServerRequest) -> bool:
        """Whether the request has the token, in one of the three places; the answer may get more headers by this."""
        if any(self._is_token(given) for given in request.query_arguments.get(TOKEN, ())):
            _take_token_out(request)
            self._set_cookie(request)
            return True
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() in ("bearer", "token") and self._is_token(_bytes(given.strip())):
            return True
        sent = request.cookies.get(self._cookie)
        if sent is None or not self._is_token(_bytes(sent.value)) or _is_foreign(request):
            return False
        if "Sec-Fetch-Site" not in request.headers and "Upgrade" not in request.headers:
            # this browser does not report whether the request is for a frame, perhaps in a page of another port
            _add_to_answer(request, {"X-Frame-Options": "SAMEORIGIN"})
        return True

    def _set_cookie(self, request: HTTPServerRequest) -> None:
        secure = "; Secure" if request.protocol == "https" else ""
        cookie = f"{self._cookie}={self._token.decode()}; HttpOnly; Path=/; SameSite=Strict{secure}"
        # this page's address has the token in it, and a browser sends the address with the links of the page
        headers = {"Set-Cookie": cookie, "Referrer-Policy": "same-origin", "Cache-Control": "no-store"}
        _add_to_answer(request, headers)

    def _is_token(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self._token)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _is_foreign(request: HTTPServerRequest) -> bool:
    """Whether a browser sends this on behalf of another site's page, which may come from another port of the same host.

    The cookie goes to such ports as well. A link may be followed from any page, since that page can't read the answer. A form
    may not be sent, and a page may not be shown in a frame.
    """
    headers = request.headers
    if (site := headers.get("Sec-Fetch-Site")) is not None:
        is_link = request.method in ("GET", "HEAD") and headers.get("Sec-Fetch-Dest") == "document"
        return site not in ("same-origin", "none") and not is_link
    # not every browser sends that header with a websocket, and none on plain HTTP to another host
    origin = headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("Host")


def _take_token_out(request: HTTPServerRequest) -> None:
    """Remove the token from the request: tornado logs the address of a page that does not exist, for example."""
    pairs = [pair for pair in request.query.split("&") if unquote_plus(pair.partition("=")[0]) != TOKEN]
    request.query = "&".join(pairs)
    request.uri = request.path + ("?" + request.query if request.query else "")
    for arguments in (request.arguments, request.query_arguments):
        arguments.pop(TOKEN, None)


def _add_to_answer(request: HTTPServerRequest, headers: Mapping[str, str]) -> None:
    """Let the answer of the application have these headers, too: it answers by the connection of the request."""
    connection: Any = request.connection
    connection.added.update(headers)


class _AddingHeaders:
    """The connection of a request, but for headers that are added to the answer."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.added: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def write_headers(self, start_line: ResponseStartLine, headers: HTTPHeaders, *args: Any) -> Any:
        """Called by tornado."""
        for name, value in self.added.items():
            headers.add(name, value)
        return self._connection.write_headers(start_line, headers, *args)


class _Answer(HTTPMessageDelegate):
    """Answers a request by a code and a text. The application has no part in it, since it would log the request."""

    def __init__(self, request: HTTPServerRequest, code: int, text: str) -> None:
        self._request = request
        self._code = code
        self._text = text.encode()

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> Awaitable[None] | None:
        """Called by tornado before it reads a body: it reads none after the answer, and closes the connection."""
        connection: Any = self._request.connection
        first_line = ResponseStartLine("HTTP/1.1", self._code, responses[self._code])
        answer = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(self._text)),
            "Cache-Control": "no-store",
            "Connection": "close",
            "X-Content-Type-Options": "nosniff",
        }
        body = None if self._request.method == "HEAD" else self._text
        connection.write_headers(first_line, HTTPHeaders(answer), body)
        connection.finish()
        return None
