"""The reachability test on every rank: listen in the place of the scheduler and of the workers to come, and connect to others."""

from __future__ import annotations

import contextlib
import queue
import threading

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.network.credentials import BACKDATED
from dask_gpu_mpi.network.node_pairs import Lost, connect_to_peers, listen_for_peers, worker_ports
from dask_gpu_mpi.network.reachability import Listener, Reach, connect_only, connect_to
from dask_gpu_mpi.options.model import Options

from .messages import Connect, Listen, Listening

__all__ = ["Connecting"]


class Connecting:
    """What one rank listens on, and what comes of its connections."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._scheduler: Listener | None = None
        self._workers: Listener | None = None
        self._results: queue.SimpleQueue[Failure | tuple[Lost, ...]] = queue.SimpleQueue()

    def listen(self, wanted: Listen) -> Listening:
        """Listen at the address of the scheduler and of the workers to come."""
        address = wanted.address or ""
        if wanted.scheduler is not None:
            with contextlib.suppress(OSError):
                self._scheduler = Listener(address, self._options.scheduler_port or 0, wanted.scheduler)
        if wanted.workers is not None:
            with contextlib.suppress(OSError):
                self._workers = listen_for_peers(address, worker_ports(self._options), wanted.workers)
        return Listening(*(0 if made is None else made.port for made in (self._scheduler, self._workers)))

    def close_scheduler(self) -> None:
        """Leave the port to the scheduler."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    def close(self) -> None:
        """Leave all ports to the scheduler and the workers."""
        self.close_scheduler()
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def connect(self, to: Connect) -> None:
        """Begin to connect, to all at once, in threads: it may take seconds, and rank 0 has messages of others to handle."""
        threading.Thread(target=self._connect, args=(to,), daemon=True).start()

    def result(self) -> Failure | tuple[Lost, ...] | None:
        """Why the scheduler's host is not reached, or which peers are not; None: not known yet, or returned already."""
        with contextlib.suppress(queue.Empty):
            return self._results.get_nowait()
        return None

    def _connect(self, to: Connect) -> None:
        lost: list[tuple[Lost, ...]] = []
        peers = threading.Thread(target=lambda: lost.append(connect_to_peers(to.peers)), daemon=True)
        if to.peers:
            peers.start()
        host, _, port = to.scheduler.rpartition(":")
        host = host.strip("[]")
        place = (host, int(port))
        reach = connect_to(*place, to.tokens) if to.tokens else Reach(connect_only(*place))
        error = reach.error
        if not error and self._options.protocol.encrypts and reach.ahead < -BACKDATED:
            text = (
                f"the clock of this node is {-reach.ahead:.0f} s behind that of the scheduler's ({to.where}): the job's "
                "certificate is not valid here yet. Fix: set the clocks by NTP or chrony, or leave this node out of the job"
            )
            self._results.put(Failure(text, 2))
            return
        if error:
            text = (
                f"could not reach the scheduler's host at {to.scheduler} ({to.where}): {error}. Fix: choose a network that leads "
                "there with interface (--interface), or open the port in the firewall"
            )
            self._results.put(Failure(text, 2))
            return
        if to.peers:
            peers.join()
        self._results.put(lost[0] if lost else ())
