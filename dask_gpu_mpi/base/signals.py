"""Handlers of signals that are never in force in a process that other code has forked; and how processes end with each other.

A forked process inherits a handler in Python, which does harm there: it would write the checkpoint again, and
`Process.terminate` would end nothing. The handler also loses signals: Python's own code in the child drops a signal that
arrives before that code has run, while the default action would have ended the child, and a `multiprocessing.Pool` then waits
forever for a process that it has terminated. So signals are blocked around each fork, and before they are unblocked the child
gets the actions that it would have without this package.

`install` sets a handler. The end of this module is about other processes: one that ends with its parent, descriptors of others,
and programs that tasks or the script have left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.base.streams import say

if TYPE_CHECKING:
    from psutil import Process

#: The signal that a process sends itself when its cluster is lost: by default it has no effect, and hardly any program uses it.
LOST = signal.SIGURG
#: All signals that this package handles.
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, LOST)
#: Bytes for a ``struct sigaction``: more than any system has (glibc: 152).
_SIGACTION = 1024
#: Seconds after which a signal that came during a fork is sent again.
_AGAIN = 0.05

_libc = ctypes.CDLL(None)
_c_handler = ctypes.pythonapi.PyOS_getsig
_c_handler.restype = ctypes.c_void_p

#: The process that has the handlers: set by `install`, and in a child that keeps them.
_owner = os.getpid()
#: Whether the process that is forked now keeps the handlers: set by `kept`.
_kept = False
#: Signal masks of the threads that are forking, by thread: from `_block` to `_unblock`, or `_leave_to_child` in the child.
_masks: dict[int, Any] = {}
#: Whether `install` has registered these three functions with `os.register_at_fork`.
_registered = False
#: Python's own handler in C, which calls those in Python: found by `install`.
_pythons_handler: int | None = None


class Action:  # not a dataclass: their import would delay an agent's first moments
    """The action of a signal in this process."""

    def __init__(self, number: int, handler: Any, raw: bytes | None = None, in_c: bool = False) -> None:
        self.number = number
        #: The result of ``signal.getsignal``: None for a handler in C that is older than Python's.
        self.handler = handler
        #: The kernel's ``struct sigaction``: `faulthandler.register` bypasses the module `signal`. None: Python's for `handler`.
        self.raw = raw
        #: Whether the handler in force is unknown to Python.
        self.in_c = in_c

    @classmethod
    def now(cls, number: int) -> Action:
        """The action of the signal now."""
        raw = ctypes.create_string_buffer(_SIGACTION)
        _libc.sigaction(number, None, raw)
        handler = signal.getsignal(number)
        in_c = not callable(handler) and (_c_handler(number) or signal.SIG_DFL) not in (
            signal.SIG_DFL,
            signal.SIG_IGN,
        )
        return cls(number, handler, raw.raw, in_c)

    def restore(self) -> None:
        """Set this action again; in the main thread."""
        signal.signal(self.number, signal.SIG_DFL if self.handler is None else self.handler)
        if self.raw is not None:
            _libc.sigaction(self.number, self.raw, None)


class Handler:
    """A handler of this package: `call` as for ``signal.signal``."""

    def __init__(self, call: Callable[[int, FrameType | None], Any], before: Action) -> None:
        self._call = call
        #: The action before, and in children.
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal, unless it is for another process or comes during a fork."""
        if os.getpid() != _owner:
            # A library has forked this process without Python, or a handler of the script that replaced this one has called it.
            self.first().restore()
            os.kill(os.getpid(), number)
        elif threading.get_ident() in _masks:
            # Python drops exceptions that are raised inside os.fork, where its hooks run.
            again = threading.Timer(_AGAIN, os.kill, (_owner, number))
            again.daemon = True
            again.start()
        else:
            self._call(number, frame)

    def first(self) -> Action:
        """The action before the first handler of this package; they form a chain, and this is its last."""
        before = self.before
        while isinstance(before.handler, Handler):
            before = before.handler.before
        return before


def install(
    number: int, call: Callable[[int, FrameType | None], Any], *, before: Action | None = None
) -> Action:
    """Handle a signal, one of `NUMBERS`, in this process but not in its children; in the main thread.

    Returns the action before, to restore it. `before` is the action in children, by default the same.
    """
    global _owner, _pythons_handler, _registered
    _owner = os.getpid()
    if not _registered:
        _registered = True
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_leave_to_child)
    now = Action.now(number)
    signal.signal(number, Handler(call, before or now))
    _pythons_handler = _c_handler(number)
    return now


def ignore_signals() -> None:
    """Leave SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 to the rank, which decides when the job ends.

    A signal to every process of a job (from slurmstepd, a terminal) reaches the rank too. These are handlers, not SIG_IGN:
    children of tasks would inherit that, and a `multiprocessing.Pool` could no longer end its processes. Fork server,
    workers and scheduler keep the handlers (`kept`). Processes that tasks fork have the default actions.
    """
    for number in NUMBERS:
        install(number, lambda *_: None, before=Action(number, signal.SIG_DFL))


def is_ours(number: int) -> bool:
    """Whether the signal has a handler of this package, which no handler in C has replaced without Python's knowledge."""
    return isinstance(signal.getsignal(number), Handler) and _c_handler(number) == _pythons_handler


def action_before(number: int) -> Action:
    """The action before the first handler of this package."""
    handler = signal.getsignal(number)
    return handler.first() if isinstance(handler, Handler) else Action(number, handler)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Let processes that are forked in this context keep the handlers, but not their children."""
    global _kept
    _kept = True
    try:
        yield
    finally:
        _kept = False


def _block() -> None:
    """Before a fork: hold back the signals of this thread."""
    thread = threading.get_ident()
    _masks[thread] = ()  # from here on the handlers do nothing in this thread
    _masks[thread] = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)


def _unblock() -> None:
    """After a fork, in the parent: let them come."""
    thread = threading.get_ident()
    if thread in _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks[thread])
        # No call after this one: Python checks for signals after calls, and the next check must be in os.fork itself.
        del _masks[thread]


def _leave_to_child() -> None:
    """After a fork, in the child: set the actions that it is to have, and let the signals come."""
    global _kept, _owner
    mask = _masks.get(threading.get_ident(), ())
    _masks.clear()
    if _kept:
        _kept = False
        _owner = os.getpid()
    else:
        for number in NUMBERS:
            if is_ours(number):
                action_before(number).restore()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Signals:
    """Remembers the first of SIGTERM and SIGINT between `take` and `give_back`; only the main thread can take them."""

    def __init__(self) -> None:
        #: Number of the signal, and when it came (``time.monotonic()``).
        self.got: tuple[int, float] | None = None
        self._before: list[Action] = []

    def take(self) -> None:
        """Begin."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before.append(install(number, self._remember))
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # A warning of the batch system that goes to all ranks; the script, on the client rank, is who can use it.
            # Ignored, and not handled: agents inherit it until they have handlers. One in C (faulthandler's) does no harm.
            action = Action.now(number)
            if not action.in_c:
                self._before.append(action)
                signal.signal(number, signal.SIG_IGN)

    def give_back(self) -> None:
        """End: the handlers are what they were."""
        while self._before:
            self._before.pop().restore()

    def _remember(self, number: int, _: Any) -> None:
        if self.got is None:
            self.got = (number, time.monotonic())


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore SIGTERM, SIGINT and the signals that the script handles: a part of the end with its own deadline, for which other
    ranks wait. An alarm of the script may be left, or a user may interrupt twice.
    """
    before: list[Action] = []
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in (*NUMBERS, signal.SIGALRM) if callable(signal.getsignal(number))]
        before = [install(number, lambda *_: None) for number in {signal.SIGTERM, signal.SIGINT, *heard}]
    try:
        yield
    finally:
        for action in before:
            action.restore()


def python_ends() -> bool:
    """Whether the main program has ended: Python waits for threads, or calls what `atexit` has, and drops what they raise."""
    return getattr(threading, "_SHUTTING_DOWN", False) or not threading.main_thread().is_alive()


def insist_on(code: int) -> None:
    """End this process with that exit code although Python ends already, with another one; the last call counts."""
    # Called last of all that Python and MPI do, in this order: the last one registered first.
    with contextlib.suppress(AttributeError):
        _libc.__cxa_atexit(_libc._exit, ctypes.c_void_p(code), None)
        _libc.__cxa_atexit(_libc.fflush, None, None)


# A process that ends with its parent, and descriptors of other processes.

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Of Linux, on all architectures but two that nobody uses for this. Python has no function for the first if it was built for an
#: older Linux, as conda's, and none for the second.
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that made it ends; `parent` 0 ends that.

    If the process `parent` has ended already, this process exits here.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number if parent else 0)
    if parent and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended, in place of the system's first process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_process(pid: int) -> int:
    """A descriptor of a process, which is readable once that has ended; OSError: it has ended, or this kernel has none."""
    return _system_call(_PIDFD_OPEN, pid, 0)


def descriptor_of(process: int, number: int) -> int:
    """A copy of another process's descriptor, by that process's own (`open_process`); OSError: it is closed, or not allowed."""
    return _system_call(_PIDFD_GETFD, process, number, 0)


def sockets_of(pid: int) -> Iterator[tuple[int, int]]:
    """The sockets that a process has open: its descriptor of each, and the socket's number (inode).

    OSError: the process has ended, or is another user's.
    """
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed by now
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                yield int(name), int(link[len("socket:[") : -1])


def _system_call(number: int, *arguments: int) -> int:
    """A call of the kernel for which Python has no function; OSError: it has failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    found: int = libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


# Programs that tasks or the script have left behind.

#: Variable in the environment of the script's children: process id of the rank.
RANK_PID = "DGM_RANK_PID"
#: Seconds between two checks of programs that are about to end.
_CHECK = 0.05


def end_programs(
    find: Callable[[], list[Process]], of: str, than: str, *, leaving: float, killing: float
) -> None:
    """End the programs that `find` finds, and print which they were: those that `of` had started, and that run longer `than`.

    They have `leaving` seconds to end by themselves, as the processes of a pool do, and `killing` seconds after SIGTERM.
    """
    import psutil

    from dask_gpu_mpi.base.text import counted, listed, printable

    _wait_for_end(find, leaving)
    names: list[str] = []
    for each in find():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            name = printable(each.name())  # a process may give itself any name
            each.terminate()
            names.append(f"{name} (process {each.pid})")
    if not names:
        return
    say(
        f"warning: {counted(len(names), 'program')} that {of} had started on {os.uname().nodename} had not ended with {than}, "
        f"and got SIGTERM: {listed(names)}. Fix: wait for them in {of}, or end them"
    )
    _wait_for_end(find, killing)
    for each in find():
        with contextlib.suppress(psutil.Error):
            each.kill()


def _wait_for_end(find: Callable[[], list[Process]], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and find():
        time.sleep(_CHECK)


def running(processes: Sequence[Process]) -> list[Process]:
    """Those of the processes that run, and all below them."""
    import psutil

    if not processes:  # as at the end of most jobs: nothing of the node needs to be inspected
        return []
    below: dict[int, list[int]] = {}
    for pid in psutil.pids():  # all of the node once: `Process.children` inspects them for each process
        with contextlib.suppress(OSError):  # it has ended
            state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split(maxsplit=2)[:2]
            if state not in (b"Z", b"X"):  # it has ended, and its parent has not noticed
                below.setdefault(int(parent), []).append(pid)
    alive = {pid for pids in below.values() for pid in pids}
    found: dict[int, Process] = {}
    waiting = [each for each in processes if each.pid in alive and each.is_running()]
    while waiting:
        each = waiting.pop()
        if each.pid in found:
            continue
        found[each.pid] = each
        for pid in below.get(each.pid, ()):
            with contextlib.suppress(psutil.Error):
                waiting.append(psutil.Process(pid))
    return [*found.values()]


def rank_that_started(pid: int) -> str | None:
    """The process id of the rank whose script has started this process, as text; empty: another process has; None: unknown.

    It is unknown of another user's process, and of one without an environment: it was started so, or shows a title in that place.
    Of a process that is just ending the text is empty, too.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except ProcessLookupError:  # it is ending
        return ""
    except OSError:
        return None
    values = (each.partition(b"=")[2] for each in variables if each.startswith(f"{RANK_PID}=".encode()))
    return os.fsdecode(next(values, b"")) if any(b"=" in each for each in variables) else None
