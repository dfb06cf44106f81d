"""Timeouts in seconds whose order matters: which side reports first, and which side ends the other."""

# The start. All but the last count from the start-up deadline (`startup_timeout`).

#: Rank 0 reports the ranks that have not come to the meeting.
NAME_MISSING = 0.5
#: This much later rank 1 reports in place of rank 0, if that is missing itself; see `in_place_of_rank_0`.
RANK_0_GRACE = 2.0
#: Ranks report those of their node that are stopped, while MPI waits for them.
NAME_STOPPED = 4.0
#: Ranks whose MPI has not started end the job.
MPI_GRACE = 6.0
#: Rank 0 assumes that its agent, which leads the start, hangs, and reports it.
HANGING = 9.0
#: Rank 1 assumes that rank 0 is dead.
RANK_0_LOST = 30.0

#: From the start, for the ranks to find each other and report, if the options that set a limit can't be read.
WITHOUT_OPTIONS = 60.0

# The command `check`.

#: Its start, unless the user has set `startup_timeout`.
CHECK_START = 60.0
#: Its tasks, each counted from the start's end: on the nodes, kernels, and the workers' reports about these.
CHECK_NODES, CHECK_KERNELS, CHECK_REPORTS = 8.0, 10.0, 11.5
#: Transfers within nodes and between them, and all tasks.
CHECK_WITHIN_NODES, CHECK_BETWEEN_NODES, CHECK_TASKS = 13.0, 14.0, 15.0

# UCX between two workers.

#: UCX starts, and both ends send their proofs; otherwise the connection stays on TLS.
UCX_START, UCX_PROOF = 30.0, 10.0
#: Two workers agree, including UCX's start; otherwise the connection is closed.
UCX_AGREEMENT = 60.0
#: Two workers make the streams of a connection.
STREAMS_START = 15.0

# Gangs.

#: A nanny ends a member that hangs: first politely, and by force after 0.8 of this.
GANG_KILL = 2.0
#: A worker that was ended, or has died, comes back before its gang is settled.
GANG_RETURN = 20.0
#: After the loss of a worker a gang of all workers waits for it: its nanny starts it again, unless it is removed.
GANG_LOST = 60.0

# One failure, and the reports of the others.

#: Once a rank has failed, the hub waits for those that have not responded yet, since most failures are on all ranks.
GATHER_FAILURES = 5.0
#: The last messages of a start are sent.
FLUSH = 2.0
#: A rank that can't reach rank 0 reports its failure itself.
UNHEARD = 8.0

# The running cluster.

#: The kernel gives up a connection between nodes that has no answer.
NODE_LOST = 30.0

# The end.

#: A client that has lost its scheduler waits for the report of its death.
REASON_TIMEOUT = 1.0
#: The hub waits, beyond its own closing, for the others to close: this part of `shutdown_timeout`, at least so many seconds.
CLOSING_SHARE, CLOSING_SLACK = 0.3, 3.0
#: A rank waits this much longer for its agent than that may take, and kills it.
AGENT_SLACK = 5.0
#: An agent waits for the end of a rank whose job has ended, before it continues a rank that is stopped.
RANK_PATIENCE = 5.0
#: A rank continues after SIGTERM, for the script's `finally` on the client rank.
TERM_GRACE = 5.0
#: A script continues (its `finally`, its `atexit`) after the cluster or the launcher was lost.
LOST_GRACE = 30.0
#: A rank that has lost rank 0 ends: its launcher may end the job with the first, and rank 0 knows more.
FAILED_GRACE = 0.5
#: The launcher reads what a rank has printed before that rank ends the job.
READING = 1.0

#: Programs that tasks have started end by themselves, after the workers; they end after SIGTERM.
TASKS_PROGRAMS = 0.5
#: The same of programs that the script has started: they may have something to save.
SCRIPTS_PROGRAMS, SAVING = 3.0, 10.0

# Force.

#: SIGKILL takes effect. In a call of the kernel that waits for a dead file system, for example, it never does.
KILLING = 2.0
#: A launcher that does not end when its job is aborted is killed.
LAUNCHER_PATIENCE = 10.0
#: An agent ends if its rank sends nothing.
UNCONFIGURED = 3600.0


def in_place_of_rank_0(rank: int) -> float:
    """Seconds after rank 0 at which another rank reports and ends the job, if all before it are silent as well.

    Most are silent together because their node is. Few report at the same time, and the last of a large job is not too late.

    >>> [in_place_of_rank_0(rank) for rank in (0, 1, 2, 3, 4, 7, 1024)]
    [0.0, 2.0, 4.0, 5.0, 6.0, 7.0, 22.0]
    """
    return RANK_0_GRACE * (rank.bit_length() + (0.5 if rank & (rank - 1) else 0.0))


def closing_slack(shutdown_timeout: float) -> float:
    """Seconds that the hub waits for the others, beyond its own closing."""
    return max(CLOSING_SLACK, CLOSING_SHARE * shutdown_timeout)
