"""Connections between workers: TLS and, if both ends offer it, UCX for large frames.

A worker listens and connects with Dask's TLS, as every process of the cluster, and offers UCX in Dask's handshake. If the other
end offers it as well, the two agree on an endpoint over the encrypted connection: addresses, secret tags, and a proof of 64
bytes that each sends over UCX. From then on frames in GPU memory (with ``protocol="ucx"``: large frames) are sent over UCX, and
all others, including headers and pickles, over TLS. So

- a peer without a certificate of the job does not get as far as UCX, and only the two ends know the tags;
- scheduler, nannies and clients, which offer nothing, need no UCX, and their messages are always encrypted;
- a connection whose UCX does not work stays on TLS;
- the end of the TLS connection ends the UCX connection: a process that has died is detected at once, as with TCP.

Sources: `distributed.comm.tcp`; `distributed_ucxx.ucxx` (0.46 to 0.52) for the order of calls to CUDA; ucxx's worker addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import secrets
import socket
import weakref
from collections.abc import Iterator
from typing import Any

from distributed.comm import registry
from distributed.comm.core import CommClosedError
from distributed.comm.tcp import TLS, TLSBackend, TLSConnector
from distributed.comm.utils import OFFLOAD_THRESHOLD, from_frames, to_frames
from distributed.protocol.serialize import Serialized
from distributed.protocol.utils import host_array
from distributed.utils import nbytes

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeouts import UCX_AGREEMENT, UCX_PROOF, UCX_START
from dask_gpu_mpi.network.interfaces import boot_id
from dask_gpu_mpi.network.listeners import TLSListener
from dask_gpu_mpi.network.ucx_endpoint import Endpoint, Ucx, UcxError

#: Key of Dask's handshake. Its value has this version, the node of the process, and whether UCX leads from there to others.
OFFER, VERSION = "dask-gpu-mpi-ucx", 2
#: Seconds for one frame, plus one for each of so many bytes; then the connection is closed, and Dask tries again.
FRAME_TIMEOUT, SLOWEST = 300.0, 10e6
#: Bytes of a proof.
PROOF_SIZE = 64
#: distributed's serialisers that leave memory on the GPU.
SERIALIZERS = ("cuda", "dask", "pickle", "error")
_boot_id = functools.cache(boot_id)
#: Addresses with which a connection has stayed on TLS, with the reason; each is warned of once.
without_ucx: dict[str, str] = {}


def use_ucx_between_workers(
    host_frames: int, *, loopback: bool = False, leads: bool = False, warned: bool = False, devices: str = ""
) -> None:
    """Offer UCX in the TLS connections of this process, in which a worker is made afterwards.

    `host_frames` is the least size of arrays in host memory that are sent over UCX as well; 0: none. For the others see `Ucx`.
    """
    WorkerComm.host_frames = host_frames
    Ucx.loopback, Ucx.leads, Ucx.warned, Ucx.devices = loopback, leads, warned, devices
    registry.backends["tls"] = _Backend()


class WorkerComm(TLS):
    """One end of such a connection."""

    #: See `use_ucx_between_workers`.
    host_frames = 0
    _tls_has_ended = False

    def __init__(self, stream: Any, local_addr: str, peer_addr: str, deserialize: bool = True) -> None:
        super().__init__(stream, local_addr, peer_addr, deserialize)
        #: Whether both ends have offered UCX and have not agreed yet.
        self._offered = False
        self._agreeing: asyncio.Task[None] | None = None
        self._endpoint: Endpoint | None = None
        stream.set_close_callback(functools.partial(_on_close, weakref.ref(self)))

    def handshake_info(self) -> dict[str, Any]:
        """The offer of this end in Dask's handshake: UCX belongs to one event loop, the worker's."""
        offer = {OFFER: [VERSION, *_place()]} if Ucx.is_of_this_loop() else {}
        return {**super().handshake_info(), **offer}

    def handshake_configuration(self, local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """Called by distributed, at either end, with both offers."""
        match local.get(OFFER), remote.get(OFFER):
            case [version, here, leads_there], [other_version, there, leads_here] if version == other_version:
                self._offered = here == there or bool(leads_there and leads_here)
        configuration: dict[str, Any] = super().handshake_configuration(local, remote)
        return configuration

    async def read(self, deserializers: Any = None) -> Any:
        """Receive a message."""
        if self._offered:
            await self._agree_once()
        if (endpoint := self._endpoint) is None:
            return await super().read(deserializers)
        inner = await super().read()
        with self._aborting_on_error():
            header = inner.header
            large = [
                # not the memoryview itself: see `Endpoint`
                endpoint.ucx.device_array(size) if on_device else host_array(size).obj
                for size, on_device in header["over_ucx"]
            ]
            if any(on_device for _, on_device in header["over_ucx"]):
                endpoint.ucx.synchronize()  # the arrays are there
            for frame in filter(nbytes, large):
                async with _time_for(frame):
                    await endpoint.receive(frame)
            over_ucx, over_tls = iter(large), iter(inner.frames)
            frames = [next(over_ucx if is_large else over_tls) for is_large in header["is_over_ucx"]]
            # GPU memory is not copied, so a thread for it would only cost its start.
            on_host = sum(nbytes(frame) for frame in frames if not _on_device(frame))
            return await from_frames(
                frames,
                deserialize=self._deserialize_messages,
                deserializers=SERIALIZERS if deserializers is None else deserializers,
                allow_offload=bool(OFFLOAD_THRESHOLD) and on_host > OFFLOAD_THRESHOLD,
            )

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Send a message; returns its bytes."""
        if self._offered:
            await self._agree_once()
        if (endpoint := self._endpoint) is None:
            size: int = await super().write(msg, serializers=serializers, on_error=on_error)
            return size
        frames = await to_frames(
            msg,
            serializers=SERIALIZERS if serializers is None else serializers,
            on_error=on_error,
            context={"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options},
        )
        is_over_ucx = [self._goes_over_ucx(frame) for frame in frames]
        over_ucx = [frame for frame, large in zip(frames, is_over_ucx, strict=True) if large]
        over_tls = [frame for frame, large in zip(frames, is_over_ucx, strict=True) if not large]
        header = {
            "is_over_ucx": bytes(is_over_ucx),
            "over_ucx": [(nbytes(frame), _on_device(frame)) for frame in over_ucx],
        }
        if any(map(_on_device, over_ucx)):
            endpoint.ucx.synchronize()  # the frames are complete
        await super().write(Serialized(header, over_tls))
        with self._aborting_on_error():
            for frame in filter(nbytes, over_ucx):
                async with _time_for(frame):
                    await endpoint.send(frame)
        return sum(map(nbytes, frames))

    def _goes_over_ucx(self, frame: Any) -> bool:
        """Whether a frame is in GPU memory, or a large NumPy array if the user has enabled that.

        Other buffers may determine how a message is deserialised, and only TLS authenticates data.
        """
        if _on_device(frame):
            return True  # even an empty one, of which only the header is sent: it is GPU memory at the other end, too
        buffer = frame.obj if isinstance(frame, memoryview) else frame
        return 0 < self.host_frames <= nbytes(frame) and type(buffer).__module__ == "numpy"

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """Close the connection if a message has not been transferred as a whole, since its state is unknown then."""
        try:
            yield
        except (UcxError, EOFError, TimeoutError) as error:
            self.abort()
            raise CommClosedError(f"in {self}: {error}") from error
        except BaseException:
            self.abort()
            raise

    async def _agree_once(self) -> None:
        """Agree once, before the first message in either direction."""
        if self._agreeing is None:
            self._agreeing = asyncio.get_running_loop().create_task(self._agree())
        await asyncio.shield(self._agreeing)

    async def _agree(self) -> None:
        """Agree with the other end, which does the same, on an endpoint or on none."""
        with self._aborting_on_error():
            try:
                async with asyncio.timeout(UCX_AGREEMENT):
                    endpoint, reason = await self._make_endpoint()
            except TimeoutError:
                raise CommClosedError(f"in {self}: no agreement within {UCX_AGREEMENT:g} s") from None
        if endpoint is None:
            _warn_once(self.peer_address, reason)
        else:
            # From now on TLS carries our own messages. The messages in them are deserialised as configured.
            self._deserialize_messages, self.deserialize = self.deserialize, False
            self._endpoint = endpoint
            # Dask drops connections that the other end has closed, but does not close them.
            weakref.finalize(self, _abort_soon, asyncio.get_running_loop(), endpoint).atexit = False
            if self.closed():  # meanwhile
                self._abort_endpoint()
        self._offered = False

    async def _make_endpoint(self) -> tuple[Endpoint | None, str]:
        """The endpoint, or the reason why there is none."""
        own: dict[str, Any] = {"tag": secrets.randbits(64), "key": secrets.token_bytes(32), "address": b""}
        ucx: Ucx | None = None
        try:
            async with asyncio.timeout(UCX_START):
                ucx = await asyncio.shield(Ucx.begin())
            own["address"] = ucx.address
        except UcxError as error:
            own["reason"] = str(error)
        except TimeoutError:
            own["reason"] = f"UCX has not started within {UCX_START:g} s"
        await super().write(own)
        other = await super().read()
        if ucx is None or not other["address"]:
            return None, own.get("reason") or f"at the other end: {other.get('reason')}"
        endpoint, reason = await _connected(ucx, own, other)
        try:
            await super().write({"reason": reason})
            others_reason = (await super().read())["reason"]
            reason = reason or others_reason
        except BaseException:
            reason = "the connection was closed"
            raise
        finally:
            if reason and endpoint is not None:
                endpoint.abort()
        return (None, reason) if reason else (endpoint, "")

    def abort(self) -> None:
        """Close both at once."""
        self._abort_endpoint()
        super().abort()

    async def close(self) -> None:  # type: ignore[override]
        """Close both, TLS after its pending data."""
        await super().close()
        self._abort_endpoint()

    def closed(self) -> bool:
        """Whether it has ended."""
        return self._tls_has_ended or bool(super().closed())

    def _abort_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.abort()


async def _connected(ucx: Ucx, own: dict[str, Any], other: dict[str, Any]) -> tuple[Endpoint | None, str]:
    """An endpoint to the other end, with proofs of both ends, or the reason why there is none."""
    endpoint: Endpoint | None = None
    try:
        endpoint = await ucx.connect(other["address"], send_tag=other["tag"], receive_tag=own["tag"])
        async with asyncio.timeout(UCX_PROOF):
            await _authenticate(endpoint, own, other)
        return endpoint, ""
    except BaseException as error:
        if endpoint is not None:
            endpoint.abort()
        if not isinstance(error, (UcxError, TimeoutError)):
            raise
        return None, str(error) or f"no answer over UCX within {UCX_PROOF:g} s"


async def _authenticate(endpoint: Endpoint, own: dict[str, Any], other: dict[str, Any]) -> None:
    """Prove that the endpoint leads to the other end of the TLS connection, over which both ends have sent their keys."""
    key = b"".join(sorted((own["key"], other["key"])))
    received = bytearray(PROOF_SIZE)
    await asyncio.gather(endpoint.send(_proof(key, own["key"])), endpoint.receive(received))
    if not hmac.compare_digest(received, _proof(key, other["key"])):
        raise UcxError("the data over UCX are not from this peer")


def _place() -> tuple[str, bool]:
    """The node of this process, and whether UCX may lead from it to others."""
    return f"{socket.gethostname()} {_boot_id()}", Ucx.leads


def _proof(key: bytes, sender: bytes) -> bytes:
    return hmac.digest(key, b"dask-gpu-mpi ucx proof" + sender, "sha512")


def _time_for(frame: Any) -> asyncio.Timeout:
    return asyncio.timeout(FRAME_TIMEOUT + nbytes(frame) / SLOWEST)


def _on_device(frame: Any) -> bool:
    return hasattr(frame, "__cuda_array_interface__")


def _abort_soon(loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> None:
    """Abort in the event loop: Python collects garbage in any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(endpoint.abort)


def _on_close(reference: weakref.ref[WorkerComm]) -> None:
    """The TLS connection has ended, at either end."""
    if (comm := reference()) is not None:
        comm._tls_has_ended = True
        comm._abort_endpoint()


def _warn_once(peer: str, reason: str) -> None:
    host = peer.rpartition(":")[0].partition("://")[2]
    if host not in without_ucx:
        without_ucx[host] = reason
        say(
            f"warning: {socket.gethostname()}: transfers between it and {host} go over TLS, not UCX: "
            f"{reason}. Fix: run with UCX_LOG_LEVEL=info to see what UCX needs (docs/transports.md), or choose --protocol tls"
        )


class _Connector(TLSConnector):
    comm_class = WorkerComm


class _Listener(TLSListener):
    comm_class = WorkerComm


class _Backend(TLSBackend):
    def get_connector(self) -> _Connector:
        return _Connector()

    def get_listener(self, *args: Any, **kwargs: Any) -> _Listener:
        return _Listener(*args, **kwargs)
