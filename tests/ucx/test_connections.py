"""Two processes as workers with TLS and UCX beside it: what is broken off in the middle, and a start that is slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs.scripts import script
from support.jobs.ucx import needs_ucx

pytestmark = needs_ucx

#: `pair()` is a connection to a process that sends back what it gets. In a file of its own, since a crash must not end the tests.
HEAD = script("ucx/scripts/connections.py")
FOOT = "\nif __name__ == '__main__':\n    main(test)\n    print('well')\n"
ROWS = {
    # a read that is cancelled in the middle of a frame, or whose connection is closed: UCX must not write into freed memory
    "memory stays until UCX has done with it": """
async def test():
    for number in range(8):
        comm = await pair()
        assert (await sent_back(comm, np.ones(3)) == 1).all()
        await comm.write({"data": to_serialize(np.full(6_000_000, number + 1.0))})
        reading = asyncio.create_task(comm.read())
        await asyncio.sleep(0.005 * number * number)
        if number % 2:
            comm.abort()
        else:
            reading.cancel()
        await asyncio.wait({reading}, timeout=20)
        assert reading.done()
        reading.cancelled() or reading.exception()
        fresh = np.zeros(6_000_000)
        await asyncio.sleep(0.2)
        assert not fresh.any()
        assert comm.closed() or not reading.cancelled()
    await exchange(size=1_000_000)
""",
    # UCX is looked at now and then after a transfer; the next one is not to wait for that, here for hours
    "a transfer after another does not wait for it": """
async def test():
    ucx_endpoint.LINGERING_TICK = ucx_endpoint.TICK = ucx_endpoint.LINGER = 10000.0
    comm = await pair()
    for number in range(5):
        assert (await sent_back(comm, np.full(100_000, number))) [-1] == number
    assert comm._endpoint is not None
    await comm.close()
""",
    # as a task has that makes a client for itself, also while UCX starts: the worker's own connections keep UCX
    "a client in another event loop talks TLS": """
async def test():
    ucx_endpoint.Ucx.begin()
    for _ in range(2):
        await asyncio.to_thread(asyncio.run, exchange(False))
        await exchange()
""",
    "a start of UCX that takes long leaves TLS and comes later": """
async def test():
    imports = ucx_endpoint._import
    def slowly():
        time.sleep(2)
        imports()
    ucx_endpoint._import, worker_comm.UCX_START = slowly, 0.5
    await exchange(False)
    await asyncio.sleep(3)
    await exchange()
""",
}


def run(test: str, tmp_path: Path) -> str:
    script = tmp_path / "script.py"
    script.write_text(HEAD + test + FOOT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, (done.returncode, done.stdout + done.stderr)
    assert done.stdout.endswith("well\n")
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ROWS)
def test_connection(name: str, tmp_path: Path) -> None:
    slow = "do not go over UCX: UCX has not started within 0.5 s" in run(ROWS[name], tmp_path)
    assert slow == name.startswith("a start")


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1])
def test_a_process_that_dies_in_the_middle_of_a_frame(seconds: float, tmp_path: Path) -> None:
    """Shared memory does not notice it. The read fails at once, and nothing waits for that process: not even UCX's end."""
    said = run(
        f"""
async def test():
    ucx_endpoint.ABORT_AFTER = 1.0
    comms = [await pair() for _ in range(4)]
    for comm in comms:
        assert (await sent_back(comm, np.ones(100_000)) == 1).all()
        assert comm._endpoint is not None
    exchanges = [asyncio.create_task(sent_back(comm, np.ones(20_000_000))) for comm in comms]
    await asyncio.sleep({seconds})
    os.kill(SERVER, signal.SIGKILL)
    ended = await asyncio.wait_for(asyncio.gather(*exchanges, return_exceptions=True), 20)
    assert all(isinstance(each, CommClosedError) for each in ended), ended
    for _ in range(40):
        await asyncio.sleep(0.1)
    return -signal.SIGKILL
""",
        tmp_path,
    )
    assert [line for line in said.splitlines() if "falling back to pickle" not in line] == ["well"]
