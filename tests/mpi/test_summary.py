"""The report's summary of real jobs that spend their time in a known way: its figures, and what each rule has to say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from support.jobs.mpi import Mpi
from support.jobs.scripts import script

#: What the rule has to say of a job that shows it, on two workers of two threads.
RULES = {
    "straggler": r"one task of 'nap' took [67]\.\d s, the mean of 21 is \d\d\d ms; .* Fix: ",
    "transfers": r"workers waited for data of others for \d\d % of the script's time: [\d.]+ \w*B in 5 transfers\. Fix: ",
    "spills": r"[\d.]+ [GM]iB spilled to disk \(sum of the peaks of 2 of 2 workers\).* Fix: .*\(memory_limit\)",
}


def run(mpirun: Mpi, case: str, *options: str) -> tuple[dict[str, Any], list[str]]:
    """The summary of a job in its report, and the lines of its output."""
    words = ["--summary", "--report", "report.json", "--nthreads", "2", *options]
    job = mpirun.start(script("mpi/scripts/spends.py"), 2, command=words, args=[case])
    done = job.wait().check(0)
    data = json.loads((job.directory / "report.json").read_text())
    assert max(len(line) for line in done.stderr.splitlines() if ": summary: " in line) <= 100
    whole = done.stderr.replace("\ndask_gpu_mpi: summary:   ", " ")
    printed = re.findall(r"^dask_gpu_mpi: summary: (.*)$", whole, re.MULTILINE)
    return data["summary"], printed


def test_the_shares_of_a_job_whose_shares_are_known(mpirun: Mpi) -> None:
    summary, printed = run(mpirun, "known", "--nthreads", "1")
    seconds = summary["seconds"]
    assert 8.0 <= seconds < 30.0
    spent = [
        {name: worker[name] * seconds for name in ("computing", "data", "tasks", "idle", "absent")}
        for worker in sorted(summary["workers"], key=lambda worker: worker["computing"])
    ]
    assert spent[0] == pytest.approx(
        {
            "computing": 0.0,
            "data": 0.0,
            "tasks": seconds - spent[0]["idle"],
            "idle": spent[1]["idle"],
            "absent": 0.0,
        },
        abs=0.1,
    )
    assert spent[1]["computing"] == pytest.approx(3.0, abs=0.4)
    assert spent[1]["data"] == pytest.approx(3.0, abs=1.0)
    assert 2.0 <= spent[1]["idle"] < seconds - 5.9
    assert all(sum(each.values()) == pytest.approx(seconds, abs=0.01) for each in spent)
    assert sum(part["share"] or 0.0 for part in summary["where"]) == pytest.approx(1.0, abs=0.02)
    assert printed[0].startswith(f"mean of 2 CPU workers, {seconds:.1f} s of the script: computing ")
    assert printed[1].startswith("least: worker ")
    assert [line.split(": ")[0] for line in printed[2:]] == ["time"] + ["change"] * (len(printed) - 3)


def test_nothing_is_to_be_changed_of_a_good_job(mpirun: Mpi) -> None:
    summary, printed = run(mpirun, "good")
    assert summary["lines"]["change"] == []
    assert summary["mean"]["computing"] > 0.8
    assert printed[-1] == "change: nothing was found"


@pytest.mark.parametrize("case", RULES)
def test_what_to_change(case: str, mpirun: Mpi) -> None:
    options = {"spills": ["--memory-limit", "600MB"], "transfers": ["--nthreads", "1"]}.get(case, [])
    summary, printed = run(mpirun, case, *options)
    lines = summary["lines"]["change"]
    assert [line for line in lines if re.fullmatch(RULES[case] + ".*", line)], lines
    assert [line.removeprefix("change: ") for line in printed if line.startswith("change: ")] == lines
