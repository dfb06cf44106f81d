"""The command `check`: the real start of a job, then tasks on its workers. All tasks together have `CHECK_TASKS` seconds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dask_gpu_mpi.base import timeouts
from dask_gpu_mpi.base.failures import report_by, report_error
from dask_gpu_mpi.base.streams import flush
from dask_gpu_mpi.check import tasks
from dask_gpu_mpi.check.report import Evidence, Finding, Report, Transfer
from dask_gpu_mpi.check.rules import apply_rules
from dask_gpu_mpi.check.tasks import KernelResult, Observations, described
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
from dask_gpu_mpi.plan import Plan, WorkerPlan
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
    check: Callable[[int, Options], None] | None = None,
) -> int:
    """Start the job, run the tasks, and return the exit code of this rank. `show` prints the report, on one rank.

    `kernel`: run a kernel on each GPU. `expect_gpus`: GPUs that each node must have (None: as many as the batch system has
    allocated). `check`: as for `start`. Raises a DaskGpuMpiError on all ranks if the start fails. It is reported then: by `show`,
    or as one line if the options can't be used.
    """
    began = time.monotonic()

    def show_failure(error: DaskGpuMpiError) -> bool:
        if isinstance(error, OptionError):
            return False
        show(report_of_failure(error, time.monotonic() - began))
        flush()
        return True

    prepare_process()
    with report_by(show_failure):
        try:
            member, session = start(lambda: options_of_check(read_options()), check=check, quiet=True)
        except DaskGpuMpiError as error:
            report_error(error)  # of a rank that has not met the others
            raise
    if session is None:
        return member.serve()
    evidence = collect(session, member.joined.options, kernel=kernel, expect_gpus=expect_gpus)
    report = Report(apply_rules(evidence), evidence, time.monotonic() - began)
    show(report)
    flush()
    return report.exit_code


def options_of_check(options: Options) -> Options:
    """The options of the job without its files, and with a shorter start unless the user has chosen its time."""
    timeout = options.startup_timeout if "startup_timeout" in options.explicit else timeouts.CHECK_START
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


def collect(session: Session, options: Options, *, kernel: bool, expect_gpus: int | None) -> Evidence:
    """Run the tasks on the workers of this session, and return all that is known of the job."""
    variable = "DGM_EXPECT_GPUS"  # of `launch`, whose ranks get the option
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
        expect_gpus=expect_gpus,
        expected_by=f"{variable}={expect_gpus}" if os.environ.get(variable) == str(expect_gpus) else "",
    )
    try:
        client = session.client(set_as_default=False, timeout=timeouts.CHECK_TASKS)
    except (OSError, TimeoutError) as error:
        raise StartupError(
            f"check: could not connect to the scheduler at {session.address} ({described(error)})",
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


class Rounds:
    """The tasks, round by round. A worker that has not ended one is left out of the next."""

    def __init__(self, client: Client, evidence: Evidence) -> None:
        self._client = client
        self._evidence = evidence
        self._plan = evidence.plan
        self._began = time.monotonic()

    def run(self) -> Evidence:
        """The evidence, with the results of all rounds."""
        observations, silent = self._observe()
        usable = [worker for worker in self._plan.workers if worker.rank in observations]
        kernels: dict[str, KernelResult] = {}
        if self._evidence.kernel:
            kernels, failed = self._compute(usable)
            usable = [worker for worker in usable if worker.name not in failed]
        right = {uuid for uuid, result in kernels.items() if not result.kind}
        computing = {one.name for one in usable if one.devices and right.issuperset(one.devices)}
        within, between = neighbours(self._plan, usable)
        transfers = [
            *self._transfer(within, computing, timeouts.CHECK_WITHIN_NODES),
            *self._transfer(between, computing, timeouts.CHECK_BETWEEN_NODES),
        ]
        clocks, without_ucx = dict[int, float](), dict[int, dict[str, str]]()
        for worker, (ahead, reasons) in self._last_looks(usable):
            # a worker that is busy measures a larger difference
            before = clocks.get(worker.rank, observations[worker.rank].ahead)
            clocks[worker.rank] = min(ahead, before, key=abs)
            without_ucx.setdefault(worker.rank, {}).update(reasons)
        return replace(
            self._evidence,
            observations=observations,
            silent=silent,
            kernels=kernels,
            transfers=tuple(transfers),
            clocks=clocks,
            without_ucx=without_ucx,
        )

    def _observe(self) -> tuple[dict[int, Observations], dict[int, str]]:
        """What a worker of each rank observes of its node, or why it does not."""
        gpus = {gpu.uuid: gpu for host in self._plan.hosts for gpu in host.gpus}
        by_tmpdir = self._evidence.options.local_directory is None
        futures: dict[int, Future[Any]] = {}
        for worker in self._plan.workers:
            if worker.rank not in futures:
                devices = [device for one in self._plan.for_rank(worker.rank) for device in one.devices]
                of_rank = [gpus[device] for device in devices]
                futures[worker.rank] = self._submit(worker, tasks.observe, of_rank, by_tmpdir)
        return self._results(futures, timeouts.CHECK_NODES)

    def _compute(self, usable: Sequence[WorkerPlan]) -> tuple[dict[str, KernelResult], dict[str | int, str]]:
        """The results of the GPUs of these workers, and why a worker has reported none."""
        patience = self._left(timeouts.CHECK_KERNELS)
        workers = {worker.name: worker for worker in usable if worker.devices}
        futures = {
            name: self._submit(one, tasks.run_kernel, one.devices, patience) for name, one in workers.items()
        }
        done, failed = self._results(futures, timeouts.CHECK_REPORTS)
        kernels: dict[str, KernelResult] = {}
        for name, worker in workers.items():
            text = f"the worker's process has ended or hangs: {failed.get(name)}"
            kernels |= done.get(name) or dict.fromkeys(worker.devices, KernelResult("died", text))
        return kernels, failed

    def _transfer(
        self, pairs: Sequence[Pair], computing: Container[str | int], limit: float
    ) -> list[Transfer]:
        """Let all pairs transfer data at the same time, after short transfers, which make their connections."""
        if not pairs:
            return []
        made: list[Transfer] = []
        data: list[tuple[Future[Any], Future[Any]]] = []
        for place, (sender, receiver) in enumerate(pairs):
            on_device = sender.name in computing and receiver.name in computing
            size = transfer_size(self._plan, on_device=on_device)
            made.append(Transfer(sender, receiver, size, on_device))
            few = self._submit(sender, tasks.make_data, place, WARM_UP, on_device)
            data.append((few, self._submit(sender, tasks.make_data, place, size, on_device)))
        for sent in zip(*data, strict=True):
            futures = {
                place: self._submit(made[place].receiver, tasks.receive, one, one.key, place)
                for place, one in enumerate(sent)
            }
            done, failed = self._results(futures, limit)
        for place, found in done.items():
            error = "" if found.right else "the received data differ from the sent data"
            made[place] = replace(made[place], on_device=found.on_device, seconds=found.seconds, error=error)
        return [replace(one, error=failed.get(place, one.error)) for place, one in enumerate(made)]

    def _last_looks(
        self, usable: Sequence[WorkerPlan]
    ) -> Iterator[tuple[WorkerPlan, tuple[float, dict[str, str]]]]:
        """The results of `tasks.last_look`, of the workers that respond."""
        found, _ = self._results(
            {one.name: self._submit(one, tasks.last_look) for one in usable}, timeouts.CHECK_TASKS
        )
        return ((one, found[one.name]) for one in usable if one.name in found)

    def _submit(self, worker: WorkerPlan, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._client.submit(function, *arguments, workers=[worker.name], pure=False)

    def _left(self, limit: float) -> float:
        """Seconds until `limit` seconds after the beginning of all rounds."""
        return max(0.0, self._began + limit - time.monotonic())

    def _results(
        self, futures: Mapping[Item, Future[Any]], limit: float
    ) -> tuple[dict[Item, Any], dict[Item, str]]:
        """The results of those that end within `limit` seconds of the beginning of all rounds, and why there is none."""
        from distributed import as_completed

        names = {future: name for name, future in futures.items()}
        done = dict[Item, Any]()
        failed = dict.fromkeys(futures, f"no result within {limit:.0f} s")
        completed = as_completed(
            futures.values(),
            loop=self._client.loop,
            with_results=True,
            raise_errors=False,
            timeout=self._left(limit),
        )
        with contextlib.suppress(TimeoutError):
            for future, result in completed:
                if future.status == "finished":
                    done[names[future]] = result
                    del failed[names[future]]
                else:  # the type, the error and its traceback, or one that it was cancelled with
                    failed[names[future]] = described(result[1] if isinstance(result, tuple) else result)
        return {name: done[name] for name in futures if name in done}, failed
