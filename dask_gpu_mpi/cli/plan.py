"""``plan`` under a launcher: the plan of this very allocation, without starting anything."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from dask_gpu_mpi.agent.worker_options import check_options_of
from dask_gpu_mpi.base.failures import Failure, one_report
from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, StartupError
from dask_gpu_mpi.machine.gpu_probe import Look, hangs, nvml_grace, start_look
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.inventory import Inventory, take_inventory
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import load_mpi
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.options.table import Options
from dask_gpu_mpi.plan.device_memory import device_options
from dask_gpu_mpi.plan.from_options import placement_options
from dask_gpu_mpi.plan.planner import Plan, make_plan

__all__ = ["plan_of_allocation"]


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
    timeout = options.startup_timeout if isinstance(options, Options) else 60.0
    deadline = time.monotonic() + timeout
    look = _start_look() if isinstance(options, Options) and options.worker_kind != "cpu" else None
    mailbox = Mailbox(load_mpi(os.environ, socket.gethostname()).COMM_WORLD, socket.gethostname(), deadline)
    answer: Inventory | Failure
    try:
        if isinstance(options, InputError):
            raise options
        launcher_check.cross_check(
            os.environ,
            mailbox.size,
            mailbox.rank,
            socket.gethostname(),
            library=load_mpi().Get_library_version(),
        )
        if options.worker_options:
            check_options_of(options.worker_class, options.worker_options, where="worker_options")
        answer = take_inventory(
            mailbox.rank,
            mailbox.size,
            os.environ,
            device_options=device_options(options),
            look_for_gpus=options.worker_kind != "cpu",
            seen=_see(look, mailbox, deadline - nvml_grace(timeout)),
        )
    except DaskGpuMpiError as error:
        answer = Failure.of(error)
    mailbox.send(0, "inventory", (socket.gethostname(), answer))
    if mailbox.rank == 0:
        return _plan(mailbox, options, deadline)
    while time.monotonic() < deadline + 5:
        for mail in mailbox.receive():
            if isinstance(mail.payload, Failure):
                raise mail.payload.error(reported=True)
            return None
        time.sleep(0.02)
    raise StartupError("rank 0 did not answer within startup_timeout")


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
    answers: dict[int, Inventory | Failure] = {}
    hosts: dict[int, str] = {}
    try:
        while len(answers) < mailbox.size:
            if time.monotonic() > deadline:
                late = [rank for rank in range(mailbox.size) if rank not in answers]
                raise StartupError(
                    f"{ranks_text(late)} of {mailbox.size} did not answer within startup_timeout"
                )
            for mail in mailbox.receive():
                hosts[mail.source], answers[mail.source] = mail.payload
            time.sleep(0.01)
        bad = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if bad:
            raise one_report(bad, hosts, mailbox.size).error(reported=False)
        assert isinstance(options, Options)  # else all answers are failures
        inventories = [answer for answer in answers.values() if isinstance(answer, Inventory)]
        plan = make_plan(inventories, placement_options(options))
    except DaskGpuMpiError as error:
        say(f"error: {error}")
        mailbox.send_all("fail", Failure.of(error))
        mailbox.flush(2.0)
        error.reported = True
        raise
    mailbox.send_all("done")
    mailbox.flush(2.0)
    return plan
