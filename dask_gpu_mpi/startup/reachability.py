"""The reachability test: every rank connects to the scheduler's host, and every node to other nodes.

`ReachabilityTest` leads it at the hub, `Connecting` takes part in it in every agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.base.failures import Failure
from dask_gpu_mpi.base.text import ranks_text
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.network.credentials import BACKDATED
from dask_gpu_mpi.network.interfaces import as_host, host_and_port
from dask_gpu_mpi.network.reachability import (
    CONNECT_TIMEOUT,
    Listener,
    Node,
    Reach,
    connect_only,
    connect_to,
    connect_to_peers,
    connection_report,
    listen_for_peers,
    peers_by_rank,
    worker_ports,
)
from dask_gpu_mpi.network.ucx import UcxAbility, missing_ucx, obstacle_between_nodes, opened_by
from dask_gpu_mpi.options.model import Options, Transport, WorkerUcx
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.startup.messages import Connect, Kind, Listen, Listening

# What the workers of a job send each other over UCX, once there is a plan: pure functions.


def ucx_ability(options: Options, *, gpus: bool) -> UcxAbility:
    """How far the workers of this rank can use UCX beside TLS.

    `options`: what the user asked for. `gpus`: whether this rank sees GPUs.
    """
    wanted = options.worker_ucx
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not gpus):
        return UcxAbility()
    if str(options.worker_class).rpartition(".")[2] == "Worker":
        return UcxAbility(
            Problem(
                "workers of the class distributed.Worker run in the agent",
                fix="worker_class (--worker-class) distributed.Nanny",
            )
        )
    if wanted is WorkerUcx.AUTO and options.worker_class != "auto" and options.worker_kind != "gpu":
        return UcxAbility(
            Problem("worker_class is not dask_cuda.CUDAWorker", fix="leave it out, or choose --protocol tls")
        )
    opened = opened_by(os.environ, options.worker_options)
    return UcxAbility(
        missing_ucx(device_memory=gpus), "" if opened else obstacle_between_nodes(os.environ), opened
    )


def choose_transport(
    wanted: WorkerUcx, plan: Plan, abilities: Mapping[int, UcxAbility], *, attaches: bool = False
) -> Transport:
    """The data that goes over UCX, and the line that says so and why.

    `wanted`: what the user asked for. `plan`: of the job. `abilities`: by rank. `attaches`: whether the workers are added to
    those of a running cluster. Raises InputError: the user asked for UCX, and a rank can't use it.
    """
    working = {worker.rank for worker in plan.workers}
    with_gpus = {worker.rank for worker in plan.workers if worker.kind == "gpu"}
    if wanted is WorkerUcx.OFF or (wanted is WorkerUcx.AUTO and not with_gpus):
        return Transport()
    reason = _reason(working, abilities, lambda ability: ability.obstacle)
    if wanted is WorkerUcx.ALL and reason:
        raise InputError(f"protocol 'ucx': {reason.text}", fix=reason.fix)
    if len(plan.workers) == 1 and not attaches:
        return Transport()
    if wanted is WorkerUcx.AUTO and (without := sorted(working - with_gpus)):
        reason = Problem(f"{ranks_text(without)} without a GPU")
    nodes = {worker.host for worker in plan.workers}
    within = _reason(working, abilities, lambda ability: ability.between_nodes)
    if not reason and within and len(nodes) == len(plan.workers) and not attaches:
        reason = Problem(f"each node has one worker, and UCX leads to no other node: {within.text}")
    if reason:
        data = "all data is encrypted" if wanted is WorkerUcx.ALL else "GPU data goes through host memory"
        return Transport(line=Problem(f"TLS; {data}. No UCX: {reason.text}", fix=reason.fix))
    data = "large data" if wanted is WorkerUcx.ALL else "GPU memory"
    line = f"TLS, and UCX for {data} between workers"
    if within and len(nodes) > 1:
        line += f" of a node (authenticated, not encrypted). Between nodes TLS alone: {within.text}"
    else:
        line += " (authenticated, not encrypted)"
    warning = None
    if opened := _reason(working, abilities, lambda ability: ability.opened_by):
        warning = Problem(
            f"{opened.text} has UCX open a TCP port in each worker, and UCX checks nobody: anyone who reaches the port can run "
            "code as you",
            fix="leave the setting out; within a node UCX needs no TCP",
            what="transport",
        )
    return Transport(wanted, Problem(line), warning, not within)


def _reason(
    working: set[int],
    abilities: Mapping[int, UcxAbility],
    reason_of: Callable[[UcxAbility], Problem | str | None],
) -> Problem | None:
    """The first reason that an ability has, with its ranks unless all have it; None: none has one."""
    ranks_of: dict[Problem | str, list[int]] = {}
    for rank in sorted(working):
        if reason := reason_of(abilities.get(rank, UcxAbility())):
            ranks_of.setdefault(reason, []).append(rank)
    for reason, ranks in ranks_of.items():
        problem = reason if isinstance(reason, Problem) else Problem(reason)
        return problem if len(ranks) == len(working) else replace(problem, where=ranks_text(ranks))
    return None


class ReachabilityTest:
    """The plan of who listens and who connects to whom, and the results; messages go out by ``send(rank, kind, payload)``."""

    def __init__(self, ranks: Sequence[int], send: Callable[[int, str, Any], None]) -> None:
        self._ranks = ranks
        self._send = send
        #: The scheduler's rank; of rank -1: not chosen yet, or of another job.
        self._scheduler = Node(host="", rank=-1, address="", token="")
        self._nodes: dict[int, Node] = {}
        self._ports: dict[int, Listening] = {}
        #: Ranks that are to listen, or to connect, and have not responded yet.
        self.awaited: set[int] = set()
        #: The results by rank.
        self.reached: dict[int, Reach] = {}
        #: Whether ranks are connecting now.
        self.under_way = False

    def listen(
        self,
        rank: int,
        host: str,
        nodes: Sequence[Node],
        addresses: Mapping[int, str | None],
    ) -> None:
        """Order the scheduler's rank, and one rank of each of several nodes, to listen at their addresses.

        `rank`, `host`: those of the scheduler. `nodes`: the nodes to connect to each other. `addresses`: by rank.
        """
        self._scheduler = Node(host, rank, addresses[rank] or "")
        if len(nodes) > 1:
            self._nodes = {node.rank: node for node in nodes}
        self.awaited = {rank, *self._nodes}
        for each in (rank, *(other for other in self._nodes if other != rank)):
            order = Listen(workers=self._nodes.get(each))
            if each == rank:
                order = replace(order, scheduler=self._scheduler)
            self._send(each, Kind.LISTEN, order)

    def on_listening(self, rank: int, ports: Listening) -> bool:
        """A rank listens, or can't; True with the last."""
        self._ports[rank] = ports
        self.awaited.discard(rank)
        return not self.awaited

    @property
    def scheduler(self) -> Listening:
        """The ports at which the scheduler's rank listens."""
        return self._ports.get(self._scheduler.rank, Listening())

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, with the ports on which they listen; empty: there is only one."""
        ports = self._ports
        return tuple(
            replace(node, port=ports.get(node.rank, Listening()).workers) for node in self._nodes.values()
        )

    def connect(self, timeout: float = CONNECT_TIMEOUT) -> None:
        """Order every rank to connect to the scheduler's, if that listens, and one of each node to others."""
        self._scheduler = replace(self._scheduler, port=self.scheduler.scheduler)
        self._connect(peers_by_rank(self.nodes) if self._nodes else {}, timeout)

    def connect_to_running(self, target: str) -> None:
        """Order every rank to connect to ``host:port``, the scheduler of another job."""
        address, port = host_and_port(target)
        self._scheduler = Node(host="", rank=-1, address=address, token="", port=port)
        self._connect({}, CONNECT_TIMEOUT)

    def _connect(self, peers: Mapping[int, tuple[Node, ...]], timeout: float) -> None:
        self.under_way = True
        self.awaited = set(self._ranks)
        for rank in self._ranks:
            self._send(rank, Kind.CONNECT, Connect(self._scheduler, peers.get(rank, ()), timeout))

    def on_reached(self, rank: int, reached: Reach) -> bool:
        """A rank has tried to connect; True with the last."""
        self.reached[rank] = reached
        self.awaited.discard(rank)
        self.under_way = bool(self.awaited)
        return not self.awaited

    def problem(self, reach: Reach, *, encrypts: bool) -> Failure | None:
        """Why a rank can't use the scheduler: it does not reach its host, or its clock is behind.

        `encrypts`: whether the job has certificates, which are valid from a certain time on.
        """
        node = self._scheduler
        where = "of another job" if node.rank < 0 else f"rank {node.rank} on {node.host}"
        if reach.error:
            unreached = Problem(
                f"could not reach the scheduler's host at {as_host(node.address)}:{node.port} ({where}): {reach.error}",
                fix="choose a network that leads there with interface (--interface), or open the port in the firewall",
                what="network",
            )
            return Failure(unreached, InputError.exit_code)
        if encrypts and reach.ahead is not None and reach.ahead < -BACKDATED:
            behind = Problem(
                f"the clock of this node is {-reach.ahead:.0f} s behind that of the scheduler's ({where}): the job's "
                "certificate is not valid here yet",
                fix="set the clocks by NTP or chrony, or leave this node out of the job",
                what="clocks",
            )
            return Failure(behind, InputError.exit_code)
        return None

    def failure(self) -> Failure | None:
        """The nodes that do not reach each other."""
        lost = {
            self._nodes[rank].host: reached.lost
            for rank, reached in sorted(self.reached.items())
            if reached.lost
        }
        if not lost:
            return None
        problem = Problem(
            f"no connection between nodes: {connection_report(lost)} (expected: every node reaches all others, since their "
            "workers exchange data)",
            fix="open the ports between these nodes in the firewall, choose another network with interface (--interface), or "
            "leave a node out of the job",
            what="node pairs",
        )
        return Failure(problem, InputError.exit_code)


def nodes_of(plan: Plan, addresses: Mapping[int, str | None]) -> list[Node]:
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


class Connecting:
    """One rank's part: it listens in the place of the scheduler and of the workers to come, and connects to others.

    `send`: ``send(kind, payload)`` to the hub, from any thread.
    """

    def __init__(self, options: Options, send: Callable[[Kind, Any], None]) -> None:
        self._options = options
        self._send = send
        self._scheduler: Listener | None = None
        self._workers: Listener | None = None

    def listen(self, wanted: Listen) -> None:
        """Listen at the address of the scheduler and of the workers to come."""
        self.close()  # for the second time, without a rank that did not respond
        options = self._options
        if (scheduler := wanted.scheduler) is not None:
            with contextlib.suppress(
                OSError
            ):  # the scheduler's own error says better why nobody can listen there
                self._scheduler = Listener(scheduler.address, options.scheduler_port or 0, scheduler.token)
        if (workers := wanted.workers) is not None:
            with contextlib.suppress(OSError):
                self._workers = listen_for_peers(workers.address, worker_ports(options), workers.token)
        ports = [0 if made is None else made.port for made in (self._scheduler, self._workers)]
        self._send(Kind.LISTENING, Listening(*ports))

    def connect(self, to: Connect) -> None:
        """Connect as ordered, and report what was reached; in a thread, since it may take seconds."""
        threading.Thread(target=self._connect, args=(to,), daemon=True).start()

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

    def _connect(self, to: Connect) -> None:
        scheduler, timeout = to.scheduler, to.timeout
        lost: dict[str, list[str]] = {}
        others = threading.Thread(
            target=lambda: lost.update(connect_to_peers(to.peers, timeout)), daemon=True
        )
        if to.peers:
            others.start()
        reach = Reach()
        if not scheduler.token:
            reach = Reach(connect_only(scheduler.address, scheduler.port, timeout))
        elif scheduler.port:
            reach = connect_to(scheduler.address, scheduler.port, scheduler.token, timeout)
        if to.peers:
            others.join()
        self._send(Kind.REACHED, replace(reach, lost=lost))
