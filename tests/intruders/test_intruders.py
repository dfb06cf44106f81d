"""Strangers who try to get into a job: none gets in, nothing of what they send is read, and the job does not mind.

The intruder is another user, on a host of the cluster's network that is none of the job's, or beside the job on its one host.
"""

from __future__ import annotations

import pytest

from support.intruders.jobs import ATTACKS, KINDS, Attacked, let_in

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

PLACES = ("from_another_host", "from_another_user")
#: Attacks that have tests of their own.
OWN = {
    "any connection",
    "routes without the token",
    "a rank's handshake",
    "memory by UCX",
    "UCX without the secret",
    "a worker of another job, with UCX",
}
ALL = sorted({attack for groups in ATTACKS.values() for group in groups for attack in group} - OWN)


@pytest.fixture(params=PLACES)
def job(request: pytest.FixtureRequest) -> Attacked:
    """The job that is attacked from this place."""
    found: Attacked = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("attack", ALL)
def test_nobody_gets_in(job: Attacked, attack: str) -> None:
    found = job.outcomes[attack]
    assert found
    assert let_in(found) == {}
    # and it was tried: all that other hosts can reach was reached
    refused = {target for target, outcome in found.items() if outcome == "out: nobody listens"}
    assert all("127.0.0.1" in target for target in refused), refused
    assert len(refused) < len(found)


def test_every_listener_is_known(job: Attacked) -> None:
    assert job.unexpected == []
    known = {name for name, kind in KINDS.items() if kind in ("comm", "http")}
    assert {each.name for each in job.listeners} >= known - {"worker http"}
    assert "worker http" not in {each.name for each in job.listeners}


def test_nothing_comes_of_it(job: Attacked) -> None:
    """No memory is open to the group, nothing is deserialised, and what a client had done is not done again."""
    assert job.open_memory == []
    assert not job.exploded
    assert job.notes == 1


def test_who_belongs_there_still_gets_in_and_the_result_is_right(job: Attacked) -> None:
    """During each group of attacks, the last one holds a hundred connections to each port, a new client got its result."""
    assert len(job.rounds) == 3
    assert all(job.rounds), job.rounds
    assert '"right": true' in job.done.check().stdout


def test_the_dashboard_wants_a_token(from_another_user: Attacked) -> None:
    found = from_another_user.outcomes["routes without the token"]
    assert let_in(found) == {}


def test_http_is_out_of_reach_of_other_hosts(from_another_host: Attacked) -> None:
    found = from_another_host.outcomes["routes without the token"]
    assert found
    assert set(found.values()) == {"out: nobody listens"}


def test_without_encryption_they_do_get_in(without_encryption: Attacked) -> None:
    """Which shows that the attacks are some."""
    for attack in ("plain TCP", "a process of Dask"):
        found = without_encryption.outcomes[attack]
        # what goes between agents is encrypted all the same
        assert all(found.pop(name).startswith("out") for name in [*found] if name.startswith("hub "))
        assert found
        assert all(outcome.startswith("in") for outcome in found.values()), found
    assert without_encryption.exploded
    assert without_encryption.notes > 1
