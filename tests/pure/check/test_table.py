"""What a preflight prints."""

from __future__ import annotations

from dataclasses import replace

from dask_gpu_mpi.check.report import Report
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.table import as_data, render
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.network.reachability import Reach
from preflights import GIB, evidence, gpu, observed, reaching


def test_table_of_a_bad_job() -> None:
    found = reaching(r1=Reach("Connection refused"))
    report = Report(found, apply_rules(found), 1.5)
    assert report.exit_code == 1
    lines = render(report).splitlines()
    red = next(i for i, line in enumerate(lines) if "ERROR" in line)
    assert "rank 1 on h2: can't reach the scheduler" in lines[red]
    assert "Fix: let all nodes" in lines[red + 1]
    assert any(line.startswith("node h2: rank 1, cores 0-1, 64.00 GiB, driver 580.1") for line in lines)
    assert any("GPU-h2-1" in line and line.endswith("ok") for line in lines)
    assert "1 error, 0 warnings" in lines[-1]
    data = as_data(report)
    assert (data["level"], data["exit_code"]) == ("error", 1)
    assert data["hosts"][1]["gpus"][0]["uuid"] == "GPU-h2-0"
    assert data["hosts"][1]["gpus"][0]["ecc_uncorrected"] == 0


def test_table_of_a_thousand_hosts_stays_small() -> None:
    found = evidence(*(replace(observed(0), rank=rank, host=f"h{rank}", boot_id=f"h{rank}", inventory=None,
                               scratch=Scratch(f"/s{rank}", error="Permission denied")) for rank in range(1000)))  # fmt: skip
    lines = render(Report(found, apply_rules(found))).splitlines()
    assert sum("can't be written" in line for line in lines) == 12
    assert any("988 more like these" in line for line in lines)
    alike = evidence(*(replace(observed(0), rank=rank, host=f"h{rank}", boot_id=f"h{rank}", inventory=None)
                       for rank in range(1000)))  # fmt: skip
    text = render(Report(alike, apply_rules(alike)))
    assert "1000 nodes h[0-999]: ranks 0-999; on each" in text
    assert len(text.splitlines()) < 40


def test_the_ranks_are_not_the_users_of_a_gpu() -> None:
    base = observed(0)
    assert base.inventory is not None
    gpus = (gpu("h1", 0, processes=((base.inventory.pid, GIB),)), gpu("h1", 1, processes=((99999, None),)))
    seen = evidence(replace(base, inventory=replace(base.inventory, gpus=gpus)))
    (host,) = as_data(Report(seen, apply_rules(seen), 1.0))["hosts"]
    assert [one["in_use"] for one in host["gpus"]] == [0, None]
