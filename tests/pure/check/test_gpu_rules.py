"""The rules of a preflight about GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_gpu_mpi.check.observations import Observations
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.errors import Problem
from support.mocks.preflights import bad, evidence, gpu, observed, only


def test_ecc_errors() -> None:
    finding = only(evidence(observed(0), observed(1, ecc={"GPU-h2-1": 3})))
    assert (finding.what, finding.level, finding.ranks) == ("GPUs", "error", (1,))
    assert "GPU 1 (GPU-h2-1) has 3 uncorrected memory errors" in finding.found


def test_lost_gpu_is_red_and_said_once() -> None:
    base = observed(1)
    assert base.inventory is not None
    lost = Problem("host h2: GPU 2 is left out", fix="reset it or leave the host out", what="GPUs")
    finding = only(evidence(observed(0), replace(base, inventory=replace(base.inventory, warnings=(lost,)))))
    assert (finding.level, finding.fix) == ("error", "reset it or leave the host out")


def test_hosts_with_different_gpus_and_drivers() -> None:
    findings = bad(evidence(observed(0), observed(1, gpus=1, driver="570.2")))
    assert [finding.level for finding in findings] == ["warning", "warning"]
    assert "580.1 for rank 0; 570.2 for rank 1" in findings[0].found
    assert "2 NVIDIA H200 for rank 0; 1 NVIDIA H200 for rank 1" in findings[1].found


@pytest.mark.parametrize(
    ("seen", "allocated", "expected", "says"),
    [
        (2, 2, None, ""),
        (2, 1, None, ""),  # GPUs that nothing confines
        (0, 0, None, ""),
        (0, 0, 0, ""),
        (2, 0, 2, ""),
        (2, 4, 2, ""),  # what the user expects counts
        (0, 4, None, "no GPU visible on the node (expected 4: SLURM_GPUS_ON_NODE=4)"),
        (1, 4, None, "only 1 GPU visible on the node (expected 4: SLURM_GPUS_ON_NODE=4)"),
        (0, 0, 4, "no GPU visible on the node (expected 4: --expect-gpus 4)"),
        (3, 0, 4, "only 3 GPUs visible on the node (expected 4: --expect-gpus 4)"),
        (2, 2, 4, "only 2 GPUs visible on the node (expected 4: --expect-gpus 4)"),
    ],
)
def test_gpus_that_are_gone(seen: int, allocated: int, expected: int | None, says: str) -> None:
    both = [observed(rank, gpus=seen, allocated_gpus=allocated) for rank in (0, 1)]
    findings = bad(evidence(*both, expect_gpus=expected))
    assert [(one.what, one.level, one.ranks, one.hosts, one.found) for one in findings] == (
        [("GPUs", "error", (0, 1), ("h1", "h2"), says)] if says else []
    )


def test_gpus_gone_on_one_host() -> None:
    findings = bad(evidence(observed(0, allocated_gpus=2), observed(1, gpus=0, allocated_gpus=2)))
    assert [(one.what, one.level, one.ranks) for one in findings] == [
        ("GPUs", "error", (1,)),
        ("GPUs", "warning", ()),
        ("placement", "warning", ()),
    ]
    assert "nvidia-smi" in findings[0].fix


def test_ranks_of_a_host_see_its_gpus_together() -> None:
    whole = observed(0)
    assert whole.inventory is not None
    shares = [
        replace(
            whole,
            rank=rank,
            allocated_gpus=2,
            inventory=replace(whole.inventory, rank=rank, gpus=(gpu("h1", rank),)),
        )
        for rank in (0, 1)
    ]
    assert bad(evidence(*shares)) == []
    finding = only(evidence(*(replace(one, allocated_gpus=3) for one in shares)))
    assert (finding.level, finding.ranks, finding.hosts) == ("error", (0, 1), ("h1",))
    assert finding.found.startswith("only 2 GPUs")
    # what a rank that does not answer would see is not known
    alone = evidence(*(replace(one, allocated_gpus=3) for one in shares), size=3, silent=(2,))
    assert [one.what for one in bad(alone)] == ["ranks"]


def test_gpus_that_cannot_be_looked_at() -> None:
    problem = Problem("NVML does not start: Unknown Error", fix="mend the NVIDIA driver", what="GPUs")
    findings = bad(evidence(observed(0), observed(1, inventory=None, problems=(problem,))))
    assert [(one.what, one.level, one.ranks) for one in findings] == [("GPUs", "error", (1,))]
    assert findings[0].fix == "mend the NVIDIA driver"


def second_rank(one: Observations, **changed: Any) -> Observations:
    """Another rank of the same node."""
    assert one.inventory is not None
    return replace(one, rank=1, **{"inventory": replace(one.inventory, rank=1), **changed})


def test_gpus_that_agree_are_counted() -> None:
    found = {finding.what: finding.found for finding in apply_rules(evidence())}
    assert found["GPUs"] == "4 NVIDIA H200, driver 580.1"
    found = {
        finding.what: finding.found
        for finding in apply_rules(evidence(observed(0, gpus=0), observed(1, gpus=0)))
    }
    assert found["GPUs"] == "no GPU"


def test_memory_errors_of_a_gpu_that_two_ranks_see() -> None:
    one = observed(0, ecc={"GPU-h1-0": 1})
    finding = only(evidence(one, second_rank(one)))
    assert (finding.ranks, finding.found) == (
        (0,),
        "GPU 0 (GPU-h1-0) has 1 uncorrected memory error since its last reset",
    )
    assert bad(evidence(observed(0, ecc=None), observed(1))) == []


def test_drivers_that_are_unknown_do_not_differ() -> None:
    assert bad(evidence(observed(0), observed(1, driver=""))) == []


def test_the_largest_number_of_a_nodes_ranks_is_expected() -> None:
    one = observed(0, allocated_gpus=3)
    finding = only(evidence(one, second_rank(one, allocated_gpus=0)))
    assert (finding.ranks, finding.found) == (
        (0, 1),
        "only 2 GPUs visible on the node (expected 3: SLURM_GPUS_ON_NODE=3)",
    )
    # what a rank that could not look would see is unknown
    blind = second_rank(one, inventory=None, problems=(Problem("NVML failed", what="GPUs"),))
    assert [finding.found for finding in bad(evidence(one, blind))] == ["NVML failed"]
