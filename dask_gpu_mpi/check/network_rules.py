"""The rules of `check` about ports, connections and clocks."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.base.hostlist import counted, fold_names
from dask_gpu_mpi.network.credentials import BACKDATED, VALID_DAYS
from dask_gpu_mpi.network.node_pairs import MOST_IN_CHECK, count_pairs
from dask_gpu_mpi.network.reachability import Reach
from dask_gpu_mpi.options.protocols import Protocol

from .report import LEAVE_OUT, Evidence, Finding, Level, split_fix

__all__ = ["check_clocks", "check_network", "check_node_pairs", "check_ports"]

#: Seconds by which clocks may differ without a warning.
CLOCK_TOLERANCE = 1.0


def check_ports(evidence: Evidence) -> Iterator[Finding]:
    """The scheduler's rank must be able to listen where the scheduler and its dashboard would."""
    listening, head = evidence.listening, (evidence.scheduler_rank,)
    if listening is None:
        return
    place = f"{evidence.address}, {f'port {evidence.port}' if evidence.port else 'any port'}"
    if listening.error:
        fix = "choose another network with interface (--interface)"
        if evidence.port:
            fix = "choose another port with scheduler_port (--scheduler-port), or leave it out for any free port"
        found = f"the scheduler can't listen at {place}: {listening.error}"
        yield Finding("error", "ports", found, fix, head)
    elif listening.elsewhere:
        yield Finding(
            "error", "ports",
            f"dashboard_address (--dashboard-address): {evidence.dashboard_address!r} is not on "
            f"{evidence.host(evidence.scheduler_rank)}, where the scheduler runs (expected an address of that node)",
            "leave the option out, or give the port alone (':8787'), for all addresses of the node", head,
        )  # fmt: skip
    elif listening.dashboard:
        yield Finding(
            "warning", "ports",
            f"the dashboard can't listen at {evidence.dashboard_address} ({listening.dashboard}) and will use another port",
            "choose a free one with dashboard_address (--dashboard-address)", head,
        )  # fmt: skip
    else:
        yield Finding("ok", "ports", f"the scheduler can listen at {place}")


def check_network(evidence: Evidence) -> Iterator[Finding]:
    """All ranks must reach the scheduler's address."""
    if evidence.network_problem:
        fix = "choose another with interface (--interface)"
        yield Finding("error", "network", *split_fix(evidence.network_problem, fix))
    if evidence.listening is None or evidence.listening.error:
        return
    scheduler = f"the scheduler's rank {evidence.scheduler_rank} on {evidence.host(evidence.scheduler_rank)}"
    reached = _reached(evidence)
    wrong = {rank: reach for rank, reach in reached.items() if reach.error}
    for rank, reach in wrong.items():
        yield Finding(
            "error", "network",
            f"can't reach {scheduler} at {evidence.address}:{evidence.listening.scheduler}: {reach.error}",
            "let all nodes of the job reach each other's ports (a firewall?), or choose another network with interface "
            "(--interface)",
            (rank,),
        )  # fmt: skip
    if reached and not wrong:
        slowest = 1000 * max(reach.round_trip for reach in reached.values())
        yield Finding(
            "ok", "network",
            f"all ranks reach {scheduler} at {evidence.address} (round trip {slowest:.1f} ms at most)",
        )  # fmt: skip


def check_node_pairs(evidence: Evidence) -> Iterator[Finding]:
    """All nodes must reach each other: their workers exchange data."""
    nodes = evidence.nodes
    for node in nodes:
        if not node.port:
            yield Finding(
                "warning", "node pairs", f"workers can't listen at {node.address}: no other node could connect to it",
                "choose other ports with worker_options (worker_port)", (node.rank,),
            )  # fmt: skip
    if not nodes or not evidence.tests:
        return
    fix = (
        "open the workers' ports between these nodes in the firewall, choose another network with interface (--interface), or "
        "leave a node out of the job"
    )
    lost = {rank: test.lost for rank, test in evidence.tests.items() if test.lost}
    for rank, missed in lost.items():
        for error in dict.fromkeys(one.error for one in missed):
            hosts = fold_names(one.host for one in missed if one.error == error)
            found = f"can't reach {hosts}: {error}; workers that exchange data would wait for each other"
            yield Finding("error", "node pairs", found, fix, (rank,))
    if not lost:
        tested, total = count_pairs(len(nodes), MOST_IN_CHECK)
        which = "all" if tested == total else f"a ring and a sample of {total}"
        yield Finding(
            "ok", "node pairs", f"{counted(tested, 'pair')} of nodes ({which}) connected in both directions"
        )


def check_clocks(evidence: Evidence) -> Iterator[Finding]:
    """Clocks must agree well enough for certificates, log files and the walltime."""
    clocks = {rank: reach.ahead for rank, reach in _reached(evidence).items() if not reach.error}
    wrong = []
    level: Level
    for rank, ahead in clocks.items():
        other = evidence.scheduler_rank
        # Rank 0 makes the certificates, and dates them back.
        since = ahead - clocks.get(0, 0.0)
        if evidence.protocol == Protocol.TLS and not -BACKDATED <= since <= VALID_DAYS * 86400:
            level, effect = "error", "the job's certificates are not valid there"
            ahead, other = since, 0
        elif abs(ahead) > CLOCK_TOLERANCE:
            level, effect = "warning", "times in log files and the remaining walltime are wrong there"
        else:
            continue
        side = "ahead of" if ahead > 0 else "behind"
        found = f"the clock is {abs(ahead):.1f} s {side} that of rank {other}: {effect}"
        wrong.append(
            Finding(level, "clocks", found, f"set the clocks by NTP or chrony; {LEAVE_OUT}", (rank,))
        )
    yield from wrong
    if clocks and not wrong:
        most = max(map(abs, clocks.values()))
        yield Finding("ok", "clocks", f"they differ by {most:.3f} s at most")


def _reached(evidence: Evidence) -> dict[int, Reach]:
    return {rank: test.reach for rank, test in evidence.tests.items() if test.reach is not None}
