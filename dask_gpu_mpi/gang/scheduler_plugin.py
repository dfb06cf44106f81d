"""The scheduler's part of gangs: it leases workers, starts all members together, and ends all when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from distributed import Scheduler
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.timeline import JOB_PLUGIN
from dask_gpu_mpi.gang.gang import (
    Candidate,
    Failure,
    Gang,
    Kind,
    Leases,
    Member,
    MismatchError,
    Stage,
    choose,
    rank_members,
)
from dask_gpu_mpi.gang.group import CANCEL, LEAVE, PLUGIN, State, one_line

__all__ = ["Gangs"]

#: Seconds between looks for workers that are not there.
POLL_INTERVAL = 0.05
#: Seconds that a nanny has to end a member that hangs: it asks first, and kills after 0.8 of them.
KILL_TIMEOUT = 2.0
#: Seconds in which a worker that was ended, or has died, comes back before its gang is settled.
RETURN_TIMEOUT = 20.0
#: Seconds after a worker was lost for which a gang of all workers waits for it: its nanny starts it again, unless it is removed.
LOST_TIMEOUT = 60.0
#: Seconds for which the failure of a gang is kept for a client that does not come for it.
FORGET_AFTER = 600.0


class Gangs(SchedulerPlugin):
    """All gangs of a cluster; registered with the scheduler by the first call of `spmd`."""

    name = PLUGIN
    #: A second one would forget the gangs of the first.
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Called by distributed in the scheduler's process."""
        self._scheduler: Any = scheduler
        self._gangs: dict[str, Gang] = {}
        #: Those that are over, with free workers, until their clients have asked why.
        self._settled: dict[str, Gang] = {}
        self._leases = Leases()
        self._granted: dict[str, asyncio.Event] = {}
        #: The workers whose processes were ended here: when, in the loop's time, and whether they have a GPU.
        self._ended: dict[str, tuple[float, bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly
        for handler in (
            self.open,
            self.join,
            self.exchange,
            self.failed,
            self.watch,
            self.fail,
            self.close_gang,
        ):
            self._scheduler.handlers[f"gang_{handler.__name__}"] = handler
        self._scheduler.stream_handlers[LEAVE] = self.leave

    # -- what clients ask -------------------------------------------------------------------------------------------------------

    async def open(
        self,
        gang: str,
        client: str,
        workers: Sequence[str] | None,
        timeout: float | None,
        start_timeout: float,
        grace: float,
    ) -> dict[str, Any]:
        """Lease the workers; the answer has the members, in rank order."""
        if client not in self._scheduler.clients:
            return {"state": State.REFUSED, "why": "its client is not connected"}
        made = self._gangs[gang] = Gang(gang, client, grace)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + start_timeout
        made.start_timer = loop.call_at(deadline, self._too_late, made, start_timeout)
        getting = asyncio.ensure_future(self._get_workers(made, workers))
        waiting: set[asyncio.Future[Any]] = {getting, made.over}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if made.over.done():
            getting.cancel()
            return self._answer_over(made)
        if (why := getting.result()) is not None:
            self._end(made, Failure(Kind.CLIENT, why))
            return {"state": State.REFUSED, "why": why}
        self._begin(self._limit_run(made, timeout))
        members = [(member.worker.name, member.worker.address) for member in made.members]
        places = [
            (member.local_rank, member.local_size, member.node_rank, member.nodes) for member in made.members
        ]
        return {"state": State.GOOD, "members": members, "places": places}

    async def watch(self, gang: str) -> dict[str, Any]:
        """Answered when the gang is over because of a failure."""
        found = self._gangs.get(gang) or self._settled.get(gang)
        if found is None:
            return {"state": State.OVER, "why": "it is over"}
        await asyncio.shield(found.over)
        return {**self._answer_over(found), "error": found.over.result().error}

    def fail(self, gang: str, kind: str, text: str, rank: int | None, error: dict[str, Any] | None) -> None:
        """The client has found a failure, or gives up."""
        if (found := self._gangs.get(gang)) is not None:
            self._end(found, Failure(kind, text, rank, error))

    async def close_gang(self, gang: str) -> dict[str, Any]:
        """The client has its results, or its error; answered when the workers are free again.

        Returns
        -------
        dict
            ``"notes"``: a line for each thing that has happened after the failure; ``"died"``: ranks whose workers have died.
        """
        if (found := self._gangs.get(gang) or self._settled.get(gang)) is None:
            return {"notes": [], "died": []}
        if not found.over.done():
            self._end(found, Failure(Kind.CLOSED, "its client has closed it"))
        await asyncio.shield(found.settled)
        self._settled.pop(gang, None)
        notes = [
            f"spmd: rank {rank} (worker {found.members[rank].worker.name} on {found.hosts[rank]}) {text}"
            for rank, text in found.notes
        ]
        return {"notes": notes, "died": sorted(found.died)}

    # -- what members ask -------------------------------------------------------------------------------------------------------

    async def join(self, gang: str, rank: int, host: str) -> dict[str, Any]:
        """Answered when all members have joined."""
        found = self._gangs.get(gang)
        if found is None or found.over.done() or found.started.done():
            return {"state": State.OVER, "why": "it was over before this rank began"}
        found.join(rank, host)
        waiting: set[asyncio.Future[Any]] = {found.started, found.over}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if found.over.done():
            found.leave(rank)
            return self._answer_over(found)
        return {
            "state": State.GOOD,
            "hosts": list(found.hosts),
            "master_addr": found.members[0].worker.node,
        }

    async def exchange(
        self, gang: str, rank: int, number: int, operation: str, part: bytes, timeout: float
    ) -> dict[str, Any]:
        """One member's part of an operation; answered with all parts."""
        found = self._gangs.get(gang)
        if found is None:
            return {"state": State.OVER, "why": "it is over"}
        try:
            complete = found.put(number, rank, operation, part)
        except MismatchError as error:
            self._end(found, Failure(Kind.CLIENT, str(error), rank))
            return self._answer_over(found)
        waiting: set[asyncio.Future[Any]] = {complete, found.over}
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if complete.done():
            return {"state": State.GOOD, "parts": complete.result()}
        if found.over.done():
            return self._answer_over(found)
        found.give_up(number, rank)
        return {"state": State.LATE, "missing": found.missing(number)}

    def failed(self, gang: str, rank: int, failure: dict[str, Any]) -> None:
        """The function has raised an exception in a member, and is about to be left."""
        if (found := self._gangs.get(gang)) is not None:
            text = f"raised {one_line(failure['exception_text'])}"
            self._end(found, Failure(Kind.RAISED, text, rank, failure))

    def leave(self, gang: str, rank: int, spoilt: bool, worker: str = "") -> None:
        """The function has been left in a member; `spoilt`: see `Stage.SPOILT`. What it raised was told before."""
        found = self._gangs.get(gang)
        if found is not None and (why := found.leave(rank, spoilt=spoilt)) is not None:
            self._end(found, Failure(Kind.CLIENT, why, rank))

    # -- what the scheduler tells -----------------------------------------------------------------------------------------------

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Called by distributed when a worker is gone."""
        for gang in list(self._gangs.values()):
            if (rank := gang.rank_of(worker)) is not None and not gang.settled.done():
                when = "while the gang ran" if gang.started.done() else "before the gang started"
                gang.die(rank)
                self._end(gang, Failure(Kind.DIED, f"died {when}", rank))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Called by distributed when a client is gone."""
        for gang in list(self._gangs.values()):
            if gang.client == client:
                self._end(gang, Failure(Kind.CLIENT, "its client is gone"))

    async def close(self) -> None:
        """Called by distributed when the scheduler closes."""
        for task in self._tasks:
            task.cancel()

    # -- inside -----------------------------------------------------------------------------------------------------------------

    async def _get_workers(self, gang: Gang, wanted: Sequence[str] | None) -> str | None:
        """Wait for the workers and lease them; why that can't be, where it can't."""
        if wanted is None:
            # those that come back after another gang are among "all"
            others = [
                other.settled for other in self._gangs.values() if other.over.done() and other is not gang
            ]
            if others:
                gang.waits_for = "the workers of another gang are not free yet"
                await asyncio.wait(others)
        names = await self._find(gang, wanted)
        if gang.over.done():
            return None
        if wanted is not None and len(names) < len(wanted):  # by its name and by its address
            return f"workers: {list(wanted)} has a worker twice (expected each once: a worker is one rank)"
        gang.waits_for = "another gang has its workers"
        granted = self._granted[gang.name] = asyncio.Event()
        self._grant(self._leases.ask(gang.name, names))
        await granted.wait()
        names = await self._find(gang, names)  # one may have died meanwhile
        workers = {worker.name: worker for worker in self._candidates()}
        alone = [name for name in names if workers[name].nanny is None]
        if alone:
            return (
                f"worker(s) {', '.join(alone)} without a nanny, which would end a rank that hangs (expected workers "
                "of class Nanny or CUDAWorker)"
            )
        gang.assign(rank_members(workers[name] for name in names))
        return None

    async def _find(self, gang: Gang, wanted: Sequence[str] | None) -> list[str]:
        """The names of these workers, once all are there."""
        while True:
            candidates = self._candidates()
            names, missing = choose(wanted, candidates)
            if wanted is None:
                missing = self._coming_back(candidates)
            if names and not missing:
                return names
            gang.waits_for = f"no worker {', '.join(missing)}" if missing else "no worker at all"
            await asyncio.sleep(POLL_INTERVAL)

    def _coming_back(self, there: Sequence[Candidate]) -> list[str]:
        """Names of the workers that belong to "all" and were lost a moment ago; in others' clusters, of those ended here."""
        watch = self._scheduler.plugins.get(JOB_PLUGIN)
        lost: list[tuple[str, str]] = [] if watch is None else list(watch.recently_lost(LOST_TIMEOUT))
        names = {worker.name for worker in there} | {name for name, _ in lost}
        since = asyncio.get_running_loop().time() - LOST_TIMEOUT
        for name, (ended, has_gpu) in self._ended.items():
            if ended > since and name not in names:
                lost.append((name, "gpu" if has_gpu else "cpu"))
        gpus = any(worker.has_gpu for worker in there) or any(kind == "gpu" for _, kind in lost)
        return [name for name, kind in lost if kind == "gpu" or not gpus]

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(
                str(worker.name),
                worker.address,
                get_address_host(worker.address),
                worker.nanny,
                "GPU" in worker.resources,
            )
            for worker in self._scheduler.workers.values()
        ]

    def _grant(self, gangs: Sequence[str]) -> None:
        for name in gangs:
            self._granted[name].set()

    def _too_late(self, gang: Gang, seconds: float) -> None:
        if not gang.started.done():
            waiting = [
                member.worker.name for member in gang.members if gang.stages[member.rank] is Stage.CALLED
            ]
            why = (
                f"worker(s) {', '.join(waiting)} have not begun: other tasks have their threads, or an argument is not there"
                if waiting
                else gang.waits_for
            )
            text = f"not started within {seconds:g} s: {why}. Fix: a longer start_timeout, or wait for what is missing first"
            self._end(gang, Failure(Kind.TIMEOUT, text))

    async def _limit_run(self, gang: Gang, timeout: float | None) -> None:
        waiting: set[asyncio.Future[Any]] = {gang.started, gang.over}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if timeout is not None:
            await asyncio.wait({gang.over}, timeout=timeout)
            ranks = ", ".join(str(member.rank) for member in gang.running())
            why = f"rank(s) {ranks} still ran" if ranks else "its results were not collected"
            self._end(gang, Failure(Kind.TIMEOUT, f"not ended within {timeout:g} s: {why}"))

    def _end(self, gang: Gang, failure: Failure) -> None:
        """It is over: tell the members, and free the workers."""
        if gang.fail(failure):
            for member in gang.running():
                if member.worker.address in self._scheduler.workers:
                    self._scheduler.worker_send(member.worker.address, {"op": CANCEL, "gang": gang.name})
            self._begin(self._settle(gang))

    async def _settle(self, gang: Gang) -> None:
        """Wait for members to return, end those that do not, and release the workers once they are there."""
        await gang.wait_for_end(gang.grace)
        gang.ends_members = True
        ending = (self._end_process(member, gang.stages[member.rank]) for member in gang.to_end())
        await asyncio.gather(*ending, return_exceptions=True)
        deadline = asyncio.get_running_loop().time() + RETURN_TIMEOUT
        while not self._are_back(gang) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_INTERVAL)
        self._note_what_is_not_as_before(gang)
        if gang.start_timer is not None:
            gang.start_timer.cancel()  # it would keep the gang, and what a member has raised
        # its client may still be sending the tasks, and asks for the failure then
        self._settled[gang.name] = self._gangs.pop(gang.name)
        asyncio.get_running_loop().call_later(FORGET_AFTER, self._settled.pop, gang.name, None)
        self._grant(self._leases.release(gang.name))
        self._granted.pop(gang.name, None)
        gang.settled.set_result(None)

    async def _end_process(self, member: Member, stage: Stage) -> None:
        """Have a worker's nanny end its process; it starts another, and takes the end for one that was asked for."""
        self._ended[member.worker.name] = (asyncio.get_running_loop().time(), member.worker.has_gpu)
        if stage is Stage.SPOILT:
            say(
                f"warning: spmd: worker {member.worker.name} is in a torch.distributed group of a gang that failed; "
                "restarting its process"
            )
        else:
            say(
                f"warning: spmd: worker {member.worker.name} has not returned from a gang that is over; restarting its process"
            )
        killing = self._scheduler.rpc(member.worker.nanny).kill(timeout=KILL_TIMEOUT, reason="gang-is-over")
        await asyncio.wait_for(killing, KILL_TIMEOUT + 3)  # the nanny's process may be stopped itself

    def _are_back(self, gang: Gang) -> bool:
        """Whether no member runs, and workers that have died are there again."""
        return not gang.to_end() and not self._away(gang)

    def _away(self, gang: Gang) -> list[Member]:
        """The members whose workers are gone and not back."""
        there = {worker.name for worker in self._candidates()}
        return [member for member in gang.dead() if member.worker.name not in there]

    def _note_what_is_not_as_before(self, gang: Gang) -> None:
        for member in gang.to_end():
            gang.notes.append((member.rank, "could not be ended; it may still use its GPU"))
            say(
                f"warning: spmd: worker {member.worker.name} on {gang.hosts[member.rank]} could not be ended by its nanny; it "
                "may still use its GPU. Fix: end its process on that node"
            )
        for member in self._away(gang):
            gang.notes.append((member.rank, "is not back; a later gang of all workers may be without it"))

    def _answer_over(self, gang: Gang) -> dict[str, Any]:
        failure = gang.over.result()
        member = gang.members[failure.rank] if failure.rank is not None else None
        return {
            "state": State.OVER,
            "kind": failure.kind,
            "why": failure.text if failure.rank is None else f"rank {failure.rank} {failure.text}",
            "text": failure.text,
            "rank": failure.rank,
            "worker": None if member is None else member.worker.name,
            "host": None if failure.rank is None else gang.hosts[failure.rank],
        }

    def _begin(self, action: Coroutine[Any, Any, None]) -> Awaitable[None]:
        task = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
