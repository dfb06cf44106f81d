"""Timeouts in seconds whose order matters: which side reports first, and which side ends the other."""

# The start. All but the last count from the start-up deadline (`startup_timeout`).

#: Each rank names the ranks of its host that are missing.
NAME_MISSING = 0.5
#: This much later another rank reports in place of rank 0, if that is missing itself, or the ranks can't communicate.
RANK_0_GRACE = 2.0
#: The agents name ranks that are stopped inside ``MPI_Init``: the first agent that ends its rank ends them all.
NAME_STOPPED = 4.0
#: The agents end ranks that are still inside ``MPI_Init``.
MPI_GRACE = 6.0
#: The watchdog of rank 0 suspects that its main thread hangs, in NVML or a file system; rank 0 may have started later than the
#: others, or have many reports to handle.
HANGING = 9.0
#: Then the main thread has this long to show that it lives.
ALIVE = 1.0
#: The other ranks take rank 0 for dead; in a job that survives lost ranks also later, if its scheduler is gone as well.
RANK_0_LOST = 30.0

#: From the start, for the ranks to find each other and report, if the options that set a limit can't be read.
WITHOUT_OPTIONS = 60.0

# One failure, and the reports of the others.

#: A rank other than 0 reports that it was interrupted: rank 0 reports for all if it was interrupted as well.
INTERRUPTED_GRACE = 0.5
#: Rank 0 waits for the reports of other ranks once one has failed: most failures are everybody's.
GATHER_FAILURES = 1.0
#: The last messages of a start, or of a command, leave.
FLUSH = 2.0

# The end.

#: The other ranks take rank 0 for dead in a job that survives lost ranks, and whose cluster is over.
RANK_0_SILENT = 600.0
#: A client that has lost its scheduler waits to know why.
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

#: A rank other than 0 reports that it has failed: rank 0 has the first word if it has failed as well.
FAILED_GRACE = 0.5
#: The answer of rank 0 leaves, even if a rank has kept it waiting until its timeout.
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
#: An agent ends to which its rank sends nothing.
UNCONFIGURED = 3600.0
