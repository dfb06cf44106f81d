"""What the command ``plan`` does: the plan of this allocation, or of a hypothetical one, without starting anything."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, StartupError
from dask_gpu_mpi.machine.gpu_probe import Look, hangs, nvml_grace, start_look
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.gathering import FAIL, FLUSH, gather, report_to_all
from dask_gpu_mpi.mpi.library import load_mpi
from dask_gpu_mpi.mpi.mailbox import Mail, Mailbox
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.planner import make_plan
from dask_gpu_mpi.workers.worker_options import read_worker_options

from .options import usable

__all__ = ["PAYLOADS", "plan_of_allocation", "plan_of_inventories"]

#: Seconds for the ranks to respond, where the options with the start-up timeout can't be used.
WITHOUT_OPTIONS = 60.0
_NO_RESPONSE = (
    "no response within startup_timeout (--startup-timeout). Fix: inspect that node (a rank that is stopped, a slow file "
    "system?), or set a longer one"
)
#: Seconds after the start-up timeout until a rank stops waiting for rank 0, which may have started later.
GRACE = 5.0


class Kind(StrEnum):
    """Kinds of messages between the ranks; a failure goes as `mpi.gathering.FAIL`."""

    #: Every rank to rank 0: ``(host, Inventory or Failure, sizes of device memory)``.
    INVENTORY = "inventory"
    #: Rank 0 to all: the plan is made.
    DONE = "done"


#: The type of what each kind carries.
PAYLOADS: Mapping[str, Any] = {
    Kind.INVENTORY: tuple[str, Inventory | Failure, dict[str, Any]],
    Kind.DONE: None,
    FAIL: Failure,
}


def plan_of_inventories(options: Options, inventories: Sequence[Inventory]) -> Plan:
    """The plan of a hypothetical allocation.

    Raises
    ------
    InputError
        No plan fits the options.
    """
    _check_worker_options(options)
    return make_plan(inventories, options)


def plan_of_allocation(options: Options | InputError) -> Plan | None:
    """The plan on rank 0, from the inventories of all ranks; None on the other ranks.

    Raises
    ------
    DaskGpuMpiError
        What a rank found wrong; the same on all ranks, printed already.
    """
    timeout = options.startup_timeout if isinstance(options, Options) else WITHOUT_OPTIONS
    deadline = time.monotonic() + timeout
    look = _start_look() if isinstance(options, Options) and options.worker_kind != "cpu" else None
    host = socket.gethostname()
    try:
        world = load_mpi(os.environ, host).COMM_WORLD
    except InputError as no_mpi:
        if isinstance(options, InputError):  # the first to be put right
            options.reported = no_mpi.reported
            raise options from None
        raise
    mailbox = Mailbox(world, host, deadline, PAYLOADS)
    answer: Inventory | Failure
    try:
        answer = _inspect(usable(options), mailbox, look, deadline - nvml_grace(timeout))
    except DaskGpuMpiError as error:
        answer = Failure.of(error)
    sizes = device_options(options) if isinstance(options, Options) else {}
    mailbox.send(0, Kind.INVENTORY, (host, answer, sizes))
    if mailbox.rank == 0:
        return _plan(mailbox, options, deadline)
    if not gather(mailbox, Kind.DONE, [0], deadline + GRACE, on_other=_raise_failure):
        raise StartupError(f"rank 0: {_NO_RESPONSE}")
    return None


def _raise_failure(mail: Mail) -> None:
    raise mail.payload.error(reported=True)


def _check_worker_options(options: Options) -> None:
    """What the agents of a job would check: `plan` starts none."""
    if options.worker_options:
        read_worker_options(options.worker_class, options.worker_options, where="worker_options")


def _inspect(options: Options, mailbox: Mailbox, look: Look | None, deadline: float) -> Inventory:
    """The inventory of this rank."""
    library = load_mpi().Get_library_version()
    launcher_check.cross_check(os.environ, mailbox.size, mailbox.rank, socket.gethostname(), library=library)
    _check_worker_options(options)
    return take_inventory(
        mailbox.rank,
        mailbox.size,
        os.environ,
        look_for_gpus=look is not None,
        seen=None if look is None else _gpus(look, mailbox, deadline),
    )


def _start_look() -> Look:
    """Have a process ask NVML for the GPUs; before MPI is loaded, which has threads."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # without that process `Look.gpus` raises
        start_look(write, close=[read], rank=os.getpid())
    return Look(read)


def _gpus(look: Look, mailbox: Mailbox, deadline: float) -> tuple[Gpu, ...]:
    """The GPUs that this rank sees."""
    where = f"rank {mailbox.rank} of {mailbox.size} on {socket.gethostname()}"
    try:
        seen = look.gpus(max(deadline - time.monotonic(), 0.1))
    except (InputError, StartupError) as error:
        raise type(error)(f"{where}: {error}") from error
    finally:
        look.close()
    if seen is None:
        raise hangs(where)
    return seen


def _plan(mailbox: Mailbox, options: Options | InputError, deadline: float) -> Plan:
    """Rank 0: gather the inventories, make the plan, and let the other ranks go."""
    try:
        answers = gather(mailbox, Kind.INVENTORY, range(mailbox.size), deadline)
        if silent := [rank for rank in range(mailbox.size) if rank not in answers]:
            raise StartupError(f"{ranks_text(silent)} of {mailbox.size}: {_NO_RESPONSE}")
        failures = {rank: answer for rank, (_, answer, _) in answers.items() if isinstance(answer, Failure)}
        if failures:
            hosts = {rank: host for rank, (host, *_) in answers.items()}
            raise one_report(failures, hosts, mailbox.size).error(reported=False)
        inventories = [inventory for _, inventory, _ in answers.values()]
        sizes = {rank: asked for rank, (_, _, asked) in answers.items()}
        plan = make_plan(inventories, usable(options), device_options=sizes)
    except DaskGpuMpiError as error:
        report_to_all(mailbox, error)
        raise
    mailbox.send_all(Kind.DONE)
    mailbox.flush(FLUSH)
    return plan
