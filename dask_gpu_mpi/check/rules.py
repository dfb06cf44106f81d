"""From what all ranks found to what is right and wrong with the job: pure functions, for `check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dask_gpu_mpi.base.hostlist import counted, fold_names, ranks_text
from dask_gpu_mpi.base.sizes import format_bytes
from dask_gpu_mpi.machine.nvml import INSPECT_COMMAND, RESET_COMMAND
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.machine.visible_devices import VISIBLE_DEVICES
from dask_gpu_mpi.network.credentials import BACKDATED, VALID_DAYS
from dask_gpu_mpi.options.protocols import Protocol

from .known_issues import known_bad
from .observations import MPI_LIBRARY, PROMISE, PYTHON, Facts
from .report import Evidence, Finding, Level

__all__ = ["judge", "judge_scratch", "split_remedy"]

#: What must not differ between processes that send each other tasks; of the rest a difference may be harmless.
MUST_AGREE = frozenset(
    {MPI_LIBRARY, "dask-gpu-mpi", "dask", "distributed", "dask-cuda", "mpi4py", "cloudpickle", "msgpack"}
)
#: What `check` names when all is well.
SHOWN = (PYTHON, "distributed", "dask-cuda", MPI_LIBRARY)

#: File systems that hosts share, by the kernel's names: what people call them.
NETWORK = {
    "nfs": "NFS", "nfs4": "NFS", "lustre": "Lustre", "gpfs": "GPFS (Spectrum Scale)", "mmfs": "GPFS (Spectrum Scale)",
    "beegfs": "BeeGFS", "fhgfs": "BeeGFS", "cifs": "CIFS", "smb3": "CIFS", "ceph": "CephFS", "fuse.ceph": "CephFS",
    "glusterfs": "GlusterFS", "fuse.glusterfs": "GlusterFS", "fuse.sshfs": "sshfs", "panfs": "PanFS", "wekafs": "WekaFS",
    "pvfs2": "OrangeFS", "afs": "AFS", "9p": "9P", "dvs": "DVS (Cray)",
}  # fmt: skip
#: File systems in memory.
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: Bytes of scratch without which not even logs and sockets have room.
LEAST_SCRATCH = 100 * 1024**2
#: Letters of a local directory beyond which the fork server's socket moves to /tmp (`forkserver.become_fork_server`).
LONGEST_SCRATCH = 107 - len("/dgm-0123456789abcdef/fork-server")
#: Seconds by which clocks may differ before it shows.
SKEW = 1.0
LEAVE_OUT = "leave the host out of the job, and tell the operators of the cluster"
SAME_ENVIRONMENT = (
    "let all hosts use one and the same environment (a shared directory or one container image)"
)


def split_remedy(text: str, otherwise: str) -> tuple[str, str]:
    """Take a message of ours apart, which ends with its remedy: ``"found. Fix: remedy"``, or ``"found; needed; remedy"``."""
    for mark in (". Fix: ", "; "):
        found, _, remedy = text.rpartition(mark)
        if found:
            return found, remedy
    return text, otherwise


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings, in the order of the report; each thing that was looked at has one at least."""
    found = [*_ranks(evidence)]
    if evidence.facts:
        found += [*_versions(evidence), *_known_bad(evidence), *_gpus(evidence), *_placement(evidence)]
        found += [*_kernels(evidence), *_network(evidence), *_clocks(evidence), *_scratch(evidence)]
    return tuple(_placed(evidence, finding) for finding in found)


def _placed(evidence: Evidence, finding: Finding) -> Finding:
    hosts = dict.fromkeys(filter(None, map(evidence.host, finding.ranks)))
    return replace(finding, hosts=tuple(hosts))


def _fold(what: str, entries: Iterable[tuple[int, Level, str, str]]) -> list[Finding]:
    """Ranks that have the same to say share a finding."""
    ranks: dict[tuple[Level, str, str], list[int]] = {}
    for rank, level, found, remedy in entries:
        ranks.setdefault((level, found, remedy), []).append(rank)
    return [Finding(level, what, found, remedy, tuple(of)) for (level, found, remedy), of in ranks.items()]


def _problems(evidence: Evidence, what: str, otherwise: str) -> list[Finding]:
    return _fold(
        what,
        (
            (rank, "error", *split_remedy(text, otherwise))
            for rank, facts in sorted(evidence.facts.items())
            for line, text in facts.problems
            if line == what
        ),
    )


def _ranks(evidence: Evidence) -> Iterator[Finding]:
    wrong = _problems(evidence, "launcher", "use the mpirun of the MPI library that mpi4py loads")
    yield from wrong
    if not wrong and not evidence.silent:
        yield Finding(
            "ok",
            "launcher",
            f"MPI and launcher agree: {counted(evidence.size, 'rank')} on {counted(len(evidence.by_host()), 'host')}",
        )
    yield from _fold(
        "ranks",
        (
            (
                rank, "error",
                f"no answer; last heard of while it looked at {evidence.doing[rank][1]}" if rank in evidence.doing
                else "no answer: stopped, swapped out, or its host is gone",
                f"look at that host ({INSPECT_COMMAND}, df); {LEAVE_OUT}",
            )
            for rank in evidence.silent
        ),
    )  # fmt: skip
    yield from _problems(evidence, "host", LEAVE_OUT)


def _versions(evidence: Evidence) -> Iterator[Finding]:
    names = dict.fromkeys(name for facts in evidence.facts.values() for name in facts.versions)
    alike = True
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, facts in sorted(evidence.facts.items()):
            ranks.setdefault(facts.versions.get(name, ""), []).append(rank)
        if len(ranks) == 1:
            continue
        alike = False
        bad = name in MUST_AGREE
        if name == PYTHON:  # functions travel as byte code, which changes with the second number
            bad = len({version.rsplit(".", 1)[0] for version in ranks}) > 1
        told = "; ".join(
            f"{version} for {ranks_text(of)} on {fold_names(evidence.host(rank) for rank in of)}"
            for version, of in ranks.items()
        )
        level: Level = "error" if bad else "warning"
        yield Finding(level, "versions", f"{name} differs: {told}", SAME_ENVIRONMENT)
    if alike:
        first = next(iter(evidence.facts.values())).versions
        shown = ", ".join(
            first[name] if name == MPI_LIBRARY else f"{name} {first[name]}" for name in SHOWN if name in first
        )
        yield Finding("ok", "versions", f"{shown}; these and the others are the same everywhere")


def _known_bad(evidence: Evidence) -> list[Finding]:
    circumstances = set()
    if any(facts.inventory and facts.inventory.gpus for facts in evidence.facts.values()):
        circumstances.add("gpus")
    if evidence.protocol == Protocol.UCX:
        circumstances.add("ucx")
    if len({facts.host for facts in evidence.facts.values()}) > 1:
        circumstances.add("hosts")
    found = _fold(
        "known versions",
        (
            (rank, row.level, f"{row.name(facts.versions)}: {row.effect}", row.remedy)
            for rank, facts in sorted(evidence.facts.items())
            for row in known_bad(facts.versions, frozenset(circumstances))
        ),
    )
    return found or [Finding("ok", "known versions", "none that is known to be bad")]


def _gpus(evidence: Evidence) -> Iterator[Finding]:
    wrong = _problems(evidence, "GPUs", f"correct {VISIBLE_DEVICES}, or leave the host out of the job")
    entries: list[tuple[int, Level, str, str]] = []
    shapes: dict[tuple[str, ...], list[int]] = {}
    drivers: dict[str, list[int]] = {}
    seen: dict[str, int] = {}
    for rank, facts in sorted(evidence.facts.items()):
        if facts.inventory is None:
            continue
        for warning in facts.inventory.warnings:
            text, remedy = split_remedy(warning, LEAVE_OUT)
            entries.append((rank, "error", text, remedy))
        for gpu in facts.inventory.gpus:
            if seen.setdefault(gpu.uuid, rank) == rank and (count := (facts.ecc or {}).get(gpu.uuid, 0)):
                text = f"GPU {gpu.index} ({gpu.uuid}) has {counted(count, 'uncorrected memory error')} since its last reset"
                entries.append((rank, "error", text, f"reset it ({RESET_COMMAND}), or {LEAVE_OUT}"))
        if facts.driver:
            drivers.setdefault(facts.driver, []).append(rank)
        shapes.setdefault(tuple(sorted(gpu.name for gpu in facts.inventory.gpus)), []).append(rank)
    wrong += _fold("GPUs", entries)
    wrong += _missing_gpus(evidence)
    if len(drivers) > 1:
        told = "; ".join(f"{driver} for {ranks_text(of)}" for driver, of in drivers.items())
        wrong.append(
            Finding(
                "warning",
                "GPUs",
                f"NVIDIA drivers differ: {told}",
                "ask the operators, or choose hosts alike",
            )
        )
    if len(shapes) > 1:
        told = "; ".join(f"{_count(names)} for {ranks_text(of)}" for names, of in shapes.items())
        wrong.append(
            Finding(
                "warning", "GPUs", f"ranks see GPUs of different number or kind: {told}",
                "ask the batch system for the same on every host, if that is not what you want",
            )
        )  # fmt: skip
    yield from wrong
    if not wrong:
        kinds = _count(tuple(sorted(_gpu_names(evidence).values())))
        driver = f", driver {next(iter(drivers))}" if drivers else ""
        yield Finding("ok", "GPUs", f"{kinds}{driver}")


def _missing_gpus(evidence: Evidence) -> Iterator[Finding]:
    """Hosts whose ranks together see fewer GPUs than they were promised.

    NVML that is not there is no error of its own, since hosts without GPUs are like that: it is one where there should be some.
    """
    hosts: dict[tuple[int, str], list[Facts]] = {}
    for ranks in evidence.by_host().values():
        promised = max(facts.promised_gpus for facts in ranks)
        source = f"{PROMISE}={promised}"
        if evidence.expect_gpus is not None:
            promised, source = evidence.expect_gpus, f"--expect-gpus {evidence.expect_gpus}"
        # What ranks that are silent or can't look would see is not known; they are red already.
        inventories = [facts.inventory for facts in ranks if facts.inventory is not None]
        if len(inventories) < len(ranks) or len(evidence.facts) < evidence.size:
            continue
        seen = len({gpu.uuid for inventory in inventories for gpu in inventory.gpus})
        if seen < promised:
            text = f"{'only ' if seen else ''}{_number(seen)} seen on the host, of {promised} ({source})"
            hosts.setdefault((seen, text), []).extend(ranks)
    for (seen, text), ranks in hosts.items():
        remedy = (
            f"let the ranks of each host see all of its GPUs together ({VISIBLE_DEVICES}, --gpu-bind, --gpus-per-task), or "
            f"{LEAVE_OUT}"
            if seen
            else f"look at {INSPECT_COMMAND} on that host (is the driver loaded?); in a container, start it with its option for "
            f"GPUs (--nv); or {LEAVE_OUT}"
        )
        yield Finding("error", "GPUs", text, remedy, tuple(facts.rank for facts in ranks))


def _number(gpus: int) -> str:
    return counted(gpus, "GPU") if gpus else "no GPU"


def _gpu_names(evidence: Evidence) -> dict[str, str]:
    inventories = [facts.inventory for facts in evidence.facts.values() if facts.inventory]
    return {gpu.uuid: gpu.name for inventory in inventories for gpu in inventory.gpus}


def _count(names: tuple[str, ...]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no GPU"


def _placement(evidence: Evidence) -> Iterator[Finding]:
    if evidence.plan_problem:
        yield Finding("error", "placement", *split_remedy(evidence.plan_problem, "correct the options"))
    elif evidence.plan is not None:
        told = {
            warning
            for facts in evidence.facts.values()
            if facts.inventory is not None
            for warning in facts.inventory.warnings
        }
        yield from (
            Finding("warning", "placement", *split_remedy(warning, ""))
            for warning in evidence.plan.warnings
            if warning not in told
        )
        kinds = [worker.kind for worker in evidence.plan.workers]
        yield Finding(
            "ok",
            "placement",
            f"{counted(kinds.count('gpu'), 'GPU worker')}, {counted(kinds.count('cpu'), 'CPU worker')}",
        )


KERNEL_REMEDIES = {
    "slow": "run check again, when these files are in the host's memory; keep the environment on a faster file system, or in a "
    "container image",
    "import": "pip install dask-gpu-mpi[cuda12] or dask-gpu-mpi[cuda13], as your driver has it",
    "cuda": f"look at {INSPECT_COMMAND} on that host: the driver must be loaded, and as new as the CUDA that is installed "
    "(dask-gpu-mpi[cuda12] or [cuda13])",
    "wrong": LEAVE_OUT,
    "late": f"look at {INSPECT_COMMAND} on that host; {LEAVE_OUT}",
    "died": f"run `python -c 'from numba import cuda; cuda.current_context()'` there; {LEAVE_OUT}",
}


def _kernels(evidence: Evidence) -> Iterator[Finding]:
    results = [(rank, result) for rank, test in sorted(evidence.tests.items()) for result in test.kernels]
    bad = [(rank, result) for rank, result in results if result.kind]
    gpus = _gpu_names(evidence)
    if not evidence.kernel:
        if gpus:
            yield Finding("warning", "kernel", "not run (--no-kernel): nobody has seen these GPUs compute")
        return
    grouped: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for rank, result in bad:
        grouped.setdefault((result.kind, result.text), []).append((rank, result.uuid))
    for (kind, text), where in grouped.items():
        uuids = [uuid for _, uuid in where]
        named = ", ".join(uuids[:4]) + (f" and {len(uuids) - 4} more" if len(uuids) > 4 else "")
        level: Level = "warning" if kind == "slow" else "error"  # the GPU was not tried
        told = (
            f"not run on {named}: {text}: a slow file system?"
            if kind == "slow"
            else f"fails on {named}: {text}"
        )
        of = tuple(sorted({rank for rank, _ in where}))
        yield Finding(level, "kernel", told, KERNEL_REMEDIES[kind], of)
    if not bad and results:
        slowest = max(result.seconds for _, result in results)
        yield Finding(
            "ok", "kernel", f"right answer from {counted(len(results), 'GPU')}, {slowest:.1f} s at most"
        )
    elif not results and gpus:
        yield Finding("warning", "kernel", "not run, since there is no plan of who uses which GPU")


def _network(evidence: Evidence) -> Iterator[Finding]:
    if evidence.network_problem:
        yield Finding(
            "error", "network", *split_remedy(evidence.network_problem, "choose another with --interface")
        )
        return
    listening = evidence.listening
    if listening is None:
        return
    where = f"{evidence.address}, {f'port {evidence.port}' if evidence.port else 'any port'}"
    head = (evidence.scheduler_rank,)
    if listening.error:
        remedy = (
            "choose another with scheduler_port (--scheduler-port), or leave it out for any free port"
            if evidence.port
            else "choose another network with interface (--interface)"
        )
        yield Finding(
            "error", "ports", f"the scheduler can't listen at {where}: {listening.error}", remedy, head
        )
        return
    if listening.dashboard:
        yield Finding(
            "warning", "ports",
            f"the dashboard's port {evidence.dashboard_address} can't be used ({listening.dashboard}): another one will be",
            "choose a free one with dashboard_address (--dashboard-address)", head,
        )  # fmt: skip
    else:
        yield Finding("ok", "ports", f"the scheduler can listen at {where}")
    here = evidence.host(evidence.scheduler_rank)
    wrong = _fold(
        "network",
        (
            (
                rank, "error",
                f"does not reach the scheduler's rank {evidence.scheduler_rank} on {here} at "
                f"{evidence.address}:{listening.port}: {test.reach.error}",
                "let all hosts of the job reach each other's ports (a firewall?), or choose another network with interface "
                "(--interface)",
            )
            for rank, test in sorted(evidence.tests.items())
            if test.reach is not None and test.reach.error
        ),
    )  # fmt: skip
    yield from wrong
    reached = [test.reach for test in evidence.tests.values() if test.reach is not None]
    if reached and not wrong:
        slowest = max(reach.round_trip for reach in reached)
        yield Finding(
            "ok", "network",
            f"all ranks reach the scheduler's rank {evidence.scheduler_rank} on {here} at {evidence.address} "
            f"(round trip {slowest * 1000:.1f} ms at most)",
        )  # fmt: skip


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    entries: list[tuple[int, Level, str, str]] = []
    clocks = {
        rank: test.reach.ahead
        for rank, test in sorted(evidence.tests.items())
        if test.reach is not None and not test.reach.error
    }
    remedy = "set the clocks by NTP or chrony; " + LEAVE_OUT
    here = f"rank {evidence.scheduler_rank}'s"
    for rank, ahead in clocks.items():
        told = f"the clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {here}"
        # Rank 0 makes the certificates, and dates them back.
        since = ahead - clocks.get(0, 0.0)
        outside = since < -BACKDATED or since > VALID_DAYS * 86400
        if outside and evidence.protocol == Protocol.TLS:
            entries.append((rank, "error", f"{told}: the job's certificates are not valid there", remedy))
        elif abs(ahead) > SKEW:
            entries.append((rank, "warning", f"{told}: times of logs and of the walltime are off", remedy))
    yield from _fold("clocks", entries)
    if clocks and not entries:
        most = max(abs(ahead) for ahead in clocks.values())
        yield Finding("ok", "clocks", f"they differ by {most:.3f} s at most")


def _scratch(evidence: Evidence) -> list[Finding]:
    found = _fold(
        "scratch",
        (
            (rank, *entry)
            for rank, facts in sorted(evidence.facts.items())
            for entry in judge_scratch(facts.scratch, facts.inventory.memory if facts.inventory else 0)
        ),
    )
    if found:
        return found
    least = min((facts.scratch.free for facts in evidence.facts.values()), default=0)
    paths = dict.fromkeys(facts.scratch.path for facts in evidence.facts.values())
    named = ", ".join(list(paths)[:2]) + (" and others" if len(paths) > 2 else "")
    return [
        Finding("ok", "scratch", f"{named}: local, writable, {format_bytes(max(0, least))} free at least")
    ]


def judge_scratch(scratch: Scratch, memory: int) -> Iterator[tuple[Level, str, str]]:
    """What is wrong with a local directory, as (level, found, remedy).

    Parameters
    ----------
    scratch : Scratch
        What the rank found.
    memory : int
        Bytes that the job may use on its host: what the workers may have to spill; 0: unknown.
    """
    elsewhere = "give a node-local one with local_directory (--local-directory) or TMPDIR"
    if scratch.error:
        yield "error", f"{scratch.path} can't be written ({scratch.error})", elsewhere
        return
    if scratch.ignored:
        yield (
            "warning", f"TMPDIR={scratch.ignored} can't be written, {scratch.path} is used instead",
            "make that directory on every host, or unset TMPDIR",
        )  # fmt: skip
    kind = NETWORK.get(scratch.filesystem)
    if kind is not None:
        yield (
            "warning", f"{scratch.path} is on {kind} ({scratch.mount}), which all hosts share: workers that spill wait for it",
            elsewhere,
        )  # fmt: skip
    if scratch.filesystem in IN_MEMORY:
        yield (
            "warning", f"{scratch.path} is on {scratch.filesystem} ({scratch.mount}), which is memory: what workers spill there "
            "frees nothing",
            elsewhere,
        )  # fmt: skip
    elif 0 <= scratch.free < LEAST_SCRATCH:
        yield "error", f"{scratch.path} has only {format_bytes(scratch.free)} free", elsewhere
    elif 0 <= scratch.free < memory:
        # Both as far as people tell them apart, so that hosts alike share a line.
        yield (
            "warning", f"{scratch.path} has less free than the host has memory: about {scratch.free / 2**30:.0f} of "
            f"{memory / 2**30:.0f} GiB; workers that spill much may fill it",
            elsewhere,
        )  # fmt: skip
    if len(scratch.path.encode()) > LONGEST_SCRATCH:
        yield (
            "warning", f"{scratch.path} is too long for a socket ({len(scratch.path.encode())} of {LONGEST_SCRATCH} bytes): "
            "other programs' may fail",
            "choose a shorter one",
        )  # fmt: skip
