"""Who listens where (docs/security-audit.md): nothing of MPI once the cluster is up, and what MPI is open to until then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from support import ROOT
from support.intruders.jobs import Attacked
from support.intruders.listeners import Listener
from support.jobs.mpi import Mpi

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, pytest.mark.both_mpis]

#: The first cells of the table's rows are names of listeners.
COLUMNS = ("one node", "several nodes, Open MPI", "several nodes, MPICH")
#: What is open as long as a job runs, but for the launcher's ports.
OPEN = {"hub comm", "scheduler comm", "scheduler http", "nanny comm", "worker comm"}
#: Of a script whose ranks are MPI processes.
WARNING = "warning: MPI: the script's ranks are MPI processes"
SEVERAL = {"openmpi": COLUMNS[1], "mpich": COLUMNS[2]}


def documented(column: str) -> dict[str, set[str]]:
    """Who listens where, by the table of docs/security-audit.md."""
    text = (ROOT / "docs" / "security-audit.md").read_text().partition("## Who listens where")[2]
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


@pytest.mark.parametrize("place", ["from_another_user", "from_another_host", "on_three_hosts"])
def test_after_the_start_nothing_of_mpi_listens(place: str, request: pytest.FixtureRequest) -> None:
    """One, two and three hosts; on all of them only servers that require the job's certificate, and the dashboard on loopback."""
    job: Attacked = request.getfixturevalue(place)
    assert job.unexpected == []
    is_open = [each for each in job.listeners if each.what != "start" and each.role != "launcher"]
    assert {each.name for each in is_open} == OPEN
    assert {each.name for each in is_open if each.place.on_loopback} >= {"scheduler http"}
    on_network = [each for each in is_open if not each.place.on_loopback]
    assert {each.name for each in on_network} == (
        set() if place == "from_another_user" else OPEN - {"scheduler http"}
    )
    assert {each.place.address for each in on_network} & {"0.0.0.0", "::"} == set()
    assert [each.name for each in is_open].count("hub comm") == 1
    # the launcher's ports have no authentication: on each host of the job they drop what comes, and no warning is needed
    tried = {*job.outcomes["any connection"].values()}
    assert "out: timed out" in tried
    assert tried <= {"out: timed out", "out: nobody listens"}
    assert "warning: launcher" not in job.done.check(0).stderr


def test_the_launcher_of_mpi_programs_stays_open(with_mpi_of_the_script: Attacked) -> None:
    """Such a program may start more ranks, which connect to it. This also shows that the attack is one."""
    assert "in: accepted" in with_mpi_of_the_script.outcomes["any connection"].values()
    warnings = with_mpi_of_the_script.done.stderr
    assert warnings.count("stay open (a script that uses MPI itself may start more ranks)") == 1


# While the ranks meet, MPI's process of each rank has its ports. It holds no key, but it runs as the user.


def test_memory_in_the_meeting(in_the_meeting: Mapping[str, Attacked], jobs: Mpi) -> None:
    """MPICH lets every host write; Open MPI takes connections only from addresses of the job's hosts."""
    found = in_the_meeting["another host"]
    assert len({*found.hidden.values()}) == 2
    if jobs.name == "openmpi":
        assert found.harmed == {}
        assert "written" in in_the_meeting["a host of the job"].harmed.values()
    else:
        assert found.harmed
        assert any(outcome.startswith("in") for outcome in found.outcomes["memory by UCX"].values())
        assert "a host of the job" not in in_the_meeting  # no need


def test_mpi_of_the_script_opens_the_memory_of_its_rank(with_mpi_of_the_script: Attacked) -> None:
    """It has its ports as long as the script runs, so the job warns; and what strangers send is not unpickled."""
    assert {each.name for each in with_mpi_of_the_script.listeners if each.role == "rank"} == {"rank"}
    assert "written" in with_mpi_of_the_script.harmed.values()
    assert not with_mpi_of_the_script.exploded
    warnings = [line for line in with_mpi_of_the_script.done.stderr.splitlines() if WARNING in line]
    assert len(warnings) == 1
