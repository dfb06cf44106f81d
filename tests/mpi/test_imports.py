"""What is imported before the cluster is up, by any process of a job, and what only afterwards."""

from __future__ import annotations

from pathlib import Path

from support.jobs.clusters import facts
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, make_gpus

#: As ``sitecustomize``: every process notes what it imports (as -X importtime does, but also after a fork, and when).
WATCH = """
import os, sys, time

def note(word):
    file = os.open(f"{os.environ['IMPORTS_FOLDER']}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{time.time()} {word}\\n".encode())
    os.close(file)

def watch(event, arguments, note=note):
    if event == "import":
        note(arguments[0])

note("starts")
os.register_at_fork(after_in_child=lambda note=note: note("forked"))
sys.addaudithook(watch)
"""
SCRIPT = """
from support.jobs.scripts.tell import tell
import time
from dask_gpu_mpi import initialize
initialize(nthreads=1, cpu_workers=1)
up = time.time()
from distributed import Client
with Client() as client:
    tell(
        up=up,
        rank=[os.getpid()],
        agents=list(client.run(os.getpid, nanny=True).values()),
        workers=list(client.run(os.getpid).values()),
        scheduler=[client.run_on_scheduler(os.getpid)],
    )
    # the dashboard, which follows
    while not client.run_on_scheduler(lambda: "bokeh.server.server" in sys.modules):
        time.sleep(0.1)
"""
#: Optional packages, which Dask looks for in each worker.
OPTIONAL = {"cudf", "distributed_ucxx", "gilknocker", "prometheus_client"}
#: Large, and not needed to start workers. (distributed itself imports numpy, and dask_cuda cuda.bindings.)
LARGE = {"IPython", "bokeh", "cupy", "matplotlib", "numba", "pandas", "pyarrow", "rich", "scipy", "sklearn"}


def test_nothing_large_is_imported_before_the_cluster_is_up(mpirun: Mpi, tmp_path: Path) -> None:
    """By GPU workers, a CPU worker, and all that they come from."""
    folder = tmp_path / "imports"
    folder.mkdir()
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    gpus, env = make_gpus(2, host="one", memory=GIB), {"IMPORTS_FOLDER": str(folder)}
    told = facts(mpirun.run(SCRIPT, 2, gpus=gpus, path=tmp_path, env=env).check())
    noted = {
        int(file.name): [line.split(" ", 1) for line in file.read_text().splitlines()]
        for file in folder.iterdir()
    }
    early, late = set(), set()
    for pid, lines in noted.items():
        for when, name in lines:
            (early if float(when) < told["up"] else late).add((pid, name.partition(".")[0]))
    assert {(pid, name) for pid, name in early if name in LARGE} == set()
    # what was watched: all processes, and those that came from a fork as well
    for kind in ("rank", "agents", "workers", "scheduler"):
        assert set(told[kind]) <= noted.keys(), kind
    assert {(pid, "distributed") for pid in told["agents"]} <= early
    assert {(pid, "forked") for pid in (*told["workers"], *told["scheduler"])} <= early
    assert (told["scheduler"][0], "bokeh") in late
    # what one worker needs, all have from the process that they are forked from
    for pid in told["workers"]:
        names = [name for when, name in noted[pid] if float(when) < told["up"]]
        imported = {name for name in names if name != "forked" and name.partition(".")[0] not in OPTIONAL}
        assert imported == set()
