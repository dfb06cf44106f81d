"""What the rules of `check` share: the texts of errors as findings, and findings of several ranks as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .report import Evidence, Finding

__all__ = ["LEAVE_OUT", "merge", "problems", "split_fix"]

LEAVE_OUT = "leave the node out of the job and inform the operators of the cluster"


def split_fix(text: str, default: str) -> tuple[str, str]:
    """Split a message before its fix; `default` where it has none.

    >>> split_fix("--interface: unknown network 'ib9' (expected eth0; lo). Fix: choose eth0", "")
    ("--interface: unknown network 'ib9' (expected eth0; lo)", 'choose eth0')
    >>> split_fix("no GPU", "leave the node out")
    ('no GPU', 'leave the node out')
    """
    found, _, fix = text.rpartition(" Fix: ")
    if not found and "(expected " not in text:  # the former shape: "found; fix"
        found, _, fix = text.rpartition("; ")
    return (found.removesuffix("."), fix) if found else (text, default)


def problems(evidence: Evidence, what: str, default_fix: str) -> Iterator[Finding]:
    """What ranks found unusable."""
    for rank, observed in evidence.observations.items():
        for line, text in observed.problems:
            if line == what:
                yield Finding("error", what, *split_fix(text, default_fix), (rank,))


def merge(evidence: Evidence, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding where those of several ranks differ in nothing else; each with the hosts of its ranks."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    return tuple(
        replace(finding, ranks=tuple(of), hosts=tuple(dict.fromkeys(filter(None, map(evidence.host, of)))))
        for finding, of in ranks.items()
    )
