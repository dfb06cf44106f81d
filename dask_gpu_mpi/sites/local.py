"""Ranks without a launcher: on one node `launch` starts them itself, and they meet over sockets that lead to it.

A rank finds its number, the number of all ranks and its socket in the environment (the class `Local` of `launchers`). A packet is
a rank as a signed 32-bit number, little-endian, and a message: a rank sends it with the destination, and gets it with the source.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dask_gpu_mpi.base.signals import RANK_PID, adopt_orphans, end_programs, rank_that_started, running
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import ranks_text, signal_name
from dask_gpu_mpi.base.timeouts import SAVING, SCRIPTS_PROGRAMS
from dask_gpu_mpi.sites.launchers import LOCAL

if TYPE_CHECKING:
    from psutil import Process

#: The beginning of a packet: the rank that gets it, or has sent it.
RANK = struct.Struct("<i")
#: In place of a rank: a message of the transport itself; to the transport, the exit code with which to end the job.
TRANSPORT = -1
#: Bytes of the largest packet, and of a socket's buffer; the system may give less than the latter.
LARGEST, BUFFER = 1 << 18, 1 << 20
#: Seconds for the other ranks to end after one has failed, or rank 0 has ended. They normally end by themselves.
GRACE = 30.0
#: Seconds for the report of a failed start, once a rank has ended before all had met.
MEETING_GRACE = 5.0
#: Seconds between SIGTERM and SIGKILL after a failed rank, and after an abort.
KILL_AFTER, ABORT_GRACE = 10.0, 1.0
#: Signals that end ranks in an orderly way, which are not reported.
ORDERLY = (signal.SIGTERM, signal.SIGINT)


class Ranks:
    """The ranks of a job on this node, with the methods of a child process that `execute.Runner` needs.

    The exit code is the one of rank 0. If that is 0 or rank 0 does not end, it is the one of the first other rank that failed,
    unless ranks may be lost (`tolerant`). `has_input`: rank 0 has the standard input. `prepare` is called in each rank first.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        size: int,
        *,
        tolerant: bool = False,
        has_input: bool = True,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        #: As of a child process: negative after a signal; None: ranks are running.
        self.returncode: int | None = None
        self._tolerant = tolerant
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._rank_0: int | None = None
        self._failed = 0
        #: How a rank ended before all had met, and when the others are ended, which wait for it.
        self._unmet = ""
        self._unmet_at = math.inf
        #: Whether this process ends the ranks; from then on their exit codes do not count.
        self._ending = False
        #: ``time.monotonic()`` of SIGTERM and SIGKILL to all ranks.
        self._end_at = self._kill_at = math.inf
        sockets: list[socket.socket] = []
        adopt_orphans()
        try:
            for rank in range(size):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets.append(ours)
                with theirs:
                    for end in (ours, theirs):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                    fd = theirs.fileno()
                    self._running[rank] = subprocess.Popen(
                        command,
                        env={
                            **environ,
                            LOCAL.rank_variable: str(rank),
                            LOCAL.size_variables[0]: str(size),
                            LOCAL.mark: str(fd),
                        },
                        stdin=None if has_input and not rank else subprocess.DEVNULL,
                        pass_fds=(fd,),
                        preexec_fn=prepare,
                    )
        except BaseException:
            self.kill()
            for process in self._running.values():
                process.wait()
            for each in sockets:
                each.close()
            raise
        ranks = {process.pid for process in self._running.values()}
        #: Children of the shell that this process has replaced (``exec``), which are not the script's. (Here psutil is imported,
        #: while the ranks start.)
        self._not_of_scripts = [each for each in _children() if each.pid not in ranks]
        self._relay = Relay(sockets)
        self._relay.start()  # after all ranks, since a process with threads should not be forked

    def poll(self) -> int | None:
        """Handle what has happened; return the exit code once all ranks have ended. Call it every second or so."""
        now = time.monotonic()
        for rank, process in [*self._running.items()]:
            if (code := process.poll()) is not None:
                del self._running[rank]
                self._has_ended(rank, code, now)
        self._reap_orphans()
        if not self._running:
            if self.returncode is None:
                self._relay.stop()  # it may have received an abort just now
                self.returncode = self._exit_code()
                end_programs(self._leftovers, "the script", "it", leaving=SCRIPTS_PROGRAMS, killing=SAVING)
            return self.returncode
        self._keep_deadlines(now)
        return None

    def _keep_deadlines(self, now: float) -> None:
        """End the ranks that are still running after an abort, a failed meeting, a failed rank, or the end of rank 0."""
        if self._relay.aborted is not None and not self._ending:
            self._end_all(now + ABORT_GRACE)
        elif now >= self._unmet_at and self._relay.connects(self._running):
            say(
                f"launch: {self._unmet} before all ranks had met; the others are killed. Fix: read its output above"
            )
            self._failed = self._failed or 1
            self._end_all(now)  # killed below: none of them has begun anything
        elif now >= self._end_at:
            say(
                f"launch: {ranks_text(self._running)}: still running {GRACE:.0f} s after a rank failed; ended"
            )
            self._end_all(now + KILL_AFTER)
        if now >= self._kill_at:
            if not self._ending:
                say(f"launch: {ranks_text(self._running)}: still running {GRACE:.0f} s after rank 0; killed")
            self._ending, self._kill_at = True, math.inf
            self.kill()

    def _end_all(self, kill_at: float) -> None:
        """Send SIGTERM to all ranks, and SIGKILL at that time."""
        self._ending, self._end_at, self._kill_at = True, math.inf, min(kill_at, self._kill_at)
        self._unmet_at = math.inf
        self.terminate()

    def send_signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self._running.values():
            process.send_signal(number)

    def terminate(self) -> None:
        """Send SIGTERM to all ranks."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all ranks."""
        self.send_signal(signal.SIGKILL)

    def _reap_orphans(self) -> None:
        """Read the exit codes of processes that ranks have left, which `adopt_orphans` makes children of this one."""
        ranks = {process.pid for process in self._running.values()}
        with contextlib.suppress(ChildProcessError):
            # the status of a rank is for its object
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) and ended.si_pid not in ranks:
                os.waitpid(ended.si_pid, 0)

    def _has_ended(self, rank: int, code: int, now: float) -> None:
        """Note the exit code of a rank, and set the time by which the others must have ended."""
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended (exit code {code})"
        expected = self._ending or self._relay.aborted is not None
        if code < 0 and -code not in ORDERLY and not expected:
            say(f"launch: rank {rank} {how}")
        # A job that may lose ranks can start without one that has come.
        if not (expected or self._unmet or self._tolerant) and self._relay.connects(self._running):
            self._unmet, self._unmet_at = f"rank {rank} {how}", now + MEETING_GRACE
        if rank == 0:
            self._kill_at = min(self._kill_at, now + GRACE)
            self._rank_0 = None if self._ending else code
        elif code and not self._ending and not self._tolerant:
            self._failed = self._failed or code
            self._end_at = min(self._end_at, now + GRACE)
        if self._rank_0 is not None:
            self._end_at = math.inf  # the others have until `_kill_at`

    def _exit_code(self) -> int:
        if self._relay.aborted is not None:
            return self._relay.aborted
        return self._rank_0 or self._failed

    def _leftovers(self) -> list[Process]:
        """The programs that scripts have started, once their ranks have ended. Agents end by themselves, in order."""
        # that of the script around this job, if there is one
        around = os.environ.get(RANK_PID, "")
        found = [each for each in _children() if each not in self._not_of_scripts]
        return running([each for each in found if rank_that_started(each.pid) not in ("", around)])


def _children() -> list[Process]:
    import psutil

    return psutil.Process().children()


class Relay(threading.Thread):
    """Forwards the packets of ranks to each other, without waiting for any of them, until all have closed their sockets."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        super().__init__(name="relay", daemon=True)
        #: The exit code of a job that a rank has aborted.
        self.aborted: int | None = None
        self._sockets = sockets
        #: Packets for each rank that its socket has no room for. They are few: ranks send some during their meeting only.
        self._waiting: list[collections.deque[bytes]] = [collections.deque() for _ in sockets]
        self._selector = selectors.DefaultSelector()
        for rank, each in enumerate(sockets):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ, rank)

    def run(self) -> None:
        """Forward packets; the body of the thread."""
        while self._selector.get_map():
            for key, events in self._selector.select():
                if events & selectors.EVENT_WRITE:
                    self._send_waiting(key.data)
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
        self._selector.close()

    def connects(self, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks has not left the meeting."""
        return any(self._sockets[rank].fileno() >= 0 for rank in ranks)

    def stop(self) -> None:
        """Forward what has arrived, and end; a process that a rank has left may still have its socket."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.join()

    def _receive(self, source: int) -> None:
        try:
            packet = self._sockets[source].recv(LARGEST)
        except BlockingIOError:
            return
        except OSError:  # it has ended with unread packets
            packet = b""
        if not packet:
            self._waiting[source].clear()
            self._selector.unregister(self._sockets[source])
            self._sockets[source].close()
        elif len(packet) >= RANK.size:
            (destination,), message = RANK.unpack_from(packet), packet[RANK.size :]
            if destination == TRANSPORT:
                self._abort(message)
            elif 0 <= destination < len(self._sockets):
                self._send(destination, RANK.pack(source) + message)

    def _abort(self, message: bytes) -> None:
        if self.aborted is None:
            self.aborted = RANK.unpack(message)[0] & 0xFF if len(message) == RANK.size else 1
            os.kill(os.getpid(), signal.SIGCHLD)  # the main thread, which blocks it, then calls `poll`

    def _send(self, rank: int, packet: bytes) -> None:
        waiting = self._waiting[rank]
        if self._sockets[rank].fileno() >= 0:
            waiting.append(packet)
            if len(waiting) == 1:
                self._send_waiting(rank)

    def _send_waiting(self, rank: int) -> None:
        waiting, to = self._waiting[rank], self._sockets[rank]
        if to.fileno() < 0:
            return
        while waiting:
            try:
                to.send(waiting[0])
            except BlockingIOError:
                break
            except OSError:  # it has ended: what it has sent before is received next
                pass
            waiting.popleft()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        if self._selector.get_key(to).events != wanted:
            self._selector.modify(to, wanted, rank)
