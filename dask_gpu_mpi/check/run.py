"""The command `check`: the real start of a job, then tasks on its workers. All tasks together have `CHECK_TASKS` seconds."""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dask_gpu_mpi.base.failures import report_by, report_error
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.base.timeouts import (
    CHECK_BETWEEN_NODES,
    CHECK_KERNELS,
    CHECK_START,
    CHECK_TASKS,
    CHECK_WITHIN_NODES,
)
from dask_gpu_mpi.check import tasks
from dask_gpu_mpi.check.report import Evidence, Finding, Report, Transfer
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.tasks import KernelResult, one_line
from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    LauncherError,
    MpiMissingError,
    OptionError,
    PlacementError,
    WorldTooSmallException,
)
from dask_gpu_mpi.job.start import prepare_process, start
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.model import Plan, WorkerPlan
from dask_gpu_mpi.sites.launchers import library_name

if TYPE_CHECKING:
    from distributed import Client, Future

    from dask_gpu_mpi.job.session import Session

Item = TypeVar("Item")


def run_check(
    read_options: Callable[[], Options],
    *,
    kernel: bool,
    show: Callable[[Report], None],
    expect_gpus: int | None = None,
) -> int:
    """Start the job, run the tasks, and return the exit code of this rank. `show` prints the report, on one rank.

    `kernel`: run a kernel on each GPU. `expect_gpus`: GPUs that each node must have (None: as many as the batch system has
    allocated). Raises a DaskGpuMpiError on all ranks if the start fails. It is reported then: by `show`, or as one line if the
    options can't be used.
    """
    began = time.monotonic()
    options = Options()

    def read() -> Options:
        nonlocal options
        options = options_of_check(read_options())
        return options

    def show_failure(error: DaskGpuMpiError) -> bool:
        if isinstance(error, OptionError):
            return False
        show(report_of_failure(error, time.monotonic() - began))
        flush()
        return True

    prepare_process()
    with report_by(show_failure):
        try:
            member, session = start(read, quiet=True)
        except DaskGpuMpiError as error:
            report_error(error)  # of a rank that has not met the others
            raise
    if session is None:
        return member.serve()
    evidence = replace(collect(session, options, kernel=kernel), expect_gpus=expect_gpus)
    report = Report(apply_rules(evidence), evidence, time.monotonic() - began)
    show(report)
    flush()
    return report.exit_code


def options_of_check(options: Options) -> Options:
    """The options of the job without its files, and with a shorter start unless the user has chosen its time."""
    timeout = options.startup_timeout if "startup_timeout" in options.explicit else CHECK_START
    file = None if options.scheduler else options.scheduler_file
    return replace(
        options, report=None, summary=False, log_directory=None, scheduler_file=file, startup_timeout=timeout
    )


def report_of_failure(error: DaskGpuMpiError, seconds: float) -> Report:
    """The report of a start that has failed: a line for each problem."""
    what = "start"
    if isinstance(error, LauncherError | MpiMissingError):
        what = "launcher"
    elif isinstance(error, PlacementError | WorldTooSmallException):
        what = "placement"
    findings = []
    for problem in error.problems:
        text = (replace(problem, where="") if problem.ranks else problem).text
        fix = problem.fix or "correct the cause, and run check again"
        findings.append(Finding("error", problem.what or what, text, fix, problem.ranks, problem.hosts))
    return Report(tuple(findings), seconds=seconds)


def collect(session: Session, options: Options, *, kernel: bool) -> Evidence:
    """Run the tasks on the workers of this session, and return all that is known of the job."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    evidence = Evidence(
        plan=session.plan,
        options=options,
        address=session.address,
        dashboard_link=session.dashboard_link,
        transport=session.transport,
        start_warnings=session.warnings,
        library=library_name(mpi.Get_library_version()) if mpi is not None else "",
        ready_seconds=session.ready_seconds,
        kernel=kernel,
    )
    with session.client(set_as_default=False, timeout=CHECK_TASKS) as client:
        return Rounds(client, evidence).run()


#: The worker that sends, and the one that receives.
Pair = tuple[WorkerPlan, WorkerPlan]


def neighbours(plan: Plan, usable: Sequence[WorkerPlan]) -> tuple[list[Pair], list[Pair]]:
    """The pairs within nodes, each worker with the next one, and those between nodes, each with one of the next node."""
    of_host: dict[str, list[WorkerPlan]] = {host.host: [] for host in plan.hosts}
    for worker in sorted(usable, key=lambda worker: worker.kind != "gpu"):
        of_host[worker.host].append(worker)
    nodes = [workers for workers in of_host.values() if workers]
    between = []
    for here, there in _ring(nodes):
        between += [(worker, there[place % len(there)]) for place, worker in enumerate(here)]
    return [pair for workers in nodes for pair in _ring(workers)], between


def _ring(items: Sequence[Item]) -> list[tuple[Item, Item]]:
    """Each with the next, the last with the first; none if there is only one."""
    return [*zip(items, [*items[1:], items[0]], strict=True)] if len(items) > 1 else []


#: Bytes that the workers of a node send at the same time, and bytes of one worker at least and at most.
ON_HOST, ON_DEVICE, LEAST, MOST = 64 << 20, 512 << 20, 1 << 20, 128 << 20
#: Bytes of the transfer that makes the connection, before the one that is measured.
WARM_UP = 1 << 10


def transfer_size(plan: Plan, *, on_device: bool) -> int:
    """The bytes of one transfer: well below a second, even if all workers of a node send them encrypted at the same time."""
    hosts = [worker.host for worker in plan.workers]
    share = max(map(hosts.count, set(hosts)))
    return max(LEAST, min(MOST, (ON_DEVICE if on_device else ON_HOST) // share))


def _without_result(
    devices: Sequence[str], error: BaseException | None, died: bool, imported: bool
) -> tuple[KernelResult, ...]:
    """The results of a worker whose kernel has not ended."""
    kind, text = "late", f"no result within {CHECK_KERNELS:.0f} s"
    if error is not None or died:
        kind, text = "died", "the worker's process ended" if error is None else one_line(error)
    elif not imported:
        kind, text = "slow", f"the import of numba took longer than {CHECK_KERNELS:.0f} s"
    return tuple(KernelResult(uuid, kind, text) for uuid in devices)


class Rounds:
    """The tasks, round by round. A worker that has not ended the first round is left out of the others."""

    def __init__(self, client: Client, evidence: Evidence) -> None:
        self._client = client
        self._evidence = evidence
        self._plan = evidence.plan
        self._began = time.monotonic()
        self._prefix = (
            f"check-{uuid.uuid4().hex[:8]}"  # other checks may run on this cluster (--no-scheduler)
        )
        self._number = 0
        #: Names of the workers whose GPUs have computed.
        self._computing: set[str | int] = set()

    def run(self) -> Evidence:
        """The evidence, with the results of all rounds."""
        usable = self._observe()
        within, between = neighbours(self._plan, usable)
        transfers = self._transfer(within, CHECK_WITHIN_NODES) + self._transfer(between, CHECK_BETWEEN_NODES)
        futures = {worker.rank: self._submit(worker, tasks.last_look) for worker in reversed(usable)}
        looks, _ = self._results(futures, CHECK_TASKS)
        return replace(
            self._evidence,
            transfers=tuple(transfers),
            # a worker that is busy measures a larger difference
            clocks={
                rank: min(ahead, self._evidence.observations[rank].ahead, key=abs)
                for rank, (ahead, _) in sorted(looks.items())
                if rank in self._evidence.observations
            },
            without_ucx={rank: reasons for rank, (_, reasons) in sorted(looks.items())},
        )

    def _observe(self) -> list[WorkerPlan]:
        """Inspect the node of each rank, and let each GPU compute; returns the workers that have done all that."""
        gpus = {gpu.uuid: gpu for host in self._plan.hosts for gpu in host.gpus}
        futures: dict[tuple[str, str | int], Future[Any]] = {}
        ranks: dict[int, list[WorkerPlan]] = {}
        for worker in self._plan.workers:
            ranks.setdefault(worker.rank, []).append(worker)
        for workers in ranks.values():  # first, since a slow import may take all the time
            of_rank = [gpus[uuid] for worker in workers for uuid in worker.devices]
            by_tmpdir = self._evidence.options.local_directory is None
            futures["node", workers[0].name] = self._submit(
                workers[0], tasks.observe, of_rank, by_tmpdir, priority=1
            )
        for worker in self._plan.workers if self._evidence.kernel else ():
            if worker.devices:
                futures["id", worker.name] = self._submit(worker, tasks.identity)
                futures["numba", worker.name] = numba = self._submit(worker, tasks.import_numba)
                futures["kernel", worker.name] = self._submit(worker, tasks.run_kernel, numba, worker.devices)
        done, failed = self._results(futures, CHECK_KERNELS)
        late = [one for one in self._plan.workers if ("kernel", one.name) in futures.keys() - done.keys()]
        again, _ = self._results(
            {one.name: self._submit(one, tasks.identity) for one in late}, CHECK_WITHIN_NODES
        )
        usable, kernels, observations = [], dict[str | int, tuple[KernelResult, ...]](), {}
        for worker in self._plan.workers:
            kernel, node = ("kernel", worker.name), ("node", worker.name)
            if kernel in done:
                kernels[worker.name] = done[kernel]
                if not any(result.kind for result in done[kernel]):
                    self._computing.add(worker.name)
            elif kernel in futures and (node in done or node not in futures):
                # a nanny has replaced a process that has died
                died = again.get(worker.name, done.get(("id", worker.name))) != done.get(("id", worker.name))
                imported = ("numba", worker.name) in done
                kernels[worker.name] = _without_result(worker.devices, failed.get(kernel), died, imported)
            if node in done:
                observations[worker.rank] = done[node]
            if {kernel, node} & futures.keys() <= done.keys():
                usable.append(worker)
        silent = {
            rank: one_line(failed[key]) if key in failed else f"no result within {CHECK_KERNELS:.0f} s"
            for rank, workers in ranks.items()
            if (key := ("node", workers[0].name)) not in done
        }
        self._evidence = replace(self._evidence, observations=observations, kernels=kernels, silent=silent)
        return usable

    def _transfer(self, pairs: Sequence[Pair], limit: float) -> list[Transfer]:
        """Let all pairs transfer data at the same time, after short transfers, which make their connections."""
        made = []
        for sender, receiver in pairs:
            on_device = {sender.name, receiver.name} <= self._computing
            made.append(Transfer(sender, receiver, transfer_size(self._plan, on_device=on_device), on_device))
        data: dict[int, list[Future[Any]]] = {
            place: [
                self._submit(one.sender, tasks.make_data, place, size, one.on_device)
                for size in (WARM_UP, one.size)
            ]
            for place, one in enumerate(made)
        }
        self._results(
            {place: self._receive(made[place], place, few) for place, (few, _) in data.items()}, limit
        )
        second = {place: self._receive(made[place], place, many) for place, (_, many) in data.items()}
        done, failed = self._results(second, limit)
        late = f"no data within {limit:.0f} s after the start"
        for place, one in enumerate(made):
            if place in done:
                found = done[place]
                error = "" if found.right else "the received data differ from the sent data"
                made[place] = replace(one, on_device=found.on_device, seconds=found.seconds, error=error)
            else:
                made[place] = replace(one, error=one_line(failed[place]) if place in failed else late)
        return made

    def _receive(self, transfer: Transfer, seed: int, data: Future[Any]) -> Future[Any]:
        label = str(data.key).partition("-")[2]
        return self._submit(transfer.receiver, tasks.receive, data, label, seed)

    def _submit(
        self, worker: WorkerPlan, function: Callable[..., Any], *arguments: Any, priority: int = 0
    ) -> Future[Any]:
        self._number += 1
        key = f"{function.__name__}-{self._prefix}-{self._number}"
        return self._client.submit(
            function, *arguments, key=key, workers=[worker.name], priority=priority, pure=False
        )

    def _results(
        self, futures: Mapping[Item, Future[Any]], limit: float
    ) -> tuple[dict[Item, Any], dict[Item, BaseException]]:
        """The results and the errors of those that end within `limit` seconds of the beginning of all rounds."""
        from distributed import as_completed

        names = {future: name for name, future in futures.items()}
        done, failed = dict[Item, Any](), dict[Item, BaseException]()
        seconds = max(0.0, self._began + limit - time.monotonic())
        completed = as_completed(
            futures.values(), loop=self._client.loop, with_results=True, raise_errors=False, timeout=seconds
        )
        with contextlib.suppress(TimeoutError):
            for future, result in completed:
                if future.status == "finished":
                    done[names[future]] = result
                else:  # the type, the error and its traceback, or one that it was cancelled with
                    failed[names[future]] = result[1] if isinstance(result, tuple) else result
        return done, failed
