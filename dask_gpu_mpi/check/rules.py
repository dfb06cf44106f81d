"""The rules of `check`: pure functions from the observations of all ranks to findings. Those about versions: `version_rules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from dask_gpu_mpi.base.text import counted, fold_names, format_bytes, listed, ranks_text
from dask_gpu_mpi.check.observations import Observations
from dask_gpu_mpi.check.report import LEAVE_OUT, Evidence, Finding, Level, merge, problems
from dask_gpu_mpi.check.version_rules import check_known_issues, check_versions
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.nvidia import INSPECT_COMMAND, RESET_COMMAND, VISIBLE_DEVICES
from dask_gpu_mpi.machine.scratch import Scratch, exposed_text
from dask_gpu_mpi.network.credentials import BACKDATED, VALID_DAYS
from dask_gpu_mpi.network.interfaces import as_host
from dask_gpu_mpi.network.reachability import MOST_IN_CHECK, count_pairs
from dask_gpu_mpi.options.model import Protocol, WorkerUcx
from dask_gpu_mpi.sites.slurm import GPUS_ON_NODE
from dask_gpu_mpi.startup.reachability import choose_transport


def apply_rules(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, in the order of the report; at least one for each thing that was inspected."""
    found = [*check_ranks(evidence)]
    if evidence.observations:
        for rule in (
            check_versions, check_known_issues, check_gpus, check_placement, check_kernels, check_transport,
            check_ports, check_network, check_node_pairs, check_clocks, check_scratch,
        ):  # fmt: skip
            found += rule(evidence)
    return merge(evidence, found)


def check_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Launcher and MPI, the ranks that respond, and whether these could inspect their nodes."""
    wrong = [*problems(evidence, "launcher", "use the mpirun of the MPI library that mpi4py loads")]
    yield from wrong
    if not wrong and not evidence.silent:
        nodes = counted(len(evidence.by_host()), "node")
        yield Finding(
            "ok", "launcher", f"MPI and launcher agree: {counted(evidence.size, 'rank')} on {nodes}"
        )
    for rank in evidence.silent:
        if rank in evidence.steps:
            found = f"no response; last step: {evidence.steps[rank][1]}"
        else:
            found = "no response; the rank may be stopped or swapped out, or its node is down"
        yield Finding(
            "error", "ranks", found, f"inspect that node ({INSPECT_COMMAND}, df); {LEAVE_OUT}", (rank,)
        )
    yield from problems(evidence, "host", LEAVE_OUT)


def check_placement(evidence: Evidence) -> Iterator[Finding]:
    """The plan and its warnings."""
    if evidence.plan_problem:
        yield Finding.of("error", "placement", evidence.plan_problem, "correct the options")
    elif evidence.plan is not None:
        for warning in evidence.plan.warnings:
            if warning.what != "GPUs":  # they have other lines
                yield Finding.of("warning", "placement", warning)
        kinds = [worker.kind for worker in evidence.plan.workers]
        workers = [counted(kinds.count(kind), f"{kind.upper()} worker") for kind in ("gpu", "cpu")]
        yield Finding("ok", "placement", ", ".join(workers))


def check_gpus(evidence: Evidence) -> Iterator[Finding]:
    """NVML, memory errors, drivers, kinds and numbers."""
    drivers: dict[str, list[int]] = {}
    kinds: dict[str, list[int]] = {}
    for rank, observed in evidence.observations.items():
        if observed.inventory is None:
            continue
        if observed.driver:
            drivers.setdefault(observed.driver, []).append(rank)
        kinds.setdefault(_kinds(gpu.name for gpu in observed.inventory.gpus), []).append(rank)
    wrong = [
        *problems(evidence, "GPUs", f"correct {VISIBLE_DEVICES}, or leave the node out of the job"),
        *_unhealthy(evidence),
        *_missing(evidence),
    ]
    if len(drivers) > 1:
        wrong.append(
            Finding(
                "warning", "GPUs", f"NVIDIA drivers differ: {_for_ranks(drivers)}",
                "ask the operators for one version, or choose nodes with the same driver",
            )
        )  # fmt: skip
    if len(kinds) > 1:
        wrong.append(
            Finding(
                "warning", "GPUs", f"ranks see GPUs of different number or kind: {_for_ranks(kinds)}",
                "request the same GPUs on every node, unless that is intended",
            )
        )  # fmt: skip
    yield from wrong
    if not wrong:
        driver = f", driver {next(iter(drivers))}" if drivers else ""
        yield Finding("ok", "GPUs", f"{_kinds(gpu.name for gpu in evidence.gpus.values())}{driver}")


def _unhealthy(evidence: Evidence) -> Iterator[Finding]:
    """Lost GPUs, and those with memory errors, each from the first rank that reports it."""
    seen: set[str] = set()
    for rank, observed in evidence.observations.items():
        if observed.inventory is None:
            continue
        for warning in observed.inventory.warnings:
            yield Finding.of("error", "GPUs", warning, LEAVE_OUT, (rank,))
        for gpu in observed.inventory.gpus:
            count = (observed.ecc or {}).get(gpu.uuid, 0)
            if count and gpu.uuid not in seen:
                errors = counted(count, "uncorrected memory error")
                found = f"GPU {gpu.index} ({gpu.uuid}) has {errors} since its last reset"
                yield Finding("error", "GPUs", found, f"reset it ({RESET_COMMAND}), or {LEAVE_OUT}", (rank,))
            seen.add(gpu.uuid)


def _missing(evidence: Evidence) -> Iterator[Finding]:
    """Nodes whose ranks together see fewer GPUs than expected.

    A node without NVML is an error only if GPUs are expected there, since nodes without GPUs do not have it.
    """
    if len(evidence.observations) < evidence.size:
        return  # the GPUs of the silent ranks are unknown, and these ranks are red already
    for ranks in evidence.by_host():
        expected, source = _expected(evidence, ranks)
        inventories = [observed.inventory for observed in ranks if observed.inventory is not None]
        seen = len({gpu.uuid for inventory in inventories for gpu in inventory.gpus})
        if len(inventories) < len(ranks) or seen >= expected:
            continue
        visible = f"only {counted(seen, 'GPU')}" if seen else "no GPU"
        yield Finding(
            "error", "GPUs", f"{visible} visible on the node (expected {expected}: {source})",
            f"let the ranks of each node see all of its GPUs together ({VISIBLE_DEVICES}, --gpu-bind, --gpus-per-task), or "
            f"{LEAVE_OUT}"
            if seen
            else f"run {INSPECT_COMMAND} on that node (is the driver loaded?); start a container with its GPU option (--nv); "
            f"or {LEAVE_OUT}",
            tuple(observed.rank for observed in ranks),
        )  # fmt: skip


def _expected(evidence: Evidence, ranks: Iterable[Observations]) -> tuple[int, str]:
    """The number of GPUs that a node should have, and its source."""
    if evidence.expect_gpus is not None:
        return evidence.expect_gpus, f"--expect-gpus {evidence.expect_gpus}"
    allocated = max(observed.allocated_gpus for observed in ranks)
    return allocated, f"{GPUS_ON_NODE}={allocated}"


def _for_ranks(ranks: Mapping[str, Iterable[int]]) -> str:
    return "; ".join(f"{text} for {ranks_text(of)}" for text, of in ranks.items())


def _kinds(names: Iterable[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(sorted(names)).items()) or "no GPU"


#: By `kernel.KernelResult.kind`.
FIXES = {
    "slow": "run check again, now that these files are in the node's page cache; or keep the environment on a faster file "
    "system, or in a container image",
    "import": "pip install dask-gpu-mpi[cuda12] or dask-gpu-mpi[cuda13], to match your driver",
    "cuda": f"run {INSPECT_COMMAND} on that node: the driver has to be loaded, and as new as the CUDA that is installed "
    "(dask-gpu-mpi[cuda12] or [cuda13])",
    "wrong": LEAVE_OUT,
    "late": f"run {INSPECT_COMMAND} on that node; {LEAVE_OUT}",
    "died": f"run `python -c 'from numba import cuda; cuda.current_context()'` there; {LEAVE_OUT}",
}


def check_kernels(evidence: Evidence) -> Iterator[Finding]:
    """Each GPU with a worker must compute the right result in time."""
    results = [(rank, result) for rank, each in evidence.kernels.items() for result in each]
    if not evidence.kernel or not results:
        if evidence.gpus:
            why = ": there is no plan that assigns the GPUs to ranks"
            if not evidence.kernel:
                why = " (--no-kernel): whether these GPUs compute is unknown"
            yield Finding("warning", "kernel", f"not run{why}")
        return
    failures: dict[tuple[str, str], dict[str, int]] = {}
    for rank, result in results:
        if result.kind:
            failures.setdefault((result.kind, result.text), {})[result.uuid] = rank
    for (kind, text), rank_of in failures.items():
        named = listed([*rank_of])
        ranks = tuple(dict.fromkeys(rank_of.values()))
        if kind == "slow":  # nothing has run on the GPU
            found = f"not run on {named}: {text}; the file system is probably slow"
            yield Finding("warning", "kernel", found, FIXES[kind], ranks)
        else:
            yield Finding("error", "kernel", f"failed on {named}: {text}", FIXES[kind], ranks)
    if not failures:
        slowest = max(result.seconds for _, result in results)
        gpus = counted(len(results), "GPU")
        yield Finding("ok", "kernel", f"correct result from {gpus}, after {slowest:.1f} s at most")


#: Seconds by which clocks may differ without a warning.
CLOCK_TOLERANCE = 1.0


def check_ports(evidence: Evidence) -> Iterator[Finding]:
    """The scheduler's rank must be able to listen at the addresses of the scheduler and its dashboard."""
    listening, head = evidence.listening, (evidence.scheduler_rank,)
    if listening is None:
        return
    port, dashboard = evidence.options.scheduler_port, evidence.options.dashboard_address
    place = f"{evidence.address}, {f'port {port}' if port else 'any port'}"
    if listening.error:
        fix = "choose another network with interface (--interface)"
        if port:
            fix = "choose another port with scheduler_port (--scheduler-port), or leave it out for any free port"
        found = f"the scheduler can't listen at {place}: {listening.error}"
        yield Finding("error", "ports", found, fix, head)
    elif listening.elsewhere:
        yield Finding(
            "error", "ports",
            f"dashboard_address (--dashboard-address): {dashboard!r} is not on "
            f"{evidence.host(evidence.scheduler_rank)}, where the scheduler runs (expected an address of that node)",
            "leave the option out, or give the port alone (':8787'), for all addresses of the node", head,
        )  # fmt: skip
    elif listening.dashboard:
        yield Finding(
            "warning", "ports",
            f"the dashboard can't listen at {dashboard} ({listening.dashboard}) and will use another port",
            "choose a free one with dashboard_address (--dashboard-address)", head,
        )  # fmt: skip
    else:
        yield Finding("ok", "ports", f"the scheduler can listen at {place}")


def check_network(evidence: Evidence) -> Iterator[Finding]:
    """All ranks must reach the scheduler's address."""
    if evidence.network_problem:
        fix = "choose another with interface (--interface)"
        yield Finding.of("error", "network", evidence.network_problem, fix)
    if evidence.listening is None or evidence.listening.error:
        return
    scheduler = f"the scheduler's rank {evidence.scheduler_rank} on {evidence.host(evidence.scheduler_rank)}"
    reached = evidence.reached
    wrong = {rank: reach for rank, reach in reached.items() if reach.error}
    for rank, reach in wrong.items():
        yield Finding(
            "error", "network",
            f"can't reach {scheduler} at {as_host(evidence.address)}:{evidence.listening.scheduler}: {reach.error}",
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
    if not nodes or not evidence.reached:
        return
    fix = (
        "open the workers' ports between these nodes in the firewall, choose another network with interface (--interface), or "
        "leave a node out of the job"
    )
    lost = {rank: reached.lost for rank, reached in evidence.reached.items() if reached.lost}
    for rank, missed in lost.items():
        for error, hosts in missed.items():
            found = f"can't reach {fold_names(hosts)}: {error}; workers that exchange data would wait for each other"
            yield Finding("error", "node pairs", found, fix, (rank,))
    if not lost:
        tested, total = count_pairs(len(nodes), MOST_IN_CHECK)
        which = "all" if tested == total else f"a ring and a sample of {total}"
        yield Finding(
            "ok", "node pairs", f"{counted(tested, 'pair')} of nodes ({which}) connected in both directions"
        )


def check_clocks(evidence: Evidence) -> Iterator[Finding]:
    """Clocks must agree well enough for certificates, log files and the walltime."""
    clocks = {rank: reach.ahead for rank, reach in evidence.reached.items() if reach.ahead is not None}
    wrong = []
    level: Level
    for rank, ahead in clocks.items():
        other = evidence.scheduler_rank
        # Rank 0 makes the certificates, and dates them back.
        since = ahead - clocks.get(0, 0.0)
        if evidence.options.protocol == Protocol.TLS and not -BACKDATED <= since <= VALID_DAYS * 86400:
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


#: File systems that nodes share: their usual names by the kernel's.
NETWORK = {
    "nfs": "NFS", "nfs4": "NFS", "lustre": "Lustre", "gpfs": "GPFS (Spectrum Scale)", "mmfs": "GPFS (Spectrum Scale)",
    "beegfs": "BeeGFS", "fhgfs": "BeeGFS", "cifs": "CIFS", "smb3": "CIFS", "ceph": "CephFS", "fuse.ceph": "CephFS",
    "glusterfs": "GlusterFS", "fuse.glusterfs": "GlusterFS", "fuse.sshfs": "sshfs", "panfs": "PanFS", "wekafs": "WekaFS",
    "pvfs2": "OrangeFS", "afs": "AFS", "9p": "9P", "dvs": "DVS (Cray)",
}  # fmt: skip
#: File systems in memory.
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: Bytes of scratch that logs and sockets need at least.
LEAST_SCRATCH = 100 * 1024**2
NODE_LOCAL = "choose a node-local directory with local_directory (--local-directory) or TMPDIR"


def check_scratch(evidence: Evidence) -> Iterator[Finding]:
    """Local directories must be writable, local, and large enough."""
    observations = evidence.observations.values()
    found = [
        Finding(level, "scratch", text, fix, (observed.rank,))
        for observed in observations
        for level, text, fix in _flaws(
            observed.scratch, observed.inventory.memory if observed.inventory else 0
        )
    ]
    yield from found
    if not found:
        named = listed([*dict.fromkeys(observed.scratch.path for observed in observations)])
        least = max(0, min(observed.scratch.free for observed in observations))
        yield Finding("ok", "scratch", f"{named}: local, writable, {format_bytes(least)} free at least")


def _flaws(scratch: Scratch, memory: int) -> Iterator[tuple[Level, str, str]]:
    """The problems of a local directory, each with its fix; `memory` bytes of its node are the job's (0: unknown)."""
    path, where = scratch.path, f"{scratch.path} is on"
    if scratch.error:
        yield "error", f"{path} can't be written ({scratch.error})", NODE_LOCAL
        return
    if scratch.exposed:
        yield "warning", exposed_text(scratch.exposed), f"chmod +t {scratch.exposed}, or {NODE_LOCAL}"
    if scratch.ignored:
        found = f"TMPDIR={scratch.ignored} can't be written; using {path} instead"
        yield "warning", found, "make that directory on every node, or unset TMPDIR"
    if kind := NETWORK.get(scratch.filesystem):
        found = f"{where} {kind} ({scratch.mount}), which all nodes share: workers that spill wait for it"
        yield "warning", found, NODE_LOCAL
    if scratch.filesystem in IN_MEMORY:
        found = (
            f"{where} {scratch.filesystem} ({scratch.mount}), which is memory: spilling there frees nothing"
        )
        yield "warning", found, NODE_LOCAL
    elif 0 <= scratch.free < LEAST_SCRATCH:
        yield "error", f"{path} has only {format_bytes(scratch.free)} free", NODE_LOCAL
    elif LEAST_SCRATCH <= scratch.free < memory:
        # Rounded, so that equal nodes share a line.
        sizes = f"about {scratch.free / 2**30:.0f} of {memory / 2**30:.0f} GiB"
        found = f"{path} has less space free than the node has memory, {sizes}: workers that spill much may fill it"
        yield "warning", found, NODE_LOCAL


FIX = "run with UCX_LOG_LEVEL=info to see what UCX needs (docs/transports.md), or choose --protocol tls"

BETWEEN_FIX = (
    "open the nodes' TCP ports to each other, or set UCX_NET_DEVICES to their network (docs/transports.md)"
)


def check_transport(evidence: Evidence) -> Iterator[Finding]:
    """The data that workers will send over UCX, and whether UCX works on and between nodes; nothing if UCX is not requested."""
    if evidence.plan is None or evidence.options.worker_ucx is WorkerUcx.OFF:
        return
    try:
        chosen, line, warning, between_nodes = choose_transport(
            evidence.options.worker_ucx, evidence.plan, evidence.abilities
        )
    except InputError as refused:
        yield Finding.of("error", "transport", refused.problem, FIX)
        return
    if chosen is WorkerUcx.OFF:
        if line.found:
            yield Finding.of("warning", "transport", line, FIX)
        return
    if warning:
        yield Finding.of("warning", "transport", warning, FIX)
    for rank, errors in evidence.ucx.items():
        for host, error in errors.items():
            found, fix = f"UCX does not work: {error}; data to and from workers there goes over TLS", FIX
            if host:
                found = f"UCX does not work to {host}: {error}; data between these nodes goes over TLS"
                fix = BETWEEN_FIX
            yield Finding("warning", "transport", found, fix, (rank,))
    if not any(evidence.ucx.values()):
        where = f"within {counted(len(evidence.ucx), 'node')}"
        if between_nodes and len(evidence.ucx) > 1:
            where += " and from each to the next"
        yield Finding("ok", "transport", f"{line}; UCX works {where}")
