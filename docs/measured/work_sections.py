"""The sections of benchmarks/results/README.md on many ranks, running clusters and what was noted by hand."""

from __future__ import annotations

from measured import start_tables, work_tables
from measured.model import Section, Table

SECTIONS = (
    Section(
        "Many ranks",
        """
`scale.py` gives the coordinator the messages of ranks that do not exist, 4 ranks and 4 GPUs on each node: bytes and
seconds are those of rank 0, without the network. Bytes and seconds grow in proportion to the ranks. No rank but the
client's is sent more than 2.5 KB.

`--join` starts the scheduler of a job, with its plugins and a report's recorder, and so many workers that speak Dask's
protocol and do nothing else. Each makes three connections over TLS: its nanny's, its own, and the one of its first
heartbeat. The figures are the scheduler's CPU time for each worker, before and after two changes: the scheduler compares a
new worker's versions with each set of versions once, not with every worker, and makes no TLS tickets. Both versions ran at the
same time. The machine was busy with other work (load about 10), which makes CPU time longer as well: only the ratios hold.

`--real` starts jobs of CPU ranks on this node; `--limit` starts, before each, as many ranks that only import what an
agent imports. 64 ranks are too many for two cores: idle workers of Dask take 3 to 4 % of a core each, and the
scheduler gets what is left.
""",
        (
            Table(start_tables.emulated_ranks, "scale", "Rank 0 with emulated ranks"),
            Table(start_tables.joining, "scale-join", "Workers that join, scheduler's CPU time"),
            Table(start_tables.real_jobs, "scale-real-32-cores", "Real jobs"),
            Table(start_tables.real_jobs, "scale-real", "Real jobs"),
        ),
    ),
    Section(
        "Files",
        """
`files.py` counts the files that are opened until a cluster is ready, not those in /proc, /sys, /dev and the job's own
temporary directory. They grow with the ranks of a node, so one rank a node is the cheapest for a shared file system;
workers are forked and import nothing. Needs strace.
""",
        (
            Table(
                start_tables.opened_files,
                "files-simulated-gpus",
                "Files opened, GPU workers on emulated GPUs",
            ),
        ),
    ),
    Section(
        "Environments on a slow file system",
        """
`staging.py` starts clusters of one rank a node from a file system whose every `open` takes 5 or 50 ms, and by `launch --stage`,
on emulated hosts of one machine. Files opened are those on that file system, of all nodes and of `launch`, without
those that were searched for in vain. All nodes unpack on the same 2 cores, which real nodes do not. The archive has
83 MB and 10,870 files.

The model has these numbers of files and bytes. It assumes that the metadata server carries out 50,000 calls per
second, and one call in 1 ms if it is idle. A file takes 4.8 calls, since Python searches for it first. The archive is
hashed with 1 GB/s and broadcast with 0.5 GB/s. A node unpacks 2,500 files per second. The model leaves out other
users, and the bytes of the files.
""",
        (
            Table(start_tables.staged, "staging", "Start with and without copies of the environment, 5 ms"),
            Table(
                start_tables.staged, "staging-50ms", "Start with and without copies of the environment, 50 ms"
            ),
        ),
    ),
    Section(
        "Idle clusters and tasks",
        """
`overhead.py` measures the CPU time of a cluster without work over 30 s, and empty tasks: the latency of one, and the
rate of 1,000 at once. An agent samples the memory of each worker ten times a second, as Dask has it. LocalCluster has
as many CPU workers as the other cluster has ranks.
""",
        (
            Table(work_tables.idle, "overhead", "Idle, CPU workers"),
            Table(work_tables.idle, "overhead-2xH100", "Idle, GPU workers (LocalCluster: CPU workers)"),
            Table(work_tables.tasks, "overhead", "Empty tasks, two CPU workers of one thread"),
        ),
    ),
    Section(
        "Transfers",
        """
`transfer.py`: `(x + x.T).sum()` of a square array of float64 in chunks of 10,000 × 10,000, one rank with one worker on
each GPU, RMM pool of 40 % of each GPU, a new array for each repetition, the first three of each trial left out. GB/s of
the array. `--operation all-to-all` makes slabs of columns out of slabs of rows, for which half of the array crosses
between two workers, and three quarters between four. A copy between two of the GPUs runs at 396 GB/s. Transpose-sum was
ended before its third trial.
""",
        (
            Table(work_tables.transfers, "transfer-2xH100", "Transpose-sum, two workers"),
            Table(work_tables.transfers, "transfer-all-to-all-2xH100", "All-to-all, two workers"),
            Table(work_tables.transfers, "transfer-all-to-all-4xH100", "All-to-all, four workers"),
        ),
    ),
    Section(
        "RAPIDS",
        """
`rapids.py`: dask-cuda's own benchmarks in a job of the default protocol, and by LocalCUDACluster over UCX, in turn, with pools
of half a GPU, CuPy's arrays in them; and a query of Polars' DaskEngine in such a job, and on the cluster that it makes for
itself. Throughput is dask-cuda's: the harmonic mean of the runs. Of a merge's 160 ms, 48 are the client's, which makes the
graph, and 60 cuDF's; transfers are 20 of ours and 27 of the other, so it gains less than the shuffle.
""",
        (Table(work_tables.rapids, "rapids-2xH100", "Two workers"),),
    ),
    Section(
        "Between two nodes",
        """
`comms.py --hosts` sends one array of NumPy's at a time between two emulated nodes, each with its network: TLS, UCX alone, and
UCX beside TLS. UCX has TCP alone (`UCX_TLS=tcp`), as it would on Slingshot. The machine was busy with other work: only the
ratios hold.
""",
        (Table(work_tables.comms, "comms-two-hosts", "UCX over TCP, two emulated nodes"),),
        3,
    ),
    Section(
        "The report",
        """
`recording.py`: the scheduler's process with 64 workers, with and without the recorder of `--report`, in turn; and the file of a
made-up hour of 64 workers. The target is 0.5 % of a core for the samples; what is kept of 200 tasks a second takes more.

Noted by hand (2 cores, MPICH 5.0.2, two ranks, four trials): from the script's last line to the launcher's exit 0.47 s without a
report, 0.51 s with JSON, 1.25 s with HTML; within trials HTML takes 0.7 to 1.05 s more. The target is 2 s.
""",
        (Table(work_tables.recorded, "recording", "The scheduler's process, idle and at work"),),
    ),
    Section(
        "Under attack",
        """
`intruders.py`: a job with one worker computes a fixed number of tasks, undisturbed and while a stranger opens 200
connections a second to the scheduler, the worker, the nanny and the dashboard. The stranger runs on the same
cores as the job, or on others where there are some, at nice 19. The target of 1.10 is missed with two cores.
""",
        (Table(work_tables.attacked, "intruders-mpich-2", "One worker"),),
    ),
    Section(
        "Clusters with faults",
        """
`soak.py` starts clusters of two ranks one after the other and injects a fault into each; what is checked, and what
each fault must lead to, is in [reliability.md](../../docs/reliability.md).
""",
        (
            Table(start_tables.soak, "soak-mpich", "200 clusters, MPICH"),
            Table(start_tables.soak, "soak-openmpi", "200 clusters, Open MPI"),
        ),
    ),
    Section(
        "The steps of a start",
        """
The [report](../../docs/report.md) has when each step of the start began and ended, on every rank: `start.steps` in its JSON, the
tab Start-up on its page. Each node's own clock is used. Without a report a rank keeps some twenty time stamps, and sends none.
One start of rank 0 of two (2 cores, Open MPI, noted by hand):

| s | step |
|---|---|
| 0.00 to 0.07 | Python starts, reads the options, starts the agent |
| 0.07 to 0.18 | imports what joining needs; the agent starts, and imports until 0.49 |
| 0.18 to 0.41 | imports mpi4py, `MPI_Init` |
| 0.41 to 0.59 | joins the other ranks, credentials; meanwhile the agent reads the options and forks |
| 0.59 to 0.65 | inventory, registration, plan, scheduler |
| 0.65 to 0.89 | starts its workers |
| 0.89 to 0.97 | the cluster is up, opens the session |
""",
    ),
    Section(
        "Noted by hand",
        """
These have no file of results; repeat them with the command.

The planner, `python benchmarks/plan.py`, 2 cores, median of 5, on a busy machine (good to a factor of 2.5):

| job | workers | plan, s |
|---|---|---|
| 8,192 nodes, 1 rank with 4 GPUs each | 32,768 | 0.466 |
| 2,048 nodes, 4 ranks that all see 4 GPUs | 8,192 | 0.109 |
| 1,024 nodes, 8 ranks with 1 of 8 GPUs each | 8,192 | 0.090 |
| 64 nodes, 128 ranks, no GPU | 8,192 | 0.113 |
""",
    ),
)
