"""Who listens where in a job, and when: all listening TCP sockets of all its processes, by the role of each."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.jobs.clusters import listening, parent, ranks_of
from support.jobs.mpi import Job

#: What a launcher is called.
LAUNCHERS = re.compile(r"(mpirun|mpiexec|prterun|prted|hydra_pmi_proxy|hydra_bstrap_proxy|orted|srun)\S*")

#: What the command line of a rank's child has, by which it is found, and its role. MPI's process may also be a fork of its rank.
CHILDREN = {"dask_gpu_mpi.agent.boot": "agent", "dask_gpu_mpi.mpi.world": "mpi"}


@dataclass(frozen=True, order=True)
class Place:
    """A listening socket: on which network (the job's hosts have one each), where, and of which process."""

    network: str
    address: str
    port: int
    pid: int

    @property
    def socket(self) -> tuple[str, str, int]:
        """The same in every process that has inherited it."""
        return self.network, self.address, self.port

    @property
    def on_loopback(self) -> bool:
        """Whether other hosts can't reach it."""
        return ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, order=True)
class Listener:
    """A listening socket and what it is for."""

    #: ``"scheduler"``, ``"worker"``, ``"nanny"`` (in an agent), ``"hub"`` (in rank 0's agent), ``"agent"``, ``"rank"``, ``"mpi"``
    #: (MPI's process of a rank), ``"launcher"``, or another's command line.
    role: str
    #: ``"comm"`` or ``"http"`` of a server, ``"start"`` for what is closed once the cluster is up, or empty.
    what: str
    place: Place

    @property
    def name(self) -> str:
        """Role and use, for tables."""
        return f"{self.role} {self.what}".strip()


class Census:
    """Looks at a job's listening sockets until the block ends.

    `roles`: Of all that was seen, the role that its process had then: nothing can be found out of one that has ended.
    """

    EVERY = 0.1  # seconds

    def __init__(self, job: Job) -> None:
        self.roles: dict[Place, str] = {}
        self._processes: dict[int, str] = {}
        self._job = job
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Census:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def look(self) -> set[Place]:
        """All that listen now."""
        found = set()
        ranks = set(ranks_of(self._job).values())
        for pid in self._job.processes():
            if (role := role_of(pid, ranks)) not in ("", "ended"):  # one that is ending has no command line
                self._processes[pid] = role
            with contextlib.suppress(OSError):  # it has ended
                network = os.readlink(f"/proc/{pid}/ns/net")
                found |= {Place(network, address, port, pid) for address, port in listening(pid)}
        for place in found:
            self.roles.setdefault(place, self._processes.get(place.pid, "ended"))
        return found

    def listeners(self, servers: Iterable[Any]) -> list[Listener]:
        """All that were seen so far, with what the script told of the servers (scripts/addresses.py)."""
        now = self.look()
        roles: dict[int, str] = {}
        uses: dict[tuple[int, int], tuple[str, str]] = {}
        for role, pid, ports in servers:
            if role in ("scheduler", "worker"):  # the other servers are in an agent
                roles[pid] = role
            uses |= {(pid, port): (role, what) for what, port in ports}
        found = []
        # what a launcher has opened stays its own where its children have inherited it, as below MPICH's
        launchers = {each.socket for each, role in self.roles.items() if role == "launcher"}
        # for a moment rank 0 has the hub's socket, too, which it opens for its agent
        passed_on = {each.socket for each in now if (each.pid, each.port) in uses}
        for place, first in [*self.roles.items()]:
            if place not in now and place.socket in passed_on:
                continue
            role, what = roles.get(place.pid) or first, ""
            if place.socket in launchers:
                role = "launcher"
            elif place not in now:
                what = "start"
            else:
                role, what = uses.get((place.pid, place.port), (role, what))
            found.append(Listener(role, what, place))
        return sorted(found)

    def _watch(self) -> None:
        while not self._over.wait(self.EVERY):
            self.look()


def role_of(pid: int, ranks: Iterable[int]) -> str:
    """The role of a process that is no server of Dask."""
    if pid in ranks:
        return "rank"
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if (above := parent(pid)) in ranks and command == Path(f"/proc/{above}/cmdline").read_bytes():
            return "mpi"
        words = command.decode(errors="replace").rstrip("\0").split("\0")
        if LAUNCHERS.fullmatch(Path(words[0]).name):
            return "launcher"
        for module, role in CHILDREN.items():
            if any(module in word for word in words) and above in ranks:
                return role
        return " ".join(words)[:200]
    return "ended"


def open_memory(pids: Iterable[int]) -> list[str]:
    """System V shared memory of these processes that others than their user may read or write, a line of the kernel's each."""
    head, *lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    perms, creator = (head.split().index(name) for name in ("perms", "cpid"))
    made = {str(pid) for pid in pids}
    return [
        line for line in lines if (fields := line.split())[creator] in made and int(fields[perms], 8) & 0o066
    ]
