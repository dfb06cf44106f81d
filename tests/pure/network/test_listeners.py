"""Listeners among strangers: half-open connections.

Garbage, and what strangers do to a whole job: tests/intruders.
"""

from __future__ import annotations

import json
from typing import Any

from support.jobs.processes import run_python
from support.jobs.scripts import script

#: A process of its own: what is tested changes all listeners of the process.
BEGIN = script("pure/network/scripts/listeners.py")


def told(main: str) -> Any:
    """What `main(address)` returns beside a listener; nothing but warnings of one line is logged."""
    done = run_python(BEGIN + main + "\nasyncio.run(run(main))")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


HALF_OPEN = """
async def main(address):
    strangers = [half_open(address) for _ in range(50)]
    answers = [await ask(address) for _ in range(3)]
    start = time.monotonic()
    for byte in b"\\x16\\x03\\x01\\x02":  # one is slow: the first bytes of a record
        with contextlib.suppress(OSError):
            strangers[0].sendall(bytes([byte]))
        await asyncio.sleep(0.3)
    closed = [await is_closed(stranger) for stranger in strangers]
    return answers, all(closed), time.monotonic() - start, await ask(address)
"""


def test_half_open_and_slow_connections_end_at_the_deadline() -> None:
    answers, closed, seconds, again = told(HALF_OPEN)
    assert (answers, closed, again) == (["hello"] * 3, True, "hello")
    assert seconds < 4


TICKET = """
async def main(address):
    comm = await connect(address, timeout=5, **security.get_connection_args("client"))
    await comm.write("hello")
    return await comm.read(), comm.stream.socket.session.has_ticket
"""


def test_tls_makes_no_tickets_for_sessions_that_nobody_resumes() -> None:
    """A third of the time that the scheduler takes for a handshake."""
    assert told(TICKET) == ["hello", False]
