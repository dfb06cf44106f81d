"""One member of a gang: the task that runs in its worker, and its environment variables."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Worker, get_worker, rpc
from distributed.comm.addressing import get_address_host

from dask_gpu_mpi.base.streams import environment
from dask_gpu_mpi.base.text import one_line
from dask_gpu_mpi.errors import GangCancelledError
from dask_gpu_mpi.gang.group import CANCEL, LEAVE, Call, Group, Reply, no_result, packed
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES
from dask_gpu_mpi.network.interfaces import as_host, list_interfaces

#: Seconds after the scheduler's own limit in which its answer must arrive. A busy scheduler is late, as it is for Dask's own
#: messages; one that is lost closes its connections, which ends the wait.
ANSWER_SLACK = 600.0
#: The first exchange of a gang, before those of the function: the port of rank 0; and seconds for it.
PORT: dict[str, Any] = {"number": -1, "operation": "start"}
AGREEING = 60.0
#: The events that end the members in this process, by gang.
_cancelled: dict[str, threading.Event] = {}


def variables_of(group: Group, nodes: int, interface: str | None) -> dict[str, str]:
    """The variables by which torch, JAX and NCCL find each other: torchrun's and JAX's names, and the cluster's interface."""
    variables = {
        "RANK": group.rank,
        "WORLD_SIZE": group.size,
        "LOCAL_RANK": group.local_rank,
        "LOCAL_WORLD_SIZE": group.local_size,
        "GROUP_RANK": group.node_rank,
        "GROUP_WORLD_SIZE": nodes,
        "NODE_RANK": group.node_rank,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "JAX_COORDINATOR_ADDRESS": f"{as_host(group.master_addr)}:{group.master_port}",
        "JAX_NUM_PROCESSES": group.size,
        "JAX_PROCESS_ID": group.rank,
    }
    if interface is not None:
        # "=": exactly this name; otherwise NCCL uses any that begins with it
        defaults = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        # the user's own values stay
        variables |= {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in variables.items()}


def device_of(resources: Mapping[str, float], environ: Mapping[str, str]) -> int | None:
    """The index of a worker's GPU in its process: the first visible one, or None without a GPU.

    Workers of this package have a resource for it; those of another cluster have a GPU if one is visible.

    >>> device_of({"GPU": 1}, {}), device_of({"CPU": 4}, {"CUDA_VISIBLE_DEVICES": "0"}), device_of({}, {})
    (0, None, None)
    """
    if "GPU" in resources or "CPU" in resources:
        return 0 if resources.get("GPU") else None
    return 0 if environ.get(VISIBLE_DEVICES, "").strip() not in ("", "-1", "NoDevFiles", "void") else None


def run_member(gang: str, rank: int, start_timeout: float, fn: Callable[..., Any], *args: Any) -> Any:
    """Wait for the other members, run `fn`, report its end, and return its result.

    An exception of `fn` is sent to the scheduler, which knows those of the other members, and not raised; the result is
    `no_result` then.
    """
    worker: Any = get_worker()
    call = _Calls(worker, gang, rank)
    cancelled = _cancelled[gang] = threading.Event()

    def failed(error: BaseException) -> None:
        text, data = packed(error)
        call(Call.FAIL, 0.0, {"text": f"raised {one_line(text)}", "error": data})

    worker.stream_handlers[CANCEL] = _on_cancel
    try:
        host = get_address_host(worker.address)
        joined = call(Call.JOIN, start_timeout, {"host": socket.gethostname()})
        if joined["state"] != Reply.GOOD:
            return no_result(gang)
        # as late as possible: another program may use the port first
        port = str(free_port(host)).encode() if rank == 0 else b""
        agreed = call(Call.EXCHANGE, AGREEING, {**PORT, "part": port, "timeout": AGREEING})
        ended, spoilt, result = False, False, None
        if agreed["state"] == Reply.GOOD:
            group = Group(
                rank,
                tuple(joined["hosts"]),
                call,
                cancelled,
                place=joined["place"],
                device=device_of(worker.state.total_resources, os.environ),
                master=(joined["master_addr"], int(agreed["parts"][0])),
            )
            with environment(variables_of(group, joined["place"]["nodes"], interface_of(host))):
                ended, result = _run(fn, group, args, failed)
            spoilt = torch_is_initialised()
        elif agreed["state"] == Reply.LATE:
            missing = ", ".join(map(str, agreed["missing"]))
            failed(TimeoutError(f"start: rank(s) {missing} have not come within {AGREEING:g} s"))
        # In the stream by which Dask reports the task's result next, so that the scheduler has it before the result.
        worker.log_event(LEAVE, {"gang": gang, "rank": rank, "spoilt": spoilt})
        return result if ended else no_result(gang)
    finally:
        call.close()
        _cancelled.pop(gang, None)


def _run(
    fn: Callable[..., Any], group: Group, args: tuple[Any, ...], failed: Callable[[BaseException], None]
) -> tuple[bool, Any]:
    """Whether the function has returned, and its result; its exception is passed to `failed`."""
    try:
        return True, fn(group, *args)
    except BaseException as error:  # includes SystemExit: a member that exits has failed
        if not (isinstance(error, GangCancelledError) and group.cancelled):  # then another member has failed
            # Report it at once: afterwards the function's objects are freed, and an object that waits for other members may hang.
            failed(error)
        return False, None


def torch_is_initialised() -> bool:
    """Whether this process is in a process group of PyTorch, so that a later gang can't make another.

    The members of a failed gang can't leave it: with NCCL ``destroy_process_group()`` waits for all of them.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())
    except AttributeError:  # its import has failed half way
        return True


def _on_cancel(gang: str) -> None:
    """Handle the scheduler's message, in the worker's event loop."""
    if (event := _cancelled.get(gang)) is not None:
        event.set()


class _Calls:
    """Calls of a member to the scheduler, from the task's thread."""

    def __init__(self, worker: Worker, gang: str, rank: int) -> None:
        self._loop: Any = worker.loop
        self._sender: dict[str, Any] = {"gang": gang, "rank": rank}
        # `Worker.scheduler` would not wait long enough for a connection to a busy scheduler
        self._scheduler = rpc(
            worker.scheduler.address, timeout=ANSWER_SLACK, connection_args=worker.connection_args
        )

    def __call__(self, operation: str, timeout: float, content: dict[str, Any]) -> dict[str, Any]:
        """Call, and wait for the answer; `timeout` is the scheduler's own limit."""
        limit = timeout + ANSWER_SLACK

        async def answer() -> Any:
            async with asyncio.timeout(limit):
                return await getattr(self._scheduler, operation)(**self._sender, **content)

        answering = asyncio.run_coroutine_threadsafe(answer(), self._loop.asyncio_loop)
        result: dict[str, Any] = answering.result(limit + ANSWER_SLACK)
        return result

    def close(self) -> None:
        """Close the connections."""
        self._loop.add_callback(self._scheduler.close_rpc)


def free_port(host: str) -> int:
    """A TCP port that is free now at this address of this node."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def interface_of(host: str) -> str | None:
    """The network interface of this node with this address."""
    return next((found.name for found in list_interfaces() if found.address == host), None)
