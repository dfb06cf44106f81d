"""What MPI itself is open to: where the ranks and the launcher listen, and what comes of strangers there (docs/security.md)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from support import ROOT
from support.intruders.jobs import Attacked, was_in
from support.intruders.listeners import Listener
from support.jobs.mpi import Mpi

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, pytest.mark.both_mpis]

#: The first cells of the table's rows are names of listeners.
COLUMNS = ("one node", "several nodes, Open MPI", "several nodes, MPICH")
SEVERAL = {"openmpi": COLUMNS[1], "mpich": COLUMNS[2]}


def documented(column: str) -> dict[str, set[str]]:
    """Who listens where, by the table of docs/security.md."""
    text = (ROOT / "docs" / "security.md").read_text().partition("## Who listens where")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    head, _, *body = rows[: next(i for i, row in enumerate(rows) if row[0] == "`scheduler http`") + 1]
    place = head.index(column)
    assert all(row[-1] for row in body), body  # who may speak to it
    return {row[0].strip("`"): set(row[place].split(", ")) - {"none"} for row in body if row[place] != "none"}


def found(listeners: Iterable[Listener]) -> dict[str, set[str]]:
    """The same of a job."""
    places: dict[str, set[str]] = {}
    for each in listeners:
        where = "all interfaces" if each.place.address in ("0.0.0.0", "::") else "the network"
        places.setdefault(each.name, set()).add("loopback" if each.place.on_loopback else where)
    return places


def exactly_these(listeners: Iterable[Listener], column: str) -> None:
    ours, table = found(listeners), documented(column)
    # the launcher's are its own affair: one MPI's are fewer
    assert ours.pop("launcher") <= table.pop("launcher")
    assert ours == table


def test_on_one_host_exactly_these_listen(from_another_user: Attacked) -> None:
    exactly_these(from_another_user.listeners, COLUMNS[0])


def test_on_several_hosts_exactly_these_listen(from_another_host: Attacked, jobs: Mpi) -> None:
    exactly_these(from_another_host.listeners, SEVERAL[jobs.name])


def test_on_one_host_no_rank_listens(from_another_user: Attacked) -> None:
    """Whoever reaches a port of MPI can write into the rank's memory: there is none, not on loopback either."""
    assert [each for each in from_another_user.listeners if each.name == "rank"] == []
    assert from_another_user.harmed == {}


def test_an_open_port_opens_the_memory(with_ports_of_mpi: Attacked) -> None:
    """Which shows that the attacks are some. UCX 1.20 can't answer over loopback: it says so, and at times dies of it."""
    assert len(with_ports_of_mpi.hidden) == 2
    assert with_ports_of_mpi.harmed.keys() == with_ports_of_mpi.hidden.keys()


def test_a_rank_that_is_none_from_another_host(from_another_host: Attacked) -> None:
    """Open MPI takes a rank's handshake only from an address of that rank's host."""
    assert from_another_host.outcomes["a rank's handshake"]
    assert from_another_host.done is not None
    from_another_host.done.check(0)
    assert not from_another_host.exploded


def test_memory_from_another_host(from_another_host: Attacked, jobs: Mpi) -> None:
    """Under MPICH every host of the network can read and write the memory of the ranks (docs/security.md, MPI)."""
    found = from_another_host.outcomes["memory by UCX"]
    in_reach = {name: was_in(from_another_host.hidden[name]) for name in found if " 127." not in name}
    assert len(in_reach) == 2
    if jobs.name == "openmpi":
        assert from_another_host.harmed == {}
        assert all(outcome.startswith("out") for outcome in found.values()), found
    else:
        assert from_another_host.harmed.keys() >= in_reach.keys()
        assert {name: found[name] for name in in_reach} == in_reach


def test_memory_from_a_host_of_the_job(from_a_host_of_the_job: Attacked, jobs: Mpi) -> None:
    """Under Open MPI users of the job's nodes can write it: a packet of its TCP component says where its contents belong."""
    ranks = {name for name in from_a_host_of_the_job.hidden if name.startswith("rank ")}
    assert "written" in from_a_host_of_the_job.harmed.values() or jobs.name != "openmpi"
    assert from_a_host_of_the_job.harmed.keys() <= ranks


def test_a_rank_that_is_none_does_not_end_the_job(
    from_a_host_of_the_job: Attacked, jobs: Mpi, request: pytest.FixtureRequest
) -> None:
    """Under Open MPI another user of a node of the job can end it: its 24 bytes name any rank, and nobody is asked for more."""
    if jobs.name == "openmpi":
        why = "Open MPI 5.0.11 ends the job when a connection in the name of a rank is closed"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    assert from_a_host_of_the_job.done is not None
    from_a_host_of_the_job.done.check(0)


def test_what_a_rank_that_is_none_sends_is_not_unpickled(from_a_host_of_the_job: Attacked) -> None:
    """Before messages were plain data the same attack did run code, under Open MPI."""
    assert from_a_host_of_the_job.outcomes["a rank's handshake"]
    assert not from_a_host_of_the_job.exploded
