"""The report of real jobs: written however they end, and what a browser shows of it."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
from dataclasses import replace
from typing import Any

import pytest

from support.jobs.clusters import INITIALIZED, facts, ranks_of, until
from support.jobs.mpi import Mpi
from support.jobs.screens import TABS, browser
from support.jobs.scripts import script
from support.mocks.gpus import GIB, make_gpus

#: Tasks that compute, fetch data from each other, and fail; long enough for a heartbeat of each worker.
WORK = script("mpi/scripts/works.py")


def run(
    mpirun: Mpi, script: str, *options: str, ranks: int = 2, report: str = "report.json", **more: Any
) -> Any:
    """A job with a report, which has its folder."""
    return mpirun.start(script, ranks, command=["--report", report, *options], **more)


def figures(job: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.directory / "report.json").read_text())
    return found


@pytest.mark.quick
def test_the_figures_of_a_job(mpirun: Mpi) -> None:
    job = run(mpirun, WORK, "--nthreads", "1", "--worker-options", '{"env": {"MY_TOKEN": "hunter2"}}')
    done = job.wait().check(0)
    assert facts(done)["joined"] == [2_000_000] * 8
    data = figures(job)
    assert data["schema"] == 1
    assert (data["job"]["how"], data["job"]["exit_code"]) == ("the script ended", 0)
    assert 0 < data["job"]["ready_after"] < data["job"]["ended_after"]
    assert [worker["name"] for worker in data["plan"]["workers"]] == [0, 1]
    record = data["record"]
    assert record["from_start"]
    assert record["tasks"]["seen"] == 29
    assert record["tasks"]["failed"] == 1
    assert sorted(record["tasks"]["names"]) == ["fail", "join", "make"]
    prefixes = {prefix["name"]: prefix for prefix in record["prefixes"]}
    assert {name: prefix["tasks"] for name, prefix in prefixes.items()} == {"make": 20, "join": 8, "fail": 1}
    assert prefixes["join"]["seconds"]["compute"] >= 8 * 0.02
    assert prefixes["make"]["bytes"] >= 20 * 100_000
    # each of the two has fetched what the other has made
    assert {(row["from"], row["to"]) for row in record["transfers"]["rows"]} == {("0", "1"), ("1", "0")}
    assert 20 * 100_000 <= sum(row["bytes"] for row in record["transfers"]["rows"]) <= 21 * 100_000
    assert {worker["name"] for worker in record["workers"]} == {"0", "1"} == set(record["alive"])
    assert all(worker["peaks"]["memory"] > 10 << 20 for worker in record["workers"]), record["workers"]
    assert all(worker["host"] == os.uname().nodename for worker in record["workers"]), record["workers"]
    assert any(record["series"]["workers"]["1"]["memory"])
    assert data["job"]["program"].endswith("/script.py")
    assert (data["job"]["user"], data["job"]["batch_job"]) == (getpass.getuser(), "")
    # no credentials of the job, and none of the user's
    text = (job.directory / "report.json").read_text()
    token = re.search(r"token=([\w-]+)", done.stderr)
    assert token is not None
    assert [word for word in (token[1], "PRIVATE KEY", "hunter2") if word in text] == []
    assert "MY_TOKEN" in text


RANK = {"python", "start the agent", "import", "import mpi4py, MPI_Init", "join the ranks"}
WAITS = "wait for the plan and the scheduler"
AGENT = {"python", "import", "configure", "fork", "inventory", WAITS, "start workers"}


def test_every_step_of_the_start_on_every_rank(mpirun: Mpi) -> None:
    script = "import os\nfrom distributed import Client\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\nClient().close()\n"
    job = run(mpirun, script, "--cpu-workers", "1")
    job.wait().check()
    assert list((job.directory / "elsewhere").iterdir()) == []  # one file, where the job began
    steps: dict[tuple[int, str], dict[str, Any]] = {}
    for step in figures(job)["start"]["steps"]:
        steps.setdefault((step["rank"], step["process"]), {})[step["name"]] = step
    for rank in (0, 1):
        assert set(steps[rank, "rank"]) >= RANK
        assert set(steps[rank, "agent"]) - {"plan"} == AGENT
        assert set(steps[rank, f"worker {rank}"]) == {"make", "start"}
    mine, its = steps[0, "rank"], steps[0, "agent"]
    assert "plan" in its  # rank 0's agent leads the start
    assert "plan" not in steps[1, "agent"]
    assert set(steps[0, "scheduler"]) == {"start"}
    # One clock: what waits for another step does not end before it.
    assert its["start workers"]["end"] >= steps[0, "worker 0"]["start"]["end"]
    assert its["inventory"]["end"] >= mine["join the ranks"]["end"]
    # Its agent starts before the rank imports anything that takes long.
    assert mine["start the agent"]["end"] <= mine["import"]["begin"]
    assert mine["import"]["end"] <= mine["import mpi4py, MPI_Init"]["begin"]


def test_the_page_of_a_job_in_a_browser(mpirun: Mpi) -> None:
    gpus = [replace(gpu, power=250) for gpu in make_gpus(2, host="one", memory=80 * GIB)]
    job = run(mpirun, WORK + "raise SystemExit(3)\n", report="report.html", gpus=gpus)
    job.wait().check(3)
    with browser() as chromium:
        tabs = {tab.title: tab for tab in chromium.open(job.directory / "report.html", dark=True)}
        assert chromium.style("backgroundColor") == "rgb(13, 17, 23)"
    assert tuple(tabs) == TABS
    assert "the script called sys.exit (exit code 3)" in tabs["Plan & options"].text
    for title, count in (("Start-up", 1), ("GPUs", 2), ("Memory & spill", 3), ("Tasks", 1), ("Transfers", 1)):
        shown = tabs[title].figures
        assert len(shown) >= count, title
        assert all(marks and min(marks) > 0 for _, marks in shown), (title, shown)
        assert tabs[title].painted >= count, title
    assert [title for title, _ in tabs["GPUs"].figures][:2] == ["GPU use, %", "GPU memory in use"]
    assert "80.00 GiB" in tabs["GPUs"].text
    assert re.search(r"energy of the GPUs: [\d.]+ Wh \([\d.,]+ J\)", tabs["Overview"].text, re.IGNORECASE)


#: What a script does at its end, by the command or with `initialize()`; exit code; how it ended by the report.
SIGNALLED = "import signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(30)\nexcept SystemExit:\n    pass\n"
ON_WALLTIME = (
    "from dask_gpu_mpi import current_session\ncurrent_session().on_walltime(lambda: None)\n"
    "import signal\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(30)\n"
)
CLOSES = (
    "from dask_gpu_mpi import current_session\ncurrent_session().close()\n"
    "tell(then=json.load(open('report.json'))['job']['how'])\nraise SystemExit(4)\n"
)
ENDINGS = [
    ("command", "raise KeyError('token=abc')\n", 1, "^KeyError$"),
    ("command", "raise SystemExit(7)\n", 7, "the script called sys.exit"),
    ("command", ON_WALLTIME, 75, "its time was running out"),
    ("command", SIGNALLED, 0, "the script ended"),
    ("command", CLOSES, 4, "the script called sys.exit"),
    ("initialize", SIGNALLED + "raise KeyError('x')\n", 1, "^KeyError"),
    ("initialize", ON_WALLTIME, 75, "^its time was running out"),
]


@pytest.mark.parametrize(
    ("form", "more", "code", "how"),
    ENDINGS,
    ids=[
        "raises",
        "sys.exit",
        "walltime",
        "a caught signal",
        "close",
        "an error after that",
        "initialize, walltime",
    ],
)
def test_it_is_written_however_the_script_ends(
    mpirun: Mpi, form: str, more: str, code: int, how: str
) -> None:
    if form == "command":
        job = run(mpirun, WORK + more, ranks=1)
    else:
        env = {"DASK_GPU_MPI__REPORT": "report.json"}
        job = mpirun.start(INITIALIZED + WORK + more, 1, env=env)
    done = job.wait().check(code)
    data = figures(job)
    assert re.search(how, data["job"]["how"])
    assert data["job"]["exit_code"] == code
    assert data["record"]["tasks"]["seen"] == 29
    if more == CLOSES:
        assert facts(done)["then"] == "the session was closed; the script continues"


def test_a_signal_to_the_job(mpirun: Mpi) -> None:
    job = run(mpirun, WORK + "tell(waits=True)\ntime.sleep(60)\n")
    job.wait_for("waits")
    os.kill(
        ranks_of(job)[0], signal.SIGTERM
    )  # Open MPI's launcher would leave it half a second for its report
    assert job.wait().rc != 0
    data = figures(job)
    assert data["job"]["how"] == "the job was sent SIGTERM"
    assert data["record"]["tasks"]["seen"] == 29


def test_a_lost_scheduler_leaves_what_the_client_rank_knows(mpirun: Mpi) -> None:
    script = WORK + "import signal\ntell(scheduler=client.run_on_scheduler(os.getpid))\ntime.sleep(60)\n"
    job = run(mpirun, script)
    pid = until(lambda: facts(job).get("scheduler"))
    os.kill(pid, signal.SIGKILL)
    job.wait().check(1)
    data = figures(job)
    assert not data["job"]["scheduler_answered"]  # the record is that of the start
    assert sorted(data["record"]["alive"]) == ["0", "1"]
    assert data["job"]["how"].startswith("the cluster was lost: the scheduler's process ended")
    assert {step["rank"] for step in data["start"]["steps"]} == {0, 1}


def test_a_worker_that_was_killed(mpirun: Mpi) -> None:
    script = (
        WORK
        + """
import logging, signal
def die():
    logging.getLogger("distributed.worker").error("its last words")
    os.kill(os.getpid(), signal.SIGKILL)
info = client.scheduler_info(n_workers=-1)["workers"]
address = next(address for address, worker in info.items() if worker["name"] == 0)
try:
    client.submit(die, workers=[address]).result(timeout=1)
except Exception:
    pass
wait_until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 2)
time.sleep(1.0)
"""
    )
    begin = "import dask; dask.config.set({'distributed.scheduler.allowed-failures': 0})\n"
    job = run(mpirun, begin + script)
    job.wait().check(0)
    record = figures(job)["record"]
    told = [(event["what"], event["worker"], event["why"]) for event in record["events"]]
    assert ("process died", "0", "signal 9") in told
    assert ("worker restarted", "0", "") in told
    assert any(what == "worker gone" and worker == "0" for what, worker, _ in told), told
    died = next(event for event in record["events"] if event["what"] == "process died")
    assert died["output"] == "[left out]"
    assert {worker["name"]: worker["starts"] > 1 for worker in record["workers"]} == {"0": True, "1": False}


def test_a_report_that_can_not_be_written_at_the_end_is_a_warning(mpirun: Mpi) -> None:
    script = "import os, sys\nos.mkdir('report.json')\nsys.exit(5)\n"
    job = run(mpirun, script, ranks=1)
    done = job.wait().clean(5)
    assert done.stderr.count("warning: the report could not be written") == 1


def test_a_report_that_is_asked_for_while_the_script_runs(mpirun: Mpi) -> None:
    script = (
        "from dask_gpu_mpi import InputError, initialize\nsession = initialize()\n"
        + WORK
        + """
session.report("first.json")
assert client.submit(sum, [1, 2]).result() == 3
session.report("second.json")
for name in ("x.pdf", "no/x.json"):
    try:
        session.report(name)
    except InputError as error:
        tell(**{name: str(error)})
session.close()
session.report("third.json")
"""
    )
    done = mpirun.run(script, 2).check()
    told = facts(done)
    assert "expected FILE.html or FILE.json" in told["x.pdf"]
    assert "can't be written" in told["no/x.json"]
    first, second, third = (
        json.loads((mpirun.jobs[-1].directory / f"{name}.json").read_text())
        for name in ("first", "second", "third")
    )
    assert third["job"]["how"] == "the session was closed; the script continues"
    assert third["record"] == second["record"]  # what was known last
    assert first["job"]["how"] == second["job"]["how"] == "the script runs"
    assert not first["record"]["from_start"]
    assert [data["record"]["tasks"]["seen"] for data in (first, second)] == [0, 1]
    assert {prefix["name"]: prefix["tasks"] for prefix in first["record"]["prefixes"]}["join"] == 8
