"""What the benchmarks make of what they have measured."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from support import ROOT

BENCHMARKS = ROOT / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """One of the programs, imported as it imports its neighbours."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[0]


@pytest.fixture(scope="module")
def common() -> ModuleType:
    return benchmark("common")


@pytest.fixture(scope="module")
def startup() -> ModuleType:
    return benchmark("startup")


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return benchmark("scale")


@pytest.fixture(scope="module")
def files() -> ModuleType:
    return benchmark("files")


def test_a_result_says_how_to_repeat_it(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell makes the same words of it: names of ways have blanks."""
    words = ["transfer.py", "--ways", "ours, UCX", "ours, TCP"]
    monkeypatch.setattr(sys, "argv", words)
    assert shlex.split(common.machine([sys.executable])["command"]) == words


def test_a_job_is_ended_whatever_it_does(common: ModuleType) -> None:
    code = "import subprocess, sys; note('ready'); subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with common.Job(code) as job:
        job.start([sys.executable, str(job.script)])
        assert job.wait("ready", limit=20.0) is not None
        assert job.members()
        assert not job.wait_for_end(0.0)
    assert not job.members()
    assert not job.folder.exists()


def test_a_job_that_fails_is_not_waited_for(common: ModuleType) -> None:
    with common.Job("sys.exit('no such thing')") as job:
        job.start([sys.executable, str(job.script)])
        assert job.wait("ready", limit=3600.0) is None
        assert job.code == 1
        assert job.output() == "no such thing\n"


def test_a_job_has_ended_when_its_exit_code_is_known(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment, by which processes are found, is gone a moment before."""
    with common.Job("note('ready'); pause(); sys.exit(3)") as job:
        job.start([sys.executable, str(job.script)])
        assert job.wait("ready", limit=20.0) is not None
        with monkeypatch.context() as patch:
            patch.setattr(common, "members", lambda mark: {})
            assert not job.wait_for_end(0.0)
            job.go_on()
            assert job.wait_for_end(20.0)
            assert job.code == 3


def test_the_most_memory_that_a_job_had(common: ModuleType) -> None:
    """Of a moment before it was ready, with a process that has ended since."""
    code = """
import subprocess
subprocess.run([sys.executable, "-c", "import time; a = bytearray(b'x') * (200 << 20); time.sleep(1.5)"])
note("ready")
pause()
"""
    with common.Job(code) as job, common.Peak(job) as peak:
        job.start([sys.executable, str(job.script)])
        assert job.wait("ready", limit=60.0) is not None
        now = sum(map(common.pss_of, job.members()))
        job.go_on()
        assert job.wait_for_end(20.0)
    assert now < 100
    assert peak.by_kind(0).keys() == {"rank"}
    assert 200 < peak.by_kind(0)["rank"] < 300
    assert peak.looks > 5


def test_peaks_are_of_runs_whose_times_do_not_count(startup: ModuleType) -> None:
    runs = [
        startup.Run("dask_gpu_mpi", 0, ready_s=1.0, pss_mib={"rank": 10.0}),
        startup.Run("dask-mpi", 0, ready_s=2.0, pss_mib={"rank": 30.0}),
        startup.Run(
            "dask_gpu_mpi", 1, ready_s=9.0, pss_mib={"rank": 90.0}, peak_mib={"rank": 12.0, "agent": 8.0}
        ),
        startup.Run("dask-mpi", 1, ready_s=9.0, pss_mib={"rank": 90.0}, peak_mib={"rank": 40.0}),
        startup.Run("dask-mpi", 2, failure="not ready", watched=True),
    ]
    for run in runs[2:4]:
        run.watched = True
    rows = startup.summary(runs)
    ours, peer = rows["dask_gpu_mpi"], rows["dask-mpi"]
    assert (ours["ready_s"], ours["pss_total"], ours["peak_total"], ours["runs"]) == (1.0, 10.0, 20.0, 1)
    assert ours["peak_mib"] == {"rank": 12.0, "agent": 8.0}
    assert (peer["ready_s"], peer["peak_total"], peer["failures"]) == (2.0, 40.0, ["not ready"])
    assert peer["ours_over_this"]["peak_total"] == 0.5
    assert peer["ours_over_this"]["ready_s"] == 0.5


def test_ratios_are_taken_within_a_round(startup: ModuleType) -> None:
    runs = [
        startup.Run(way, number, ready_s=seconds, pss_mib={"rank": 10.0})
        for way, times in (("dask_gpu_mpi", (1.0, 2.0, 3.0)), ("dask-mpi", (2.0, 8.0, 6.0)))
        for number, seconds in enumerate(times)
    ]
    runs[-1].killed, runs[-1].failure = True, "did not end by itself"
    rows = startup.summary(runs)
    assert rows["dask-mpi"]["ready_s"] == 6.0
    assert rows["dask-mpi"]["ours_over_this"]["ready_s"] == 0.5  # of 1/2, 2/8 and 3/6
    assert rows["dask-mpi"]["ours_over_this"]["end_s"] is None
    assert rows["dask-mpi"]["killed"] == 1
    assert rows["dask-mpi"]["failures"] == ["did not end by itself"]
    assert rows["dask_gpu_mpi"]["pss_total"] == 10.0


def test_what_a_process_is(common: ModuleType) -> None:
    agent = "python -c import json; from dask_gpu_mpi.agent.boot import main"
    found = {
        1: (0, "/bin/mpirun -np 1"),
        2: (1, "python -m dask_gpu_mpi script.py"),
        3: (2, agent),
        4: (3, agent),
        5: (4, agent),
        6: (4, agent),
        7: (3, "python -c from multiprocessing.resource_tracker import main"),
        8: (2, "python -c from multiprocessing.spawn import spawn_main"),
        9: (2, "python -I -S -c import ctypes; ctypes.CDLL('libcuda.so.1')"),
        10: (3, agent),
    }
    kinds = [common.kind_of(pid, found, 6) for pid in found]
    assert kinds == [
        "launcher",
        "rank",
        "agent",
        "fork server",
        "worker",
        "scheduler",
        "tracker",
        "worker",
        "driver",
        "tracker",
    ]


def test_the_end_beyond_an_empty_program(startup: ModuleType) -> None:
    runs = [
        startup.Run(way, number, end_s=seconds)
        for way, times in (("dask_gpu_mpi", (0.5, 0.9, None)), ("empty MPI", (0.1, 0.2, 0.3)))
        for number, seconds in enumerate(times)
    ]
    rows = startup.summary(runs)
    assert rows["dask_gpu_mpi"]["end_beyond_empty_s"] == pytest.approx(0.55)  # of 0.4 and 0.7
    assert rows["empty MPI"]["end_beyond_empty_s"] is None


def test_a_way_that_fails_twice_is_left_out(startup: ModuleType) -> None:
    def one(way: str, number: int) -> Any:
        return startup.Run(way, number, failure="not ready" if way == "b" else "")

    runs = startup.in_turn(["a", "b"], 4, one)
    assert [(run.way, run.round) for run in runs] == [("a", n) for n in range(4)] + [("b", 0), ("b", 1)]


#: What strace writes of a rank (10), its agent (20) with a thread (21) and its tracker (22), fork server (30) and worker (40).
TRACES = {
    5: ['1.0 execve("/bin/mpirun", ["mpirun"], 0x1 /* 9 vars */) = 0', "1.1 vfork() = 10"],
    10: [
        '1.2 openat(AT_FDCWD, "/lib/python3/x/__pycache__/a.cpython-311.pyc", O_RDONLY|O_CLOEXEC) = 3',
        '1.2 newfstatat(3, "", {st_mode=S_IFREG|0644, st_size=9, ...}, AT_EMPTY_PATH) = 0',
        '1.3 openat(AT_FDCWD, "/proc/10/stat", O_RDONLY|O_CLOEXEC) = 3',
        "1.4 clone(child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD, child_tidptr=0x7) = 20",
    ],
    20: [
        "1.5 clone3({flags=CLONE_VM|CLONE_THREAD, child_tid=0x7}, 88) = 21",
        "1.6 fork() = 30",
        "1.7 fork() = 22",
    ],
    21: ['1.6 newfstatat(AT_FDCWD, "/lib/python3/b.py", 0x7, 0) = -1 ENOENT (No such file or directory)'],
    22: ['1.8 openat(AT_FDCWD, "/dev/null", O_WRONLY|O_CLOEXEC) = 3'],
    30: ["1.9 clone(child_stack=NULL, flags=SIGCHLD, child_tidptr=0x7) = 40"],
    40: [
        '2.0 openat(AT_FDCWD, "/lib/python3/x/numpy.cpython-311-x86_64-linux-gnu.so", O_RDONLY|O_CLOEXEC) = 3',
        '2.1 openat(AT_FDCWD, "/scratch/worker/global.lock", O_RDWR|O_CREAT|O_CLOEXEC, 0666) = 3',
        '2.2 openat(AT_FDCWD, "/lib/python3/x", O_RDONLY|O_DIRECTORY) = 3',
        "2.2 getdents64(3, 0x5 /* 7 entries */, 32768) = 216",
        "2.2 getdents64(3, 0x5 /* 0 entries */, 32768) = 0",
        '9.0 openat(AT_FDCWD, "/lib/late.pyc", O_RDONLY|O_CLOEXEC) = 3',
    ],
}


def test_calls_are_counted_by_kind_of_process(files: ModuleType) -> None:
    everyone = files.processes(TRACES, 5.0, "/scratch")
    kinds = files.roles(everyone, {"workers": [40], "agents": [20], "scheduler": 99})
    assert kinds == {5: "launcher", 10: "rank", 20: "agent", 22: "agent", 30: "fork server", 40: "worker"}
    assert everyone[10].counts == {"opened": 1, "modules": 1}
    assert everyone[20].counts == {"absent": 1, "looked at": 1}  # its thread's
    assert everyone[40].counts == {"opened": 2, "modules": 1, "listed": 1}
    assert everyone[40].modules == ["/lib/python3/x/numpy.cpython-311-x86_64-linux-gnu.so"]


def test_what_a_worker_adds(files: ModuleType) -> None:
    def row(each: int, opened: int, scheduler: int) -> dict[str, Any]:
        counts = dict.fromkeys(files.COUNTS, 0)
        return {
            "ranks": 2,
            "workers_each": each,
            "host": {**counts, "opened": opened + scheduler},
            "roles": {"scheduler": {**counts, "opened": scheduler}},
        }

    grown = files.growth([row(1, 100, 50), row(2, 120, 10), row(4, 160, 10)])
    assert grown["2"]["opened"] == 10.0  # 60 for six more workers


def test_the_start_of_many_ranks_is_linear_in_bytes(scale: ModuleType) -> None:
    rows = [scale.simulate(size) for size in (64, 512)]
    slopes = scale.exponents(rows)
    for step in ("gather", "scatter", "go"):
        assert slopes[f"{step}, bytes"]["64-512"] < 1.1
    # and no rank but the client's is sent what grows with the job
    assert rows[1]["steps"]["scatter"]["largest"] < rows[0]["steps"]["scatter"]["largest"] + 200


WORK = """
import sys
import numpy
sys.modules["cupy"] = numpy  # what is moved about is the same
from distributed import Client
if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as client:
        work(client, sys.argv[1], 60, 20, 4, 60.0)
"""


@pytest.mark.parametrize("operation", ["transpose-sum", "all-to-all"])
@pytest.mark.parametrize("lost", [False, True])
def test_what_is_transferred_is_looked_at(operation: str, lost: bool) -> None:
    transfer = benchmark("transfer")
    program = transfer.WORK + WORK
    if lost:
        program = program.replace("x + x.T", "x + 0 * x.T").replace("width].copy()", "width] * 0")
    done = subprocess.run(
        [sys.executable, "-c", program, operation], capture_output=True, text=True, timeout=60
    )
    if lost:
        assert "AssertionError" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    seconds = json.loads(line.removeprefix("RESULT "))
    assert len(seconds) == 4
    assert all(value > 0 for value in seconds)


def test_an_attacks_cost_is_a_ratio_within_trials() -> None:
    """A machine that is slower in one trial than in another changes both of its runs."""
    rounds = [
        {
            "undisturbed": {"seconds": seconds, "lines": 3, "code": 0},
            "attacked": {"seconds": 1.1 * seconds, "lines": 5, "code": 0},
        }
        for seconds in (1.0, 2.0, 10.0)
    ]
    found = benchmark("intruders").summary(rounds)
    assert found == {"undisturbed_s": 2.0, "attacked_s": 2.2, "ratio": 1.1, "lines": 5, "codes": [0]}
