"""The command `check`: the real start of a job, then tasks on its workers. All tasks together have `CHECK_TASKS` seconds."""

from __future__ import annotations

import contextlib
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
    CHECK_NODES,
    CHECK_RESTARTS,
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
    StartupError,
    WorldTooSmallException,
)
from dask_gpu_mpi.job.start import prepare_process, start
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.model import WorkerPlan
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
    evidence = Evidence(
        plan=session.plan,
        options=options,
        address=session.address,
        dashboard_link=session.dashboard_link,
        transport=session.transport,
        start_warnings=session.warnings,
        library=library_name(session.mpi_library),
        ready_seconds=session.ready_seconds,
        kernel=kernel,
    )
    try:
        client = session.client(set_as_default=False, timeout=CHECK_TASKS)
    except (OSError, TimeoutError) as error:
        raise StartupError(
            f"check: could not connect to the scheduler at {session.address} ({one_line(error)})",
            fix="run check again, with --log-level info",
        ) from error
    with client:
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
    """The tasks, round by round. A worker that has not ended one is left out of the next."""

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
        if self._evidence.kernel:
            usable = self._compute(usable)
        within, between = neighbours(self._plan, usable)
        transfers = self._transfer(within, CHECK_WITHIN_NODES) + self._transfer(between, CHECK_BETWEEN_NODES)
        looks, _ = self._results(
            {one.name: self._submit(one, tasks.last_look) for one in usable}, CHECK_TASKS
        )
        clocks, without_ucx = dict[int, float](), dict[int, dict[str, str]]()
        for worker in usable:
            if worker.name in looks:
                ahead, reasons = looks[worker.name]
                # a worker that is busy measures a larger difference
                before = clocks.get(worker.rank, self._evidence.observations[worker.rank].ahead)
                clocks[worker.rank] = min(ahead, before, key=abs)
                without_ucx.setdefault(worker.rank, {}).update(reasons)
        return replace(self._evidence, transfers=tuple(transfers), clocks=clocks, without_ucx=without_ucx)

    def _observe(self) -> list[WorkerPlan]:
        """Let a worker of each rank observe its node; returns the workers of the ranks that have done so."""
        gpus = {gpu.uuid: gpu for host in self._plan.hosts for gpu in host.gpus}
        by_tmpdir = self._evidence.options.local_directory is None
        futures: dict[int, Future[Any]] = {}
        for worker in self._plan.workers:
            if worker.rank not in futures:
                devices = [device for one in self._plan.for_rank(worker.rank) for device in one.devices]
                of_rank = [gpus[device] for device in devices]
                futures[worker.rank] = self._submit(worker, tasks.observe, of_rank, by_tmpdir)
        done, failed = self._results(futures, CHECK_NODES)
        late = f"no result within {CHECK_NODES:.0f} s"
        silent = {
            rank: one_line(failed[rank]) if rank in failed else late for rank in futures if rank not in done
        }
        observations = {rank: done[rank] for rank in futures if rank in done}
        self._evidence = replace(self._evidence, observations=observations, silent=silent)
        return [worker for worker in self._plan.workers if worker.rank in done]

    def _compute(self, usable: Sequence[WorkerPlan]) -> list[WorkerPlan]:
        """Let the GPUs of these workers compute; returns the workers that have done so, or have none."""
        workers = {worker.name: worker for worker in usable if worker.devices}
        before, _ = self._results(
            {name: self._submit(worker, tasks.identity) for name, worker in workers.items()}, CHECK_NODES
        )
        imports = {name: self._submit(worker, tasks.import_numba) for name, worker in workers.items()}
        futures = {
            name: self._submit(worker, tasks.run_kernel, imports[name], worker.devices)
            for name, worker in workers.items()
        }
        done, failed = self._results(futures, CHECK_KERNELS)
        late = {name: worker for name, worker in workers.items() if name not in done}
        # a nanny replaces a process that has died
        after, _ = self._results(
            {name: self._submit(worker, tasks.identity) for name, worker in late.items()}, CHECK_RESTARTS
        )
        kernels = dict[str | int, tuple[KernelResult, ...]](done)
        for name, worker in late.items():
            died = name in after and after[name] != before.get(name)
            imported = imports[name].status == "finished"
            kernels[name] = _without_result(worker.devices, failed.get(name), died, imported)
        in_order = {worker.name: kernels[worker.name] for worker in usable if worker.name in kernels}
        self._evidence = replace(self._evidence, kernels=in_order)
        self._computing = {
            name for name, results in kernels.items() if not any(result.kind for result in results)
        }
        return [worker for worker in usable if worker.name not in late]

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

    def _submit(self, worker: WorkerPlan, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._number += 1
        key = f"{function.__name__}-{self._prefix}-{self._number}"
        return self._client.submit(function, *arguments, key=key, workers=[worker.name], pure=False)

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
