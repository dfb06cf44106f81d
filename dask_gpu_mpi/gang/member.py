"""One member of a gang: the task that runs in its worker."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distributed import Worker, get_worker
from distributed.comm.addressing import get_address_host
from distributed.core import error_message, send_recv

from dask_gpu_mpi.base.text import text_of
from dask_gpu_mpi.errors import GangCancelledError
from dask_gpu_mpi.gang.gang import Member
from dask_gpu_mpi.gang.group import CANCEL, LEAVE, Group, State, no_result
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES
from dask_gpu_mpi.network.interfaces import list_interfaces

if TYPE_CHECKING:
    from dask_gpu_mpi.gang.gang import Member


# The environment variables of a member: those by which torch, JAX and NCCL find each other.

#: Of these the user's own values stay.
DEFAULTS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def variables_of(
    member: Member, size: int, master_addr: str, master_port: int, interface: str | None
) -> dict[str, str]:
    """What a member's environment has while it runs: torchrun's names, JAX's, and the cluster's interface."""
    host = f"[{master_addr}]" if ":" in master_addr else master_addr
    variables = {
        "RANK": member.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": member.local_rank,
        "LOCAL_WORLD_SIZE": member.local_size,
        "GROUP_RANK": member.node_rank,
        "GROUP_WORLD_SIZE": member.nodes,
        "NODE_RANK": member.node_rank,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "JAX_COORDINATOR_ADDRESS": f"{host}:{master_port}",
        "JAX_NUM_PROCESSES": size,
        "JAX_PROCESS_ID": member.rank,
    }
    if interface is not None:
        # "=": this very name, where NCCL would take any that begins with it
        variables |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    return {name: str(value) for name, value in variables.items()}


@contextmanager
def applied(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process, and restore what was there before."""
    new = {name: value for name, value in variables.items() if name not in DEFAULTS or name not in os.environ}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def device_of(resources: Mapping[str, float], environ: Mapping[str, str]) -> int | None:
    """The index by which a worker's process knows its own GPU: its first visible one, or None without a GPU.

    Workers of this package have a resource that tells; those of another cluster have a GPU if they are shown one.

    >>> device_of({"GPU": 1}, {}), device_of({"CPU": 4}, {"CUDA_VISIBLE_DEVICES": "0"}), device_of({}, {})
    (0, None, None)
    """
    if "GPU" in resources or "CPU" in resources:
        return 0 if resources.get("GPU") else None
    return 0 if environ.get(VISIBLE_DEVICES, "").strip() not in ("", "-1", "NoDevFiles", "void") else None


#: Seconds beyond those that the scheduler itself waits, until its answer must be here. One that is busy is late, as it is for
#: Dask's own messages; one that is lost closes its connections, and the wait ends then.
ANSWER_SLACK = 600.0
#: The first exchange of a gang, before those of the function: the port of rank 0; and seconds for it.
PORT: dict[str, Any] = {"number": -1, "operation": "start"}
AGREEING = 60.0
#: The events that end the members in this process, by gang.
_cancelled: dict[str, threading.Event] = {}


def run_member(
    gang: str, member: Member, size: int, start_timeout: float, fn: Callable[..., Any], *args: Any
) -> Any:
    """Wait for the other members, run `fn`, and report how that went; returns what it returned.

    What `fn` raises goes to the scheduler, which compares it with what other members have met, and not into Dask's state of
    tasks: `no_result` is returned then.
    """
    worker: Any = get_worker()
    call = _Calls(worker, gang, member.rank)
    cancelled = _cancelled[gang] = threading.Event()

    def failed(error: BaseException) -> None:
        call("failed", 0.0, {"failure": _as_data(error)})

    worker.stream_handlers[CANCEL] = _on_cancel
    try:
        host = get_address_host(worker.address)
        joined = call("join", start_timeout, {"host": socket.gethostname()})
        if joined["state"] != State.GOOD:
            return no_result(gang)
        # now, and not before the others are there: until its use another program may take the port
        port = str(free_port(host)).encode() if member.rank == 0 else b""
        agreed = call("exchange", AGREEING, {**PORT, "part": port, "timeout": AGREEING})
        ended, spoilt, result = False, False, None
        if agreed["state"] == State.GOOD:
            hosts, master = tuple(joined["hosts"]), (str(joined["master_addr"]), int(agreed["parts"][0]))
            device = device_of(worker.state.total_resources, os.environ)
            group = Group(member, hosts, master, device, call, cancelled)
            with applied(variables_of(member, size, *master, interface_of(host))):
                ended, result = _run(fn, group, args, failed)
            spoilt = torch_is_initialised()
        elif agreed["state"] == State.LATE:
            missing = ", ".join(map(str, agreed["missing"]))
            failed(TimeoutError(f"start: rank(s) {missing} have not come within {AGREEING:g} s"))
        call.leave(spoilt=spoilt)
        return result if ended else no_result(gang)
    finally:
        _cancelled.pop(gang, None)


def _run(
    fn: Callable[..., Any], group: Group, args: tuple[Any, ...], failed: Callable[[BaseException], None]
) -> tuple[bool, Any]:
    """Whether the function has returned, and the result; what goes wrong is reported by `failed`."""
    try:
        return True, fn(group, *args)
    # SystemExit as well: a member that ends is one that has failed
    except BaseException as error:
        if not (
            isinstance(error, GangCancelledError) and group.cancelled
        ):  # which is not this member's failure
            # Now: afterwards what the function had is freed, and what waits for other members in its end may hang this one
            failed(error)
        return False, None


def torch_is_initialised() -> bool:
    """Whether this process is a member of a process group of PyTorch: a later gang can't make another.

    Where a gang has failed, its members can't leave the group: with NCCL ``destroy_process_group()`` waits for all of them.
    """
    if (distributed := sys.modules.get("torch.distributed")) is None:
        return False
    try:
        return bool(distributed.is_available() and distributed.is_initialized())
    except Exception:  # half imported, say: who knows
        return True


def _as_data(error: BaseException) -> dict[str, Any]:
    try:
        message = error_message(error)
    except Exception:  # Dask asks for its text, which the user's class may not be able to give
        instead = RuntimeError(f"{type(error).__name__} {text_of(error)}".strip())
        message = error_message(instead.with_traceback(error.__traceback__))
    kept = ("exception", "traceback", "exception_text", "traceback_text")
    return {key: message[key] for key in kept}  # type: ignore[literal-required]


def _on_cancel(gang: str) -> None:
    """From the scheduler, in the worker's event loop."""
    if (event := _cancelled.get(gang)) is not None:
        event.set()


class _Calls:
    """Calls of a member to the scheduler, from the task's thread, over the worker's own connections."""

    def __init__(self, worker: Worker, gang: str, rank: int) -> None:
        self._worker: Any = worker
        self._who: dict[str, Any] = {"gang": gang, "rank": rank}

    def __call__(self, name: str, timeout: float, content: dict[str, Any]) -> dict[str, Any]:
        """Call, and wait; `timeout` is what the scheduler itself keeps to."""
        pool, address = self._worker.rpc, self._worker.scheduler.address
        limit = timeout + ANSWER_SLACK

        async def answer() -> Any:
            async with asyncio.timeout(limit):
                # not by `Worker.scheduler`: to connect to a scheduler that is busy may take longer than Dask waits
                comm = await pool.connect(address, timeout=limit)
                try:
                    return await send_recv(comm, op=f"gang_{name}", **self._who, **content)
                finally:
                    pool.reuse(address, comm)

        loop = self._worker.loop.asyncio_loop
        result: dict[str, Any] = asyncio.run_coroutine_threadsafe(answer(), loop).result(limit + ANSWER_SLACK)
        return result

    def leave(self, *, spoilt: bool) -> None:
        """Report that the function has been left, in the stream in which Dask reports the task's result next.

        So it needs no answer: the scheduler has it before the result, however busy it is.
        """
        self._worker.loop.add_callback(
            self._worker.batched_send, {"op": LEAVE, **self._who, "spoilt": spoilt}
        )


def free_port(host: str) -> int:
    """A TCP port that is free at this address of this node now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def interface_of(host: str) -> str | None:
    """The network interface of this node that has this address."""
    return next((found.name for found in list_interfaces() if found.address == host), None)
