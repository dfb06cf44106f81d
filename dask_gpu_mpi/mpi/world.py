"""The transports by which ranks meet, once, at the start. Each is a `World`:

    MpiChild       MPI in a child process, which lives until the ranks have met, and passes on their packets
    LaunchedWorld  `launch`, which has started the ranks of one node, and passes on their packets
    OwnMpi         MPI of the script's process, if the user has made that an MPI process

`job.start` chooses one by `own_world` and `world_of`, `job.entering` waits for it, and `startup.meeting` sends messages over it.

A rank process is no MPI process, unless the user makes it one: nothing of MPI's, neither a port nor a thread, is in the process
that has the job's key and runs the script. The child has no secrets: it passes on what the ranks have sealed.

Never use mpi4py's methods in lower case, which unpickle messages: anyone who reaches a port of the MPI library could run code.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.frames import wait_until_read
from dask_gpu_mpi.base.plain_data import PlainDataError, from_plain, pack, unpack
from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.base.text import exit_text
from dask_gpu_mpi.base.timeouts import FAILED_GRACE, KILLING, READING
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, LauncherError, StartupError
from dask_gpu_mpi.sites.launchers import LOCAL, all_on_one_host, detect
from dask_gpu_mpi.sites.local import RANK, TRANSPORT

#: Signals of which the rank decides what they mean; a terminal and some launchers send them to its child as well.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: Bytes of the largest message, and of the buffers of a socket.
LARGEST, BUFFER = 1 << 17, 1 << 21
#: Seconds for the end of the job after a rank has asked for it, for ``MPI_Finalize``, and for the last messages over MPI.
ABORTING, FINALIZING, LEAVING = 10.0, 5.0, 2.0


class World:
    """The ranks that the launcher has started, and messages to them; this class is a rank that is alone."""

    #: The rank of this process, and the number of ranks; `size` is 0 until they are known.
    rank = 0
    size = 1
    #: Version text of the MPI library; empty: there is none.
    library = ""
    #: Whether the script's process is an MPI process (`OwnMpi`), and whether that may have ports.
    is_own = is_open = False
    #: Whether it is all ranks, and not those of a communicator of the script.
    is_whole = True

    def fileno(self) -> int | None:
        """The descriptor that is readable when a message may have come; None: there is none."""
        return None

    def send(self, rank: int, data: bytes) -> None:
        """Send a message; returns at once."""

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that are here now, each with the rank that has sent it. Raises a DaskGpuMpiError if there is no MPI."""
        return []

    def leave(self) -> None:
        """End this rank's part, when all ranks do so. May be called again."""

    def end(self) -> None:
        """Wait until nothing of this world is left in this job, before this rank ends; some seconds at most."""
        self.leave()

    def abort(self, code: int) -> None:
        """End all ranks, including those that don't answer; returns if that is not possible."""

    def before_end(self, call: Callable[[], None]) -> None:
        """Call this when the script ends its MPI, before other ranks are waited for."""

    def finalize(self) -> None:
        """End MPI of the script's process at its end, unless it is ended. A forked process has no part in it."""


class PacketWorld(World):
    """A world behind a socket to another process, which passes packets on: they begin with the number of the other rank.

    A packet with the number `TRANSPORT` is of that process itself.
    """

    def __init__(self, sock: socket.socket) -> None:
        #: None: the other process has ended, or this rank has left.
        self._socket: socket.socket | None = sock
        #: Packets for which the socket has no room yet.
        self._later: deque[bytes] = deque()
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)

    def fileno(self) -> int | None:
        """As in the base class."""
        return None if self._socket is None else self._socket.fileno()

    def send(self, rank: int, data: bytes) -> None:
        """As in the base class."""
        self._later.append(RANK.pack(rank) + data)
        self._post()

    def _post(self) -> None:
        # there is no room now, or the other side has ended, which `receive` notices
        with contextlib.suppress(OSError):
            while self._later and self._socket is not None:
                self._socket.send(self._later[0])
                self._later.popleft()

    def receive(self) -> list[tuple[int, bytes]]:
        """As in the base class."""
        self._post()
        found: list[tuple[int, bytes]] = []
        while self._socket is not None:
            try:
                packet = self._socket.recv(RANK.size + LARGEST)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self._close()
                self._on_end()
                break
            (source,) = RANK.unpack_from(packet)
            if source == TRANSPORT:
                self._on_transport(packet[RANK.size :])
                break  # who waits for the world is not there yet for the messages behind it
            found.append((source, packet[RANK.size :]))
        return found

    def _on_transport(self, data: bytes) -> None:
        """Handle a message of the other process itself."""

    def _on_end(self) -> None:
        """Handle the end of the other process."""

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def leave(self) -> None:
        """As in the base class."""
        deadline = time.monotonic() + 1.0
        while self._later and self._socket is not None and time.monotonic() < deadline:
            self._post()
            time.sleep(0.002)
        self._close()

    def abort(self, code: int) -> None:
        """As in the base class."""
        flush()
        if self._socket is None or not self.size:  # its process is inside ``MPI_Init``
            return
        self.send(TRANSPORT, RANK.pack(code))
        deadline = time.monotonic() + ABORTING
        with contextlib.suppress(DaskGpuMpiError):  # MPI ends, as it should
            while time.monotonic() < deadline and self._socket is not None:
                self.receive()
                time.sleep(0.02)


class LaunchedWorld(PacketWorld):
    """The ranks that `launch` has started on this node; it passes on their packets."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            super().__init__(socket.socket(fileno=os.dup(int(environ[LOCAL.mark]))))
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) not in (None, errno.EBADF, errno.ENOTSOCK):
                raise
            # the user's shell has the variables of a rank
            raise LauncherError(
                f"environment: {LOCAL.mark}={environ[LOCAL.mark]} is not a socket of `launch`",
                fix=f"unset {LOCAL.mark}",
            ) from None
        os.set_inheritable(self.fileno() or 0, False)
        with contextlib.suppress(OSError):
            os.close(int(environ[LOCAL.mark]))
        self.rank, self.size = int(environ[LOCAL.rank_variable]), int(environ[LOCAL.size_variables[0]])


# As the agent (`agent.handle`): no file is imported before the rank's path is set.
_BOOT = "import sys; sys.path[:] = sys.argv[3:]; from dask_gpu_mpi.mpi.world import main; main(*map(int, sys.argv[1:3]))"


class MpiChild(PacketWorld):
    """MPI in a child process, which lives until the ranks have met. `environ`: with the launcher's variables.

    `forks`: no code of the user has run in this process. Then the child is a fork of it, unless a library has started threads:
    a new Python would need 50 ms for its start and for what this process has imported already.
    """

    def __init__(self, environ: Mapping[str, str], path: list[str], *, forks: bool = False) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        self.rank, self.size = 0, 0
        # also in the child, until it ignores them
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            begin = self._fork if forks and len(os.listdir("/proc/self/task")) == 1 else self._run_python
            self._process = begin(theirs, environ, path)
        except OSError as error:
            self._close()
            raise StartupError(
                f"could not start the process for MPI ({error.strerror})",
                fix="allow more files, processes, memory (ulimit -a)",
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def _run_python(
        self, theirs: socket.socket, environ: Mapping[str, str], path: list[str]
    ) -> psutil.Process:
        """Start the child as a new Python."""
        os.set_inheritable(theirs.fileno(), True)
        return psutil.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), *path],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            cwd="/",  # MPI's libraries read files of the working directory, where others may have put some
            close_fds=False,  # some launchers give a rank a descriptor (PMI_FD)
        )

    def _fork(self, theirs: socket.socket, environ: Mapping[str, str], path: list[str]) -> psutil.Process:
        """Start the child as a fork of this process, with the same surroundings as a new Python."""
        rank = os.getpid()
        flush()
        if pid := os.fork():
            return psutil.Process(pid)
        code = 1
        try:
            self._close()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            os.chdir("/")
            os.environ.clear()
            os.environ.update(environ)
            sys.path[:] = path
            main(theirs.detach(), rank)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            flush()
            # C's exit, as at the end of a new Python: `atexit` has functions of the rank, and os._exit unloads no library
            ctypes.CDLL(None).exit(code)
        os._exit(code)

    def _on_transport(self, data: bytes) -> None:
        """The world, or the reason why there is none."""
        try:
            kind, payload = unpack(data)
            if kind == "world":
                self.rank, self.size, self.library = from_plain(tuple[int, int, str], payload)
                return
            failure: Failure = from_plain(Failure, payload)
        except (PlainDataError, ValueError, TypeError) as error:
            raise StartupError(
                f"the process for MPI sent something else ({error})",
                fix="the same version of dask_gpu_mpi in this environment and in PYTHONPATH",
            ) from None
        self._close()
        raise failure.error(reported=False)

    def _on_end(self) -> None:
        if not self.size:
            raise StartupError(
                f"MPI could not be initialized ({self._exit_text()})",
                fix="read its output above; use the launcher that belongs to the MPI library of mpi4py",
            )
        time.sleep(FAILED_GRACE)  # if another rank has aborted the job, the launcher ends this one meanwhile
        raise StartupError(
            f"MPI's process of rank {self.rank} on {socket.gethostname()} ended before all ranks had met ({self._exit_text()})",
            fix="read its output above; out of memory, most often",
            fatal=True,
        )

    def _exit_text(self) -> str:
        try:
            return exit_text(self._process.wait(2.0) or 0)
        except psutil.TimeoutExpired:
            return "its process closed its connection"

    def end(self) -> None:
        """As in the base class: a launcher counts a rank whose ``MPI_Finalize`` was cut off as failed."""
        self.leave()
        try:
            self._process.wait(FINALIZING)
        except psutil.TimeoutExpired:
            say(
                f"warning: rank {self.rank}: MPI_Finalize has not returned within {FINALIZING:g} s; its process is killed, which "
                "the launcher may count. Fix: srun, or another MPI library"
            )
            self._process.kill()
            with contextlib.suppress(psutil.TimeoutExpired):
                self._process.wait(KILLING)


class MpiWorld(World):
    """A communicator: messages over one tag, sent without waiting, received as they come, those of a rank in their order."""

    #: A number that no program uses by chance, below MPI's least bound.
    TAG = 32701

    def __init__(self, comm: Any, library: str) -> None:
        self.rank, self.size, self.library = comm.Get_rank(), comm.Get_size(), library
        self._comm = comm
        self._leaving: list[Any] = []
        #: Messages that are arriving: sender, request, buffer. MPI may use a buffer at any time, so none is freed before that.
        self._arriving: list[tuple[int, Any, bytearray]] = []
        #: Messages of others, which are never received.
        self._kept: list[Any] = []

    def send(self, rank: int, data: bytes) -> None:
        """As in the base class."""
        from mpi4py import MPI

        with self._returning(), contextlib.suppress(MPI.Exception):
            self._leaving.append(self._comm.Isend([data, MPI.BYTE], dest=rank, tag=self.TAG))

    def receive(self) -> list[tuple[int, bytes]]:
        """As in the base class."""
        from mpi4py import MPI

        status = MPI.Status()
        with self._returning(), contextlib.suppress(MPI.Exception):
            while message := self._comm.Improbe(source=MPI.ANY_SOURCE, tag=self.TAG, status=status):
                size = status.Get_count(MPI.BYTE)
                if 0 <= size <= LARGEST:
                    buffer = bytearray(size)
                    request = message.Irecv([buffer, MPI.BYTE])
                    self._arriving.append((status.Get_source(), request, buffer))
                else:
                    self._kept.append(message)
        arriving, self._arriving = self._arriving, []
        found: list[tuple[int, bytes]] = []
        late: set[int] = set()
        with self._returning():
            for source, request, buffer in arriving:
                if source not in late and self._done(request):
                    found.append((source, bytes(buffer)))
                else:
                    late.add(source)
                    self._arriving.append((source, request, buffer))
        return found

    def _done(self, request: Any) -> bool:
        from mpi4py import MPI

        try:
            return bool(request.Test())
        except MPI.Exception:
            return True

    @contextlib.contextmanager
    def _returning(self) -> Iterator[None]:
        """A context in which errors of MPI are exceptions: a script's communicator may abort."""
        from mpi4py import MPI

        before = self._comm.Get_errhandler()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            yield
        finally:
            self._comm.Set_errhandler(before)

    def has_sent(self) -> bool:
        """Whether all messages have left."""
        with self._returning():
            self._leaving = [request for request in self._leaving if not self._done(request)]
        return not self._leaving

    def leave(self) -> None:
        """Wait until all messages have left, some seconds at most."""
        deadline = time.monotonic() + LEAVING
        while not self.has_sent() and time.monotonic() < deadline:
            time.sleep(0.002)

    def abort(self, code: int) -> None:
        """End all ranks, after the launcher has read what this rank has printed: Hydra may lose it otherwise."""
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            flush()
            wait_until_read((1, 2), READING)
            MPI.COMM_WORLD.Abort(code)


class OwnMpi(MpiWorld):
    """MPI of the script's process: the user's (`comm`, or one that runs already), or one that its program goes on with."""

    is_own = True

    def __init__(self, comm: Any, library: str, *, is_open: bool = True, is_whole: bool = True) -> None:
        super().__init__(comm, library)
        self.is_open = is_open and self.size > 1
        self.is_whole = is_whole
        self._pid = os.getpid()

    def before_end(self, call: Callable[[], None]) -> None:
        """As in the base class: by an attribute of ``COMM_SELF``, whose deletion is the first that ``MPI_Finalize`` does."""
        from mpi4py import MPI

        keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: call())
        MPI.COMM_SELF.Set_attr(keyval, None)

    def finalize(self) -> None:
        """As in the base class."""
        from mpi4py import MPI

        # as mpi4py does, since the script's rank may call it itself: `library.finalize` would wait for a message of that rank
        if os.getpid() == self._pid and not MPI.Is_finalized():
            MPI.Finalize()


#: Whether MPI of this process was initialized here (`own_world`), for ranks of one host.
_has_no_port = False


def own_world(comm: Any, environ: Mapping[str, str], host: str, *, starts: bool) -> OwnMpi | None:
    """The world of MPI in this process; None: nothing requires it here.

    `comm`: the user's communicator. `starts`: the program continues as an MPI program, so MPI is initialized here if it is not.
    Raises a MpiMissingError, a LauncherError, or an InputError if the script has finalized MPI.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    runs = loaded is not None and loaded.Is_initialized()
    if not (runs or starts or comm is not None):
        return None
    if loaded is not None and loaded.Is_finalized():
        raise InputError(
            "the script called MPI.Finalize() before initialize() (expected: MPI is running or not yet initialized)",
            fix="call initialize() first",
        )
    from dask_gpu_mpi.mpi.library import load_mpi

    global _has_no_port
    mpi: Any = loaded if runs else load_mpi(environ, host, by_mpi4py=True)
    if not runs:
        _has_no_port = all_on_one_host(environ)  # `load_mpi` leaves it none there
    whole = comm is None
    if not (whole or (isinstance(comm, mpi.Comm) and comm != mpi.COMM_NULL)):
        raise InputError(
            f"initialize: comm={comm!r} is not a communicator with this rank",
            expected="an mpi4py.MPI.Intracomm",
            fix="call initialize() only on the ranks of a communicator, or without comm for all",
        )
    return OwnMpi(
        mpi.COMM_WORLD if whole else comm,
        mpi.Get_library_version(),
        is_open=not _has_no_port,
        is_whole=whole,
    )


def world_of(environ: Mapping[str, str], path: list[str], *, forks: bool = False) -> PacketWorld:
    """The world of a rank without MPI in its process: that of `launch`, or of MPI in a child (`MpiChild`)."""
    launched = detect(environ)
    if launched is not None and launched.launcher is LOCAL:
        return LaunchedWorld(environ)
    return MpiChild(environ, path, forks=forks)


# The child's side.


def main(fd: int, rank: int) -> None:
    """Run MPI for the process `rank`, which is the parent of this one, until it leaves."""
    die_with_parent(rank)
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the rank decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    from dask_gpu_mpi.mpi import library

    host = socket.gethostname()
    try:
        mpi = library.load_mpi(os.environ, host)
    except DaskGpuMpiError as error:
        sock.send(RANK.pack(TRANSPORT) + pack(["failed", Failure.of(error)]))
        sys.exit(0)
    world = MpiWorld(mpi.COMM_WORLD, mpi.Get_library_version())
    sock.send(RANK.pack(TRANSPORT) + pack(["world", [world.rank, world.size, world.library]]))
    code = 0
    try:
        _pass_on(sock, world)
        library.finalize()
    except Exception as error:
        say(f"error: MPI: {type(error).__name__}: {error}. Fix: find out why this library fails on this node")
        code = 1
    sys.exit(code)  # not os._exit: MPICH 5 takes leave of its launcher when the library is unloaded


def _pass_on(sock: socket.socket, world: MpiWorld) -> None:
    """Pass on the packets of the rank and the messages of other ranks, until the rank has left."""
    pause = 0.001
    while True:
        received = world.receive()
        for source, data in received:
            with contextlib.suppress(ConnectionError):  # the rank has left; only strangers send now
                sock.send(RANK.pack(source) + data)
        pause = 0.001 if received else min(2 * pause, 0.02)
        if not select.select([sock], [], [], pause)[0]:
            world.has_sent()  # lets the library work
            continue
        packet = b""
        with contextlib.suppress(ConnectionError):
            packet = sock.recv(RANK.size + LARGEST)
        if not packet:
            world.leave()
            world.receive()  # libraries complain of messages that are left
            return
        pause = 0.001
        (rank,) = RANK.unpack_from(packet)
        if rank == TRANSPORT:
            (code,) = RANK.unpack_from(packet, RANK.size)
            world.abort(code)
        else:
            world.send(rank, packet[RANK.size :])
