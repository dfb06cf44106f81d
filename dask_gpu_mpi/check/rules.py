"""The rules of `check`: pure functions from the evidence to findings, each of which is a line of the report.

`dask_gpu_mpi.check.run` collects the evidence from the workers of a real job, and calls `apply_rules`. The tables of a rule are
above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dask_gpu_mpi.base.text import counted, fold_names, format_bytes, listed, ranks_text
from dask_gpu_mpi.check.report import LEAVE_OUT, Evidence, Finding, Level, Transfer, merge
from dask_gpu_mpi.check.tasks import NOT_INSTALLED, PYTHON
from dask_gpu_mpi.machine.nvidia import INSPECT_COMMAND, RESET_COMMAND, VISIBLE_DEVICES
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.network.interfaces import host_and_port
from dask_gpu_mpi.plan.planner import UNSEEN

Rule = Callable[[Evidence], Iterator[Finding]]


def apply_rules(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, in the order of the report; at least one for each thing that was inspected."""
    rules: tuple[Rule, ...] = (
        check_ranks, check_versions, check_known_issues, check_gpus, check_placement, check_start, check_kernels,
        check_transport, check_ports, check_clocks, check_scratch,
    )  # fmt: skip
    return merge(evidence, (finding for rule in rules for finding in rule(evidence)))


def check_ranks(evidence: Evidence) -> Iterator[Finding]:
    """The ranks, which have met, and those whose workers do not respond."""
    plan, by = evidence.plan, f" by {evidence.library}" if evidence.library else ""
    ranks, nodes = counted(plan.world_size, "rank"), counted(len(plan.hosts), "node")
    have = "has" if plan.world_size == 1 else "have"
    yield Finding("ok", "launcher", f"{ranks} on {nodes} {have} met{by}")
    for rank, why in evidence.silent.items():
        found = f"its worker has not inspected the node and its local directory: {why}"
        yield Finding(
            "error", "ranks", found, f"inspect that node ({INSPECT_COMMAND}, df); {LEAVE_OUT}", (rank,)
        )


#: Versions that must not differ between processes that send each other tasks. Other differences may be harmless.
MUST_AGREE = frozenset(
    {"dask-gpu-mpi", "dask", "distributed", "dask-cuda", "mpi4py", "cloudpickle", "msgpack"}
)
#: Versions that `check` lists if there is no problem.
SHOWN = (PYTHON, "distributed", "dask-cuda")


def check_versions(evidence: Evidence) -> Iterator[Finding]:
    """Versions must not differ between ranks."""
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for rank, observed in evidence.observations.items():
        for name, version in observed.versions.items():
            ranks_of.setdefault(name, {}).setdefault(version, []).append(rank)
    different = {name: ranks for name, ranks in ranks_of.items() if len(ranks) > 1}
    for name, ranks in different.items():
        bad = name in MUST_AGREE
        if name == PYTHON:  # functions are sent as byte code, which changes with the second number
            bad = len({version.rsplit(".", 1)[0] for version in ranks}) > 1
        found = "; ".join(
            f"{version} for {ranks_text(of)} on {fold_names(map(evidence.host, of))}"
            for version, of in ranks.items()
        )
        yield Finding(
            "error" if bad else "warning", "versions", f"{name} differs: {found}",
            "use the same environment on all nodes (a shared directory or one container image)",
        )  # fmt: skip
    if ranks_of and not different:
        shown = {name: version for name in SHOWN for version in ranks_of.get(name, ())}
        texts = ", ".join(f"{name} {version}" for name, version in shown.items())
        yield Finding("ok", "versions", f"{texts}; all versions are the same on all ranks")


#: In place of a specifier: the package is not installed.
MISSING = "missing"
_CUDA = "pip install 'dask-gpu-mpi[cuda12]' or 'dask-gpu-mpi[cuda13]', to match your driver"


class KnownBad(NamedTuple):
    """Versions that do not work together."""

    #: PEP 440 specifiers by name, which must all fit.
    wanted: Mapping[str, str]
    level: Level
    #: Whether that matters only in jobs with GPUs.
    needs_gpus: bool
    #: For the user.
    effect: str
    fix: str


KNOWN_BAD: tuple[KnownBad, ...] = (
    # github.com/dask/distributed/issues/9350
    KnownBad({"bokeh": ">=3.10", "distributed": "<=2026.7.1"}, "warning", False,
     "Scheduler.close raises, so that other Dask clusters (LocalCluster, dask-mpi) fail or hang at their end; dask-gpu-mpi's own "
     "end normally", "pip install 'bokeh<3.10', or a newer distributed where RAPIDS allows it"),
    # a thread started at exit: python/cpython#113964
    KnownBad({PYTHON: ">=3.12,<3.12.3"}, "warning", False,
     "it can't start a thread at exit, so that dask-mpi and others hang there; dask-gpu-mpi does not",
     "use Python 3.12.3 or newer, or 3.11"),
    KnownBad({PYTHON: ">=3.14"}, "warning", False,
     "this is not tested, and Dask's warnings at the end of a job are not silenced",
     "use Python 3.11, 3.12 (from 3.12.3) or 3.13"),
    KnownBad({"dask-cuda": ">=0", "cuda-bindings": MISSING}, "error", True,
     "`import dask_cuda` fails: no GPU worker starts", _CUDA),
    KnownBad({"dask-cuda": MISSING}, "error", True, "GPU workers need dask_cuda.CUDAWorker", _CUDA),
    *(KnownBad({name: ">=1.22"}, "warning", False,
       "UCXX does not work with it: data between workers goes over TLS", f"pip install '{name}<1.22'")
      for name in ("libucx-cu12", "libucx-cu13")),
)  # fmt: skip


def known_bad(versions: Mapping[str, str], *, gpus: bool) -> Iterator[Finding]:
    """The findings about these versions, in a job with or without GPUs.

    >>> [one.found[:38] for one in known_bad({"bokeh": "3.10.2", "distributed": "2026.7.1"}, gpus=False)]
    ['bokeh 3.10.2 with distributed 2026.7.1']
    """
    for bad in KNOWN_BAD:
        fits = all(_fits(versions.get(name), specifier) for name, specifier in bad.wanted.items())
        if fits and (gpus or not bad.needs_gpus):
            parts = (
                f"no {name}" if specifier == MISSING else f"{name} {versions[name]}"
                for name, specifier in bad.wanted.items()
            )
            yield Finding(bad.level, "known versions", f"{' with '.join(parts)}: {bad.effect}", bad.fix)


def _fits(version: str | None, wanted: str) -> bool:
    if version is None or wanted == MISSING:
        return wanted == MISSING and version in (None, NOT_INSTALLED)
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except ValueError:  # `InvalidVersion`, or a number of thousands of digits
        return False


def check_known_issues(evidence: Evidence) -> Iterator[Finding]:
    """Versions that are known to be bad in this job."""
    gpus = any(host.gpus for host in evidence.plan.hosts)
    found = [
        replace(finding, ranks=(rank,))
        for rank, observed in evidence.observations.items()
        for finding in known_bad(observed.versions, gpus=gpus)
    ]
    yield from found or [Finding("ok", "known versions", "no version that is known to be bad")]


def check_start(evidence: Evidence) -> Iterator[Finding]:
    """The warnings of the start for which there is no other line, such as versions that are not tested."""
    others = [one for one in evidence.start_warnings if one not in map(str, evidence.plan.warnings)]
    for warning in others:
        found, _, fix = warning.partition(". Fix: ")
        yield Finding("warning", "start", found, fix)
    if not others:
        workers = counted(len(evidence.plan.workers), "worker")
        yield Finding("ok", "start", f"{workers} ready after {evidence.ready_seconds:.1f} s")


def check_placement(evidence: Evidence) -> Iterator[Finding]:
    """The plan and its warnings."""
    for problem in evidence.plan.warnings:
        if problem.what not in ("GPUs", UNSEEN):
            yield Finding("warning", problem.what or "placement", problem.text, problem.fix)
    kinds = [worker.kind for worker in evidence.plan.workers]
    workers = [counted(kinds.count(kind), f"{kind.upper()} worker") for kind in ("gpu", "cpu")]
    yield Finding("ok", "placement", ", ".join(workers))


def check_gpus(evidence: Evidence) -> Iterator[Finding]:
    """Lost GPUs, memory errors, drivers, kinds and numbers."""
    wrong = [
        Finding("error", "GPUs", problem.text, problem.fix or LEAVE_OUT)
        for problem in evidence.plan.warnings
        if problem.what == "GPUs"
    ]
    wrong += [*_memory_errors(evidence), *_missing(evidence)]
    drivers: dict[str, list[str]] = {}
    for rank, observed in evidence.observations.items():
        if observed.driver:
            drivers.setdefault(observed.driver, []).append(evidence.host(rank))
    if len(drivers) > 1:
        fix = "ask the operators for one version, or choose nodes with the same driver"
        wrong.append(Finding("warning", "GPUs", f"NVIDIA drivers differ: {_on_hosts(drivers)}", fix))
    kinds: dict[str, list[str]] = {}
    for host in evidence.plan.hosts:
        kinds.setdefault(_kinds(gpu.name for gpu in host.gpus), []).append(host.host)
    if len(kinds) > 1:
        found = f"nodes have GPUs of different number or kind: {_on_hosts(kinds)}"
        fix = "request the same GPUs on every node, unless that is intended"
        wrong.append(Finding("warning", "GPUs", found, fix))
    yield from wrong
    if not wrong:
        driver = f", driver {next(iter(drivers))}" if drivers else ""
        names = (gpu.name for host in evidence.plan.hosts for gpu in host.gpus)
        yield Finding("ok", "GPUs", f"{_kinds(names)}{driver}")


def _memory_errors(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.plan.hosts:
        places = {gpu.uuid: gpu.index for gpu in host.gpus}
        for rank, observed in evidence.of_host(host).items():
            for uuid, count in observed.ecc.items():
                if count:
                    errors = counted(count, "uncorrected memory error")
                    found = f"GPU {places.get(uuid, '?')} ({uuid}) has {errors} since its last reset"
                    fix = f"reset it ({RESET_COMMAND}), or {LEAVE_OUT}"
                    yield Finding("error", "GPUs", found, fix, (rank,))


def _missing(evidence: Evidence) -> Iterator[Finding]:
    """Nodes with fewer GPUs than expected; a job of CPU workers alone counts none."""
    if evidence.options.worker_kind == "cpu":
        return
    for host in evidence.plan.hosts:
        expected, source = host.promise.count, host.promise.source
        if evidence.expect_gpus is not None:
            expected = evidence.expect_gpus
            source = evidence.expected_by or f"--expect-gpus {expected}"
        seen = len(host.gpus)
        if seen >= expected:
            continue
        visible = f"only {counted(seen, 'GPU')}" if seen else "no GPU"
        fix = host.promise.fix or f"run {INSPECT_COMMAND} on that node"
        if seen:
            fix = f"let the ranks of each node see all of its GPUs together ({VISIBLE_DEVICES}, --gpu-bind, --gpus-per-task)"
        found = f"{visible} visible on the node (expected {expected}: {source})"
        yield Finding("error", "GPUs", found, f"{fix}, or {LEAVE_OUT}", host.ranks)


def _on_hosts(hosts: Mapping[str, Iterable[str]]) -> str:
    """The hosts that have each text."""
    return "; ".join(f"{text} on {fold_names(dict.fromkeys(of))}" for text, of in hosts.items())


def _kinds(names: Iterable[str]) -> str:
    """The numbers of GPUs of each kind, by the names of all."""
    return ", ".join(f"{number} {name}" for name, number in Counter(sorted(names)).items()) or "no GPU"


#: The fix for each `tasks.KernelResult.kind`.
FIXES = {
    "slow": "run check again, now that these files are in the node's page cache; or keep the environment on a faster file "
    "system, or in a container image",
    "import": _CUDA,
    "cuda": f"run {INSPECT_COMMAND} on that node: the driver has to be loaded, and as new as the CUDA that is installed "
    "(dask-gpu-mpi[cuda12] or [cuda13])",
    "wrong": LEAVE_OUT,
    "late": f"run {INSPECT_COMMAND} on that node; {LEAVE_OUT}",
    "died": f"run `python -c 'from numba import cuda; cuda.current_context()'` there; {LEAVE_OUT}",
}


def check_kernels(evidence: Evidence) -> Iterator[Finding]:
    """Each GPU with a worker must compute the right result in time."""
    if not evidence.kernel and any(worker.devices for worker in evidence.plan.workers):
        yield Finding("warning", "kernel", "not run (--no-kernel): whether these GPUs compute is unknown")
    rank_of = {uuid: worker.rank for worker in evidence.plan.workers for uuid in worker.devices}
    failures: dict[tuple[str, str], list[str]] = {}
    for uuid, result in evidence.kernels.items():
        if result.kind:
            failures.setdefault((result.kind, result.text), []).append(uuid)
    for (kind, text), uuids in failures.items():
        level: Level = "warning" if kind in ("import", "slow") else "error"
        how = "not run" if level == "warning" else "failed"
        ranks = tuple(dict.fromkeys(rank_of[uuid] for uuid in uuids))
        yield Finding(level, "kernel", f"{how} on {listed(uuids)}: {text}", FIXES[kind], ranks)
    if evidence.kernels and not failures:
        slowest = max(result.seconds for result in evidence.kernels.values())
        gpus = counted(len(evidence.kernels), "GPU")
        yield Finding("ok", "kernel", f"correct result from {gpus}, after {slowest:.1f} s at most")


#: In the line of a transport that is not UCX although it could be (`startup`).
NO_UCX = "No UCX: "
UCX_FIX = "run with UCX_LOG_LEVEL=info to see what UCX needs (docs/transports.md), or choose --protocol tls"
BETWEEN_FIX = (
    "open the nodes' TCP ports to each other, or set UCX_NET_DEVICES to their network (docs/transports.md)"
)
PORTS_FIX = (
    "open the workers' ports between these nodes in the firewall, choose another network with interface (--interface), or leave "
    "a node out of the job"
)


def check_transport(evidence: Evidence) -> Iterator[Finding]:
    """The transfers between workers, and whether they have used UCX, if they could."""
    line, _, fix = evidence.transport.partition(". Fix: ")
    wrong = []
    if NO_UCX in line:
        wrong.append(Finding("warning", "transport", line, fix or UCX_FIX))
    for rank, reasons in evidence.without_ucx.items():
        for address, reason in reasons.items():
            found = (
                f"UCX does not work with {address}: {reason}; data to and from workers there goes over TLS"
            )
            wrong.append(Finding("warning", "transport", found, BETWEEN_FIX, (rank,)))
    for transfer in evidence.transfers:
        if transfer.error:
            sender = transfer.sender
            found = f"could not receive data of worker {sender.name} on {sender.host}: {transfer.error}"
            wrong.append(Finding("error", "transport", found, PORTS_FIX, (transfer.receiver.rank,)))
    yield from wrong
    parts = [line] if line and NO_UCX not in line else []
    for where, between in (("within nodes", False), ("between nodes", True)):
        parts += _rates(where, [one for one in evidence.transfers if one.between_nodes is between])
    if parts:
        yield Finding("ok", "transport", "; ".join(parts))


def _rates(where: str, transfers: Sequence[Transfer]) -> Iterator[str]:
    """The slowest and the fastest of these transfers, in words."""
    rates = [one.rate for one in transfers if one.rate is not None]
    if rates:
        kind = "GPU memory" if all(one.on_device for one in transfers) else "host memory"
        if len({one.on_device for one in transfers}) > 1:
            kind = "host and GPU memory"
        texts = [*dict.fromkeys(f"{rate / 1e9:.2g}" for rate in (min(rates), max(rates)))]
        yield f"{where} {' to '.join(texts)} GB/s ({kind}, {counted(len(rates), 'transfer')} at the same time)"


def check_ports(evidence: Evidence) -> Iterator[Finding]:
    """The address of the scheduler, at which all workers have reached it, and that of the dashboard."""
    scheduler, wanted = evidence.plan.scheduler, evidence.options.dashboard_address
    used = urlsplit(evidence.dashboard_link).port if evidence.dashboard_link else None
    port = host_and_port(wanted)[1] if evidence.options.scheduler else 0
    if used and port and used != port:
        found = f"the dashboard can't listen at {wanted}, and uses port {used}"
        fix = "choose a free one with dashboard_address (--dashboard-address)"
        yield Finding("warning", "ports", found, fix, (scheduler.rank,))
    where = (
        f"on rank {scheduler.rank} on {scheduler.host}" if evidence.options.scheduler else "of another job"
    )
    yield Finding("ok", "network", f"all workers have reached the scheduler {where} at {evidence.address}")


#: Seconds by which clocks may differ without a warning.
CLOCK_TOLERANCE = 1.0


def check_clocks(evidence: Evidence) -> Iterator[Finding]:
    """Clocks must agree well enough for log files and the walltime; for certificates, the start requires that."""
    wrong = {rank: ahead for rank, ahead in evidence.clocks.items() if abs(ahead) > CLOCK_TOLERANCE}
    for rank, ahead in wrong.items():
        side = "ahead of" if ahead > 0 else "behind"
        found = (
            f"the clock is {abs(ahead):.1f} s {side} that of rank {evidence.plan.scheduler.rank}: times in log files and the "
            "remaining walltime are wrong there"
        )
        fix = f"set the clocks by NTP or chrony; {LEAVE_OUT}"
        yield Finding("warning", "clocks", found, fix, (rank,))
    if evidence.clocks and not wrong:
        most = max(map(abs, evidence.clocks.values()))
        yield Finding("ok", "clocks", f"they differ by {most:.3f} s at most")


#: File systems that nodes share, as the kernel calls them.
NETWORK = frozenset({
    "nfs", "nfs4", "lustre", "gpfs", "mmfs", "beegfs", "fhgfs", "cifs", "smb3", "ceph", "fuse.ceph", "glusterfs",
    "fuse.glusterfs", "fuse.sshfs", "panfs", "wekafs", "pvfs2", "afs", "9p", "dvs",
})  # fmt: skip
#: File systems in memory.
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: Bytes of scratch that logs and sockets need at least.
LEAST_SCRATCH = 100 * 1024**2
NODE_LOCAL = "choose a node-local directory with local_directory (--local-directory) or TMPDIR"


def check_scratch(evidence: Evidence) -> Iterator[Finding]:
    """Local directories must be writable, local, and large enough."""
    scratches = {rank: observed.scratch for rank, observed in evidence.observations.items()}
    memory = {rank: host.memory for host in evidence.plan.hosts for rank in host.ranks}
    found = [
        Finding(level, "scratch", text, fix, (rank,))
        for rank, scratch in scratches.items()
        for level, text, fix in _flaws(scratch, memory[rank])
    ]
    yield from found
    if scratches and not found:
        named = listed([*dict.fromkeys(scratch.path for scratch in scratches.values())])
        least = max(0, min(scratch.free for scratch in scratches.values()))
        yield Finding("ok", "scratch", f"{named}: local, writable, {format_bytes(least)} free at least")


def _flaws(scratch: Scratch, memory: int) -> Iterator[tuple[Level, str, str]]:
    """The problems of a local directory, each with its fix; `memory` bytes of its node are the job's (0: unknown)."""
    path, where = scratch.path, f"{scratch.path} is on {scratch.filesystem} ({scratch.mount})"
    if scratch.error:
        yield "error", f"{path} can't be written ({scratch.error})", NODE_LOCAL
        return
    if scratch.ignored:
        found = f"TMPDIR={scratch.ignored} can't be written; using {path} instead"
        yield "warning", found, "make that directory on every node, or unset TMPDIR"
    if scratch.filesystem in NETWORK:
        yield "warning", f"{where}, which all nodes share: workers that spill wait for it", NODE_LOCAL
    if 0 <= scratch.free < LEAST_SCRATCH:
        yield "error", f"{path} has only {format_bytes(scratch.free)} free", NODE_LOCAL
    elif scratch.filesystem in IN_MEMORY:
        yield "warning", f"{where}, which is memory: spilling there frees nothing", NODE_LOCAL
    elif 0 <= scratch.free < memory:
        # Rounded, so that equal nodes share a line.
        sizes = f"about {scratch.free / 2**30:.0f} of {memory / 2**30:.0f} GiB"
        found = f"{path} has less space free than the node has memory, {sizes}: workers that spill much may fill it"
        yield "warning", found, NODE_LOCAL
