"""Timeouts in seconds whose order matters: which side reports first, and which side ends the other."""

# The start. All but the last count from the start-up deadline (`startup_timeout`).

#: Each rank reports the ranks of its host that are missing.
NAME_MISSING = 0.5
#: This much later another rank reports in place of rank 0, if that is missing itself, or the ranks can't communicate.
RANK_0_GRACE = 2.0
#: The agents report ranks that are stopped inside ``MPI_Init``: the first agent that ends its rank ends them all.
NAME_STOPPED = 4.0
#: The agents end ranks that are still inside ``MPI_Init``.
MPI_GRACE = 6.0
#: The watchdog of rank 0 assumes that its main thread hangs, in NVML or a file system. Rank 0 may have started later than the
#: others, or have many reports to handle.
HANGING = 9.0
#: Then the main thread has this long to respond.
ALIVE = 1.0
#: The other ranks assume that rank 0 is dead; in a job that survives lost ranks also later, if its scheduler is gone as well.
RANK_0_LOST = 30.0

#: From the start, for the ranks to find each other and report, if the options that set a limit can't be read.
WITHOUT_OPTIONS = 60.0

# The command `check`.

#: Its start, unless the user has set `startup_timeout`.
CHECK_START = 60.0
#: Its tasks, each counted from the start's end: on the nodes, kernels, workers that are restarted after them.
CHECK_NODES, CHECK_KERNELS, CHECK_RESTARTS = 8.0, 11.0, 11.5
#: Transfers within nodes and between them, and all tasks.
CHECK_WITHIN_NODES, CHECK_BETWEEN_NODES, CHECK_TASKS = 13.0, 14.0, 15.0

# UCX between two workers.

#: UCX starts, and both ends send their proofs; otherwise the connection stays on TLS.
UCX_START, UCX_PROOF = 30.0, 10.0
#: Two workers agree, including UCX's start; otherwise the connection is closed.
UCX_AGREEMENT = 60.0

# Gangs.

#: A nanny ends a member that hangs: first politely, and by force after 0.8 of this.
GANG_KILL = 2.0
#: A worker that was ended, or has died, comes back before its gang is settled.
GANG_RETURN = 20.0
#: After the loss of a worker a gang of all workers waits for it: its nanny starts it again, unless it is removed.
GANG_LOST = 60.0

# One failure, and the reports of the others.

#: A rank other than 0 reports that it was interrupted: rank 0 reports for all if it was interrupted as well.
INTERRUPTED_GRACE = 0.5
#: Rank 0 waits for the reports of other ranks once one has failed, since most failures are on all ranks.
GATHER_FAILURES = 1.0
#: The last messages of a start, or of a command, are sent.
FLUSH = 2.0

# The end.

#: The other ranks assume that rank 0 is dead in a job that survives lost ranks, and whose cluster is over.
RANK_0_SILENT = 600.0
#: A client that has lost its scheduler waits for the report of its death.
REASON_TIMEOUT = 1.0
#: Rank 0 waits, beyond its own closing, until the others have closed: this part of `shutdown_timeout`, and so many seconds at
#: least.
CLOSING_SHARE, CLOSING_SLACK = 0.3, 3.0
#: All ranks come to an orderly end, if the program continues.
FREE_TIMEOUT = 3.0
#: A rank continues after SIGTERM, for the script's `finally` on the client rank.
TERM_GRACE = 5.0
#: A script continues (its `finally`, its `atexit`) after the cluster or the launcher was lost.
LOST_GRACE = 30.0

# The end of a process: its last messages, before ``MPI_Finalize``, which would wait longer, and spin.

#: A rank other than 0 reports that it has failed: rank 0 reports first if it has failed as well.
FAILED_GRACE = 0.5
#: The answer of rank 0 is sent, even if rank 0 had to wait for a rank until its timeout.
ANSWER_TIMEOUT = 1.0
#: A rank that has failed waits for the others, which may be waiting for it in MPI, forever.
FAILED_TIMEOUT = 5.0
#: A rank waits for the last messages of the others.
LAST_MESSAGES_TIMEOUT = 30.0

# Force.

#: SIGKILL takes effect. In a call of the kernel that waits for a dead file system, for example, it never does.
KILLING = 2.0
#: A launcher that does not end when its job is aborted is killed.
LAUNCHER_PATIENCE = 10.0
#: An agent ends if its rank sends nothing.
UNCONFIGURED = 3600.0
