"""The sections of benchmarks/results/README.md on the start and the end of a cluster."""

from __future__ import annotations

from measured import start_tables as tables
from measured.model import Section, Table

#: Names of the checkouts in the files of each kind.
HALVED = {"dask_gpu_mpi": "present version", "before": "231 modules", "last": "151 modules"}


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

- A start takes 0.17 to 0.57 of dask-mpi's time, and an end 0.14 to 0.27 of it.
- LocalCluster, which has no MPI and no agents, is ready sooner where there are four ranks with one worker each.
- A worker takes 14 MiB, since the workers of a rank are forked from one process that has imported Dask. A rank takes
  110 MiB: itself, its agent, the fork server. So few ranks with many workers are the cheapest.
- The machine was about twice as slow as on other days, for all programs.
""",
        starts(
            ("startup-openmpi", "CPU workers, Open MPI"),
            ("startup-mpich", "CPU workers, MPICH"),
        ),
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
One rank with one worker on each GPU. The driver brings up the GPUs and makes their contexts one after the other. RAPIDS with
cuDF was installed.
""",
        starts(("startup-2xH100", "GPU workers"), ("startup-4xH100", "GPU workers")),
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
        "Versions compared",
        """
`startup.py --checkout NAME=FOLDER` interleaves another checkout with this one, so that the effect of a change on the
start is measured. The package of *231 modules* is that before its parts were merged. All three checkouts had their .pyc files
(`python -m compileall`).
""",
        (Table(tables.compared, "startup-halved", "Two CPU workers", {"names": HALVED}),),
        3,
    ),
)
