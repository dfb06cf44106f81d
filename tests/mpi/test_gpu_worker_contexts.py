"""CUDA contexts of GPU workers: each worker makes one, in its own environment, and so does its successor."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from support.jobs.clusters import TELL, facts
from support.jobs.gpus import gpu_environ
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, LOG_VARIABLE, compile_cuda, compile_nvml, make_gpus, read_log

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler")

GPUS = make_gpus(2, host="one", memory=80 * GIB)
SCRIPT = (
    TELL
    + """
import signal, time
from distributed import Client
from dask_gpu_mpi import initialize

def rows():
    return sorted(client.run(look).values(), key=lambda row: row["name"])

session = initialize()
client = Client()
"""
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str | None]:
    """Two GPUs, and a driver that writes down who makes contexts."""
    env = gpu_environ(compile_nvml(tmp_path / "lib"), GPUS) | {LOG_VARIABLE: str(tmp_path / "log")}
    compile_cuda(tmp_path / "lib")
    return dict(env)


def contexts(tmp_path: Path) -> list[int]:
    """The process of each context that was made, as often as it was, sorted."""
    return sorted(pid for pid, what in read_log(tmp_path / "log") if "Retain" in what)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_worker_makes_one_and_so_does_its_successor(
    mpirun: Mpi, environ: dict[str, str | None], tmp_path: Path, ranks: int
) -> None:
    body = """
tell(before=rows())
victim = rows()[0]
os.kill(victim["pid"], signal.SIGKILL)
limit = time.monotonic() + 30
after = []
while (len(after) < 2 or victim["pid"] in [row["pid"] for row in after]) and time.monotonic() < limit:
    time.sleep(0.2)
    try:
        after = rows()
    except OSError:
        pass  # of the connection to the one that has gone
tell(after=after)
"""
    done = mpirun.run(SCRIPT + body, ranks, env=environ).check()
    told = facts(done)
    before, after = told["before"], told["after"]
    assert (
        [row["visible"] for row in before] == [row["visible"] for row in after] == [gpu.uuid for gpu in GPUS]
    )
    assert before[1]["pid"] == after[1]["pid"]
    # each has made one, and nobody else
    assert contexts(tmp_path) == sorted({row["pid"] for row in (*before, *after)})
    assert "Traceback" not in done.stderr


def test_the_driver_is_kept_up_for_the_start_alone(
    mpirun: Mpi, environ: dict[str, str | None], tmp_path: Path
) -> None:
    """A process that is no worker has initialised CUDA, made no context, and is gone when the workers are there."""
    body = """
limit = time.monotonic() + 10
others = {int(line.split()[0]) for line in open(os.environ["EMULATED_CUDA_LOG"]) if "cuInit" in line}
others -= {row["pid"] for row in rows()}
left = others
while left and time.monotonic() < limit:
    time.sleep(0.02)
    left = {pid for pid in others if os.path.exists(f"/proc/{pid}")}
tell(others=sorted(others), left=sorted(left))
"""
    told = facts(mpirun.run(SCRIPT + body, 1, env=environ).check())
    assert len(told["others"]) == 1
    assert told["left"] == []
    assert told["others"][0] not in contexts(tmp_path)


def test_environment_of_the_users_for_workers(
    mpirun: Mpi, environ: dict[str, str | None], tmp_path: Path
) -> None:
    # CUDA reads its variables once: the context must not be there before them
    (tmp_path / "dask.yaml").write_text("distributed: {nanny: {environ: {CUDA_DEVICE_MAX_CONNECTIONS: 1}}}\n")
    env = {**environ, "DASK_CONFIG": str(tmp_path / "dask.yaml")}
    body = """
seen = client.run(lambda: os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
tell(rows=rows(), seen=sorted(seen.values()))
"""
    told = facts(mpirun.run(SCRIPT + body, 1, env=env).check())
    assert told["seen"] == ["1", "1"]
    assert contexts(tmp_path) == sorted(row["pid"] for row in told["rows"])
