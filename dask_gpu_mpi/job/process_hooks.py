"""What a cluster changes in the process of its rank: standard streams, `sys.excepthook`, SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from dask_gpu_mpi.base.signals import LOST, Action, install, is_ours
from dask_gpu_mpi.base.streams import open_missing
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.program import run_script
from dask_gpu_mpi.mpi.finalize import finalize
from dask_gpu_mpi.mpi.signals import insist_on, python_ends

__all__ = ["handle_loss", "handle_signal", "on_signal", "prepare"]


def prepare(label: Callable[[], str | None]) -> None:
    """Let an uncaught error of ours end the script with its line and its exit code, and SIGTERM run the script's `finally`.

    Parameters
    ----------
    label : callable
        What to print before the traceback of any other error; None: nothing.
    """
    open_missing()
    outcome.install(label)
    # Without a handler Python dies of it with no `finally` at all.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        handle_signal(signal.SIGTERM)


def handle_signal(number: int) -> None:
    """Have a signal end the script by an exception in the main thread (`on_signal`), which alone can set that."""
    if threading.current_thread() is threading.main_thread():
        install(number, on_signal)


def handle_loss() -> None:
    """Have a lost cluster end the script by an exception in the main thread, whatever the script does of SIGTERM."""
    before = Action.now(LOST)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and (is_ours(LOST) or (before.handler is signal.SIG_DFL and not before.in_c)):
        install(LOST, _on_loss)


def _on_loss(number: int, frame: FrameType | None) -> None:
    from dask_gpu_mpi.job.session import current_session

    session = current_session()
    if session is not None and session._member.ending.lost is not None:  # else somebody else has sent it
        on_signal(number, frame)


def on_signal(number: int, frame: FrameType | None) -> None:
    """End the script: SystemExit, or what its session raises."""
    # Slurm sends TERM twice at once, and then KILL some seconds later: the script's `finally` has until then.
    # Not SIG_IGN, which children inherit: a Pool in `finally`, or in a callback, could not end its processes.
    install(number, lambda *_: None)
    if _script_has_ended(frame):
        return
    from dask_gpu_mpi.job.session import current_session

    session = current_session()
    if session is not None:
        ends = python_ends()
        if ends and session._has_finished():
            return
        try:
            session._on_signal(number, frame)
        except BaseException as error:
            if ends:  # while it waits for the script's threads, or in its `atexit`: Python drops what is raised there
                insist_on(outcome.code_of_exception(error))
            raise
    code = outcome.code_of_signal(number)
    outcome.note(outcome.outcome_of_signal(number, code))
    raise SystemExit(code)


def _script_has_ended(frame: FrameType | None) -> bool:
    """Whether the signal came between the script's own end, by an exception, say, and ours: there is nothing to raise into."""
    from dask_gpu_mpi.job.session import Session
    from dask_gpu_mpi.mpi.mailbox import Mailbox

    ours = {
        function.__code__
        for function in (outcome.ExceptHook.__call__, Session._finish, Mailbox.close, finalize)
    }
    if frame is not None and frame.f_code is run_script.__code__:
        return True  # not in the script, but in what reports its exception
    while frame is not None:
        if frame.f_code in ours:
            return True
        frame = frame.f_back
    return False
