"""Shapes of jobs on one host, with real processes and every worker looked at from inside; tests/pure has the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from support.jobs.clusters import facts
from support.jobs.gpus import CORES, SCRIPT, SITE, SOCKETS, check_workers
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, SimGpu, SimMig, make_gpus

EIGHT = make_gpus(8, host="one", memory=80 * GIB, cores=SOCKETS * 4)


def start(**options: Any) -> str:
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"from dask_gpu_mpi import initialize\ninitialize({words})\n" + SCRIPT


BIND = """
import os
os.sched_setaffinity(0, map(int, os.environ["TEST_CORES"].split(",")))
"""


def test_a_rank_per_socket_bound_to_its_cores(mpirun: Mpi) -> None:
    # the first rank on the second socket, and neighbours by index on different sockets
    cores = [{"TEST_CORES": ",".join(map(str, socket))} for socket in SOCKETS[::-1]]
    told = facts(mpirun.run(BIND + start(), 2, gpus=EIGHT, per_rank_env=cores).check())
    names = ["0-1", "0-3", "0-5", "0-7", "1-0", "1-2", "1-4", "1-6"]
    if len(CORES) == 1:
        names = [f"{place // 4}-{place}" for place in range(8)]
    bound = {0: set(SOCKETS[1]), 1: set(SOCKETS[0])}
    check_workers(told, EIGHT, {name: [EIGHT[int(name[2:])]] for name in names}, bound=bound)
    assert told["plan"]["warnings"] == []


def test_several_gpus_for_each_worker_and_a_worker_that_is_killed(mpirun: Mpi) -> None:
    kill = """
import signal
victim = next(row for row in rows if row["name"] == "1-5")
os.kill(victim["pid"], signal.SIGKILL)
def is_back():
    there = {worker["name"]: address for address, worker in client.scheduler_info(n_workers=-1)["workers"].items()}
    return len(there) == len(rows) and there["1-5"] != victim["address"]
wait_until(is_back)
tell(first=rows, workers=looks(client))
"""
    gpus = make_gpus(8, host="one", memory=80 * GIB, cores=[SOCKETS[0], SOCKETS[1]])
    gpus = tuple(gpus[i] for i in (0, 4, 1, 5, 2, 6, 3, 7))  # sockets take turns
    options = ["--gpus-per-worker", "2", "--cpu-workers", "1"]
    done = mpirun.run(SCRIPT + kill, 2, command=options, gpus=gpus).check()
    told = facts(done)
    together = [(0, 2), (1, 3), (4, 6), (5, 7)] if len(CORES) > 1 else [(0, 1), (2, 3), (4, 5), (6, 7)]
    expected = {f"{i // 2}-{pair[0]}": [gpus[place] for place in pair] for i, pair in enumerate(together)}
    before = check_workers(told | {"workers": told["first"]}, gpus, expected, cpu_workers=["0-cpu-0"])
    # its nanny has brought it back as it was, on the same GPUs
    after = check_workers(told, gpus, expected, cpu_workers=["0-cpu-0"])
    assert [name for name in before if before[name]["pid"] != after[name]["pid"]] == ["1-5"]
    assert done.left == ()


def test_mig_instances_by_uuid(mpirun: Mpi) -> None:
    # slices of different sizes, in another order than the GPU's, whole and abbreviated names, one of them left out, other
    # devices for each rank
    slices = [
        SimMig(f"MIG-{letter * 8}-0000-4000-8000-000000000001", size * GIB)
        for letter, size in zip("abcd", (10, 20, 10, 40), strict=True)
    ]
    gpus = [
        SimGpu(
            uuid=f"GPU-{number * 8}-0000-4000-8000-000000000001",
            memory=80 * GIB,
            mig=tuple(slices[i : i + 2]),
        )
        for number, i in (("1", 0), ("2", 2))
    ]
    visible = [{"CUDA_VISIBLE_DEVICES": f"{slices[3].uuid},MIG-aaaa"}, {"CUDA_VISIBLE_DEVICES": "MIG-bb"}]
    options = {"rmm_pool_size": 0.5, "rmm_maximum_pool_size": 0.75, "device_memory_limit": 0.25}
    script = start(worker_options=options) + (
        "tell(rmm=client.run(lambda dask_worker: (dask_worker.name, sys.modules['rmm'].calls)))\n"
    )
    told = facts(mpirun.run(script, 2, gpus=gpus, path=SITE, per_rank_env=visible).check())
    expected = {"0-0": [slices[0]], "0-2": [slices[3]], "1-1": [slices[1]]}
    check_workers(told, gpus, expected, device_limit=0.25)
    # fractions of the worker's own slice
    for name, calls in told["rmm"].values():
        ((function, asked),) = calls
        size = expected[name][0].memory
        assert function == "reinitialize"
        assert (asked["initial_pool_size"], asked["maximum_pool_size"]) == (size // 2, size * 3 // 4)
        assert (asked["pool_allocator"], asked["managed_memory"], asked["logging"]) == (True, False, False)


def test_all_of_cudaworkers_options_as_json(mpirun: Mpi, tmp_path: Path) -> None:
    gpus = (*make_gpus(1, host="small", memory=16 * GIB), *make_gpus(1, host="large", memory=80 * GIB))
    logs = tmp_path / "logs"  # made where the workers are
    options = {
        "rmm_maximum_pool_size": 0.75, "rmm_async": True, "rmm_release_threshold": 0.5,
        "rmm_track_allocations": True, "rmm_log_directory": str(logs), "device_memory_limit": "8 GiB", "enable_cudf_spill": True,
        "cudf_spill_stats": 1, "pre_import": "wave,dbm.dumb", "enable_nvlink": None, "enable_tcp_over_ucx": True,
        "memory_limit": "1 GiB", "resources": {"FOO": 2}, "lifetime": "1 hour",
    }  # fmt: skip
    script = """
def inside(dask_worker):
    import cudf, rmm, sys
    imported = [name in sys.modules for name in ("wave", "dbm.dumb")]
    return str(dask_worker.name), rmm.calls, cudf.options, imported

import os
spills = [client.run_on_scheduler(lambda: os.environ.get("CUDF_SPILL")), os.environ.get("CUDF_SPILL")]
tell(inside=sorted(client.run(inside).values()), spills=spills)
"""
    words = ["--cpu-workers", "1", "--worker-options", json.dumps(options)]
    how: dict[str, Any] = {"env": {"DASK_CUDF_SPILL_WARNING": "False"}, "gpus": gpus, "path": SITE}
    told = facts(mpirun.run(SCRIPT + script, 1, command=words, **how).check())
    rows = {row["name"]: row for row in told["workers"]}
    assert [rows[name]["device"] for name in ("0-0", "0-1")] == [8 * GIB] * 2
    assert {row["memory"] for row in rows.values()} == {GIB}
    assert rows["0-0"]["resources"] == {"GPU": 1, "FOO": 2}
    assert told["steered"] == {"GPU": ["0-0", "0-1"], "CPU": ["0-cpu-0"]}
    # who reads the data of such workers must spill as well
    assert told["spills"] == ["on", "on"]
    (small, large, cpu) = told["inside"]
    for (_, calls, cudf, imported), memory in ((small, 16 * GIB), (large, 80 * GIB)):
        assert calls == [
            ["CudaAsyncMemoryResource", {"initial_pool_size": None, "release_threshold": memory // 2}],
            ["LimitingResourceAdaptor", {"allocation_limit": memory * 3 // 4}],
            ["enable_logging", {"log_file_name": calls[2][1]["log_file_name"]}],
            ["TrackingResourceAdaptor", {}],
        ]
        assert calls[2][1]["log_file_name"].startswith(str(logs))
        assert cudf == {"spill": True, "spill_stats": 1}
        assert imported == [True, True]
    # the CPU worker beside them has none of it
    assert cpu[0] == "0-cpu-0"
    assert cpu[1:3] == [[], {}]
    assert logs.is_dir()


def test_the_same_part_in_different_orders_and_a_class_made_from_cudaworker(
    mpirun: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import dask_cuda\n\nclass Mine(dask_cuda.CUDAWorker):\n    pass\n")
    visible = [
        {"CUDA_VISIBLE_DEVICES": "7,2,4"},
        {"CUDA_VISIBLE_DEVICES": f"{EIGHT[4].uuid},7,GPU-{EIGHT[2].uuid[4:12]}"},
    ]
    script = start(worker_class="mine.Mine", nthreads=2, worker_options={"env": {"MINE": "yes"}})
    script += "tell(mine=[*client.run(os.getenv, 'MINE').values()])\n"
    told = facts(mpirun.run(script, 2, gpus=EIGHT, path=tmp_path, per_rank_env=visible).check())
    rows = check_workers(told, EIGHT, {"0-0": [EIGHT[2]], "0-1": [EIGHT[4]], "1-2": [EIGHT[7]]})
    assert told["mine"] == ["yes"] * 3
    assert {row["nthreads"] for row in rows.values()} == {2}
    assert told["steered"].keys() == {"GPU"}


# -- what is refused


def test_busy_gpus(mpirun: Mpi) -> None:
    gpus = list(make_gpus(2, host="one", memory=80 * GIB))
    gpus[1] = SimGpu(uuid=gpus[1].uuid, memory=80 * GIB, processes=((1, 30 * GIB),))
    host, busy = os.uname().nodename, f"GPU 1 ({gpus[1].uuid})"
    done = mpirun.run("print('runs')", 2, command=["--require-idle-gpus"], gpus=gpus)
    used = f"{30 * GIB} bytes (30.00 GiB) in use by other processes"
    done.refused(f"host {host}: {busy}", used, "--no-require-idle-gpus")
    assert "runs" not in done.stdout
    # a pool that fits the idle one, and not what is free of the other
    options = ["--worker-options", '{"rmm_pool_size": 0.7}']
    done = mpirun.run("print('runs')", 2, command=options, gpus=gpus)
    free = f"free: {50 * GIB} bytes (50.00 GiB)"
    done.refused(f"rmm_pool_size of worker 1-1 on {host}", busy, free, "expected '45 GiB' at most")


def test_libraries_that_the_script_names(mpirun: Mpi) -> None:
    # cuDF, here a module of the tests, is imported by workers with a GPU and by the scheduler before a task needs it
    script = """
def has_cudf(dask_worker=None, dask_scheduler=None):
    return "cudf" in sys.modules

def on_workers():
    return {row["name"]: client.run(has_cudf)[row["address"]] for row in rows}

import sys
wait_until(lambda: on_workers()["0-0"] and client.run_on_scheduler(has_cudf))
import gc
tell(has=on_workers(), sum=client.submit(sum, [1, 2]).result(), frozen=gc.get_freeze_count())
"""
    how: dict[str, Any] = {"gpus": make_gpus(1, memory=80 * GIB), "path": SITE}
    told = facts(mpirun.run(SCRIPT + script, 1, command=["--cpu-workers", "1"], **how).check())
    assert told["frozen"] > 10_000  # by the command: Python then ends sooner
    assert told["has"] == {"0-0": True, "0-cpu-0": False}
    assert told["sum"] == 3
