"""The dashboard of a running job: its token opens it, nothing else does; and nothing of a job listens for HTTP but that."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit

import pytest
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from dask_gpu_mpi import connect
from support.jobs.clusters import CLIENT, COMMAND, facts, listening, until, without_mpi
from support.jobs.mpi import Job, Mpi
from support.jobs.scripts import script

#: Tells what there is to try, and works on until there is a file.
SCRIPT = script("mpi/scripts/dashboard.py")


def get(url: str, **headers: str) -> tuple[int, Any]:
    """Code and headers of what answers a request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.headers
    except HTTPError as error:
        with error:
            return error.code, error.headers


def speaks_http(address: str, port: int) -> bool:
    with socket.create_connection((address, port), 5) as connection:
        connection.settimeout(2)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            return connection.recv(4) == b"HTTP"
        except OSError:
            return False


def http_servers(job: Job) -> set[int]:
    """The ports on which Dask's processes of a job answer HTTP."""
    sockets = {place for pid in without_mpi(job) for place in listening(pid)}
    assert len(sockets) >= 3  # nannies or workers, a scheduler
    return {port for address, port in sockets if speaks_http(address, port)}


def has_token(path: Path, token: str) -> bool:
    try:
        return token.encode() in path.read_bytes()
    except OSError:
        return False


@pytest.mark.quick
def test_its_token_alone_opens_it(mpirun: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    options = ["--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file)]
    job = mpirun.start(SCRIPT, 2, command=options)
    job.wait_for('"link"')
    told = facts(job)
    printed = re.search(r"dashboard at (\S+)", job.stderr)
    assert printed is not None
    link = printed[1]
    # what is printed, and Dask's links in the script, in its pages, in its children, and in other processes
    assert (told["link"], told["child"]) == (link, link)
    assert link in told["html"]
    with connect(file) as client:
        assert client.dashboard_link == link
    (token,) = parse_qs(urlsplit(link).query)["token"]
    port = urlsplit(link).port
    base = f"http://127.0.0.1:{port}"

    paths = {re.sub(r"\(.*?\)", "1", route.rstrip("$").removesuffix("/?")) or "/" for route in told["routes"]}
    assert {"/status", "/info", "/metrics", "/health", "/eventstream", "/json/identity.json"} <= paths
    wrong = token[:-1] + ("A" if token[-1] != "A" else "B")
    strangers = {
        path: codes
        for path in paths
        if (codes := [get(base + path)[0], get(f"{base}{path}?token={wrong}")[0]]) != [403, 403]
    }
    assert strangers == {}
    assert get(f"{base}/status", Authorization=f"Bearer {wrong}")[0] == 403

    code, headers = get(link)
    assert code == 200
    cookie = headers["Set-Cookie"].partition(";")[0]
    for path in ("/status", "/info/main/workers.html", "/health", "/statics/css/base.css"):
        assert get(base + path, Cookie=cookie)[0] == 200
        assert get(base + path, Authorization=f"Bearer {token}")[0] == 200
        assert get(base + path, Cookie=cookie.replace(token, wrong))[0] == 403
    assert open_page(base, cookie) == (101, 101, 403)
    # in distributed it stops the scheduler from then on

    assert http_servers(job) == {port}
    processes = [Path(f"/proc/{pid}") for pid in job.processes()]
    assert [
        path for path in processes if has_token(path / "cmdline", token) or has_token(path / "environ", token)
    ] == []
    assert json.loads(file.read_text())["dask-gpu-mpi"]["dashboard"] == link
    done = job.go_on()
    assert "works 3" in done.stdout
    # once where it is printed, which the script tells again here; strangers leave no line
    assert done.stderr.count(token) == 1
    assert [line for line in done.stderr.splitlines() if re.search(r"\b403\b|tornado", line)] == []


def test_that_of_an_open_cluster_is_open(mpirun: Mpi) -> None:
    """As dask-mpi's: to lock it would help nobody. A warning says that both are open."""
    code = "from distributed import Client; print('link', Client().dashboard_link, flush=True); import time; time.sleep(60)"
    job = mpirun.start([*COMMAND, "--no-security", "--dashboard-address", "127.0.0.1:0", "-c", code], 2)
    job.wait_for("link http")
    printed = re.search(r"dashboard at (\S+)", job.stderr)
    assert printed is not None
    assert re.fullmatch(r"http://localhost:[0-9]+/status", printed[1])
    assert f"link {printed[1]}\n" in job.stdout
    assert get(printed[1].removesuffix("/status") + "/health")[0] == 200
    assert "can reach this cluster and run code as you, and its dashboard has no token. Fix: " in job.stderr
    job.signal(15)
    job.wait()


def test_its_port_may_be_taken_even_if_warnings_are_errors(mpirun: Mpi) -> None:
    """The dashboard gets another one, with a warning of ours: a tunnel may wait at the one that was asked for."""
    code = (
        "from dask_gpu_mpi import initialize; initialize(); from distributed import Client; "
        "print(Client().submit(sum, [1]).result())"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environ = {"DASK_GPU_MPI__DASHBOARD_ADDRESS": f"127.0.0.1:{port}"}
        done = mpirun.run(["python", "-W", "error", "-c", code], 2, env=environ).clean()
    assert done.stdout == "1\n"
    assert f"localhost:{port}/" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "is in use" in line)
    assert f"dashboard: port {port} of " in line


def open_page(base: str, cookie: str) -> tuple[int, ...]:
    """The codes with which a page's websocket opens: for a browser, for one on the other end of a tunnel, without the cookie."""
    request = urllib.request.Request(f"{base}/status", headers={"Cookie": cookie})
    with urllib.request.urlopen(request, timeout=10) as answer:
        (session,) = re.findall(r'"token":"([^"]+)"', answer.read().decode())
    url, protocol = f"{base.replace('http', 'ws')}/status/ws", f"bokeh, {session}"
    browser = {"Cookie": cookie, "Origin": base}
    tunnel = {"Cookie": cookie, "Origin": "http://localhost:9", "Host": "localhost:9"}

    async def opened(headers: dict[str, str]) -> int:
        try:
            connection = await websocket_connect(
                HTTPRequest(url, headers={"Sec-WebSocket-Protocol": protocol, **headers})
            )
        except HTTPClientError as error:
            return error.code
        assert '"ACK"' in str(await connection.read_message())
        connection.close()
        return 101

    async def all_opened() -> tuple[int, ...]:
        return tuple([await opened(headers) for headers in (browser, tunnel, {"Origin": base})])

    return asyncio.run(asyncio.wait_for(all_opened(), 20))


@pytest.mark.parametrize(
    ("options", "servers"),
    [
        pytest.param((), 0, id="nannies"),
        pytest.param(("--worker-options", '{"dashboard_address": "127.0.0.1:0"}'), 2, id="asked for"),
    ],
)
def test_without_it_nothing_listens_for_http(mpirun: Mpi, options: tuple[str, ...], servers: int) -> None:
    code = (
        CLIENT
        + "print('link', repr(client.dashboard_link), client.submit(sum, [1, 2]).result(), flush=True)\ngo_on()\n"
    )
    job = mpirun.start([*COMMAND, "--no-dashboard", *options, "-c", code], 2)
    job.wait_for("link '' 3")
    until(lambda: len(http_servers(job)) == servers, 5)
    done = job.go_on()
    assert "dashboard" not in done.stderr
