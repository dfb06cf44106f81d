"""The rules of a preflight about local directories."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.check.rules import LEAST_SCRATCH, LONGEST_SCRATCH, NETWORK, apply_rules
from dask_gpu_mpi.machine.scratch import Scratch
from support.mocks.preflights import GIB, bad, evidence, observed


@pytest.mark.parametrize(
    ("scratch", "level", "says"),
    [
        (Scratch("/s", "ext4", "/", 100 * GIB), None, ""),
        (Scratch("/s", "xfs", "/", 64 * GIB), None, ""),
        (Scratch("/s", "", "", -1), None, ""),
        (Scratch("/s", "xfs", "/", 63 * GIB), "warning", "about 63 of 64 GiB"),
        (Scratch("/s", "ext4", "/", 1000), "error", "has only 1000 B free"),
        (Scratch("/s", "ext4", "/", 100 * GIB, error="Permission denied"), "error", "can't be written (Permission denied)"),
        (Scratch("/s", "ext4", "/", 100 * GIB, ignored="/t"), "warning", "TMPDIR=/t"),
        (Scratch("/s", "ext4", "/", 100 * GIB, exposed="/s"), "warning", "may replace the workers' files in '/s'"),
        (Scratch("/s", "tmpfs", "/s", 100 * GIB), "warning", "is memory"),
        (Scratch("/s", "tmpfs", "/s", 1 * GIB), "warning", "is memory"),
        (Scratch("/s", "ramfs", "/s", -1), "warning", "is memory"),
        (Scratch("/" + "s" * LONGEST_SCRATCH, "ext4", "/", 100 * GIB), "warning", "too long for a socket"),
        *((Scratch("/s", kind, "/s", 100 * GIB), "warning", f"is on {name} (/s)") for kind, name in NETWORK.items()),
    ],
)  # fmt: skip
def test_scratch(scratch: Scratch, level: str | None, says: str) -> None:
    findings = bad(evidence(observed(0), observed(1, scratch=scratch)))
    assert [finding.level for finding in findings] == ([level] if level else [])
    for finding in findings:
        assert (finding.what, finding.ranks) == ("scratch", (1,))
        assert says in finding.found


def test_network_file_systems_go_by_their_names() -> None:
    assert {NETWORK[kind] for kind in ("nfs4", "lustre", "beegfs")} == {"NFS", "Lustre", "BeeGFS"}
    assert NETWORK["gpfs"].startswith("GPFS")


@pytest.mark.parametrize(
    ("free", "level"),
    [
        (-1, None),
        (0, "error"),
        (LEAST_SCRATCH - 1, "error"),
        (LEAST_SCRATCH, "warning"),
        (64 * GIB - 1, "warning"),
        (64 * GIB, None),
    ],
)
def test_free_space_at_the_bounds(free: int, level: str | None) -> None:
    scratch = Scratch("/s", "ext4", "/", free)
    assert [one.level for one in bad(evidence(observed(0), observed(1, scratch=scratch)))] == (
        [level] if level else []
    )


def test_memory_that_is_unknown_is_no_bound() -> None:
    blind = observed(1, inventory=None, scratch=Scratch("/s", "ext4", "/", LEAST_SCRATCH))
    assert "scratch" not in {one.what for one in bad(evidence(observed(0), blind))}


@pytest.mark.parametrize(
    ("paths", "named"),
    [("aaa", "/a"), ("aba", "/a, /b"), ("abc", "/a, /b and others"), ("abcd", "/a, /b and others")],
)
def test_green_line_names_two_directories(paths: str, named: str) -> None:
    ranks = [
        observed(rank, scratch=Scratch(f"/{path}", "ext4", "/", (200 - rank) * GIB), inventory=None)
        for rank, path in enumerate(paths)
    ]
    found = {one.what: one.found for one in apply_rules(evidence(*ranks))}
    assert found["scratch"] == f"{named}: local, writable, {201 - len(paths)}.00 GiB free at least"
    unknown = observed(0, scratch=Scratch("/s"))
    assert "/s: local, writable, 0 B free at least" in {one.found for one in apply_rules(evidence(unknown))}


def test_a_name_that_just_fits_a_socket() -> None:
    scratch = Scratch("/" + "s" * (LONGEST_SCRATCH - 1), "ext4", "/", 100 * GIB)
    assert bad(evidence(observed(0), observed(1, scratch=scratch))) == []
    assert LEAST_SCRATCH == 104_857_600
    assert LONGEST_SCRATCH + len("/dgm-0123456789abcdef/fork-server") == 107  # unix(7): 108 with the zero
