"""Data between workers: its sums are right also when they are by node."""

from __future__ import annotations

from dask_gpu_mpi.view.recorder import Transfers


def test_too_many_pairs_become_those_of_nodes_and_nothing_is_lost() -> None:
    transfers = Transfers(most=50)
    for number in range(1_000):
        sender, receiver = number % 32, number * 7 % 31
        transfers.add((f"{sender}", f"h{sender // 8}"), (f"{receiver}", f"h{receiver // 8}"), 10, 0.5)
    rows = transfers.as_rows()
    assert transfers.by == "node"
    assert {row[0] for row in rows} == {"h0", "h1", "h2", "h3"}
    assert [sum(row[place] for row in rows) for place in (2, 3, 4)] == [1_000, 10_000, 500.0]


def test_too_many_nodes_are_one() -> None:
    transfers = Transfers(most=3)
    for number in range(100):
        transfers.add((f"{number}", f"h{number}"), ("0", "h0"), 1, 0.0)
    rows = transfers.as_rows()
    assert len(rows) <= 5
    assert sum(row[2] for row in rows) == 100
    assert "other" in {row[0] for row in rows}
