"""``plan``: the plan of this very allocation, without starting anything, or of a hypothetical one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from dask_gpu_mpi.agent.worker_options import check_options_of
from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, StartupError
from dask_gpu_mpi.machine.gpu_probe import Look, hangs, nvml_grace, start_look
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.gathering import FLUSH, gather, report_to_all
from dask_gpu_mpi.mpi.library import load_mpi
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.plan.from_options import placement_options
from dask_gpu_mpi.plan.plan import Plan
from dask_gpu_mpi.plan.planner import make_plan

__all__ = ["plan_of_allocation", "plan_of_inventories"]

#: Seconds for the ranks to answer, where the options that set a limit can't be read.
WITHOUT_OPTIONS = 60.0


def plan_of_inventories(options: Options | InputError, inventories: Sequence[Inventory]) -> Plan:
    """The plan of an allocation that is not there.

    Raises
    ------
    InputError
        The options can't be used, or fit no plan.
    """
    options = _usable(options)
    _check_worker_options(options)
    asked = device_options(options)
    return make_plan(
        [replace(inventory, device_options=asked) for inventory in inventories], placement_options(options)
    )


def plan_of_allocation(options: Options | InputError) -> Plan | None:
    """Gather what every rank sees and plan on rank 0.

    Returns
    -------
    Plan or None
        None on the other ranks.

    Raises
    ------
    DaskGpuMpiError
        What a rank found wrong; the same on all ranks, printed already.
    """
    timeout = options.startup_timeout if isinstance(options, Options) else WITHOUT_OPTIONS
    deadline = time.monotonic() + timeout
    look = _start_look() if isinstance(options, Options) and options.worker_kind != "cpu" else None
    host = socket.gethostname()
    mailbox = Mailbox(load_mpi(os.environ, host).COMM_WORLD, host, deadline)
    answer: Inventory | Failure
    try:
        answer = _inspect(_usable(options), mailbox, look, deadline - nvml_grace(timeout))
    except DaskGpuMpiError as error:
        answer = Failure.of(error)
    mailbox.send(0, "inventory", (host, answer))
    if mailbox.rank == 0:
        return _plan(mailbox, options, deadline)
    while time.monotonic() < deadline + 5:
        for mail in mailbox.receive():
            if isinstance(mail.payload, Failure):
                raise mail.payload.error(reported=True)
            return None
        time.sleep(0.02)
    raise StartupError("rank 0 did not answer within startup_timeout")


def _usable(options: Options | InputError) -> Options:
    if isinstance(options, InputError):
        raise options
    return options


def _check_worker_options(options: Options) -> None:
    """What the agents of a job would find wrong: here there are none."""
    if options.worker_options:
        check_options_of(options.worker_class, options.worker_options, where="worker_options")


def _inspect(options: Options, mailbox: Mailbox, look: Look | None, deadline: float) -> Inventory:
    """What this rank sees."""
    library = load_mpi().Get_library_version()
    launcher_check.cross_check(os.environ, mailbox.size, mailbox.rank, socket.gethostname(), library=library)
    _check_worker_options(options)
    return take_inventory(
        mailbox.rank,
        mailbox.size,
        os.environ,
        device_options=device_options(options),
        look_for_gpus=look is not None,
        seen=_see(look, mailbox, deadline),
    )


def _start_look() -> Look:
    """Have a process look at the GPUs; before MPI is loaded, which has threads."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # no process can be had: the look has no answer, and says so
        start_look(write, close=[read], rank=os.getpid())
    return Look(read)


def _see(look: Look | None, mailbox: Mailbox, deadline: float) -> tuple[Gpu, ...] | None:
    """What that process has seen of the GPUs; None where nobody was to look."""
    if look is None:
        return None
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
    try:
        answers = gather(mailbox, "inventory", range(mailbox.size), deadline)
        silent = [rank for rank in range(mailbox.size) if rank not in answers]
        if silent:
            raise StartupError(
                f"{ranks_text(silent)} of {mailbox.size} did not answer within startup_timeout"
            )
        found = [answer for _, answer in answers.values()]
        bad = {rank: answer for rank, (_, answer) in answers.items() if isinstance(answer, Failure)}
        if bad:
            hosts = {rank: host for rank, (host, _) in answers.items()}
            raise one_report(bad, hosts, mailbox.size).error(reported=False)
        plan = make_plan(found, placement_options(_usable(options)))
    except DaskGpuMpiError as error:
        report_to_all(mailbox, error)
        raise
    mailbox.send_all("done")
    mailbox.flush(FLUSH)
    return plan
