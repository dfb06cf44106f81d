"""Who tries UCX with whom."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.check.ucx_pairs import UcxPairs


@pytest.mark.parametrize(("nodes", "peers"), [(0, 0), (1, 0), (2, 1), (3, 2), (5, 2)])
def test_each_node_with_the_next(nodes: int, peers: int) -> None:
    pairs = UcxPairs({2 * rank: f"h{rank}" for rank in range(nodes)})
    assert [pairs.peers_of(2 * rank) for rank in range(nodes)] == [peers] * nodes
    sent = [each for rank in range(nodes) for each in pairs.add(2 * rank, b"address")]
    assert len(sent) == nodes * peers
    assert len({(rank, peer.host) for rank, peer in sent}) == nodes * peers


def test_tags_match() -> None:
    pairs = UcxPairs({0: "h1", 1: "h2"})
    assert not [*pairs.add(0, b"one")]
    (_, one), (_, two) = pairs.add(1, b"two")
    assert (one.send_tag, one.receive_tag) == (two.receive_tag, two.send_tag)
    assert one.send_tag != one.receive_tag
    assert {one.address, two.address} == {b"one", b"two"}


def test_a_node_whose_ucx_does_not_work() -> None:
    pairs = UcxPairs({0: "h1", 1: "h2"})
    assert not [*pairs.add(0, b"")]
    assert [peer.address for _, peer in pairs.add(1, b"two")] == [b"", b""]


def test_only_the_first_address_of_a_rank_counts_and_strangers_do_not() -> None:
    pairs = UcxPairs({0: "h1", 1: "h2"})
    assert not [*pairs.add(0, b"one"), *pairs.add(0, b"another"), *pairs.add(7, b"seven")]
    assert {peer.address for _, peer in pairs.add(1, b"two")} == {b"one", b"two"}
