"""Start and end of a cluster under Slurm's srun, against dask-jobqueue's SLURMRunner.

    python benchmarks/slurm_startup.py --json benchmarks/results/startup-slurm.json --plot benchmarks/results/startup-slurm.png

Brings up the test bed (ci/testbed: network namespaces of this machine as nodes, with a real Slurm), takes one allocation,
starts every configuration in it with srun, interleaved, and stops everything. Needs root, Debian's slurm-wlm, slurm-client,
munge, libpmix-dev, and the Python of an environment with an MPI and dask-jobqueue. Within an allocation (``SLURM_JOB_ID`` is
set) that one is used: CPU seconds and memory are then those of this node's processes only.

SLURMRunner takes a task for each worker and two more, and a file on a shared file system; its workers are `distributed.Worker`
by default, dask_gpu_mpi's have a nanny each: so there are two configurations of it. All have CPU workers of one thread. It has
no TLS, and needs no MPI. Shapes are ranks x workers for each; the columns are those of startup.py. CPU seconds are sampled,
since Slurm's daemons start the tasks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from common import OURS, ROOT, START_LIMIT, Job, cpu_of, has, introduce, machine, parser_for, write
from startup import CLIENT, LIMITS, SCRIPTS, Run, in_turn, measure, plot, show, summary

TESTBED = ROOT / "ci" / "testbed"
RUNNER = """
if __name__ == "__main__":
    from distributed import Client
    from dask_jobqueue.slurm import SLURMRunner
    file = os.path.join(folder, "scheduler-{job_id}.json")
    with SLURMRunner(scheduler_file=file, worker_class=WORKER, worker_options={"nthreads": 1}) as runner, \\
            Client(runner) as client:
""" + CLIENT.replace("\n    ", "\n        ")
WAYS = {
    OURS: SCRIPTS[OURS],
    "SLURMRunner": RUNNER.replace("WORKER", "None"),
    "SLURMRunner, nannies": RUNNER.replace("WORKER", "'distributed.Nanny'"),
    **{way: SCRIPTS[way] for way in LIMITS},
}


class Step(Job):
    """A job step: its processes are Slurm's children, so their CPU seconds are sampled until they end."""

    def wait_for_end(self, limit: float = 10.0) -> bool:
        """Whether all processes have ended by themselves; notes their CPU seconds until then."""
        ended: dict[int, float] = {}
        own: dict[int, float] = {}
        until = time.time() + limit
        over = False
        while not over and time.time() < until:
            found = list(self.members())
            for pid in found:
                mine = cpu_of([pid], children=False)
                ended.setdefault(pid, max(0.0, cpu_of([pid]) - mine) if not own.get(pid) else 0.0)
                own[pid] = max(own.get(pid, 0.0), mine)
            over = not found
            time.sleep(0.02)
        self.cpu = sum(own.values()) + sum(ended.values())
        return over

    def reap(self) -> None:
        """Reap srun, whose CPU seconds are among the others."""
        before = self.cpu
        super().reap()
        self.cpu = before


@contextlib.contextmanager
def allocation(nodes: int) -> Iterator[list[str]]:
    """The command before an srun in an allocation: this one, or one on a test bed that exists as long as the block."""
    if "SLURM_JOB_ID" in os.environ:
        yield []
        return
    # names of sockets are short
    with tempfile.TemporaryDirectory(prefix="dgs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {"TESTBED_DIR": f"{folder}/bed", "TESTBED_OWNER": str(os.getpid())}
        on = [str(TESTBED / "on"), "h1"]
        try:
            for line in (["hosts-up", str(nodes)], ["slurm-up", "0"]):
                done = _run([str(TESTBED / line[0]), *line[1:]])
                if done.returncode:
                    sys.exit(done.stderr.strip() or f"{line[0]} failed with {done.returncode}")
            os.environ["SLURM_CONF"] = done.stdout.strip()
            asked = ["--parsable", f"--nodes={nodes}", "--exclusive", f"--output={folder}/batch.out"]
            done = _run([*on, "sbatch", *asked, "--wrap", "sleep 36000"])
            if done.returncode:
                sys.exit(f"sbatch: {done.stderr.strip()}")
            job = done.stdout.strip()
            until = time.time() + START_LIMIT
            while _run([*on, "squeue", "-h", "-j", job, "-o", "%T"]).stdout.strip() != "RUNNING":
                if time.time() > until:
                    sys.exit(f"job {job} does not run after {START_LIMIT:g} s")
                time.sleep(0.1)
            os.environ["SLURM_JOB_ID"] = job
            yield on
        finally:
            os.environ.pop("SLURM_JOB_ID", None)
            for script in ("slurm-down", "hosts-down"):
                _run([str(TESTBED / script)])


def _run(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def pmi() -> str:
    """The ``--mpi`` of srun for the MPI library of this environment."""
    done = _run([sys.executable, "-m", "mpi4py", "--mpi-lib-version"])
    return "pmix" if "Open MPI" in done.stdout else "pmi2"


def run_one(way: str, shape: tuple[int, int], number: int, srun: list[str], nodes: int) -> Run:
    """Start one cluster in the allocation, measure it when it is ready, and let it end."""
    ranks, each = shape
    run = Run(way, number, load=round(os.getloadavg()[0], 2))
    tasks = ranks * each + 2 if way.startswith("SLURMRunner") else ranks
    with Step(WAYS[way], ranks * each, STARTUP_GPU=0) as job:
        # dask-jobqueue writes its defaults there, in the user's home as a rule
        job.environ["DASK_CONFIG"] = str(job.folder / "config")
        program = [str(job.script)]
        if way == OURS:
            # so many on each node
            more = ranks * (each - 1) // nodes
            program = ["-m", OURS, "--nthreads", "1", "--cpu-workers", str(more), *program]
        line = [*srun, f"--ntasks={tasks}", sys.executable, *program]
        measure(run, job, [line], ranks if way in LIMITS else 0, START_LIMIT)
    return run


def main() -> int:
    """Measure, print, write; exit code 1 when a cluster of dask_gpu_mpi did not come up, or had to be killed."""
    parser = parser_for(__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="hosts of the test bed (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="multiples of the nodes")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="CPU workers for each rank")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if any(ranks % options.nodes for ranks in options.ranks):
        parser.error(f"--ranks {options.ranks}: multiples of --nodes {options.nodes} are needed")
    ways = list(WAYS)
    if not has("dask-jobqueue"):
        print("without SLURMRunner: dask-jobqueue is not installed here (pip install dask-jobqueue)")
        ways = [OURS, *LIMITS]
    wrong = 0
    results: dict[str, Any] = {}
    everything: dict[str, Any] = {}
    with allocation(options.nodes) as on:
        srun = [*on, "srun", f"--jobid={os.environ['SLURM_JOB_ID']}", f"--mpi={pmi()}"]
        srun += ["--cpu-bind=none", "--overlap", "--overcommit", "--mem=0", f"--nodes={options.nodes}"]
        where = {"benchmark": "startup-slurm", **machine([*on, "srun"]), "nodes": options.nodes}
        where["mpi"] = _run([*on, "srun", "--version"]).stdout.strip()
        introduce(where)
        for shape in itertools.product(options.ranks, options.workers):

            def one(way: str, number: int, shape: tuple[int, int] = shape) -> Run:
                return run_one(way, shape, number, srun, options.nodes)

            runs = in_turn(ways, options.rounds, one)
            wrong += sum(run.way == OURS and bool(run.failure) for run in runs)
            name = f"{shape[0]}x{shape[1]}"
            results[name] = summary(runs)
            everything[name] = [asdict(run) for run in runs]
            show(f"{shape[0]} ranks x {shape[1]} worker(s), {options.nodes} nodes", results[name])
            write(options.json, {**where, "results": results, "runs": everything})
    plot(results, options.plot, groups=f"ranks x workers, {options.nodes} nodes")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
