"""``check`` under a launcher: every rank observes and tests, rank 0 applies the rules; all deadlines together stay below 20 s.

    STEP, OBSERVED from every rank -> plan, addresses -> LISTEN to the scheduler's rank and one of each node
    -> LISTENING from these -> TEST to all -> TESTED from all -> the report -> DONE to all

What is wrong with a rank is a finding, not an error: only options that can't be used end the check at once.
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
from dask_gpu_mpi.sites.launchers import library_name

from .coordinator import OBSERVE_TIMEOUT, REPORT_TIMEOUT, CheckCoordinator
from .observations import without_rank
from .rank import PAYLOADS, CheckingRank
from .report import Evidence, Finding, Report, split_fix
from .rules import apply_rules

__all__ = ["run_check"]

#: Seconds after `REPORT_TIMEOUT` until rank 0 reports that it hangs itself, and until the other ranks stop waiting for it.
HEAD_GRACE, GRACE = 3.0, 4.0
DEADLINE_NAME = f"the deadline of check ({OBSERVE_TIMEOUT:g} s)"


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
        Of the job, or why they can't be used.
    kernel, expect_gpus, has_client
        As in `CheckCoordinator`.
    show : callable
        Takes the report, on one rank.

    Returns
    -------
    int
        The exit code, the same on all ranks.

    Raises
    ------
    DaskGpuMpiError
        The options can't be used, on all ranks; or rank 0 does not respond.
    """
    environ, host = os.environ, socket.gethostname()
    for name in ("psutil", "pynvml"):
        # Before the deadlines begin, which are not to depend on the file system that these modules come from.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try:
        mpi = load_mpi(environ, host)
    except InputError as error:
        _refuse(options, error.reported)
        return _alone(error, error.reported, show)
    started = time.monotonic()
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    library = mpi.Get_library_version()
    problems: list[tuple[str, str]] = []
    try:
        launcher_check.cross_check(environ, size, rank, host, library=library)
    except LauncherError as error:
        if size == 1:  # each rank is a world of its own
            silent = launcher_check.wait_for_rank_0_to_report(environ)
            _refuse(options, silent)
            return _alone(error, silent, show)
        problems.append(("launcher", without_rank(str(error))))
    try:
        mailbox = Mailbox(world, host, started + OBSERVE_TIMEOUT, PAYLOADS, deadline_name=DEADLINE_NAME)
    except StartupError as error:
        if rank == 0:
            _alone(error, False, show)
            error.reported = True
        report_error(error)
        abort(error.exit_code)
        raise
    me = CheckingRank(mailbox, environ, host)
    # The other ranks can't know which step rank 0 was at, and a world of one rank has no other.
    watch = _watch(me, started, show) if rank == 0 else None
    try:
        me.observe(options, library_name(library), problems)
        if rank == 0:
            return CheckCoordinator(mailbox, me, options, kernel, expect_gpus, has_client, started).run(show)
        return me.serve(started + REPORT_TIMEOUT + GRACE)
    finally:
        if watch is not None:
            watch.cancel()
        me.close()


def _refuse(options: Options | InputError, silent: bool) -> None:
    """Options that can't be used come first, also on a rank that has no connection to the others."""
    if isinstance(options, InputError):
        options.reported = silent
        raise options


def _alone(error: DaskGpuMpiError, silent: bool, show: Callable[[Report], None]) -> int:
    """The report of a rank that has no connection to the others."""
    if not silent:
        finding = Finding("error", "launcher", *split_fix(str(error), "see above"))
        show(Report(Evidence(size=0), (finding,)))
    return 1


def _watch(me: CheckingRank, started: float, show: Callable[[Report], None]) -> threading.Timer:
    """Report and end the job if this rank has not ended in time: its main thread may hang in NVML or a file system."""

    def end() -> None:
        evidence = Evidence(me.size, steps={me.rank: (me.host, me.step)}, silent=(me.rank,))
        report = Report(evidence, apply_rules(evidence), time.monotonic() - started)
        try:
            show(report)
            flush()
            if me.size > 1:
                abort(report.exit_code)
        finally:  # MPICH may return from the abort, and exit handlers may hang
            os._exit(report.exit_code)

    timer = threading.Timer(started + REPORT_TIMEOUT + HEAD_GRACE - time.monotonic(), end)
    timer.daemon = True
    timer.start()
    return timer
