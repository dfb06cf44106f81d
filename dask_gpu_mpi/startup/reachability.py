"""The reachability test on rank 0: every rank connects to the scheduler's host, and every node to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.network.node_pairs import MOST_AT_START, Lost, Node, connection_report, peers_by_rank
from dask_gpu_mpi.network.reachability import Tokens
from dask_gpu_mpi.plan.plan import Plan

from .messages import Connect, Kind, Listen, Listening

__all__ = ["ReachabilityTest"]


class ReachabilityTest:
    """Who is to listen, who is to connect to whom, and what came of it; messages go out by ``send(rank, kind, payload)``."""

    def __init__(self, size: int, send: Callable[[int, str, Any], None]) -> None:
        self._size = size
        self._send = send
        #: The scheduler's rank, host and address; rank -1: of another job.
        self._scheduler = (-1, "", "")
        self._tokens = Tokens()
        self._nodes: dict[int, Node] = {}
        self._ports: dict[int, Listening] = {}
        self._lost: dict[int, Sequence[Lost]] = {}
        #: Ranks that have connected.
        self.reached: set[int] = set()
        #: Whether ranks are connecting now.
        self.under_way = False

    def listen(self, plan: Plan, addresses: Mapping[int, str | None]) -> None:
        """Have the scheduler's rank, and one rank of each node that has workers, listen at their addresses."""
        head = plan.scheduler
        self._scheduler = (head.rank, head.host, addresses[head.rank] or "")
        nodes = _nodes(plan, addresses)
        if len(nodes) > 1:
            self._nodes = {node.rank: node for node in nodes}
        for rank in dict.fromkeys((head.rank, *self._nodes)):
            workers = self._nodes[rank].tokens if rank in self._nodes else None
            tokens = self._tokens if rank == head.rank else None
            self._send(rank, Kind.LISTEN, Listen(addresses[rank], tokens, workers))

    def on_listening(self, rank: int, ports: Listening) -> bool:
        """A rank listens, or can't; True with the last."""
        self._ports[rank] = ports
        return self._ports.keys() >= {self._scheduler[0], *self._nodes}

    def connect(self) -> bool:
        """Have every rank connect to the scheduler's, and one of each node to its peers; False: there is nobody to connect to."""
        rank, host, address = self._scheduler
        if not self._ports[rank].scheduler:
            return False
        nodes = [replace(node, port=self._ports[number].workers) for number, node in self._nodes.items()]
        target = f"{address}:{self._ports[rank].scheduler}"
        self._connect(target, f"rank {rank} on {host}", self._tokens, peers_by_rank(nodes, MOST_AT_START))
        return True

    def connect_to_running(self, target: str) -> None:
        """Have every rank connect to ``host:port``, where another job's scheduler runs."""
        self._connect(target, "of another job", None, {})

    def _connect(
        self, target: str, where: str, tokens: Tokens | None, peers: Mapping[int, tuple[Node, ...]]
    ) -> None:
        self.under_way = True
        for rank in range(self._size):
            self._send(rank, Kind.CONNECT, Connect(target, where, tokens, peers.get(rank, ())))

    def on_reached(self, rank: int, lost: Sequence[Lost] | None) -> bool:
        """A rank has connected to the scheduler, and to its peers but for some; True with the last rank."""
        self.reached.add(rank)
        if lost:
            self._lost[rank] = lost
        return len(self.reached) == self._size

    def failure(self) -> Failure | None:
        """The nodes that do not reach each other."""
        if not self._lost:
            return None
        lost = {self._nodes[rank].host: self._lost[rank] for rank in sorted(self._lost)}
        return Failure(
            f"no connection between nodes: {connection_report(lost)} (expected: every node reaches all others, since their "
            "workers exchange data). Fix: open the ports between these nodes in the firewall, choose another network with "
            "interface (--interface), or leave a node out of the job",
            2,
        )


def _nodes(plan: Plan, addresses: Mapping[int, str | None]) -> list[Node]:
    """The nodes that have workers, or the scheduler, which connects to workers as well."""
    working = {worker.rank for worker in plan.workers}
    nodes = []
    for host in plan.hosts:
        rank = next((rank for rank in host.ranks if rank in working), None)
        if rank is None and plan.scheduler.rank in host.ranks:
            rank = plan.scheduler.rank
        address = None if rank is None else addresses[rank]
        if rank is not None and address is not None:
            nodes.append(Node(host.host, rank, address))
    return nodes
