"""The gate in front of a real scheduler's HTTP server, over loopback: who comes in, who reads 403, and who listens at all."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse
from tornado.websocket import WebSocketClientConnection, websocket_connect

from dask_gpu_mpi.agent import dashboard_gate
from dask_gpu_mpi.agent.dashboard_gate import TokenGate, guard_servers

TOKEN = "right-T0ken_"
WRONG = "wrong-T0ken_"


class Site:
    """A scheduler's HTTP server behind the gate, and its visitors."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.server = scheduler.services["dashboard"]
        self.host = f"127.0.0.1:{self.server.port}"

    async def fetch(self, path: str, headers: dict[str, str] | None = None) -> HTTPResponse:
        wanted = HTTPRequest(f"http://{self.host}{path}", headers=headers, follow_redirects=False)
        return await AsyncHTTPClient().fetch(wanted, raise_error=False)

    async def codes(self, path: str, *headers: dict[str, str]) -> list[int]:
        return [(await self.fetch(path, each)).code for each in headers]

    async def cookie(self) -> str:
        """What a browser sends once it has followed the link."""
        answer = await self.fetch(f"/health?token={TOKEN}")
        return answer.headers["Set-Cookie"].partition(";")[0]

    async def websocket(self, path: str, **headers: str) -> WebSocketClientConnection:
        return await websocket_connect(HTTPRequest(f"ws://{self.host}{path}", headers=headers))


@asynccontextmanager
async def a_site(*, pages: bool = False) -> AsyncIterator[Site]:
    from distributed import Scheduler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distributed.node.HTTPServer", None)
        guard_servers(TOKEN)
        scheduler: Any = Scheduler(
            host="127.0.0.1", port=0, protocol="tcp", dashboard=False, dashboard_address="127.0.0.1:0"
        )
    async with scheduler:
        site = Site(scheduler)
        if pages:
            dashboard = pytest.importorskip("distributed.dashboard.scheduler", exc_type=ImportError)
            dashboard.connect(site.server.application, site.server, scheduler, prefix="/")
        yield site


async def test_links_that_do_not_open_it() -> None:
    given = (
        f"?token={WRONG}", "?token=", "?token", f"?token={TOKEN}x", f"?token={TOKEN[:-1]}", f"?tokens={TOKEN}",
        "?token=%00%ff", "?token=" + "x" * 10_000, f"#token={TOKEN}",
    )  # fmt: skip

    async with a_site() as site:
        assert [(await site.fetch(f"/health{each}")).code for each in given] == [403] * len(given)


async def test_headers_that_open_it_and_those_that_do_not() -> None:
    async with a_site() as site:
        right = ({"Authorization": f"{scheme} {TOKEN}"} for scheme in ("Bearer", "token", "bearer"))
        assert await site.codes("/health", *right) == [200] * 3
        cookie = await site.cookie()
        name, _, value = cookie.partition("=")
        assert value == TOKEN
        assert await site.codes("/health", {"Cookie": cookie}, {"Cookie": f"a=b; {cookie}; c=d"}) == [200] * 2
        wrong = (
            {"Authorization": f"Bearer {WRONG}"}, {"Authorization": TOKEN}, {"Authorization": "Bearer"},
            {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer \u00e9"}, {"Cookie": f"{name}={WRONG}"},
            {"Cookie": f"token={TOKEN}"}, {"Cookie": TOKEN}, {"Cookie": f"{name}=\u00e9"}, {"Cookie": f'{name}="\\303'},
        )  # fmt: skip
        assert await site.codes("/health", *wrong) == [403] * len(wrong)


async def test_the_link_sets_a_cookie_that_no_script_reads_and_no_other_site_sends() -> None:
    async with a_site() as site:
        answer = await site.fetch(f"/health?token={TOKEN}")
        assert (answer.code, answer.body) == (200, b"ok")
        cookie, *attributes = answer.headers["Set-Cookie"].split("; ")
        assert sorted(attributes) == ["HttpOnly", "Path=/", "SameSite=Strict"]  # no end: that of the browser
        assert answer.headers["Referrer-Policy"] == "same-origin"
        # once: the cookie is enough
        assert "Set-Cookie" not in (await site.fetch("/health", {"Cookie": cookie})).headers
        # what comes by it, of a browser that does not tell what a request is for, is shown in frames of this site only
        for headers, path, expected in (
            ({"Cookie": cookie}, "/health", "SAMEORIGIN"),
            ({"Cookie": cookie}, "/none", "SAMEORIGIN"),
            ({"Cookie": cookie, "Sec-Fetch-Site": "none"}, "/health", None),
            ({"Authorization": f"Bearer {TOKEN}"}, "/health", None),
        ):
            assert (await site.fetch(path, headers)).headers.get("X-Frame-Options") == expected
        # another job's has another name, since tunnels to both may end at the same host
        assert TokenGate(site.server.application, WRONG)._cookie not in cookie


async def test_the_token_is_in_no_log_and_in_no_redirect(caplog: pytest.LogCaptureFixture) -> None:
    async with a_site(pages=True) as site:
        caplog.set_level(logging.DEBUG, "tornado.access")  # Dask has it say nothing; a user may want it
        assert (await site.fetch(f"/nowhere?a=1&%74oken={TOKEN}&token={TOKEN}&b")).code == 404
        assert "/nowhere?a=1&b" in caplog.text
        assert TOKEN not in caplog.text
        answer = await site.fetch(f"/?token={TOKEN}")
        assert (answer.code, answer.headers["Location"]) == (301, "/status")


#: jupyter-server-proxy passes on what the browser sends to JupyterLab.
HUB = {"Host": "hub.example", "X-ProxyContextPath": "/user/me/proxy/8787"}
#: What browsers say of a request, and what it gets with the cookie alone.
REQUESTS: list[tuple[dict[str, str], int]] = [
    ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
    ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, 200),
    # a link on another page
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, 403),
    # a script, a picture, a request of another page's, for example of another port that a tunnel leads to
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "websocket"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}, 403),
    ({"Host": "localhost:9000", "Origin": "http://localhost:9000"}, 200),
    ({"Host": "localhost:9000", "Origin": "http://localhost:9001"}, 403),
    ({"Host": "localhost:9000", "Origin": "null"}, 403),
    ({**HUB, "Origin": "https://hub.example"}, 200),
    ({**HUB, "Origin": "https://other.example"}, 403),
]


async def test_pages_of_others_come_in_with_no_cookie_but_with_the_token() -> None:
    async with a_site() as site:
        cookie = {"Cookie": await site.cookie()}
        for headers, code in REQUESTS:
            assert await site.codes("/health", {**headers, **cookie}, headers) == [code, 403], headers
            link = f"/health?token={TOKEN}"
            assert await site.codes(link, {**headers, **cookie}, headers) == [200, 200], headers


async def test_the_event_stream_is_closed_to_all() -> None:
    """In distributed whoever asks for it, and does not become a websocket, has every later transition raise."""
    async with a_site() as site:
        answer = await site.fetch(f"/eventstream?token={TOKEN}")
        assert (answer.code, b"event stream" in answer.body) == (404, True)
        assert "websocket" not in site.scheduler.plugins
        with pytest.raises(HTTPClientError, match="404"):
            await site.websocket("/eventstream", Cookie=await site.cookie())


async def test_a_connection_that_is_kept_is_asked_again_and_closed() -> None:
    async with a_site() as site:
        reader, writer = await opened(site)
        for query, code in ((f"?token={TOKEN}", b"200"), (f"?token={TOKEN}", b"200"), ("", b"403")):
            writer.write(f"GET /health{query} HTTP/1.1\r\nHost: {site.host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == code
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
        assert await reader.read() == b""  # strangers keep none
        writer.close()
        await writer.wait_closed()


async def opened(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of its own, which stays."""
    host, port = site.host.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_who_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_gate, "REQUEST_TIMEOUT", 0.3)
    async with a_site() as site:
        reader, writer = await opened(site)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        await writer.wait_closed()
