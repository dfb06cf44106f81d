"""Tests UCX on a node, and to other nodes: `UcxTrial` in a rank, `main` in a child of it, which sends and receives.

It runs in a child since UCX does not work in a process with the rank's MPI library, and since a GPU that hangs must not block the
rank. Rank 0 sends each child the addresses of the others (`UcxPairs`), by messages between ranks, which are authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.timeouts import UCX_MARGIN
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.sites.launchers import scrub

#: Bytes that are sent.
_SIZE = 1 << 20
_MOST_LETTERS = 200


@dataclass(frozen=True)
class UcxOrder:
    """The test for one rank."""

    #: UUID of the GPU whose memory is sent; empty: host memory.
    device: str
    #: Number of other nodes to test it with.
    peers: int = 0
    #: The network devices that a worker on this GPU uses; empty: all.
    devices: str = ""


@dataclass(frozen=True)
class UcxPeer:
    """A process on another node to exchange data with."""

    host: str
    #: Its UCX address; empty: UCX does not work there.
    address: bytes
    send_tag: int = 0
    receive_tag: int = 0


#: The errors of one rank's tests by the other node's host name (empty: within its own node). None of them: UCX works.
UcxErrors = dict[str, str]


class UcxTrial:
    """A child that tests UCX by `order`, in the rank's environment without the launcher's variables; killed after `seconds`."""

    def __init__(self, order: UcxOrder, environ: Mapping[str, str], seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        # not a pipe, which a thread would have to read; `result` closes it
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            [
                sys.executable,
                "-P",  # import no module from the working directory, since it may be another user's
                "-m",
                __name__,
                str(os.getpid()),
                str(seconds - UCX_MARGIN),
                json.dumps(asdict(order)),
            ],
            env={**scrub(environ), VISIBLE_DEVICES: order.device},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._address: bytes | None = None
        self._result: UcxErrors | None = None
        self._reader = threading.Thread(target=self._read, name="UCX trial", daemon=True)
        self._reader.start()

    @property
    def address(self) -> bytes | None:
        """The child's UCX address; empty: UCX does not work here; None: not known yet."""
        if self._address is None and not self._reader.is_alive():
            return b""
        return self._address

    def introduce(self, peer: UcxPeer) -> None:
        """Let the child test UCX with this peer too."""
        line = json.dumps({**asdict(peer), "address": peer.address.hex()}) + "\n"
        with contextlib.suppress(OSError, ValueError):  # it has ended
            assert self._child.stdin is not None
            self._child.stdin.write(line.encode())
            self._child.stdin.flush()

    def result(self) -> UcxErrors:
        """Wait for the result, until the deadline at most, and end the child. Call it once."""
        self._reader.join(max(0.0, self._deadline - time.monotonic()))
        late = self._reader.is_alive()
        if late:
            self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver
            self._child.wait(1.0)
        text = ""
        with self._errors, contextlib.suppress(OSError):
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace").strip()
        if self._result is not None:
            return self._result
        if late:
            return {"": f"no result within {self._seconds:.0f} s"}
        last = (text.splitlines() or ["no error output"])[-1]
        return {"": f"exit code {self._child.returncode}: {last[:_MOST_LETTERS]}"}

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError, LookupError, TypeError):  # output of UCX
                    told = json.loads(line)
                    if "address" in told:
                        self._address = bytes.fromhex(told["address"])
                    else:
                        self._result = {str(host): str(error) for host, error in told["errors"].items()}


class UcxPairs:
    """The pairs of nodes that test UCX with each other, kept by rank 0: each with the next, in a ring, like a job's workers.

    `hosts`: the host of each rank that tests, one of each node.

    >>> pairs = UcxPairs({0: "h1", 2: "h2"})
    >>> pairs.peers_of(0)
    1
    >>> list(pairs.add(2, b"two"))
    []
    >>> [(rank, peer.host, peer.address) for rank, peer in pairs.add(0, b"one")]
    [(0, 'h2', b'two'), (2, 'h1', b'one')]
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = dict(hosts)
        ring = [*self._hosts]
        following = ring[1:] + ring[:1]
        self._pairs = {frozenset(pair) for pair in zip(ring, following, strict=True) if pair[0] != pair[1]}
        self._addresses: dict[int, bytes] = {}

    def peers_of(self, rank: int) -> int:
        """The number of nodes with which this rank tests it."""
        return sum(rank in pair for pair in self._pairs)

    def add(self, rank: int, address: bytes) -> Iterator[tuple[int, UcxPeer]]:
        """Add the address of a rank; yields the ranks to inform now, each with a peer, since both addresses are known."""
        if rank not in self._hosts or rank in self._addresses:
            return
        self._addresses[rank] = address
        for pair in self._pairs:
            if rank in pair and pair <= self._addresses.keys():
                (other,) = pair - {rank}
                there, back = secrets.randbits(64), secrets.randbits(64)
                works = bool(address and self._addresses[other])
                for one, two, sends, receives in ((rank, other, there, back), (other, rank, back, there)):
                    known = self._addresses[two] if works else b""
                    yield one, UcxPeer(self._hosts[two], known, sends, receives)


def main() -> None:
    """The child: prints its address, then the result, each as a line of JSON."""
    parent, seconds, order = int(sys.argv[1]), float(sys.argv[2]), UcxOrder(**json.loads(sys.argv[3]))
    die_with_parent(parent)
    try:
        errors = asyncio.run(_Trial(order, seconds).run())
    except Exception as raised:  # an error of UCX, RMM or the driver is the result
        errors = {"": _one_line(raised)}
    _tell(errors=errors)
    os._exit(0)  # the end of UCX with Python is not a part of the test


class _Trial:
    def __init__(self, order: UcxOrder, seconds: float) -> None:
        self._order = order
        self._deadline = time.monotonic() + seconds
        self._data = secrets.token_bytes(_SIZE)

    async def run(self) -> UcxErrors:
        """Test UCX; returns the errors with other nodes, and raises that within this node."""
        from dask_gpu_mpi.network.ucx_endpoint import Ucx

        Ucx.loopback, Ucx.leads, Ucx.warned = not self._order.peers, bool(self._order.peers), True
        Ucx.devices = self._order.devices
        if self._order.device:
            import dask

            dask.config.set({"distributed-ucxx.create-cuda-context": True})
        self._ucx = await Ucx.begin()
        tag = secrets.randbits(64)
        # only within this node the received data are known
        await self._exchange(UcxPeer("", self._ucx.address, tag, tag), check=True)
        _tell(address=self._ucx.address.hex())
        lines: asyncio.Queue[str] = asyncio.Queue()
        # one reader, since a text stream is not for several threads
        threading.Thread(target=_read_lines, args=(asyncio.get_running_loop(), lines), daemon=True).start()
        failed = await asyncio.gather(*(self._with_next_peer(lines) for _ in range(self._order.peers)))
        if self._order.peers:
            await asyncio.sleep(0.3)  # for transfers that others have not acknowledged yet
        return dict(each for each in failed if each is not None)

    async def _with_next_peer(self, lines: asyncio.Queue[str]) -> tuple[str, str] | None:
        """Test the next peer from stdin; returns its host and the error. None: it works, or is not tested."""
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                line = await lines.get()
        except TimeoutError:  # the peer has no address, which its own rank reports
            return None
        if not line.strip():
            return None
        told = json.loads(line)
        peer = UcxPeer(**{**told, "address": bytes.fromhex(told["address"])})
        if not peer.address:
            return None
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                await self._exchange(peer, check=False)
        except TimeoutError:
            return peer.host, "no data came over UCX in time"
        except Exception as raised:  # as in `main`
            return peer.host, _one_line(raised)
        return None

    async def _exchange(self, peer: UcxPeer, *, check: bool) -> None:
        endpoint = await self._ucx.connect(peer.address, send_tag=peer.send_tag, receive_tag=peer.receive_tag)
        sent: Any = bytearray(self._data)
        received: Any = bytearray(_SIZE)
        if self._order.device:
            import rmm

            sent, received = rmm.DeviceBuffer.to_device(self._data), self._ucx.device_array(_SIZE)
            self._ucx.synchronize()
        await asyncio.gather(endpoint.send(sent), endpoint.receive(received))
        if check and (received.tobytes() if self._order.device else bytes(received)) != self._data:
            raise ValueError("the received data differ from the sent data")


def _read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str]) -> None:
    """Put the lines of stdin into the queue, until it ends."""
    for line in sys.stdin:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lines.put_nowait, line)


def _tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_LETTERS]


if __name__ == "__main__":
    main()
