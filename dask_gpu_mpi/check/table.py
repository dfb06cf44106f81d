"""The report of `check`, as a table for people and as plain data for programs; many nodes that are alike share a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import click

from dask_gpu_mpi.base.hostlist import counted, fold_names, fold_numbers, ranks_text
from dask_gpu_mpi.base.sizes import format_bytes
from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host

from .kernel import KernelResult
from .observations import Observations
from .report import Evidence, Finding, Level, Report

__all__ = ["as_data", "render"]

MANY_NODES = 16
#: Lines of one level about one thing that the table shows; the JSON has them all.
MOST_LINES = 12
#: Each level's label and colour; the labels are enough without colours.
_LABELS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
_HEADER = ("GPU", "name", "UUID", "memory", "cores", "in use", "ECC", "kernel")


def as_data(report: Report) -> dict[str, Any]:
    """Plain data, for JSON: sizes in bytes, times in seconds, ``null`` for what is not known."""
    evidence = report.evidence
    return {
        "level": report.level,
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "world_size": evidence.size,
        "scheduler": {
            "rank": evidence.scheduler_rank,
            "host": evidence.host(evidence.scheduler_rank),
            "address": evidence.address or None,
        },
        "findings": [
            {
                "level": finding.level,
                "what": finding.what,
                "found": finding.found,
                "remedy": finding.fix,
                "ranks": list(finding.ranks),
                "hosts": list(finding.hosts),
            }
            for finding in report.findings
        ],
        "hosts": [_host_data(evidence, ranks) for ranks in evidence.by_host().values()],
        "versions": [{"ranks": ranks, "versions": dict(versions)} for ranks, versions in _versions(evidence)],
    }


def _host_data(evidence: Evidence, ranks: Sequence[Observations]) -> dict[str, Any]:
    kernels = _kernels(evidence, ranks)
    inventory = ranks[0].inventory
    gpus = []
    for gpu in _gpus(ranks):
        kernel = kernels.get(gpu.uuid)
        gpus.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memory": gpu.memory,
                "cpus": list(gpu.cpus),
                "pci": gpu.pci,
                "in_use": gpu.busy,
                "ecc_uncorrected": _ecc(ranks, gpu),
                "kernel": None if kernel is None else kernel.kind or "ok",
                "kernel_seconds": None if kernel is None else round(kernel.seconds, 3),
            }
        )
    return {
        "host": ranks[0].host,
        "ranks": [observed.rank for observed in ranks],
        "cpus": sorted({cpu for observed in ranks if observed.inventory for cpu in observed.inventory.cpus}),
        "memory": inventory.memory if inventory else None,
        "driver": ranks[0].driver or None,
        "gpus": gpus,
        "scratch": [
            {
                "ranks": [observed.rank for observed in ranks if observed.scratch.path == scratch.path],
                "path": scratch.path,
                "filesystem": scratch.filesystem or None,
                "free": scratch.free if scratch.free >= 0 else None,
            }
            for scratch in {observed.scratch.path: observed.scratch for observed in ranks}.values()
        ],
        "clock_ahead": _ahead(evidence, ranks),
    }


def render(report: Report) -> str:
    """Write a report as aligned text, without a trailing newline; the labels are styled, for a terminal."""
    evidence = report.evidence
    by_host = evidence.by_host()
    lines = []
    if by_host:
        ranks, nodes = counted(evidence.size, "rank"), counted(len(by_host), "node")
        lines += [f"check of {ranks} on {nodes}, {report.seconds:.1f} s", ""]
    lines += _finding_lines(report)
    # Of few nodes each has a block of its own.
    groups: dict[Hashable, list[list[Observations]]] = {}
    for number, observations in enumerate(by_host.values()):
        key = _pattern(evidence, observations) if len(by_host) > MANY_NODES else number
        groups.setdefault(key, []).append(observations)
    blocks = [(_title(evidence, group), _rows(evidence, group)) for group in groups.values()]
    table = [_HEADER, *(row for _, rows in blocks for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for title, rows in blocks:
        lines += ["", title]
        for row in (_HEADER, *rows) if rows else ():
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
    counts = Counter(finding.level for finding in report.findings)
    label, colour = _LABELS[report.level]
    summary = f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}"
    return "\n".join([*lines, "", f"{click.style(label, fg=colour)}: {summary}"])


def _finding_lines(report: Report) -> Iterator[str]:
    width = max((len(finding.what) for finding in report.findings), default=0)

    def line(level: Level, what: str, text: str) -> str:
        label, colour = _LABELS[level]
        return f"  {click.style(f'{label:7}', fg=colour)}  {what:{width}}  {text}"

    counts: Counter[tuple[Level, str]] = Counter()
    for finding in report.findings:
        counts[finding.level, finding.what] += 1
        if counts[finding.level, finding.what] <= MOST_LINES:
            where = _where(finding, report.evidence.size)
            yield line(finding.level, finding.what, f"{where}{finding.found}")
            if finding.fix:
                yield f"  {'':7}  {'':{width}}  Fix: {finding.fix}"
    for (level, what), count in counts.items():
        if count > MOST_LINES:
            yield line(level, what, f"{count - MOST_LINES} more like these; --json has them all")


def _where(finding: Finding, size: int) -> str:
    """The ranks of a finding and their nodes; nothing where it concerns all ranks, or the job."""
    if not finding.ranks or len(finding.ranks) == size:
        return ""
    hosts = f" on {fold_names(finding.hosts)}" if finding.hosts else ""
    return f"{ranks_text(finding.ranks)}{hosts}: "


def _gpus(ranks: Sequence[Observations]) -> list[Gpu]:
    return gpus_of_host(
        (observed.inventory.pid, observed.inventory.gpus) for observed in ranks if observed.inventory
    )


def _kernels(evidence: Evidence, ranks: Sequence[Observations]) -> dict[str, KernelResult]:
    tests = [evidence.tests[observed.rank] for observed in ranks if observed.rank in evidence.tests]
    return {result.uuid: result for test in tests for result in test.kernels}


def _ecc(ranks: Sequence[Observations], gpu: Gpu) -> int | None:
    return next(
        (observed.ecc[gpu.uuid] for observed in ranks if observed.ecc and gpu.uuid in observed.ecc), None
    )


def _ahead(evidence: Evidence, ranks: Sequence[Observations]) -> float | None:
    for observed in ranks:
        test = evidence.tests.get(observed.rank)
        if test is not None and test.reach is not None and not test.reach.error:
            return round(test.reach.ahead, 4)
    return None


def _versions(evidence: Evidence) -> list[tuple[list[int], tuple[tuple[str, str], ...]]]:
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, observed in evidence.observations.items():
        found.setdefault(tuple(observed.versions.items()), []).append(rank)
    return [(ranks, versions) for versions, ranks in found.items()]


def _pattern(evidence: Evidence, ranks: Sequence[Observations]) -> Hashable:
    """What must be equal for two nodes to share a block: all but names, UUIDs, free bytes and the first rank."""
    first = ranks[0]
    return (
        tuple(observed.rank - first.rank for observed in ranks),
        first.inventory and (first.inventory.cpus, first.inventory.memory),
        first.driver,
        first.scratch.path,
        first.scratch.filesystem,
        tuple(row[:2] + row[3:] for row in _rows(evidence, [ranks])),
    )


def _title(evidence: Evidence, group: Sequence[Sequence[Observations]]) -> str:
    first = group[0][0]
    parts = []
    if first.inventory is not None:
        cores = fold_numbers(
            cpu for observed in group[0] if observed.inventory for cpu in observed.inventory.cpus
        )
        memory = first.inventory.memory
        parts += [f"cores {cores}", format_bytes(memory) if memory else "memory unknown"]
    parts += [f"driver {first.driver}"] if first.driver else []
    free = min(ranks[0].scratch.free for ranks in group)
    room = f", {format_bytes(free)} free" if free >= 0 else ""
    parts.append(f"scratch {first.scratch.path} ({first.scratch.filesystem or 'unknown'}{room})")
    if len(group) == 1:
        ahead = _ahead(evidence, group[0])
        parts += [f"clock {ahead:+.3f} s"] if ahead is not None else []
        return f"node {first.host}: {ranks_text(observed.rank for observed in group[0])}, {', '.join(parts)}"
    every = ranks_text(observed.rank for ranks in group for observed in ranks)
    return f"{len(group)} nodes {fold_names(ranks[0].host for ranks in group)}: {every}; on each {', '.join(parts)}"


def _rows(evidence: Evidence, group: Sequence[Sequence[Observations]]) -> list[tuple[str, ...]]:
    kernels = _kernels(evidence, group[0])
    rows: list[tuple[str, ...]] = []
    for gpu in _gpus(group[0]):
        ecc, kernel = _ecc(group[0], gpu), kernels.get(gpu.uuid)
        place = str(gpu.index) if gpu.slice < 0 else f"{gpu.index}:{gpu.slice}"
        rows.append(
            (
                place,
                gpu.name,
                gpu.uuid if len(group) == 1 else "-",
                format_bytes(gpu.memory) if gpu.memory else "-",
                fold_numbers(gpu.cpus) or "-",
                "-" if not gpu.processes else "some" if gpu.busy is None else format_bytes(gpu.busy),
                "-" if ecc is None else str(ecc),
                "-" if kernel is None else "FAILED" if kernel.kind else "ok",
            )
        )
    return rows
