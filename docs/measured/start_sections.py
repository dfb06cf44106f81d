"""The sections of benchmarks/results/README.md on the start and the end of a cluster."""

from __future__ import annotations

from measured import start_tables as tables
from measured.model import Section, Table

#: Names of the checkouts in the files of each kind.
LATER = {"dask_gpu_mpi": "later version", "before": "earlier version"}
BETWEEN = {"dask_gpu_mpi": "version between", "base": "earlier version"}
HALVED = {"dask_gpu_mpi": "present version", "before": "231 modules", "last": "151 modules"}
LEFT_OUT = {
    "dask_gpu_mpi": "version with both parts",
    "base": "earlier version, which has both",
    "nospares": "without GPU workers' processes forked in advance",
    "nounsaid": "without its own reader of options",
}


def starts(*files: tuple[str, str]) -> tuple[Table, ...]:
    """Tables of startup.py."""
    return tuple(Table(tables.startup, name, about) for name, about in files)


SECTIONS = (
    Section(
        "The benchmarks",
        """
Each is one command, run with the Python of an environment that has an MPI and what is to be compared with.

| program | what it measures |
|---|---|
| `startup.py` | start, end, CPU time and memory of a cluster, beside dask-mpi, LocalCluster, `dask worker`; `--gpu`: on GPUs |
| `slurm_startup.py` | the same under `srun`, beside dask-jobqueue's SLURMRunner; brings its own Slurm up, as root |
| `scale.py` | rank 0 with up to 65,536 emulated ranks; real jobs of many ranks on this node |
| `files.py` | files that a start opens and looks for on a node (needs strace) |
| `staging.py` | a start from a slow file system, with and without `launch --stage`; a model of 1,000 nodes |
| `overhead.py` | an idle cluster; latency and rate of empty tasks |
| `transfer.py` | arrays that cross between GPU workers: transpose-sum, or `--operation all-to-all` |
| `comms.py` | one array between two processes, by transport |
| `intruders.py` | a fixed piece of work, undisturbed and under connections of strangers |
| `soak.py` | clusters with faults, one after the other ([reliability.md](../../docs/reliability.md)) |
| `plan.py`, `workloads.py` | the planner; work on GPUs, with checked results |
""",
    ),
    Section(
        "Start and end",
        """
`startup.py` starts clusters in several ways, interleaved. dask-mpi takes one rank for each CPU worker and two more;
all programs are used as they are documented. What the tables show:

- A start takes a fifth to a half of dask-mpi's time, and an end a fifth of it or less.
- LocalCluster, which has no MPI and no agents, is ready sooner under Open MPI where there are four ranks with one
  worker each.
- A worker takes 14 MiB, since the workers of a rank are forked from one process that has imported Dask. A rank takes
  100 MiB: itself, its agent, the fork server. So few ranks with many workers are the cheapest.
""",
        starts(
            ("startup-openmpi", "CPU workers, Open MPI"),
            ("startup-mpich", "CPU workers, MPICH"),
            ("startup-scheduler-file", "CPU workers, beside a scheduler and `dask worker --nworkers N`"),
        ),
    ),
    Section(
        "Peak of the memory",
        """
The largest of twenty samples a second, in trials of their own, whose times do not count. It is within 1 % of what a
cluster has when it is ready.
""",
        (
            Table(tables.peak, "startup-peak", "CPU workers, Open MPI"),
            Table(tables.peak, "startup-peak-mpich", "CPU workers, MPICH"),
            Table(tables.peak, "startup-peak-2xH200", "GPU workers"),
        ),
        3,
    ),
    Section(
        "Under Slurm",
        """
SLURMRunner needs no MPI; it takes one task for each worker and two more, and its workers have no nannies unless asked
for. Without nannies it is ready sooner than dask-gpu-mpi where each rank has one worker; with them, as dask-gpu-mpi
has them, it is later in every shape.
""",
        starts(("startup-slurm", "CPU workers, two emulated nodes")),
        3,
    ),
    Section(
        "Start on GPUs",
        """
One rank with one worker on each GPU. The driver brings up the GPUs and makes their contexts one after the other, so
with four of them it is what all programs wait for. These tables are of an earlier version
([versions compared](#versions-compared)).
""",
        starts(
            ("startup-4xH200", "Four GPU workers"),
            ("startup-2xH200", "Two GPU workers"),
            ("startup-1xH200", "One GPU worker"),
            ("startup-scheduler-file-2xH200", "Two GPU workers, beside a scheduler and `dask cuda worker`"),
            ("startup-mpich-2xH200", "Two GPU workers, MPICH"),
        ),
        3,
    ),
    Section(
        "Start by transport",
        """
By default workers have UCX beside TLS, and the start does not wait for it. UCX alone takes longer: see [start of
UCX](#start-of-ucx).
""",
        (
            Table(
                tables.startup,
                "startup-protocols-1xH100",
                "One GPU worker, by transport",
                {"names": {"dask_gpu_mpi": "dask-gpu-mpi, UCX beside TLS (default)"}},
            ),
            Table(
                tables.startup,
                "startup-protocols-2xH100",
                "Two GPU workers, by transport",
                {"names": {"dask_gpu_mpi": "dask-gpu-mpi, UCX beside TLS (default)"}},
            ),
            *(
                Table(tables.startup, name, about, {"names": {"dask_gpu_mpi": "dask-gpu-mpi, UCX alone"}})
                for name, about in (
                    ("startup-ucx-2xH200", "Two GPU workers, UCX alone"),
                    ("startup-ucx-4xH200", "Four GPU workers, UCX alone"),
                )
            ),
        ),
        3,
    ),
    Section(
        "Start of UCX",
        """
Where the time of UCX's start goes on 1×H100 (noted by hand): `import libucxx; libucxx.load_library()` 0.41 s, the
hooks of CUDA 0.75 s, `import ucxx` 0.8 s. UCX rewrites functions, and sleeps for 50 ms at each, lest another thread
is in it. With `UCX_MEM_MMAP_HOOK_MODE=reloc UCX_MEM_CUDA_HOOK_MODE=reloc` the first two take 0.02 and 0.01 s. Tables
of relocations miss functions that CUDA's runtime looks up by itself, so the default stays. One worker alone starts no
UCX. Among several each starts it one second after it is up, in a thread, or with its first connection to another
worker.
""",
        (),
        3,
    ),
    Section(
        "Without .pyc files",
        """
Where no `.pyc` files are there and none are written (`PYTHONDONTWRITEBYTECODE`, some container images), every process
that imports compiles what it imports: the agent's import takes 1.9 s instead of 0.4 s. The files did not record this;
it is concluded from that time.
""",
        (
            *starts(
                ("startup-4xH200-no-pyc", "Four GPU workers, no .pyc"),
                ("startup-2xH200-no-pyc", "Two GPU workers, no .pyc"),
                ("startup-2xH100-rapids", "Two GPU workers, with cuDF installed, present version"),
                ("startup-1xH200-no-pyc", "One GPU worker, no .pyc"),
            ),
            *(
                Table(tables.startup, name, about, {"names": {"dask_gpu_mpi": "dask-gpu-mpi, UCX alone"}})
                for name, about in (
                    ("startup-ucx-2xH200-no-pyc", "Two GPU workers, UCX alone, no .pyc"),
                    ("startup-ucx-4xH200-no-pyc", "Four GPU workers, UCX alone, no .pyc"),
                )
            ),
        ),
        3,
    ),
    Section(
        "Versions compared",
        """
`startup.py --checkout NAME=FOLDER` interleaves another checkout with this one, so that the effect of a change on the
start is measured. Most figures of H200s and of 2 cores are of the *earlier* version. It forks processes for GPU workers
in advance, which make their CUDA contexts while MPI initialises, and reads options without Dask. The *version between*
does neither, for simpler code ([design](../../docs/design.md#what-was-measured-and-left-out)). The *later* one starts the agent
before the options are read, which makes up for a part; it is not yet the one with UCX beside TLS. The package of *231 modules*
is that before its parts were merged. All three checkouts had their .pyc files (`python -m compileall`).
""",
        (
            Table(tables.compared, "startup-halved", "Two CPU workers", {"names": HALVED}),
            Table(tables.compared, "startup-rooms-1xH200", "One GPU worker", {"names": LATER}),
            Table(
                tables.compared, "startup-rooms-1xH200-no-pyc", "One GPU worker, no .pyc", {"names": LATER}
            ),
            *(
                Table(
                    tables.compared,
                    f"startup-{name}-2xH200{end}",
                    f"Two GPU workers, {ranks}{more}",
                    {"names": names},
                )
                for name, names, more in (
                    ("before-after", BETWEEN, ""),
                    ("left-out", LEFT_OUT, ", parts left out"),
                )
                for end, ranks in (("", "one rank"), ("-2ranks", "two ranks"))
            ),
        ),
        3,
    ),
)
