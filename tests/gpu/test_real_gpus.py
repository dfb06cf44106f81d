"""The main job on real GPUs: what CUDA itself says inside each worker, real work, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, MESSAGES, facts, scratch_of, workers_of
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

#: With `script(...)`, what every job begins with.
HEAD = script("gpu/scripts/sees_gpus.py")
COMMANDED = "from dask_gpu_mpi import current_session\nsession = current_session()\nclient = Client()\n"


def initialized(**options: Any) -> str:
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"from dask_gpu_mpi import initialize\nsession = initialize({words})\nclient = Client()\n"


def need(gpus: Any, count: int) -> None:
    if len(gpus.uuids) < count:
        pytest.skip(
            f"{count} GPUs needed, {len(gpus.uuids)} here; tests/mpi/test_gpus.py has the same with emulated ones"
        )


def options_for(protocol: str, **options: Any) -> dict[str, Any]:
    if protocol != "tls":
        need_ucx()
    return {"protocol": protocol, **options}


def need_ucx() -> None:
    if find_spec("distributed_ucxx") is None:
        pytest.skip("distributed-ucxx is not installed: pip install 'dask-gpu-mpi[cuda13]'")


def check(
    told: dict[str, Any], gpus: Any, uuids: list[str], *, script: bool = False
) -> dict[str, dict[str, Any]]:
    """One worker on each of these GPUs, and what CUDA says there is what the plan says; contexts in the workers alone.

    With `script` in the script's own process too, which has used CUDA.
    """
    rows, plan = workers_of(told), told["plan"]
    assert sorted(worker["device"] for worker in plan["workers"]) == sorted(uuids)
    assert sorted(rows) == sorted(worker["name"] for worker in plan["workers"])
    memory = dict(zip(gpus.uuids, gpus.memory, strict=True))
    for worker in plan["workers"]:
        row = rows[worker["name"]]
        assert row["uuid"] == row["visible"] == worker["device"]
        assert row["count"] == 1
        assert row["kernel"] is True
        assert row["affinity"] == worker["cpus"]
        assert row["memory"] == worker["memory_limit"] > 0
        assert row["resources"] == {"GPU": 1}
        assert row["device"] == int(0.8 * memory[worker["device"]])
        assert row["identity"] == []
    assert sum(row["memory"] for row in rows.values()) <= sum(host["memory"] for host in plan["hosts"])
    assert told["contexts"] == [
        int(uuid in uuids) + int(script and uuid == gpus.uuids[0]) for uuid in gpus.uuids
    ]
    return rows


@pytest.mark.parametrize(
    "geometry", ["one rank", "a rank per GPU", "a rank per GPU, isolated", "one rank less", "one GPU of all"]
)
def test_geometries(mpirun: Mpi, gpus: Any, geometry: str) -> None:
    count = len(gpus.uuids)
    env: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": None}
    per_rank, ranks, uuids = None, count, list(gpus.uuids)
    if geometry == "one rank":
        ranks = 1
    elif geometry == "a rank per GPU, isolated":
        per_rank = [{"CUDA_VISIBLE_DEVICES": str(index)} for index in reversed(range(count))]
    elif geometry == "one rank less":
        need(gpus, 2)
        ranks = count - 1
    elif geometry == "one GPU of all":
        need(gpus, 2)
        ranks, env, uuids = 1, {"CUDA_VISIBLE_DEVICES": str(count - 1)}, uuids[-1:]
    script = HEAD + initialized() + "seen()\n"
    done = mpirun.run(script, ranks, env=env, per_rank_env=per_rank, timeout=120).check()
    rows = check(facts(done), gpus, uuids)
    names = sorted(rows)
    expected = {
        "one rank": [f"0-{i}" for i in range(count)],
        "a rank per GPU": [f"{i}-{i}" for i in range(count)],
        "a rank per GPU, isolated": [f"{count - 1 - i}-{i}" for i in range(count)],
        "one GPU of all": ["0-0"],
    }
    if geometry in expected:
        assert names == sorted(expected[geometry])
    gpus.check_idle()
    assert scratch_of(mpirun.jobs[-1]) == []


@pytest.mark.parametrize("protocol", ["tls", "auto"])
@pytest.mark.parametrize("form", ["initialize", "command"])
def test_unguarded_script_ends(mpirun: Mpi, gpus: Any, tmp_path: Path, form: str, protocol: str) -> None:
    options = options_for(protocol)
    end = "seen()\ntell(address=client.scheduler.address)\nsys.exit(7)\n"
    if form == "initialize":
        done = mpirun.run(HEAD + initialized(**options) + end, 2, timeout=120)
    else:
        script = tmp_path / "script.py"
        script.write_text(HEAD + COMMANDED + end)
        done = mpirun.run([*COMMAND, "--protocol", protocol, str(script)], 2, timeout=120)
    done.check(7)
    told = facts(done)
    check(told, gpus, list(gpus.uuids))
    assert told["address"].startswith("tls://127.0.0.1:")
    assert "Traceback" not in done.stderr
    assert not any(word in done.stderr for word in ("WARN", "ERROR", "distributed")), done.stderr
    gpus.check_idle()


SVD = """
import cupy
random = da.random.RandomState(seed=1, RandomState=cupy.random.RandomState)
x = random.normal(size=(10_000, 1_000), chunks=(1_000, 1_000))
u, s, v = da.linalg.svd(x)
x, u, s, v = dask.persist(x, u, s, v)
error = abs((u * s) @ v - x).max().compute()
tell(kind=type(s.compute()).__module__.partition(".")[0], error=float(error), scale=float(abs(x).max().compute()))
"""
TRANSPOSE = """
import cupy
random = da.random.RandomState(seed=2, RandomState=cupy.random.RandomState)
x = random.random((20_000, 20_000), chunks=5_000).persist()
total, twice = dask.compute(x.sum(), (x + x.T).sum())
tell(total=float(total), twice=float(twice))
gathered = client.submit(lambda: cupy.arange(100_000), pure=False).result()
tell(gathered=[type(gathered).__module__.partition(".")[0], int(gathered.sum())])
"""
LOOK_AT_POOL = """
def pool(dask_worker):
    import rmm
    return type(rmm.mr.get_current_device_resource()).__name__
"""
#: Work of some seconds, whose `future` has the sum of transposes: half of the array's elements.
COMPUTES = """
import cupy, signal

def slowly(block):
    time.sleep(0.1)
    return block

random = da.random.RandomState(seed=3, RandomState=cupy.random.RandomState)
x = random.random((30_000, 30_000), chunks=5_000)
for step in range(4):
    x = ((x + x.T) / 2).map_blocks(slowly, dtype=x.dtype, meta=cupy.empty((0, 0)))
future = client.compute(x.sum())
"""
POOL = {"rmm_pool_size": 0.8, "rmm_allocator_external_lib_list": "cupy"}


@pytest.mark.parametrize("protocol", ["tls", "auto", "ucx"])
def test_arrays(mpirun: Mpi, gpus: Any, protocol: str) -> None:
    """dask.array on CuPy, an RMM pool of 80 % on each GPU: the SVD of Dask's documentation, and what crosses between GPUs."""
    pool = LOOK_AT_POOL + "tell(pools=sorted(set(client.run(pool).values())))\n"
    options = options_for(protocol, worker_options=POOL)
    script = HEAD + initialized(**options) + pool + MESSAGES + SVD + TRANSPOSE
    done = mpirun.run(script, 2, timeout=200).check()
    told = facts(done)
    assert told["messages"] == [2_000_000_000]
    if protocol in ("auto", "ucx") and len(gpus.uuids) > 1:
        assert "transport: TLS, and UCX for" in done.stderr
    assert told["pools"] == ["PoolMemoryResource"]
    assert told["kind"] == "cupy"
    assert told["error"] < 1e-10 * told["scale"]
    assert told["twice"] == pytest.approx(2 * told["total"], rel=1e-9)
    assert told["total"] == pytest.approx(0.5 * 20_000**2, rel=1e-3)
    assert told["gathered"] == ["cupy", 99_999 * 50_000]
    gpus.check_idle()


@pytest.mark.parametrize("protocol", ["tls", "auto"])
def test_worker_killed_in_the_middle(mpirun: Mpi, gpus: Any, protocol: str) -> None:
    """Its nanny brings it back on the same GPU, with its pool, and the result is right.

    Over UCX the others keep the memory of the one that was killed mapped (CUDA IPC), so that its pool must fit twice: not 80 %.
    """
    body = """
before = {row["name"]: row for row in client.run(cuda).values()}
victim = sorted(before)[-1]
held = lambda dask_scheduler: {ws.name: len(ws.has_what) for ws in dask_scheduler.workers.values()}
limit = time.monotonic() + 60
while (results := client.run_on_scheduler(held)[victim]) < 3 and time.monotonic() < limit:
    time.sleep(0.05)
tell(results=results, early=future.done())
os.kill(before[victim]["pid"], signal.SIGKILL)
total = future.result(timeout=100)
limit = time.monotonic() + 60
while len(after := {row["name"]: row for row in client.run(cuda).values()}) < len(before) and time.monotonic() < limit:
    time.sleep(0.5)
tell(total=float(total), before=before[victim], after=after.get(victim))
tell(pools=sorted(client.run(pool).values()))
seen()
"""
    switches = {"enable_nvlink": True, "rmm_pool_size": 0.4} if protocol != "tls" else {}
    options = options_for(protocol, worker_options={**POOL, **switches})
    done = mpirun.run(HEAD + initialized(**options) + LOOK_AT_POOL + COMPUTES + body, 1, timeout=200).check()
    told = facts(done)
    assert told["results"] >= 3
    assert told["early"] is False
    assert told["total"] == pytest.approx(0.5 * 30_000**2, rel=1e-3)
    assert told["after"]["pid"] != told["before"]["pid"]
    assert told["after"]["uuid"] == told["before"]["uuid"]
    assert told["pools"] == ["PoolMemoryResource"] * len(gpus.uuids)
    check(told, gpus, list(gpus.uuids), script=True)  # the script has made an array of its own
    gpus.check_idle()


def test_rank_lost_in_the_middle(surviving: Mpi, gpus: Any) -> None:
    """The other rank goes on with its GPU, and the result is right; the lost one's GPU is free at the end."""
    need(gpus, 2)
    body = """
import psutil
held = lambda dask_scheduler: [len(ws.has_what) for ws in dask_scheduler.workers.values()]
limit = time.monotonic() + 60
while (results := min(client.run_on_scheduler(held))) < 3 and time.monotonic() < limit:
    time.sleep(0.05)
tell(results=results, early=future.done())
(lost,) = [each for each in psutil.Process(os.getppid()).children() if each.pid != os.getpid()]
for each in [lost, *lost.children(recursive=True)]:
    os.kill(each.pid, signal.SIGKILL)
tell(total=float(future.result(timeout=100)), workers=len(client.scheduler_info(n_workers=-1)["workers"]))
"""
    options = options_for("auto", worker_options=POOL, tolerate_lost_ranks=1)
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.uuids[:2])}
    done = surviving.run(HEAD + initialized(**options) + COMPUTES + body, 2, env=env, timeout=150).check()
    told = facts(done)
    assert told["results"] >= 3
    assert told["early"] is False
    assert told["total"] == pytest.approx(0.5 * 30_000**2, rel=1e-3)
    assert told["workers"] == 1
    assert "it had 1 worker and 1 GPU. Continuing with 1 worker" in done.stderr
    gpus.check_idle()


def test_benchmark_of_dask_cuda(mpirun: Mpi, gpus: Any, tmp_path: Path) -> None:
    """dask-cuda's own `local_cupy` finds our cluster by its scheduler file."""
    file = tmp_path / "cluster.json"
    worker_options = json.dumps({"rmm_pool_size": 0.4, "rmm_allocator_external_lib_list": "cupy"})
    words = ("--protocol", "tcp", "--scheduler-file", str(file), "--worker-options", worker_options)
    job = mpirun.start([*COMMAND, *words], 1)
    job.wait_for("ready after", stream="stderr")
    options = {
        "--scheduler-file": str(file), "--protocol": "tcp", "--size": "10000", "--chunk-size": "2500", "--runs": "2",
        "--ignore-size": "1 MiB", "--output-basename": str(tmp_path / "out"),
    }  # fmt: skip
    line = [sys.executable, "-m", "dask_cuda.benchmarks.local_cupy", *sum(options.items(), ())]
    line += ["--disable-rmm", "--shutdown-external-cluster-on-exit"]
    found = subprocess.run(line, capture_output=True, text=True, timeout=150)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "transpose_sum" in found.stdout
    assert "tcp" in found.stdout.lower()
    with contextlib.suppress(ProcessLookupError):
        job.launcher.wait(30)
    done = job.wait()
    assert done.rc == 0
    gpus.check_idle()
