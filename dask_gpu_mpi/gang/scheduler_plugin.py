"""The scheduler's part of gangs: it leases workers, starts all members together, and ends all when one fails.

The life of a gang, by the calls (`group.Call`) of its client (`spmd`) and of its members (`group.run_member`):

1. `open`: the client requests workers. They are leased to the gang when all are there and no other gang has one of them.
2. The client sends a task to each worker, and calls `watch`, which is answered when the gang fails.
3. `join`: each member's task has begun. All calls are answered when the last member has joined. So the members start together.
4. `exchange`: each member sends its part of an operation, such as a barrier. All calls are answered when the last part is there.
5. A member reports an exception by `fail`, and its end by the event `LEAVE`.
6. With the first failure, or `close_gang` of the client, which has all results, the gang is over (`_end`). Members that still run
   are told so. Then the gang is settled (`_settle`): processes of members that do not return are ended, and the workers are free.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import JOB_PLUGIN
from dask_gpu_mpi.base.timeouts import GANG_KILL, GANG_LOST, GANG_RETURN
from dask_gpu_mpi.gang.gang import (
    Gang,
    GangEnd,
    GangMember,
    Leases,
    MemberStage,
    MismatchError,
    choose,
    rank_members,
)
from dask_gpu_mpi.gang.group import CANCEL, LEAVE, PLUGIN, Call, Reply

#: Seconds between checks whether the wait for a lost worker is over.
LOST_INTERVAL = 1.0
#: Seconds until a line says that a gang waits for workers that are not there.
WAITS_SILENTLY = 10.0
#: Seconds for which the failure of a gang is kept for its client.
FORGET_AFTER = 600.0


class Gangs(SchedulerPlugin):
    """All gangs of a cluster; registered with the scheduler by the first call of `spmd`."""

    name = PLUGIN
    #: A second plugin would forget the gangs of the first.
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Called by distributed in the scheduler's process."""
        self._scheduler: Any = scheduler
        self._gangs: dict[str, Gang] = {}
        #: Gangs that are over, with free workers, until their clients have requested the reason.
        self._settled: dict[str, Gang] = {}
        self._leases = Leases()
        #: Set when a worker comes or goes, or leaves its function.
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself has weak references only
        self._scheduler.handlers |= {
            Call.OPEN: self.open,
            Call.WATCH: self.watch,
            Call.FAIL: self.fail,
            Call.CLOSE: self.close_gang,
            Call.JOIN: self.join,
            Call.EXCHANGE: self.exchange,
        }

    # -- calls of clients -----------------------------------------------------------------------------------------------------

    async def open(
        self,
        gang: str,
        client: str,
        workers: Sequence[str] | None,
        timeout: float | None,
        start_timeout: float,
        grace: float,
    ) -> dict[str, Any]:
        """Lease the workers; the answer has their addresses, in rank order."""
        if client not in self._scheduler.clients:
            return {"state": Reply.REFUSED, "why": "its client is not connected"}
        made = self._gangs[gang] = Gang(gang, client, grace)
        self._begin(self._end_if_late(made, start_timeout, timeout))
        leasing = asyncio.create_task(self._lease_workers(made, workers))
        await _first(leasing, made.over)
        if made.over.done():
            leasing.cancel()
            return _answer_of(made)
        if (why := leasing.result()) is not None:
            self._end(made, GangEnd(why))
            return {"state": Reply.REFUSED, "why": why}
        return {"state": Reply.GOOD, "workers": [member.worker.address for member in made.members]}

    async def watch(self, gang: str) -> dict[str, Any]:
        """Answered when the gang is over because of a failure."""
        found = self._gangs.get(gang) or self._settled.get(gang)
        if found is None:
            return {"state": Reply.OVER, "why": "it is over"}
        await asyncio.shield(found.over)
        return {**_answer_of(found), "error": found.over.result().error}

    def fail(self, gang: str, text: str, rank: int | None = None, error: bytes | None = None) -> None:
        """The client has detected a failure or gives up, or the function has raised an exception in a member."""
        if (found := self._gangs.get(gang)) is not None:
            self._end(found, GangEnd(text, rank, error))

    async def close_gang(self, gang: str) -> dict[str, Any]:
        """The client has its results, or its error. Answered when the workers are free again.

        The answer has, under ``notes``, a line for each event after the failure, and under ``died`` the ranks whose workers have
        died.
        """
        if (found := self._gangs.get(gang) or self._settled.get(gang)) is None:
            return {"notes": [], "died": []}
        self._end(found, GangEnd("its client has closed it", closed=True))
        await asyncio.shield(found.settled)
        self._settled.pop(gang, None)
        notes = [f"spmd: {found.on_member(rank, text)}" for rank, text in found.notes]
        return {"notes": notes, "died": sorted(found.died)}

    # -- calls of members -----------------------------------------------------------------------------------------------------

    async def join(self, gang: str, rank: int, host: str) -> dict[str, Any]:
        """Answered when all members have joined."""
        found = self._gangs.get(gang)
        if found is None or found.over.done() or found.started.done():
            return {"state": Reply.OVER, "why": "it was over before this rank began"}
        found.join(rank, host)
        await _first(found.started, found.over)
        if found.over.done():
            found.leave(rank)
            self._changed.set()
            return _answer_of(found)
        return {
            "state": Reply.GOOD,
            "hosts": found.hosts,
            "place": found.members[rank].place,
            "master_addr": found.members[0].worker.host,
        }

    async def exchange(
        self, gang: str, rank: int, number: int, operation: str, part: bytes, timeout: float
    ) -> dict[str, Any]:
        """One member's part of an operation; answered with all parts."""
        found = self._gangs.get(gang)
        if found is None:
            return {"state": Reply.OVER, "why": "it is over"}
        try:
            complete = found.rounds.put(number, rank, operation, part)
        except MismatchError as error:
            self._end(found, GangEnd(str(error), rank))
            return _answer_of(found)
        await _first(complete, found.over, timeout=timeout)
        if complete.done():
            return {"state": Reply.GOOD, "parts": complete.result()}
        if found.over.done():
            return _answer_of(found)
        found.rounds.give_up(number, rank)
        return {"state": Reply.LATE, "missing": found.rounds.missing(number)}

    # -- events of the scheduler ----------------------------------------------------------------------------------------------

    def log_event(self, topic: str, msg: Any) -> None:
        """Called by distributed with an event: the function has ended in a member, after a call of `fail` if it has raised."""
        if topic == LEAVE and (gang := self._gangs.get(msg["gang"])) is not None:
            rank = msg["rank"]
            if (why := gang.leave(rank, spoilt=msg["spoilt"])) is not None:
                self._end(gang, GangEnd(why, rank))
            self._changed.set()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by distributed when a worker has come."""
        self._changed.set()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Called by distributed when a worker is gone."""
        for gang in list(self._gangs.values()):
            for member in gang.members:
                if member.worker.address == worker and not gang.settled.done():
                    when = "while the gang ran" if gang.started.done() else "before the gang started"
                    gang.die(member.rank)
                    self._end(gang, GangEnd(f"died {when}", member.rank))
        self._changed.set()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Called by distributed when a client is gone."""
        for gang in list(self._gangs.values()):
            if gang.client == client:
                self._end(gang, GangEnd("its client is gone"))

    async def close(self) -> None:
        """Called by distributed when the scheduler closes."""
        for task in self._tasks:
            task.cancel()

    # -- the start ------------------------------------------------------------------------------------------------------------

    async def _lease_workers(self, gang: Gang, wanted: Sequence[str] | None) -> str | None:
        """Wait for the workers and lease them; returns the reason if that is impossible."""
        if wanted is None:
            # workers that come back after another gang are among "all"
            others = [
                other.settled for other in self._gangs.values() if other.over.done() and other is not gang
            ]
            if others:
                gang.waits_for = "the workers of another gang are not free yet"
                await asyncio.wait(others)
        names = await self._wait_for(gang, wanted)
        if gang.over.done():
            return None
        if wanted is not None and len(names) < len(wanted):  # by its name and by its address
            return f"workers: {list(wanted)} has a worker twice (expected each once: a worker is one rank)"
        gang.waits_for = "another gang has its workers, the caller's perhaps"
        self._grant(self._leases.ask(gang.name, names))
        await gang.granted.wait()
        names = await self._wait_for(gang, names)  # one may have died meanwhile
        workers = {str(worker.name): worker for worker in self._scheduler.workers.values()}
        alone = [name for name in names if workers[name].nanny is None]
        if alone:
            return (
                f"worker(s) {', '.join(alone)} without a nanny, which would end a rank that hangs (expected workers "
                "of class Nanny or CUDAWorker)"
            )
        gang.assign(rank_members(workers[name] for name in names))
        return None

    async def _wait_for(self, gang: Gang, wanted: Sequence[str] | None) -> list[str]:
        """Wait until these workers are all connected, and return their names; None: all workers."""
        while True:
            workers = self._scheduler.workers.values()
            names, missing = choose(wanted, workers)
            if wanted is None:
                missing = self._coming_back(workers)
            gang.misses_workers = bool(missing) or not names
            if not gang.misses_workers:
                return names
            gang.waits_for = f"no worker {', '.join(missing)}" if missing else "no worker at all"
            await self._change(LOST_INTERVAL)

    async def _change(self, timeout: float) -> None:
        """Wait until a worker comes or goes or leaves its function, for so many seconds at most."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    async def _until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait until a condition is met that depends on workers, for so many seconds at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not condition() and (left := deadline - loop.time()) > 0:
            await self._change(left)

    def _coming_back(self, there: Iterable[WorkerState]) -> list[str]:
        """Names of the workers of "all" that were lost a moment ago, which only a cluster of this package knows."""
        watch = self._scheduler.plugins.get(JOB_PLUGIN)
        lost: list[tuple[str, str]] = [] if watch is None else watch.recently_lost(GANG_LOST)
        gpus = any("GPU" in worker.resources for worker in there) or any(kind == "gpu" for _, kind in lost)
        return [name for name, kind in lost if kind == "gpu" or not gpus]

    def _grant(self, gangs: Sequence[str]) -> None:
        for name in gangs:
            self._gangs[name].granted.set()

    async def _end_if_late(self, gang: Gang, start_timeout: float, timeout: float | None) -> None:
        """End a gang that has not started in time, or not ended."""
        await _first(gang.started, gang.over, timeout=min(WAITS_SILENTLY, start_timeout))
        if not (gang.started.done() or gang.over.done()) and gang.misses_workers:
            say(
                f"warning: spmd: {gang.waits_for}; it waits for {start_timeout:g} s (start_timeout). Fix: correct `workers`"
            )
        await _first(gang.started, gang.over, timeout=max(0.0, start_timeout - WAITS_SILENTLY))
        if not gang.started.done():
            waiting = ", ".join(str(member.worker.name) for member in gang.at(MemberStage.CALLED))
            why = gang.waits_for
            if waiting:
                why = f"worker(s) {waiting} have not begun: other tasks have their threads, or an argument is not there"
            fix = "a longer start_timeout, or wait for what is missing first"
            self._end(gang, GangEnd(f"not started within {start_timeout:g} s: {why}. Fix: {fix}", late=True))
        elif timeout is not None:
            await _first(gang.over, timeout=timeout)
            ranks = ", ".join(str(member.rank) for member in gang.at(MemberStage.JOINED))
            why = f"rank(s) {ranks} still ran" if ranks else "its results were not collected"
            self._end(gang, GangEnd(f"not ended within {timeout:g} s: {why}", late=True))

    # -- the end --------------------------------------------------------------------------------------------------------------

    def _end(self, gang: Gang, end: GangEnd) -> None:
        """End a gang, unless it is over: cancel its members, and free its workers."""
        if gang.over.done():
            return
        gang.over.set_result(end)
        for member in gang.at(MemberStage.JOINED):
            if member.worker.address in self._scheduler.workers:
                self._scheduler.worker_send(member.worker.address, {"op": CANCEL, "gang": gang.name})
        self._begin(self._settle(gang))

    async def _settle(self, gang: Gang) -> None:
        """Wait for members to return, end the others, and release the workers once they are back."""
        await self._until(lambda: not gang.at(MemberStage.JOINED), gang.grace)
        gang.ends_members = True
        ending = (self._end_process(member, gang.stages[member.rank]) for member in gang.to_end())
        await asyncio.gather(*ending, return_exceptions=True)
        await self._until(lambda: not gang.to_end() and not self._not_back(gang), GANG_RETURN)
        self._note_differences(gang)
        # its client may still be sending the tasks, and requests the failure afterwards
        self._settled[gang.name] = self._gangs.pop(gang.name)
        asyncio.get_running_loop().call_later(FORGET_AFTER, self._settled.pop, gang.name, None)
        self._grant(self._leases.release(gang.name))
        gang.settled.set_result(None)

    async def _end_process(self, member: GangMember, stage: MemberStage) -> None:
        """Let a worker's nanny end its process, as on request, and start another."""
        why = "has not returned from a gang that is over"
        if stage is MemberStage.SPOILT:
            why = "is in a torch.distributed group of a gang that failed"
        say(f"warning: spmd: worker {member.worker.name} {why}; restarting its process")
        killing = self._scheduler.rpc(member.worker.nanny).kill(timeout=GANG_KILL, reason="gang-is-over")
        await asyncio.wait_for(killing, GANG_KILL + 3)  # the nanny's process itself may be stopped

    def _not_back(self, gang: Gang) -> list[GangMember]:
        """The members whose workers are gone, and have not been restarted."""
        there = {worker.name for worker in self._scheduler.workers.values()}
        return [member for member in gang.at(MemberStage.DEAD) if member.worker.name not in there]

    def _note_differences(self, gang: Gang) -> None:
        """Note the workers that are not as before."""
        for member in gang.to_end():
            gang.notes.append((member.rank, "could not be ended; it may still use its GPU"))
            say(
                f"warning: spmd: worker {member.worker.name} on {gang.hosts[member.rank]} could not be ended by its nanny; it "
                "may still use its GPU. Fix: end its process on that node"
            )
        for member in self._not_back(gang):
            gang.notes.append((member.rank, "is not back; a later gang of all workers may be without it"))

    def _begin(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _first(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of these is done."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _answer_of(gang: Gang) -> dict[str, Any]:
    """The answer to a call of a gang that is over."""
    end = gang.over.result()
    if end.rank is None:
        return {"state": Reply.OVER, "why": end.text, "late": end.late}
    return {
        "state": Reply.OVER,
        "why": gang.on_member(end.rank, end.text),
        "rank": end.rank,
        "worker": str(gang.members[end.rank].worker.name),
        "host": gang.hosts[end.rank],
    }
