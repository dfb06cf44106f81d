"""One rank of a running cluster, until the job ends: it runs the script or waits, and hears of the cluster from its agent alone.

`job.start` makes the `Member`. A rank without the script waits in `Member.serve`. On the script's rank, a thread handles the
messages while the script runs (`job.monitor`), and `job.session` calls `Member.end`. `Ending` is how far the end has come, and
`RankAgents` starts another agent when one has died.

No wait here is in a call that can't be interrupted, and every wait has a deadline. The agent always ends before the rank.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.agent.ending import LOST, report_lost_cluster
from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.base.frames import Held, wait_for_any, wait_until_read
from dask_gpu_mpi.base.signals import Signals, is_ours, undisturbed
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeouts import AGENT_SLACK, FAILED_GRACE, NODE_LOST, TERM_GRACE, closing_slack
from dask_gpu_mpi.errors import ClusterLostError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.job.entering import Joined
from dask_gpu_mpi.machine.nvidia import closing_time
from dask_gpu_mpi.machine.scratch import remove_scratch
from dask_gpu_mpi.mpi.launcher import end_job
from dask_gpu_mpi.mpi.neighbours import kill_rank
from dask_gpu_mpi.network.scheduler_file import remove_scheduler_file
from dask_gpu_mpi.options.convert import loaded_config
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.startup.messages import COORDINATOR, Configuration, Kind

#: Seconds before each restart of an agent that has died. One more starts no workers: the rank has to hear of the job's end.
DELAYS = (0.5, 2.0, 8.0)
#: Seconds between polls of a rank without the script, and of one that ends.
POLL_IDLE, POLL_BUSY = 0.1, 0.01


class Ending:
    """How far the end of one rank has come, and why its cluster ends. What has happened stays so.

    In this order: `stopped` (the cluster), `ended` (the job), `closed` (this rank's workers), `done` (its agent).
    """

    def __init__(self) -> None:
        #: The cluster is over: by the script's end, ``close()``, ``shutdown()``, or because it was lost.
        self.stopped = False
        #: The job ends, and the cluster with it.
        self.ended = False
        #: This rank's part of the cluster has closed.
        self.closed = False
        #: This rank's agent has nothing left to do.
        self.done = False
        #: How the cluster was lost, if it was, on the rank that raises it: the client's, or rank 0 if it has no script.
        self.lost: str | None = None
        #: The signal that ends the job, if one does: of a job without a script.
        self.signal: int | None = None
        #: The exit code of the script; 0 if it is not known.
        self.code = 0
        #: The exit code that the job must have because ranks did not respond.
        self.must_have = 0
        #: This rank is lost to the others, by its network as far as it can tell, and they may continue without it.
        self.cut_off = False

    def end(self) -> None:
        """Note that the job ends."""
        self.stopped = self.ended = True

    def end_part(self) -> None:
        """Note that nothing is left of this rank's part."""
        self.closed = self.done = True

    def exit_code(self, received: int | None = None) -> int:
        """The exit code of a rank without the script.

        `received`: the first signal that this rank was sent, which counts if the rank leaves by itself.

        >>> Ending().exit_code(15)
        143
        """
        if self.lost is not None or self.must_have:
            return self.must_have or outcome.FAILED
        number = self.signal if self.ended else received
        if number is not None:
            return outcome.code_of_signal(number)
        return 0 if self.ended else outcome.FAILED


class Member:
    """A rank of a cluster that is up; `signals` were taken before it joined.

    `leave_open` (``exit=False``): the program continues on this rank when the cluster stops. `has_client`: a rank runs a script.
    """

    def __init__(self, joined: Joined, signals: Signals, *, leave_open: bool, has_client: bool) -> None:
        self.joined = joined
        self.signals = signals
        self.rank = joined.rank
        self.leave_open = leave_open
        self.ending = Ending()
        self.agents = RankAgents(joined, leave_open=leave_open)
        #: On the client rank: the job's own scheduler has had a client, of any process.
        self.had_client = False
        #: On the client rank: the signal that another rank was sent, until `Monitor` has passed it to the script.
        self.for_script: int | None = None
        self._has_client = has_client
        if leave_open and joined.world.is_own and joined.size > 1:
            atexit.register(self.abort_after_failure)  # before mpi4py's own, which finalizes MPI
        #: Whether the script runs its `finally` after a signal, and whether this rank has reported its own signal.
        self._script_cleans_up = self._signal_reported = False
        self._parent = os.getppid()
        self.launched = launchers.detect(joined.environ) is not None
        self._lock = threading.Lock()

    @property
    def _has_script(self) -> bool:
        return self._has_client and self.joined.is_client

    def launcher_gone(self) -> bool:
        """Whether the launcher that started this rank has died."""
        return self.launched and os.getppid() != self._parent

    # -- while it runs ------------------------------------------------------------------------------------------

    def pump(self, timeout: float) -> None:
        """Handle what has happened; waits at most `timeout` seconds for it."""
        with self._lock:
            if not self.ending.stopped:
                self.agents.start_if_due()
            for kind, payload in self.agents.events(timeout):
                self._on_message(kind, payload)
            agent = self.agents.present
            if agent is not None and agent.lost:
                self._on_lost_agent(agent)

    def pump_until(self, done: Callable[[], bool], limit: float) -> None:
        """Handle what happens until `done()`, or until `limit` (``time.monotonic()``)."""
        while not done() and time.monotonic() < limit:
            self.pump(POLL_BUSY)

    def _on_message(self, kind: Kind, payload: Any) -> None:
        ending = self.ending
        match kind:
            case Kind.STOP:
                ending.stopped = True
                if self.joined.is_client:
                    ending.lost = payload  # for the script; rank 0's agent has printed it
                    if self.leave_open:  # the programs of all ranks continue at once, whatever the function does that runs here
                        self.agents.send(Kind.OVER, (True, None, None))
            case Kind.END:
                ending.code, ending.signal = payload
                ending.end()
                if self.rank == COORDINATOR and not self._has_client and ending.code:
                    ending.lost = "the scheduler or all workers were lost"
            case Kind.CLOSED:
                ending.closed = True
            case Kind.ENDED:
                ending.must_have = ending.must_have or payload
                ending.end()
                ending.end_part()
            case Kind.GONE:
                self._on_lost_rank_0(cut_off=payload)
            case Kind.BUSY:
                self._script_cleans_up = True
            case Kind.SIGNAL if self._has_script:
                self.for_script = payload
            case Kind.CLIENT:
                self.had_client = True
            case Kind.PREPARED:
                self.agents.enter_again()
            case Kind.ENTERED:
                self.agents.keep_line()
            case Kind.START:  # another agent has been heard
                self.agents.hang_up(but_last=True)
            case Kind.FAILED:  # another agent can't enter the job again
                self._on_lost_rank_0(cut_off=False)

    def _on_lost_agent(self, agent: AgentProcess) -> None:
        """Its workers have died with it: start another one, or end."""
        ending, agents = self.ending, self.agents
        if ending.done:
            return
        text = f"the agent of {agents.of} ended ({agent.exit_text()})"
        agents.drop(0.5)
        if ending.stopped:
            ending.end_part()
            if not self._has_script:  # which continues; nobody would tell another rank of the job's end
                ending.end()
                agents.hang_up()
        elif self.joined.has_scheduler or self.rank == COORDINATOR:
            # with rank 0's agent the hub is lost
            agents.hang_up()
            with_it = ", and the scheduler with it" if self.joined.has_scheduler else ""
            self._on_lost_cluster(f"{text}{with_it}")
        elif (delay := agents.start_later()) is not None:
            removed = f"rank {self.rank} removed, continuing with the other ranks"
            say(f"{text}; {f'restarting it in {delay:g} s' if delay else removed}")
        else:  # nothing is left to hear of the job's end
            ending.end()
            ending.end_part()

    def _on_lost_cluster(self, lost: str) -> None:
        if self.joined.scheduler_file is not None:
            remove_scheduler_file(*self.joined.scheduler_file)
        report_lost_cluster(lost)
        ending = self.ending
        ending.end_part()
        if self._has_script:
            ending.lost, ending.stopped = lost, True
        else:
            ending.lost = lost if self.rank == COORDINATOR else None
            ending.end()

    def _on_lost_rank_0(self, *, cut_off: bool) -> None:
        """The connection to the hub has ended: rank 0's agent is gone, and with it the scheduler; or this rank is `cut_off`."""
        ending = self.ending
        if ending.stopped:
            return
        lost = f"rank 0 lost, and with it the script and the scheduler: {LOST}"
        time.sleep(FAILED_GRACE)  # if rank 0 lives, it has more to say, and its exit code is the job's
        # One line is enough, and that many ranks may be lost.
        if self._has_script or self.rank <= 1 + self.joined.options.tolerate_lost_ranks:
            say(f"error: {lost}. Fix: inspect that node, and the log file of the rank (--log-directory)")
        if self._has_script:
            ending.lost, ending.stopped = lost, True
            return
        wait_until_read((1, 2), FAILED_GRACE)
        ending.end()
        if self.joined.options.survives:  # the launcher does not count rank 0's end
            ending.cut_off = cut_off
            ending.must_have = outcome.FAILED

    # -- ranks without the script -------------------------------------------------------------------------------

    def serve(self) -> int:
        """Wait until the job ends, on a rank without the script, and return its exit code.

        Raises a ClusterLostError on rank 0 if the scheduler was lost, unless the program continues there with a client.
        """
        ending, signals = self.ending, self.signals
        try:
            leaves_early = self._wait_for_end()
            self._leave()
        finally:
            signals.give_back()
        received = signals.got[0] if signals.got is not None else None
        if ending.lost is not None and not (self.leave_open and self._has_client):
            raise ClusterLostError(ending.lost, reported=True)
        if self.leave_open:
            self._raise_signal_again(received)
            return 0
        if leaves_early:
            return 0  # the script goes on, and a launcher would end it with another code
        if ending.cut_off:
            # As a lost rank: a launcher would count its exit code once the network is back.
            kill_rank(os.getpid())
        return ending.exit_code(received)

    def _raise_signal_again(self, received: int | None) -> None:
        """Let the signal that has ended the cluster end the program, which would continue as if nothing had happened.

        It would wait in MPI for ranks that the signal has ended. `received`: the one that this rank was sent.
        """
        number = self.ending.signal if received is None else received
        if number is None:
            return
        if self.ending.code and is_ours(number):
            raise SystemExit(self.ending.code)  # as the script: 75 after its checkpoint
        signal.raise_signal(number)

    def _wait_for_end(self) -> bool:
        """Wait until the job ends, or the cluster if the program continues; True: this rank leaves before that, by a signal."""
        while not self.ending.ended and not (self.ending.stopped and self.leave_open):
            self.pump(POLL_IDLE)
            if self.signals.got is not None and self._leaves(*self.signals.got):
                self.agents.send(Kind.WORKERS_ENDED, False)  # in order: the others continue
                self.agents.drop(self.joined.options.shutdown_timeout)
                self.ending.end_part()  # it gets no answer
                return True
            if self.launcher_gone():
                self.agents.drop(self.joined.options.shutdown_timeout)
                os._exit(outcome.FAILED)
        return False

    def _leaves(self, number: int, since: float) -> bool:
        """Report this rank's signal, which came at `since`; returns whether the rank has to leave without an answer.

        It waits for the script's `finally`, which the client rank announces to all.
        """
        if not self._signal_reported:
            self._signal_reported = True
            self.agents.send(Kind.SIGNAL, number)
        return not self._script_cleans_up and time.monotonic() > since + TERM_GRACE

    # -- the end ------------------------------------------------------------------------------------------------

    def end(self, *, final: bool, code: int | None = None) -> None:
        """End the cluster on all ranks: the script has ended (`final`), or has closed its session.

        `code`: the script's exit code; None: it is not known.
        """
        ending = self.ending
        if not (ending.ended if final else ending.stopped):
            self.agents.send(Kind.OVER, (final, None, code))
            if self.agents.present is None:
                ending.end()
                ending.end_part()
        self._leave(final=final)

    def abort_after_failure(self) -> None:
        """At the end of a program that has continued after the cluster: if it fails, others may wait for it in MPI."""
        code = outcome.failure()
        if code is None:
            return
        with undisturbed():  # if several ranks fail, the launcher signals the others after the first abort
            time.sleep(FAILED_GRACE if self.rank else 0.0)
            say(
                f"error: rank {self.rank} of {self.joined.size} has failed (exit code {code}), and other ranks may wait for it "
                "in MPI; aborting the job. Fix: catch the exception on that rank, if all are to continue"
            )
            self.joined.world.abort(code)

    def _leave(self, *, final: bool = True) -> None:
        """Wait until this rank's part has closed, and, if the job ends, end its agent; in a script that continues it stays.

        Aborts the job if ranks do not respond.
        """
        ending, options = self.ending, self.joined.options
        own = closing_time(options, self.joined.environ) + 1.0
        limit = time.monotonic() + own + 1.0
        if self.joined.has_scheduler or self.rank == COORDINATOR:
            # the scheduler closes after all workers; rank 0's agent waits for the other ranks
            limit += own + closing_slack(options.shutdown_timeout) + AGENT_SLACK
        ends = final or self.leave_open
        self.pump_until(lambda: ending.done if ends else ending.closed or ending.done, limit)
        if not ends and not ending.done and ending.closed:
            return
        begun = time.monotonic()
        if self.agents.present is not None and not ending.done:
            self.agents.present.kill()
        self.agents.hang_up()  # first: the hub does not wait for the removal of files
        self.agents.drop(options.shutdown_timeout)
        self.agents.remove_scratch(begun + options.shutdown_timeout)
        if ending.must_have and self.rank == COORDINATOR:
            end_job(ending.must_have, self.joined.environ)


class RankAgents:
    """The agent of a rank of the running cluster, and those that replace it, until the rank ends.

    An agent that has died is replaced after a delay of `DELAYS`, and once more by one that starts no workers.
    """

    def __init__(self, joined: Joined, *, leave_open: bool) -> None:
        self._joined = joined
        self._leave_open = leave_open
        #: The rank, in messages.
        self.of = f"rank {joined.rank} on {joined.host}"
        #: None: the next one is not started yet, or nothing is left to do.
        self.present: AgentProcess | None = joined.agent
        self._restarts = 0
        #: When another agent is to be started (``time.monotonic()``).
        self._due = math.inf
        #: This rank's ends of the agents' connections to the hub, which end with the last process that has them: the rank, so
        #: that the hub does not take the rank for lost meanwhile. The present agent's is the last.
        self._lines = [] if joined.line is None else [Held(joined.line)]
        #: Directories of agents that have ended, which could not be removed in time.
        self._left: list[str] = []

    @property
    def fd(self) -> int:
        """The descriptor to wait on; -1: there is no agent now."""
        return -1 if self.present is None or self.present.lost else self.present.fd

    def send(self, kind: Kind, payload: Any = None) -> None:
        """Send the hub a message, through the agent."""
        if self.present is not None:
            self.present.send(kind, payload)

    def events(self, timeout: float) -> Iterable[tuple[Kind, Any]]:
        """The agent's messages that have come; waits at most `timeout` seconds for one."""
        if self.present is not None:
            return self.present.events(timeout)
        # If the hub has something to say, the end most likely, the next agent starts at once.
        lines = [line.fd for line in self._lines[-1:] if line.is_ours]
        if wait_for_any(timeout, *lines) and self._due < math.inf:
            self._due = 0.0
        return ()

    def start_later(self) -> float | None:
        """Let another agent start after so many seconds, 0 for one without workers; None: there were enough."""
        if self._restarts > len(DELAYS):
            return None
        delay = (*DELAYS, 0.0)[self._restarts]
        self._due = time.monotonic() + delay
        self._restarts += 1
        return delay

    def seconds_until_due(self) -> float:
        """Seconds until another agent is to be started; infinite: none is."""
        return max(0.0, self._due - time.monotonic())

    def start_if_due(self) -> None:
        """Start another agent, if it is time; once it is `PREPARED`, it enters the job again."""
        if time.monotonic() <= self._due:
            return
        self._due = math.inf
        joined = self._joined
        try:
            agent = AgentProcess(joined.environ)
        except OSError as error:  # no descriptors, no memory: perhaps later
            say(f"the agent of {self.of} could not be started ({error.strerror})")
            self._due = time.monotonic() + DELAYS[-1]
            return
        self.present = agent
        agent.begin(joined.options, joined.environ, inspect_gpus=False)
        deadline = time.monotonic() + NODE_LOST
        agent.configure(
            configuration(joined.options, joined.environ, leave_open=self._leave_open, deadline=deadline)
        )

    def enter_again(self) -> None:
        """Let an agent that has replaced another one enter the job."""
        if self._restarts:
            again = replace(self._joined.entry, again=True, workers=self._restarts <= len(DELAYS))
            self.send(Kind.ENTER, again)

    def keep_line(self) -> None:
        """Keep this rank's end of the connection that the agent has made to the hub."""
        if self.present is not None and (line := self.present.take_line()) is not None:
            self._lines.append(Held(line))

    def hang_up(self, *, but_last: bool = False) -> None:
        """Close this rank's ends of its agents' connections, for the hub to notice that the agents have gone."""
        kept = self._lines[-1:] if but_last else []
        for line in self._lines:
            if line not in kept:
                line.close()
        self._lines = kept

    def drop(self, timeout: float) -> None:
        """End the agent within `timeout` seconds."""
        agent, self.present = self.present, None
        if agent is not None:
            agent.close(timeout)
            if agent.scratch is not None and os.path.exists(agent.scratch):
                self._left.append(agent.scratch)

    def remove_scratch(self, limit: float) -> None:
        """Remove what is left of the agents' directories, until `limit` (``time.monotonic()``)."""
        for path in self._left:
            remove_scratch(path, within=limit - time.monotonic())
            if os.path.exists(path):
                seconds = self._joined.options.shutdown_timeout
                say(
                    f"warning: {self.of}: could not remove all of {path} within {seconds:g} s (shutdown_timeout). Fix: remove "
                    "it, and set a faster local_directory or a longer shutdown_timeout"
                )
        self._left = []


def configuration(
    options: Options, environ: Mapping[str, str], *, leave_open: bool, **more: Any
) -> Configuration:
    """The settings of an agent, with the Dask configuration of this process."""
    from dask_gpu_mpi.job.program import libraries_of_script

    launched = launchers.detect(environ)
    # `launch` ends programs of its ranks itself, by their environment; a program that continues after its cluster is not ours
    ends_forks = launched is not None and not leave_open
    loaded = loaded_config()
    dask_config = dict(loaded.config) if loaded is not None else {}
    return Configuration(
        replace(options, comm=None),
        dask_config,
        imports=libraries_of_script(),
        ends_forks=ends_forks,
        ends_programs=ends_forks and launched is not None and launched.launcher is not launchers.LOCAL,
        **more,
    )
