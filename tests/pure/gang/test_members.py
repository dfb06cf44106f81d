"""Who is in a gang, and which rank each worker has."""

from __future__ import annotations

from dask_gpu_mpi.gang.gang import Candidate, choose, rank_members


def workers(**nodes: str) -> list[Candidate]:
    return [
        Candidate(name, f"tls://{node}:{name}", node)
        for node, names in nodes.items()
        for name in names.split()
    ]


def test_all_workers_with_a_gpu_where_there_are_some() -> None:
    gpu, cpu = Candidate("0-0", "a", "h", has_gpu=True), Candidate("0-cpu-0", "b", "h")
    assert choose(None, [gpu, cpu]) == (["0-0"], [])
    assert choose(None, [cpu]) == (["0-cpu-0"], [])
    assert choose(["0-cpu-0", "b", "a"], [gpu, cpu]) == (["0-cpu-0", "0-0"], [])
    assert choose(None, []) == ([], [])


def test_ranks_of_a_node_are_neighbours() -> None:
    members = rank_members(workers(h1="1-1 11-0 1-0", h2="2-0 0-0"))
    assert [member.rank for member in members] == [0, 1, 2, 3, 4]
    assert [member.worker.name for member in members] == ["0-0", "2-0", "1-0", "1-1", "11-0"]
    assert [(member.node_rank, member.local_rank, member.local_size) for member in members] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 3),
        (1, 1, 3),
        (1, 2, 3),
    ]
    assert {member.nodes for member in members} == {2}
