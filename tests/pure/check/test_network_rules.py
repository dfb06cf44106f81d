"""The rules of a preflight about ports, connections and clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpu_mpi.check.report import Evidence
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.errors import Problem
from dask_gpu_mpi.network.credentials import BACKDATED, VALID_DAYS
from dask_gpu_mpi.network.reachability import Lost, Reach
from dask_gpu_mpi.startup.messages import Listening
from support.mocks.preflights import bad, evidence, nodes, observed, only, reaching


def test_rank_that_does_not_reach_the_scheduler() -> None:
    finding = only(reaching(r1=Reach("Connection refused")))
    assert (finding.what, finding.level, finding.ranks, finding.hosts) == ("network", "error", (1,), ("h2",))
    assert "rank 0 on h1 at 10.0.0.1:4711: Connection refused" in finding.found


def test_hosts_that_share_no_network() -> None:
    problem = (
        "the hosts share no network: rank 0: none; set the interface to use with interface (--interface)"
    )
    findings = bad(evidence(network_problem=Problem(problem), listening=None))
    assert [(one.what, one.level) for one in findings] == [("network", "error")]
    assert "--interface" in findings[0].fix


@pytest.mark.parametrize(("port", "remedy"), [(8786, "--scheduler-port"), (0, "--interface")])
def test_scheduler_that_cannot_listen(port: int, remedy: str) -> None:
    listening = Listening(error="Address already in use")
    finding = only(evidence(port=port, listening=listening))
    assert (finding.what, finding.level, finding.ranks) == ("ports", "error", (0,))
    assert remedy in finding.fix


def test_dashboard_port_that_is_taken() -> None:
    finding = only(evidence(listening=Listening(4711, dashboard="Address already in use")))
    assert (finding.what, finding.level) == ("ports", "warning")
    assert "127.0.0.1:8787" in finding.found


def test_dashboard_at_an_address_of_another_node() -> None:
    listening = Listening(4711, dashboard="Cannot assign requested address", elsewhere=True)
    finding = only(evidence(listening=listening))
    assert (finding.what, finding.level, finding.ranks) == ("ports", "error", (0,))
    assert "'127.0.0.1:8787' is not on h1, where the scheduler runs" in finding.found
    assert "leave the option out" in finding.fix


@pytest.mark.parametrize(
    ("ahead", "protocol", "level"),
    [
        (0.9, "tls", None),
        (-0.9, "tls", None),
        (1.1, "tls", "warning"),
        (-BACKDATED + 1, "tls", "warning"),
        (-BACKDATED - 1, "tls", "error"),
        (-BACKDATED - 1, "tcp", "warning"),
        (BACKDATED + 1, "tls", "warning"),
        (VALID_DAYS * 86400 + 1, "tls", "error"),
    ],
)
def test_clocks(ahead: float, protocol: str, level: str | None) -> None:
    findings = bad(replace(reaching(r1=Reach("", ahead)), protocol=protocol))
    assert [finding.level for finding in findings] == ([level] if level else [])
    for finding in findings:
        assert (finding.what, finding.ranks) == ("clocks", (1,))
        assert ("ahead of" if ahead > 0 else "behind") in finding.found


def test_green_lines_name_addresses_and_times() -> None:
    found = {finding.what: finding.found for finding in apply_rules(reaching(r1=Reach("", -0.25, 2.5)))}
    assert found["ports"] == "the scheduler can listen at 10.0.0.1, any port"
    assert (
        found["network"]
        == "all ranks reach the scheduler's rank 0 on h1 at 10.0.0.1 (round trip 2500.0 ms at most)"
    )
    assert found["clocks"] == "they differ by 0.250 s at most"
    found = {finding.what: finding.found for finding in apply_rules(evidence(port=8786))}
    assert found["ports"] == "the scheduler can listen at 10.0.0.1, port 8786"


def test_what_was_not_tested_is_not_reported() -> None:
    good = evidence()
    none = {rank: replace(test, reach=None) for rank, test in good.tests.items()}
    green = {finding.what for finding in apply_rules(replace(good, tests=none))}
    assert not green & {"network", "clocks"}
    assert {finding.what for finding in apply_rules(replace(good, listening=None))} >= {"clocks"}
    silent = apply_rules(replace(good, listening=Listening(error="no response"), tests=none))
    assert [one.what for one in silent if one.what in ("ports", "network", "clocks")] == ["ports"]


def test_certificates_are_dated_by_the_clock_of_rank_0() -> None:
    both = {"r0": Reach("", -BACKDATED), "r1": Reach("", -2.0 * BACKDATED)}
    assert [(one.ranks, one.level) for one in bad(reaching(**both))] == [((0,), "warning"), ((1,), "warning")]
    both["r1"] = Reach("", -2.0 * BACKDATED - 0.1)
    assert [(one.ranks, one.level) for one in bad(reaching(**both))] == [((0,), "warning"), ((1,), "error")]
    assert [one.level for one in bad(reaching(r1=Reach("", VALID_DAYS * 86400.0)))] == ["warning"]


def test_clock_of_a_rank_that_reaches_nothing_is_unknown() -> None:
    finding = only(reaching(r1=Reach("Connection refused", 99.0)))
    assert finding.what == "network"


def test_clocks_at_the_tolerance() -> None:
    assert bad(reaching(r1=Reach("", 1.0))) == []
    assert only(reaching(r1=Reach("", -1.01))).found.startswith("the clock is 1.0 s behind that of rank 0: ")


def test_clocks_are_compared_with_that_of_rank_0_for_certificates() -> None:
    """With the scheduler elsewhere: its clock is right, and too far behind that of rank 0 for the certificates."""
    far = replace(reaching(r0=Reach("", 2.0 * BACKDATED)), scheduler_rank=1)
    assert [(one.ranks, one.level, one.found.partition(":")[0]) for one in bad(far)] == [
        ((0,), "warning", "the clock is 7200.0 s ahead of that of rank 1"),
        ((1,), "error", "the clock is 7200.0 s behind that of rank 0"),
    ]


@pytest.mark.parametrize(("ahead", "level"), [(-BACKDATED, "warning"), (-BACKDATED - 0.5, "error")])
def test_rank_0_whose_clock_is_unknown_counts_as_right(ahead: float, level: str) -> None:
    found = bad(reaching(r0=Reach("Connection refused"), r1=Reach("", ahead)))
    assert [(one.what, one.level) for one in found] == [("network", "error"), ("clocks", level)]


SILENT = "no answer within 5 s"


def missing(**lost: tuple[Lost, ...]) -> Evidence:
    """Three hosts, of which some do not reach others."""
    found = [observed(rank) for rank in range(3)]
    good = evidence(*found, nodes=nodes(3))
    tests = {rank: replace(test, lost=lost.get(f"r{rank}", ())) for rank, test in good.tests.items()}
    return replace(good, tests=tests)


def test_all_nodes_reach_each_other() -> None:
    (green,) = [one for one in apply_rules(missing()) if one.what == "node pairs"]
    assert (green.level, green.found) == ("ok", "3 pairs of nodes (all) connected in both directions")


def test_of_many_nodes_a_sample_is_tested() -> None:
    (green,) = [one for one in apply_rules(evidence(nodes=nodes(1000))) if one.what == "node pairs"]
    assert green.found == "32000 pairs of nodes (a ring and a sample of 499500) connected in both directions"


def test_pairs_that_do_not_are_named() -> None:
    findings = bad(missing(r1=(Lost("h3", SILENT),), r2=(Lost("h2", SILENT),)))
    assert [(one.what, one.level, one.ranks, one.hosts) for one in findings] == [
        ("node pairs", "error", (1,), ("h2",)),
        ("node pairs", "error", (2,), ("h3",)),
    ]
    assert [one.found.partition(";")[0] for one in findings] == [
        f"can't reach h3: {SILENT}",
        f"can't reach h2: {SILENT}",
    ]
    assert "--interface" in findings[0].fix


def test_a_node_that_nobody_reaches_has_one_line() -> None:
    gone = (Lost("h3", SILENT),)
    findings = bad(missing(r0=gone, r1=gone, r2=(Lost("h1", SILENT), Lost("h2", "refused"))))
    assert [(one.ranks, one.found.partition(";")[0]) for one in findings] == [
        ((0, 1), f"can't reach h3: {SILENT}"),
        ((2,), f"can't reach h1: {SILENT}"),
        ((2,), "can't reach h2: refused"),
    ]


def test_a_node_on_which_workers_can_not_listen() -> None:
    first, second = nodes(2)
    finding = only(evidence(nodes=(first, replace(second, port=0))))
    assert (finding.what, finding.level, finding.ranks) == ("node pairs", "warning", (1,))
    assert second.address in finding.found


def test_pairs_that_were_not_tested_are_not_reported() -> None:
    good = evidence(nodes=nodes(2), tests={})
    assert [one for one in apply_rules(good) if one.what == "node pairs"] == []
