"""``check`` under a launcher: every rank looks and tests, rank 0 judges; all deadlines together stay below 20 s.

    DOING, FACTS from every rank -> plan, addresses -> LISTEN to the scheduler's rank -> LISTENING from it -> TEST to all
    -> TESTED from all -> the report -> DONE to all

What is wrong with a rank is a finding, not an error: only options that can't be used end it at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, LauncherError, StartupError
from dask_gpu_mpi.mpi import launcher_check
from dask_gpu_mpi.mpi.library import abort, load_mpi
from dask_gpu_mpi.mpi.mailbox import Mailbox
from dask_gpu_mpi.options.model import Options

from .coordinator import LOOK, REPORT, CheckCoordinator
from .rank import CheckingRank
from .report import Evidence, Finding, Report
from .rules import judge, split_remedy

__all__ = ["run_check"]

#: Seconds beyond the report after which rank 0 says itself that it hangs, and the others no longer believe that it lives.
HEAD_GRACE, GRACE = 3.0, 4.0
LIMIT = f"the {LOOK:g} s that check gives it"


def run_check(
    options: Options | InputError,
    *,
    kernel: bool,
    show: Callable[[Report], None],
    expect_gpus: int | None = None,
    has_client: bool = True,
) -> int:
    """Check this allocation.

    Parameters
    ----------
    options : Options or InputError
        What the user asked for, or why that can't be.
    kernel : bool
        Whether to run a kernel on each GPU.
    show : callable
        Is given the report, on one rank.
    expect_gpus : int, optional
        GPUs that each host is to have; what the batch system says, unless given.
    has_client : bool
        Whether the job is to run a script.

    Returns
    -------
    int
        The exit code, the same on all ranks.

    Raises
    ------
    DaskGpuMpiError
        The options can't be used, on all ranks; or rank 0 is gone.
    """
    environ, host = os.environ, socket.gethostname()
    for name in ("psutil", "pynvml"):
        # A part of the interpreters' start, so that the deadlines do not depend on the file system that they come from.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try:
        mpi = load_mpi(environ, host)
    except InputError as error:
        return _alone(error, error.reported, show)
    started = time.monotonic()
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    library = mpi.Get_library_version()
    problems: list[tuple[str, str]] = []
    try:
        launcher_check.cross_check(environ, size, rank, host, library=library)
    except LauncherError as error:
        if size == 1:  # ranks that can't tell each other
            return _alone(error, launcher_check.wait_for_rank_0_to_report(environ), show)
        # Which rank this is, is said elsewhere.
        problems.append(("launcher", str(error).partition(f" on {host}: ")[2] or str(error)))
    try:
        mailbox = Mailbox(world, host, started + LOOK, limit=LIMIT)
    except StartupError as error:
        if rank == 0:
            _alone(error, False, show)
            error.reported = True
        report_error(error)
        abort(error.exit_code)
        raise
    me = CheckingRank(mailbox, environ, host)
    # Rank 0 watches the others, and nobody else can tell what it was doing; a world of one has nobody else at all.
    watch = _watch(me, started, show) if rank == 0 else None
    try:
        me.look(options, launcher_check.library_name(library), problems)
        if rank == 0:
            return CheckCoordinator(mailbox, me, options, kernel, expect_gpus, has_client, started).run(show)
        return me.until_told(started + REPORT + GRACE)
    finally:
        if watch is not None:
            watch.cancel()
        me.close()


def _alone(error: DaskGpuMpiError, silent: bool, show: Callable[[Report], None]) -> int:
    """The report of a rank that can't speak with the others."""
    if not silent:
        found, remedy = split_remedy(str(error), "see above")
        show(Report(Evidence(size=0), (Finding("error", "launcher", found, remedy),)))
    return 1


def _watch(me: CheckingRank, started: float, show: Callable[[Report], None]) -> threading.Timer:
    """End the job should this rank still be busy when all is to be over: its main thread may hang in NVML or a file system."""

    def end() -> None:
        evidence = Evidence(me.size, doing={me.rank: (me.host, me.doing)}, silent=(me.rank,))
        report = Report(evidence, judge(evidence), time.monotonic() - started)
        try:
            show(report)
            flush()
            if me.size > 1:
                abort(report.exit_code)
        finally:  # MPICH may come back from the abort, and no exit handler can be trusted to end
            os._exit(report.exit_code)

    timer = threading.Timer(started + REPORT + HEAD_GRACE - time.monotonic(), end)
    timer.daemon = True
    timer.start()
    return timer
