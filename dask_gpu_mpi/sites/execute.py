"""Runs the commands of a job of ``launch`` one after the other: copies of the environment, the check, the job; then a requeue.

Each command is a launcher, or the ranks. `Runner` passes signals on to it and returns its exit code. `run_launch`, which
`dask_gpu_mpi.cli.launch` calls, has the order of the commands, and the meaning of the mark that a job leaves.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dask_gpu_mpi.base.files import is_ours, make_folder, remove
from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import GONE, LOST, say
from dask_gpu_mpi.errors import InputError, LauncherError
from dask_gpu_mpi.sites.batch import output_of
from dask_gpu_mpi.sites.command import Launch
from dask_gpu_mpi.sites.local import Ranks

#: Signals that end a job, and those before its walltime.
END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WARNING = (signal.SIGUSR1, signal.SIGUSR2)
#: Seconds before a signal is forwarded. `timeout` and batch systems signal the whole group: the launcher, too, is then ending.
FORWARD_DELAY = 1.0
#: The same if the batch system signals the ranks itself: somebody may have signalled this process alone. By default Slurm kills
#: the ranks of a job after 30 seconds.
BATCH_DELAY = 35.0
#: Seconds to wait after the launcher's end. `scancel` makes the ranks write their checkpoint and end, and its signal may arrive
#: here after that; a cancelled job must not be requeued. Processes on other nodes clean up in this time, before Slurm kills them.
LINGER = 3.0
#: Seconds between two checks of the child, in case a SIGCHLD is lost.
POLL = 1.0
#: Seconds for the launcher to end after a job that has lost ranks: it may wait for a rank that is stopped, or whose node is gone.
LAUNCHER_GRACE = 30.0
#: Seconds for the copies of an environment, and for their removal.
STAGE_TIMEOUT, UNSTAGE_TIMEOUT = 1800.0, 120.0
#: si_code of signals of the kernel (sigaction(2)). With SIGINT: a terminal's Ctrl-C, which the whole foreground group gets.
SI_KERNEL = 0x80


class Runner:
    """Runs children in the foreground, one after the other, and forwards signals to them.

    After ``__enter__``, signals are blocked until `run` or `listen` fetches them, so that none is lost.
    """

    def __init__(
        self, *, end_delay: float, forwards_warning: bool, is_ended: Callable[[], bool] = lambda: False
    ) -> None:
        #: Seconds before SIGTERM and SIGINT are forwarded.
        self.end_delay = end_delay
        #: Whether the batch system ends the job by itself.
        self._is_ended = is_ended
        self._warning = forwards_warning
        # a signal that is ignored, as by nohup, stays ignored
        ignored = {number for number in (*END, *WARNING) if signal.getsignal(number) is signal.SIG_IGN}
        self._signals = {*END, *WARNING, signal.SIGCHLD} - ignored
        self._mask: set[int] = set()
        #: The signal that ended the job; None: there was none.
        self.stopped_by: signal.Signals | None = None

    def __enter__(self) -> Runner:
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, self._signals))
        return self

    def __exit__(self, *_: object) -> None:
        while self._signals and signal.sigtimedwait(self._signals, 0.0) is not None:
            pass  # a late signal must not end this process, which has the job's exit code
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def run(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        preflight: bool = False,
        mark: str = "",
        within: float = math.inf,
        ranks: int = 0,
        tolerant: bool = False,
    ) -> int:
        """Run a command until it has ended; return its exit code, 128 + N after signal N.

        `ranks`: start it that many times, as the ranks of a job without a launcher (`Ranks`, also `tolerant`).

        The preflight gets no standard input, which belongs to the script, and no signal before the walltime, which would end it.
        After `within` seconds it is ended.
        A job that has lost ranks writes its exit code to the file `mark`; `LAUNCHER_GRACE` seconds later the launcher is killed.
        """
        child = self._start(command, environ, ranks=ranks, tolerant=tolerant, has_input=not preflight)
        # when the child gets the signal that ends the job, when it is told to end, and when it is killed
        forward_at, end_at, kill_at = math.inf, time.monotonic() + within, math.inf
        while child.poll() is None:
            now = time.monotonic()
            if now > end_at:
                say(
                    f"error: launch: --stage: did not end within {within:.0f} s. Fix: find the node that hangs, and start "
                    "without it"
                )
                child.terminate()
                end_at, kill_at = math.inf, now + LAUNCHER_GRACE
            elif now > kill_at:
                child.kill()  # the batch system ends the remaining processes
            elif mark and kill_at == math.inf and (ended := _read_mark(mark)) and ended.code is not None:
                kill_at = now + LAUNCHER_GRACE
            if now >= forward_at:
                forward_at = math.inf
                self._end(child)
            got = signal.sigtimedwait(self._signals, min(POLL, max(0.0, forward_at - now)))
            if got is None or got.si_signo == signal.SIGCHLD:
                continue
            if got.si_signo in WARNING:
                if self._warning and not preflight:
                    child.send_signal(got.si_signo)
            elif self._note_end(got) and forward_at == math.inf:
                forward_at = time.monotonic() + self.end_delay
        self.listen(0.0)  # the launcher may have ended before the signal was fetched
        code = child.returncode or 0
        code = 128 - code if code < 0 else code
        # the child got SIGTERM for it
        by_interrupt = self.stopped_by == signal.SIGINT and code == 128 + signal.SIGTERM
        return 128 + signal.SIGINT if by_interrupt else code

    def _start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        ranks: int,
        tolerant: bool,
        has_input: bool,
    ) -> subprocess.Popen[bytes] | Ranks:
        parent = os.getpid()

        def prepare() -> None:
            # after a SIGTERM, the launcher cleans up its nodes; ranks may be unable to handle one
            die_with_parent(parent, signal.SIGKILL if ranks else signal.SIGTERM)
            if ranks:  # of a terminal that is closed: it is sent to all processes, and this one then ends the ranks in order
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

        try:
            if ranks:
                return Ranks(command, environ, ranks, tolerant=tolerant, has_input=has_input, prepare=prepare)
            stdin = None if has_input else subprocess.DEVNULL
            return subprocess.Popen(command, env=dict(environ), stdin=stdin, preexec_fn=prepare)
        except OSError as error:
            if not ranks:
                fix = "load the module of another MPI library, or set --launcher"
            elif error.errno in (errno.EAGAIN, errno.EMFILE, errno.ENFILE):
                fix = "raise the limits of processes and open files (ulimit -u, -n)"
            else:
                fix = "install it, or load its module"
            raise LauncherError(f"launch: could not start {command[0]}: {error.strerror}", fix=fix) from None

    def _note_end(self, got: signal.struct_siginfo) -> bool:
        """Note a signal that ends the job; whether the child needs it: a terminal's Ctrl-C has reached the child as well."""
        if self.stopped_by is None:
            say(f"launch: {signal.Signals(got.si_signo).name} received; ending the job")
        self.stopped_by = signal.Signals(got.si_signo)
        return not (self.stopped_by == signal.SIGINT and got.si_code == SI_KERNEL)

    def _end(self, child: subprocess.Popen[bytes] | Ranks) -> None:
        """Forward the end of the job, unless the batch system ends it by itself."""
        if self.end_delay >= BATCH_DELAY:
            if self._is_ended():
                return
            say(f"launch: the ranks have not ended after {BATCH_DELAY:.0f} s; the launcher gets SIGTERM")
        # Of two SIGINT MPICH's and Slurm's launchers kill the ranks at the second one.
        child.send_signal(signal.SIGTERM)

    def listen(self, seconds: float) -> None:
        """Wait for a signal that ends the job, unless there was one."""
        ends = self._signals & set(END)
        if self.stopped_by is None and ends and (got := signal.sigtimedwait(ends, seconds)) is not None:
            self.stopped_by = signal.Signals(got.si_signo)


def run_launch(
    launch: Launch, environ: Mapping[str, str], requeue: Callable[[], int | None] | None = None
) -> int:
    """Run the preflight, if there is one, and the job; return the exit code of the one that ended last.

    `requeue` is called after exit code 75, or after the loss of a node that the job needs, unless the job was cancelled. It
    returns the exit code; None: 75.
    """
    child = {name: value for name, value in {**environ, **launch.environment}.items() if value is not None}
    _prepare_folders(launch)
    with (
        Runner(
            end_delay=FORWARD_DELAY if launch.forwards_end else BATCH_DELAY,
            forwards_warning=not launch.batch.signals_all,
            is_ended=lambda: launch.batch.ends_job(environ, output_of),
        ) as runner,
        contextlib.ExitStack() as stack,
    ):
        if launch.mark:
            stack.callback(_remove_mark, launch.mark)
        if launch.stage:
            stack.callback(_unstage, runner, launch, child)
        if (code := _before_the_job(runner, launch, child)) is not None:
            return code
        code = runner.run(launch.run, child, mark=launch.mark, ranks=launch.ranks, tolerant=launch.tolerant)
        mark = _read_mark(launch.mark)
        lost_node = _lost_node(launch.mark, code, mark)
        if mark is not None and mark.code is not None:
            code = mark.code
        has_lost = bool(lost_node) or (mark is not None and mark.word == LOST)
        requeues = requeue is not None and (code == 75 or has_lost)
        if requeues:
            runner.listen(LINGER)
        if runner.stopped_by is not None:
            if launch.lingers:
                time.sleep(LINGER)
            return 128 + runner.stopped_by if code == 75 and launch.batch.requeues_by_code else code
        if lost_node:
            fix = "" if requeues else ", and submit the job again"
            if launch.lingers:  # Slurm sends a signal without B: to the daemons of mpirun, which it kills
                fix += "; after a signal before the walltime, request it as --signal=B:USR1@SECONDS"
            say(
                f"error: launch: {launch.run[0]} exited with code {code}, but the job has not completed ({lost_node}); a node "
                f"was lost. Fix: look for the node in the batch system's log{fix}"
            )
        if requeue is not None and requeues:
            answer = requeue()  # the batch system may end this run by a signal at once
            if answer is None and launch.batch.keeps_number:  # it uses the copies again
                stack.pop_all()
            return 75 if answer is None else answer
    return 1 if lost_node else code


def _before_the_job(runner: Runner, launch: Launch, environ: Mapping[str, str]) -> int | None:
    """Make the copies and run the check, if there are any; the exit code if the job must not start."""
    began = time.monotonic()
    for command in (launch.stage, launch.check):
        if not command:
            continue
        within, ranks = (STAGE_TIMEOUT, 0) if command is launch.stage else (math.inf, launch.ranks)
        code = runner.run(command, environ, preflight=True, within=within, ranks=ranks)
        if runner.stopped_by is not None:  # launchers have different codes then (Hydra: 15)
            return 128 + runner.stopped_by
        if code:
            return code
        if command is launch.stage:
            say(f"launch: --stage: each node has its copy after {time.monotonic() - began:.1f} s")
    return None


def _prepare_folders(launch: Launch) -> None:
    """Make the folder that a container or a profiler needs, and remove a mark that a run before a requeue has left."""
    try:
        if launch.make:
            closes = launch.private and not os.path.lexists(launch.make)
            make_folder(launch.make)
            if closes:
                os.chmod(launch.make, 0o700)
        if launch.mark:
            remove(launch.mark)
    except OSError as error:
        raise InputError(
            f"launch: the folder of the log files can't be written ({error.filename}: {error.strerror})",
            fix="another by --log-directory or DGM_LOGS",
        ) from None


def _unstage(runner: Runner, launch: Launch, environ: Mapping[str, str]) -> None:
    runner.end_delay = math.inf  # a second signal must not stop it half way
    if code := runner.run(launch.unstage, environ, preflight=True, within=UNSTAGE_TIMEOUT):
        say(
            f"launch: --stage: {launch.unstage[-1]} may be left on nodes ({launch.unstage[0]} exited with code {code}). Fix: "
            "remove it there"
        )


# The mark: a file that the job writes at its end, if the launcher's exit code does not prove that it has completed.


class Mark(NamedTuple):
    """The text of a mark."""

    #: The exit code of a job that has lost ranks; None: it has lost none, or has no code.
    code: int | None
    #: `LOST`, `GONE`, or empty.
    word: str


def _read_mark(file: str) -> Mark | None:
    """The mark in this file.

    None: the mark is missing, or another user's, which could otherwise make a lost job count as completed.
    """
    with (
        contextlib.suppress(OSError),
        open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as opened,
    ):
        status = os.fstat(opened.fileno())
        if stat.S_ISREG(status.st_mode) and is_ours(status):
            words = opened.read(100).split()
            code = int(words[0]) & 0xFF if words and words[0].isdecimal() else None
            return Mark(code, words[-1] if words and words[-1] in (LOST, GONE) else "")
    return None


def _remove_mark(file: str) -> None:
    """Remove the mark of this run, which nobody reads any more."""
    with contextlib.suppress(OSError):
        if _read_mark(file) is not None:
            remove(file)


def _lost_node(file: str, code: int, mark: Mark | None) -> str:
    """The sign that a node was lost, although the launcher's exit code does not tell; empty: none, or the job has no mark.

    ssh ends with 255 if its connection is lost, and so does mpirun; Open MPI's also with 0, and never after a killed rank.
    """
    if file and mark is None and code in (0, 255):
        return f"{file} is missing, or another user's"
    return "a rank has gone before its end" if mark is not None and code == 0 and mark.word == GONE else ""
