"""The report of `check`, as a table for people and as plain data for programs; many hosts that are alike are told once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import click

from dask_gpu_mpi.base.hostlist import counted, fold_names, fold_numbers, ranks_text
from dask_gpu_mpi.base.sizes import format_bytes
from dask_gpu_mpi.machine.gpus import Gpu, gpus_of_host

from .kernel import KernelResult
from .observations import Facts
from .report import Evidence, Finding, Report

__all__ = ["as_data", "render"]

MANY_HOSTS = 16
#: Lines of one level about one thing that the table shows; the JSON has them all.
MOST_LINES = 12
#: The words without their colours are enough.
_WORDS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
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
                "remedy": finding.remedy,
                "ranks": list(finding.ranks),
                "hosts": list(finding.hosts),
            }
            for finding in report.findings
        ],
        "hosts": [_host_data(evidence, ranks) for ranks in evidence.by_host().values()],
        "versions": [{"ranks": ranks, "versions": dict(versions)} for ranks, versions in _versions(evidence)],
    }


def _host_data(evidence: Evidence, ranks: Sequence[Facts]) -> dict[str, Any]:
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
        "ranks": [facts.rank for facts in ranks],
        "cpus": sorted({cpu for facts in ranks if facts.inventory for cpu in facts.inventory.cpus}),
        "memory": inventory.memory if inventory else None,
        "driver": ranks[0].driver or None,
        "gpus": gpus,
        "scratch": [
            {
                "ranks": [facts.rank for facts in ranks if facts.scratch.path == scratch.path],
                "path": scratch.path,
                "filesystem": scratch.filesystem or None,
                "free": scratch.free if scratch.free >= 0 else None,
            }
            for scratch in {facts.scratch.path: facts.scratch for facts in ranks}.values()
        ],
        "clock_ahead": _ahead(evidence, ranks),
    }


def render(report: Report) -> str:
    """Write a report as aligned text, without a trailing newline; the first words are styled, for a terminal."""
    evidence = report.evidence
    lines = []
    if evidence.facts:
        hosts = len(evidence.by_host())
        lines += [
            f"check of {counted(evidence.size, 'rank')} on {counted(hosts, 'host')}, {report.seconds:.1f} s",
            "",
        ]
    lines += _finding_lines(report)
    groups: dict[Hashable, list[list[Facts]]] = {}
    by_host = evidence.by_host()
    for number, ranks in enumerate(by_host.values()):
        key = _pattern(evidence, ranks) if len(by_host) > MANY_HOSTS else number
        groups.setdefault(key, []).append(ranks)
    blocks = [(_title(evidence, group), _rows(evidence, group)) for group in groups.values()]
    widths = [
        max((len(row[i]) for _, rows in blocks for row in (_HEADER, *rows)), default=0)
        for i in range(len(_HEADER))
    ]
    for title, rows in blocks:
        lines += ["", title]
        for row in (_HEADER, *rows) if rows else ():
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
    counts = Counter(finding.level for finding in report.findings)
    word, colour = _WORDS[report.level]
    summary = f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}"
    return "\n".join([*lines, "", f"{click.style(word, fg=colour)}: {summary}"])


def _finding_lines(report: Report) -> Iterator[str]:
    width = max((len(finding.what) for finding in report.findings), default=0)
    shown: Counter[tuple[str, str]] = Counter()
    for finding in report.findings:
        shown[finding.level, finding.what] += 1
        if shown[finding.level, finding.what] > MOST_LINES:
            continue
        yield _finding_line(finding, finding.found, report.evidence.size, width)
        if finding.remedy:
            yield f"  {'':7}  {'':{width}}  -> {finding.remedy}"
    for (level, what), count in shown.items():
        if count > MOST_LINES:
            more = f"{count - MOST_LINES} more like these; --json has them all"
            word, colour = _WORDS[level]
            yield f"  {click.style(f'{word:7}', fg=colour)}  {what:{width}}  {more}"


def _finding_line(finding: Finding, text: str, size: int, width: int) -> str:
    word, colour = _WORDS[finding.level]
    where = ""
    # What concerns all ranks needs no names.
    if finding.ranks and len(finding.ranks) < size:
        hosts = f" on {fold_names(finding.hosts)}" if finding.hosts else ""
        where = f"{ranks_text(finding.ranks)}{hosts}: "
    return f"  {click.style(f'{word:7}', fg=colour)}  {finding.what:{width}}  {where}{text}"


def _gpus(ranks: Sequence[Facts]) -> list[Gpu]:
    return gpus_of_host((facts.inventory.pid, facts.inventory.gpus) for facts in ranks if facts.inventory)


def _kernels(evidence: Evidence, ranks: Sequence[Facts]) -> dict[str, KernelResult]:
    tests = [evidence.tests[facts.rank] for facts in ranks if facts.rank in evidence.tests]
    return {result.uuid: result for test in tests for result in test.kernels}


def _ecc(ranks: Sequence[Facts], gpu: Gpu) -> int | None:
    return next((facts.ecc[gpu.uuid] for facts in ranks if facts.ecc and gpu.uuid in facts.ecc), None)


def _ahead(evidence: Evidence, ranks: Sequence[Facts]) -> float | None:
    for facts in ranks:
        test = evidence.tests.get(facts.rank)
        if test is not None and test.reach is not None and not test.reach.error:
            return round(test.reach.ahead, 4)
    return None


def _versions(evidence: Evidence) -> list[tuple[list[int], tuple[tuple[str, str], ...]]]:
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, facts in sorted(evidence.facts.items()):
        found.setdefault(tuple(facts.versions.items()), []).append(rank)
    return [(ranks, versions) for versions, ranks in found.items()]


def _pattern(evidence: Evidence, ranks: Sequence[Facts]) -> Hashable:
    """What must be equal for two hosts to be told together: all but names, UUIDs, free bytes and the first rank."""
    first = ranks[0]
    return (
        tuple(facts.rank - first.rank for facts in ranks),
        first.inventory and (first.inventory.cpus, first.inventory.memory),
        first.driver,
        first.scratch.path,
        first.scratch.filesystem,
        tuple(row[:2] + row[3:] for row in _rows(evidence, [ranks])),
    )


def _title(evidence: Evidence, group: Sequence[Sequence[Facts]]) -> str:
    first = group[0][0]
    parts = []
    if first.inventory is not None:
        cores = fold_numbers(cpu for facts in group[0] if facts.inventory for cpu in facts.inventory.cpus)
        memory = first.inventory.memory
        parts += [f"cores {cores}", format_bytes(memory) if memory else "memory unknown"]
    parts += [f"driver {first.driver}"] if first.driver else []
    free = min(ranks[0].scratch.free for ranks in group)
    room = f", {format_bytes(free)} free" if free >= 0 else ""
    parts.append(f"scratch {first.scratch.path} ({first.scratch.filesystem or 'unknown'}{room})")
    if len(group) == 1:
        ahead = _ahead(evidence, group[0])
        parts += [f"clock {ahead:+.3f} s"] if ahead is not None else []
        return f"host {first.host}: {ranks_text(facts.rank for facts in group[0])}, {', '.join(parts)}"
    every = ranks_text(facts.rank for ranks in group for facts in ranks)
    return f"{len(group)} hosts {fold_names(ranks[0].host for ranks in group)}: {every}; on each {', '.join(parts)}"


def _rows(evidence: Evidence, group: Sequence[Sequence[Facts]]) -> list[tuple[str, ...]]:
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
