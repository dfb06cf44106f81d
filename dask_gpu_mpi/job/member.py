"""One rank of a running cluster, until the job ends: it runs the script or waits, and hears of the cluster from its agent alone.

No wait here is in a call that can't be interrupted, and every wait has a deadline. The agent always ends before the rank.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask_gpu_mpi.agent.ending import LOST, report_lost_cluster
from dask_gpu_mpi.agent.handle import AgentProcess
from dask_gpu_mpi.base.frames import Held, wait_until_read
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
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.startup.messages import COORDINATOR, Configuration, Kind

#: Seconds before each restart of an agent that has died. One more starts no workers: the rank has to hear of the job's end.
DELAYS = (0.5, 2.0, 8.0)
#: Seconds between polls of a rank without the script, and of one that ends.
POLL_IDLE, POLL_BUSY = 0.1, 0.01


class Ending:
    """How far the end of one rank has come, and why its cluster ends. What has happened stays so."""

    def __init__(self) -> None:
        #: The cluster is over: by the script's end, ``close()``, ``shutdown()``, or because it was lost.
        self.stopped = False
        #: The job ends, and the cluster with it.
        self.ended = False
        #: This rank's part of the cluster has closed.
        self.closed = False
        #: This rank's agent has nothing left to do.
        self.done = False
        #: How the cluster was lost, if it was, on the rank that raises it: the client's, or rank 0 of a job without script.
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
        #: On the client rank: the job's own scheduler has had a client, of any process.
        self.had_client = False
        #: On the client rank: the signal that another rank was sent, until `Monitor` has passed it to the script.
        self.for_script: int | None = None
        self._has_client = has_client
        if leave_open and joined.world.is_own and joined.size > 1:
            atexit.register(self.abort_after_failure)  # before mpi4py's own, which finalizes MPI
        self._script_cleans_up = False
        self._signal_reported = False
        self._restarts = 0
        #: When another agent is to be started (``time.monotonic()``).
        self._restart_due = math.inf
        #: Scratch of agents that have ended, which could not be removed in time.
        self._left: list[str] = []
        #: The connections to the hub of this rank's agents: the present one's is the last.
        self._lines = [] if joined.line is None else [Held(joined.line)]
        self._parent = os.getppid()
        self.launched = launchers.detect(joined.environ) is not None
        self._lock = threading.Lock()

    # -- while it runs ------------------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """The descriptor to wait on; -1: there is no agent now."""
        agent = self.joined.agent
        return -1 if agent is None or agent.lost else agent.fd

    def seconds_until_due(self) -> float:
        """Seconds until `pump` has something to do without a message; infinite: nothing is due."""
        return max(0.0, self._restart_due - time.monotonic())

    def send(self, kind: Kind, payload: Any = None) -> None:
        """Send the hub a message, through this rank's agent."""
        if self.joined.agent is not None:
            self.joined.agent.send(kind, payload)

    def pump(self, timeout: float) -> None:
        """Handle what has happened; waits at most `timeout` seconds for it."""
        with self._lock:
            if time.monotonic() > self._restart_due and not self.ending.stopped:
                self._start_agent()
            agent = self.joined.agent
            if agent is None:
                self._wait_for_line(timeout)
                return
            for kind, payload in agent.events(timeout):
                self._on_message(kind, payload)
            if agent.lost:
                self._on_lost_agent(agent)

    def _wait_for_line(self, timeout: float) -> None:
        """Wait without an agent; if the hub has something to say, the end most likely, the next one starts at once."""
        poller = select.poll()
        for line in self._lines[-1:]:
            if line.is_ours:
                poller.register(line.fd, select.POLLIN)
        if poller.poll(1000 * timeout) and self._restart_due < math.inf:
            self._restart_due = 0.0

    def pump_until(self, done: Callable[[], bool], limit: float) -> None:
        """Handle what happens until `done()`, or until `limit` (``time.monotonic()``)."""
        while not done() and time.monotonic() < limit:
            self.pump(POLL_BUSY)

    def _on_message(self, kind: Kind, payload: Any) -> None:
        ending, joined = self.ending, self.joined
        match kind:
            case Kind.STOP:
                ending.stopped = True
                if joined.is_client:
                    ending.lost = payload  # for the script; rank 0's agent has printed it
                    if self.leave_open:  # the programs of all ranks continue at once, whatever the function does that runs here
                        self.send(Kind.OVER, (True, None, None))
            case Kind.START:  # another agent has been heard
                self._hang_up(self._lines[:-1])
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
            case Kind.PREPARED if self._restarts:
                again = replace(joined.entry, again=True, workers=self._restarts <= len(DELAYS))
                self.send(Kind.ENTER, again)
            case Kind.ENTERED:
                line = joined.agent.take_line() if joined.agent is not None else None
                self._lines += [] if line is None else [Held(line)]
            case Kind.FAILED:  # another agent can't enter the job again
                self._on_lost_rank_0(cut_off=False)

    @property
    def _has_script(self) -> bool:
        return self._has_client and self.joined.is_client

    @property
    def _here(self) -> str:
        return f"rank {self.rank} on {self.joined.host}"

    def launcher_gone(self) -> bool:
        """Whether the launcher that started this rank has died."""
        return self.launched and os.getppid() != self._parent

    # -- the agent ----------------------------------------------------------------------------------------------

    def drop_agent(self, timeout: float) -> None:
        """End this rank's agent within `timeout` seconds."""
        agent, self.joined.agent = self.joined.agent, None
        if agent is not None:
            agent.close(timeout)
            if agent.scratch is not None and os.path.exists(agent.scratch):
                self._left.append(agent.scratch)

    def _hang_up(self, lines: Sequence[Held] | None = None) -> None:
        """Close this rank's ends of its agents' connections, for the hub to notice that the agent has gone; None: all."""
        for line in self._lines if lines is None else lines:
            line.close()
        self._lines = [line for line in self._lines if line.fd >= 0]

    def _on_lost_agent(self, agent: AgentProcess) -> None:
        """Its workers have died with it: start another one, or end."""
        ending = self.ending
        if ending.done:
            return
        text = f"the agent of {self._here} ended ({agent.exit_text()})"
        self.drop_agent(0.5)
        if ending.stopped:
            ending.end_part()
            if not self._has_script:  # which continues; nobody would tell another rank of the job's end
                ending.end()
                self._hang_up()
        elif self.joined.has_scheduler or self.rank == COORDINATOR:
            # with rank 0's agent the hub is lost
            self._hang_up()
            of = ", and the scheduler with it" if self.joined.has_scheduler else ""
            self._on_lost_cluster(f"{text}{of}")
        elif self._restarts <= len(DELAYS):
            delay = (*DELAYS, 0.0)[self._restarts]
            removed = f"rank {self.rank} removed, continuing with the other ranks"
            say(f"{text}; {f'restarting it in {delay:g} s' if delay else removed}")
            self._restart_due = time.monotonic() + delay
            self._restarts += 1
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

    def _start_agent(self) -> None:
        """Start another agent; once it is `PREPARED`, it enters the job again."""
        self._restart_due = math.inf
        joined = self.joined
        try:
            agent = AgentProcess(joined.environ)
        except OSError as error:  # no descriptors, no memory: perhaps later
            say(f"the agent of {self._here} could not be started ({error.strerror})")
            self._restart_due = time.monotonic() + DELAYS[2]
            return
        joined.agent = agent
        agent.begin(joined.options, joined.environ, inspect_gpus=False)
        again = configuration(
            joined.options, joined.environ, leave_open=self.leave_open, deadline=time.monotonic() + NODE_LOST
        )
        agent.configure(again)

    # -- ranks without the script -------------------------------------------------------------------------------

    def serve(self) -> int:
        """Wait until the job ends, on a rank without the script, and return its exit code.

        Raises a ClusterLostError on rank 0 of a job without a script if the scheduler was lost.
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
            number = ending.signal if received is None else received
            if number is not None:
                # The program would continue as if nothing had happened, and wait in MPI for ranks that the signal has ended.
                if ending.code and is_ours(number):
                    raise SystemExit(ending.code)  # as the script: 75 after its checkpoint
                signal.raise_signal(number)
            return 0
        if leaves_early:
            return 0  # the script goes on, and a launcher would end it with another code
        if ending.cut_off:
            # As a lost rank: a launcher would count its exit code once the network is back.
            kill_rank(os.getpid())
        return ending.exit_code(received)

    def _wait_for_end(self) -> bool:
        """Wait until the job ends, or the cluster if the program continues; True: this rank leaves before that, by a signal."""
        while not self.ending.ended and not (self.ending.stopped and self.leave_open):
            self.pump(POLL_IDLE)
            if self.signals.got is not None and self._leaves(*self.signals.got):
                self.send(Kind.WORKERS_ENDED, False)  # in order: the others continue
                self.drop_agent(self.joined.options.shutdown_timeout)
                self.ending.end_part()  # it gets no answer
                return True
            if self.launcher_gone():
                self.drop_agent(self.joined.options.shutdown_timeout)
                os._exit(outcome.FAILED)
        return False

    def _leaves(self, number: int, since: float) -> bool:
        """Report this rank's signal, which came at `since`; returns whether the rank has to leave without an answer.

        It waits for the script's `finally`, which the client rank announces to all.
        """
        if not self._signal_reported:
            self._signal_reported = True
            self.send(Kind.SIGNAL, number)
        return not self._script_cleans_up and time.monotonic() > since + TERM_GRACE

    # -- the end ------------------------------------------------------------------------------------------------

    def end(self, *, final: bool, code: int | None = None) -> None:
        """End the cluster on all ranks: the script has ended (`final`), or has closed its session.

        `code`: the script's exit code; None: it is not known.
        """
        ending = self.ending
        raised = sys.exception()
        if final and isinstance(raised, SystemExit):  # of the function of `execute`; the program may continue
            outcome.note(outcome.outcome_of_error(raised))
        if not (ending.ended if final else ending.stopped):
            self.send(Kind.OVER, (final, None, code))
            if self.joined.agent is None:
                ending.end()
                ending.end_part()
            if final:
                ending.closed = False
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
        agent = self.joined.agent
        if agent is not None and not ending.done:
            agent.kill()
        self._hang_up()  # first: the hub does not wait for the removal of files
        self.drop_agent(options.shutdown_timeout)
        for path in self._left:  # of agents that were lost before, too
            remove_scratch(path, within=begun + options.shutdown_timeout - time.monotonic())
            if os.path.exists(path):
                say(
                    f"warning: {self._here}: could not remove all of {path} within {options.shutdown_timeout:g} s "
                    "(shutdown_timeout). Fix: remove it, and set a faster local_directory or a longer shutdown_timeout"
                )
        self._left = []
        if ending.must_have and self.rank == COORDINATOR:
            end_job(ending.must_have, self.joined.environ)


def configuration(
    options: Any, environ: Mapping[str, str], *, leave_open: bool, **more: Any
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
