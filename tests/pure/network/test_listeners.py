"""Listeners among strangers: half-open connections, and no descriptors left.

Garbage, and what strangers do to a whole job: tests/intruders.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from support.jobs.processes import run_python
from support.jobs.scripts import script

PROTOCOLS = pytest.mark.parametrize("protocol", ["tls", "tcp"])

#: A process of its own: what is tested changes all listeners of the process, and runs out of descriptors.
BEGIN = script("pure/network/scripts/listeners.py")


def told(protocol: str, main: str, **credentials: Any) -> tuple[Any, list[str]]:
    """What `main(address)` returns beside a listener, and the lines that were logged."""
    code = BEGIN + main + "\nasyncio.run(run(main))"
    done = run_python(code, protocol, json.dumps(credentials))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert not any("Traceback" in line for line in answer["lines"]), answer["lines"]
    return answer["found"], answer["lines"]


HALF_OPEN = """
async def main(address):
    strangers = [half_open(address) for _ in range(50)]
    answers = [await ask(address) for _ in range(3)]
    start = time.monotonic()
    # one is slow: the first bytes of a record of TLS, or of the length of a message of Dask's
    for byte in b"\\x16\\x03\\x01\\x02" if protocol == "tls" else bytes(7):
        with contextlib.suppress(OSError):
            strangers[0].sendall(bytes([byte]))
        await asyncio.sleep(0.3)
    closed = [await is_closed(stranger) for stranger in strangers]
    return answers, all(closed), time.monotonic() - start, await ask(address)
"""


@PROTOCOLS
def test_half_open_and_slow_connections_end_at_the_deadline(protocol: str) -> None:
    (answers, closed, seconds, again), lines = told(protocol, HALF_OPEN)
    assert (answers, closed, again) == (["hello"] * 3, True, "hello")
    assert seconds < 4
    assert 2 <= len(lines) <= 10, lines
    assert "no handshake within 1 s" in lines[0]
    assert sum(int(line.partition(" more of this kind in ")[0]) for line in lines[1:]) == 49, lines


HANGS_UP = """
async def main(address):
    for _ in range(5):
        half_open(address).close()
        await asyncio.sleep(0.01)
    return await ask(address)
"""


@PROTOCOLS
def test_a_peer_that_only_looks_whether_it_listens_is_not_reported(protocol: str) -> None:
    assert told(protocol, HANGS_UP) == ("hello", [])


FULL = """
FLOOD = '''
import socket, sys
sys.stdin.readline()
made = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(300)]
print("open", flush=True)
sys.stdin.read()
'''
async def main(address):
    dask.config.set({"distributed.comm.timeouts.connect": "60s"})
    listeners.DASK_HANDSHAKE = 60.0
    port = address.rpartition(":")[2]
    flood = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, port, stdin=-1, stdout=-1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    flood.stdin.write(b"go\\n")
    await flood.stdout.readline()
    answers = [await asyncio.wait_for(ask(address), 10) for _ in range(10)]
    await asyncio.sleep(1.0)
    left = 128 - len(os.listdir("/proc/self/fd"))
    flood.stdin.close()
    await flood.wait()
    return answers, left, accepts
"""


@PROTOCOLS
def test_no_descriptors_for_strangers(protocol: str) -> None:
    (answers, left, accepts), lines = told(protocol, FULL)
    assert answers == ["hello"] * 10
    assert left > 16
    assert accepts < 1000
    assert lines[0].startswith("too many connections: ")
    assert "(the limit is 128)" in lines[0]
    assert len(lines) < 20, lines


NOTHING_TO_CLOSE = """
async def main(address):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    stranger = socket.socket()
    stranger.setblocking(False)
    own = []
    with contextlib.suppress(OSError):
        while True:
            own.append(os.open("/dev/null", os.O_RDONLY))
    with contextlib.suppress(BlockingIOError):
        stranger.connect(("127.0.0.1", int(address.rpartition(":")[2])))
    before = accepts
    await asyncio.sleep(1.2)
    times = accepts - before
    for fd in own:
        os.close(fd)
    return times, await ask(address)
"""


def test_accept_without_a_descriptor_waits() -> None:
    (times, answer), lines = told("tcp", NOTHING_TO_CLOSE)
    assert answer == "hello"
    assert 1 <= times <= 4
    assert lines[0].startswith("too many connections: Too many open files")


BELIEVES = """
async def main(address):
    args = security.get_connection_args("client")
    context = args["ssl_context"]
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the refusal is to be the listener's
    try:
        await connect(address, timeout=5, **args)
        return "in"
    except OSError:
        return "refused"
"""


def test_a_clock_that_is_wrong_is_named() -> None:
    found, lines = told("tls", BELIEVES, now=time.time() - 91 * 86400)
    assert found == "refused"
    assert "has expired by the clock of" in lines[0], lines


TICKET = """
async def main(address):
    comm = await connect(address, timeout=5, **security.get_connection_args("client"))
    await comm.write("hello")
    return await comm.read(), comm.stream.socket.session.has_ticket
"""


def test_tls_makes_no_tickets_for_sessions_that_nobody_resumes() -> None:
    """A third of the time that the scheduler takes for a handshake."""
    found, _ = told("tls", TICKET)
    assert found == ["hello", False]
