"""How the start grows with the number of ranks: plan, gather and scatter of up to 65,536 emulated ranks, and real jobs.

    python benchmarks/scale.py --join 300 --json benchmarks/results/scale.json --plot benchmarks/results/scale.png
    python benchmarks/scale.py --sizes --register 1000 3000 --json benchmarks/results/scale-register.json
    python benchmarks/scale.py --sizes --real 16 32 64 128 --limit --json benchmarks/results/scale-real.json

Meeting and coordinator do without MPI and network: they receive the messages of ranks that do not exist, and their own are
sealed or coded as in a job, so that bytes and CPU seconds are those of rank 0 and of its agent, less MPI and TLS. The exponent is
the slope between two sizes (1 is linear), of the best of three runs.

``--register N`` connects the agents of N ranks, all in one process, to a hub in another one, over TLS: CPU time of the hub's
process for each agent until all have registered, and from there until all know that the cluster is up. ``--join N`` measures the
scheduler's CPU time for each worker that registers over TLS.

``--real`` starts jobs of so many ranks here, with one CPU worker each, which must come up, compute, end with code 0: seconds
until the client sees all workers, and the rate at which the scheduler took them, from its own records. ``--limit`` measures a
baseline before each: as many ranks that only import what an agent imports (its fork server is forked from it).

Exit code 1: a step grows faster than linearly, or a real job failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import multiprocessing
import secrets
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import (
    ALONE,
    COLOURS,
    Job,
    become_reaper,
    cluster,
    default_launcher,
    drawing,
    introduce,
    machine,
    middle,
    parser_for,
    save,
    write,
)

from dask_gpu_mpi.agent.hub import Connection, Hub, encode, tls_context
from dask_gpu_mpi.agent.scheduler import run_scheduler
from dask_gpu_mpi.base.plain_data import from_plain, pack, unpack
from dask_gpu_mpi.base.streams import raise_descriptor_limit
from dask_gpu_mpi.base.timeline import Timeline
from dask_gpu_mpi.machine.inventory import Inventory, hypothetical_job
from dask_gpu_mpi.mpi.world import World
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.network.interfaces import Interface
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.coordinator import Coordinator
from dask_gpu_mpi.startup.meeting import Hello, Invitation, KeyPair, Meeting, listen
from dask_gpu_mpi.startup.messages import (
    COORDINATOR,
    PAYLOADS,
    Cluster,
    Event,
    Kind,
    Registration,
    SchedulerSettings,
)
from dask_gpu_mpi.startup.transport import AT_ONCE, connection_settings

#: A CPU worker on each rank, on nodes with GPUs too.
CPU = ("--worker-class", "distributed.Nanny", "--nthreads", "1")
SIZES = (64, 512, 4096, 16384, 65536)
RANKS_PER_HOST = GPUS_PER_HOST = 4
RUNS = 3
#: Steps shorter than this are not judged: a slope of noise.
SHORTEST = 0.1
#: A slope that counts as linear, measured.
LINEAR = 1.25
SCRIPT = """
from distributed import Client
with Client() as client:
    client.wait_for_workers(count)
    note("ready")
    joined = sorted(t for t, event in client.get_events("all") if event.get("action") == "add-worker")
    right = client.gather(client.map(abs, range(10 * count))) == list(range(10 * count))
    seen = len(client.scheduler_info(n_workers=-1)["workers"])
    note("result", seen=seen, right=right, joined=len(joined), joining_s=joined[-1] - joined[0] if joined else 0.0)
note("last")
"""
IMPORTS = """
import gc, importlib
gc.disable()
from dask_gpu_mpi.agent.main import PRELOAD, PRELOAD_LATER
for name in (*PRELOAD, *PRELOAD_LATER):
    importlib.import_module(name)
"""


#: What the scheduler's rank reports.
ADDRESS = ("tls://10.0.0.1:40000", "http://localhost:8787/status")
#: An agent's steps, and the address of one of its workers.
READY: tuple[list[Any], str] = ([], "tls://10.0.0.1:40001")
#: The step that an agent reports before it registers.
STEP = "inspecting its cores, memory and networks, and the local directory"


def registration_of(inventory: Inventory) -> Registration:
    """What a rank of a node with three networks sends."""
    host = inventory.rank // RANKS_PER_HOST
    network = tuple(
        Interface(name, f"10.{number}.{host // 256}.{host % 256}", f"10.{number}.0.0/16")
        for number, name in enumerate(("hsn0", "hsn1", "eth0"))
    )
    shape = tuple((f"option{number}", None) for number in range(10))
    interfaces = (Interface("lo", "127.0.0.1", "127.0.0.0/8"), *network)
    return Registration(inventory.host, inventory, interfaces, None, shape)


def registrations_of(size: int) -> list[Registration]:
    """Those of all ranks."""
    job = hypothetical_job(size // RANKS_PER_HOST, RANKS_PER_HOST, GPUS_PER_HOST, visible="all")
    return [registration_of(inventory) for inventory in job]


def received(data: bytes) -> tuple[str, Any]:
    """A message of an agent, as `Connection.receive` reads it."""
    kind, payload = from_plain(tuple[str, Any], unpack(memoryview(data)[4:]))
    return kind, from_plain(PAYLOADS[kind], payload)


class Gathering(World):
    """Rank 0's world, to which the other ranks have already sent these messages."""

    def __init__(self, size: int, waiting: list[tuple[int, bytes]]) -> None:
        self.size = size
        self._waiting = waiting
        #: Bytes of each message that rank 0 has sent.
        self.sent: list[int] = []

    def send(self, rank: int, data: bytes) -> None:
        """As in the base class."""
        self.sent.append(len(data))

    def receive(self) -> list[tuple[int, bytes]]:
        """As in the base class."""
        found, self._waiting = self._waiting, []
        return found


def meet(registrations: list[Registration], config: dict[str, Any]) -> tuple[float, list[int]]:
    """Rank 0's part of the meeting: keys, and the invitation to each rank; CPU seconds, and bytes of its messages."""
    hellos = [
        Hello(each.host, KeyPair().public, each.inventory.boot_id, each.interfaces) for each in registrations
    ]
    waiting = [(rank, pack([Kind.HELLO, hello])) for rank, hello in enumerate(hellos) if rank != COORDINATOR]
    world = Gathering(len(hellos), waiting)
    begun = time.process_time()
    meeting = Meeting(world, hellos[COORDINATOR])
    meeting.receive()
    meeting.send_all(Kind.ENTER, Invitation("10.0.0.1", 40000, config))
    seconds = time.process_time() - begun
    if meeting.missing:
        raise RuntimeError(f"missing: {meeting.missing[:10]}")
    return seconds, world.sent


def simulate(size: int) -> dict[str, Any]:
    """Start a cluster of `size` ranks that do not exist; CPU seconds and bytes of each step on rank 0."""
    registrations = registrations_of(size)
    credentials = make_credentials()
    steps: dict[str, dict[str, Any]] = {}

    def note(name: str, begun: float | None, messages: list[int]) -> None:
        seconds = 0.0 if begun is None else time.process_time() - begun
        steps[name] = {"seconds": seconds, "bytes": sum(messages), "largest": max(messages, default=0)}

    #: Of each message: kind, rank, bytes.
    sent: list[tuple[str, int, int]] = []

    def send(rank: int, kind: str, payload: Any) -> None:
        # rank 0's agent has the hub
        sent.append((kind, rank, len(encode(kind, payload)) if rank != COORDINATOR else 0))

    def lengths(*kinds: Kind) -> list[int]:
        return [length for kind, _, length in sent if kind in kinds]

    messages = [encode(Kind.REGISTRATION, each) for each in registrations]
    hosts = {rank: each.host for rank, each in enumerate(registrations)}
    coordinator = Coordinator(
        hosts, Options(), Timeline("agent"), send=send, deadline=1e9, credentials=credentials
    )
    gc.collect()
    gc.disable()  # as an agent has it during the start
    seconds, invitations = meet(registrations, credentials)
    note("meet", None, invitations)
    steps["meet"]["seconds"] = seconds
    begun = time.process_time()
    for rank, message in enumerate(messages[:-1]):
        coordinator.handle(Event(rank, *received(message)), 1.0)
    note("gather", begun, [len(data) for data in messages])
    begun = time.process_time()
    coordinator.handle(Event(size - 1, *received(messages[-1])), 1.0)
    note("plan", begun, [])
    begun = time.process_time()
    coordinator.handle(Event(COORDINATOR, Kind.ADDRESS, ADDRESS), 2.0)
    note("scatter", begun, lengths(Kind.START))
    begun = time.process_time()
    for rank in range(size):
        coordinator.handle(Event(rank, Kind.READY, READY), 3.0)
    note("prove", begun, lengths(Kind.CONNECT))
    begun = time.process_time()
    for rank in [rank for kind, rank, _ in sent if kind == Kind.CONNECT]:
        coordinator.handle(Event(rank, Kind.REACHED, {}), 3.0)
    note("go", begun, lengths(Kind.UP))
    gc.enable()
    if not isinstance(coordinator.outcome, Cluster):
        raise RuntimeError(f"{size} ranks: {coordinator.outcome}")
    note("client's plan", None, [])
    steps["client's plan"]["largest"] = len(encode(Kind.UP, coordinator.outcome))
    return {
        "ranks": size,
        "workers": len(coordinator.plan.workers) if coordinator.plan else 0,
        "steps": steps,
    }


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The shortest time of each step: other load on the machine only makes it longer."""
    for name, step in runs[0]["steps"].items():
        step["seconds"] = min(run["steps"][name]["seconds"] for run in runs)
    return runs[0]


def exponents(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Slope of each step between neighbouring sizes; steps that are too short have none."""
    found: dict[str, dict[str, float]] = {}
    for small, large in itertools.pairwise(rows):
        grown = math.log(large["ranks"] / small["ranks"])
        for name, step in large["steps"].items():
            for key, least in (("seconds", SHORTEST), ("bytes", 1)):
                before = small["steps"][name][key]
                if before >= least:
                    slope = round(math.log(step[key] / before) / grown, 2)
                    found.setdefault(f"{name}, {key}", {})[f"{small['ranks']}-{large['ranks']}"] = slope
    return found


def answers(kind: str) -> Iterator[tuple[Kind, Any]]:
    """What an agent answers the hub."""
    if kind == Kind.SCHEDULER:
        yield Kind.ADDRESS, ADDRESS
    elif kind == Kind.START:
        yield Kind.READY, READY
    elif kind == Kind.CONNECT:
        yield Kind.REACHED, {}


def lead(size: int, config: dict[str, Any], pipe: Any) -> None:
    """The process with the hub: as rank 0's agent, but its own registration comes last. Sends its port, then CPU seconds."""
    raise_descriptor_limit()
    registrations = registrations_of(size)
    hosts = {rank: each.host for rank, each in enumerate(registrations)}
    sock = listen("127.0.0.1")
    gc.collect()
    gc.disable()  # as an agent has it during the start

    async def work() -> list[float]:
        registered = asyncio.Event()
        up = asyncio.Event()
        waiting = size - 1
        lost: list[int] = []

        def on_event(event: Event) -> None:
            nonlocal waiting
            coordinator.handle(event, time.monotonic())
            if event.kind == Kind.REGISTRATION:
                waiting -= 1
                if not waiting:
                    registered.set()
            if coordinator.outcome is not None:
                up.set()

        def local(kind: str, payload: Any) -> None:
            for answer in answers(kind):
                hub.receive_local(*answer)

        hub = Hub(size, local, on_event, lost.append)
        coordinator = Coordinator(
            hosts, Options(), Timeline("agent"), send=hub.send, deadline=math.inf, credentials=config
        )
        marks = [time.process_time()]
        await hub.serve(sock, config)
        pipe.send(sock.getsockname()[1])
        await registered.wait()
        marks.append(time.process_time())
        hub.receive_local(Kind.REGISTRATION, registrations[COORDINATOR])
        await up.wait()
        await hub.close(60.0)
        marks.append(time.process_time())
        if not isinstance(coordinator.outcome, Cluster):
            raise RuntimeError(f"{coordinator.outcome}, lost: {lost[:10]}")
        return marks

    pipe.send(asyncio.run(work()))


def register(size: int, deadline: float) -> dict[str, Any]:
    """CPU time of the hub's process for each of `size` - 1 agents that connect at the same time, over TLS."""
    raise_descriptor_limit()
    config = make_credentials()
    messages = [encode(Kind.REGISTRATION, each) for each in registrations_of(size)]
    step = encode(Kind.STEP, STEP)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=lead, args=(size, config, other), daemon=True)
    process.start()
    other.close()
    port = pipe.recv()

    async def agent(rank: int, tls: ssl.SSLContext) -> None:
        streams = await asyncio.open_connection("127.0.0.1", port, ssl=tls, ssl_handshake_timeout=deadline)
        connection = Connection(*streams)
        connection.send(encode(Kind.ENTERED, (rank, False)) + step + messages[rank])
        kinds = set()
        with contextlib.suppress(EOFError):  # the hub closes
            while True:
                kind, _ = await connection.receive()
                kinds.add(kind)
                for answer in answers(kind):
                    connection.send(encode(*answer))
        connection.close()
        if Kind.UP not in kinds:
            raise RuntimeError(f"rank {rank} was not told that the cluster is up")

    async def work() -> None:
        tls = tls_context(config, server=False)
        async with asyncio.timeout(deadline), asyncio.TaskGroup() as group:
            for rank in range(1, size):
                group.create_task(agent(rank, tls))

    begun = time.perf_counter()
    try:
        asyncio.run(work())
        seconds = time.perf_counter() - begun
        marks = pipe.recv() if pipe.poll(60) else []
    finally:
        process.join(10)
        process.kill()
    cpu = [1e3 * (end - start) / (size - 1) for start, end in itertools.pairwise(marks)]
    return {
        "agents": size - 1,
        "seconds": round(seconds, 2),
        "register_cpu_ms_each": round(cpu[0], 3),
        "rest_of_start_cpu_ms_each": round(cpu[1], 3),
    }


#: Steps by which a worker joins, each with a connection of its own: its nanny, the worker, its first heartbeat.
JOINING = ("nanny", "worker", "heartbeat")


def serve(options: Options, settings: SchedulerSettings, pipe: Any) -> None:
    """Run the scheduler as a child of a fork server does, whose imports are not scanned for garbage."""
    logging.getLogger("distributed").setLevel(options.log_level.upper())
    gc.freeze()
    run_scheduler(options, settings, pipe)


async def joined(address: str, count: int, cpu: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Join as `count` workers that speak Dask's protocol and do nothing else: all nannies, all workers, all heartbeats."""
    from distributed import Security, Worker, rpc
    from distributed.comm import connect
    from distributed.protocol.pickle import dumps
    from distributed.versions import get_versions

    from dask_gpu_mpi.gang.scheduler_plugin import Gangs
    from dask_gpu_mpi.workers.plugins import Figures

    arguments = Security().get_connection_args("worker")
    async with rpc(address, connection_args=arguments) as scheduler:
        await scheduler.register_scheduler_plugin(plugin=dumps(Gangs()), name=Gangs.name, idempotent=True)
    with tempfile.TemporaryDirectory() as folder:
        async with Worker(
            address, nthreads=1, dashboard=False, local_directory=folder, plugins={Figures(())}
        ) as worker:
            metrics, extra = await worker.get_metrics(), await worker.get_startup_information()
            await worker.close(nanny=False)
    comms: list[list[Any]] = [[] for _ in range(count)]

    def address_of(number: int, port: int) -> str:
        host = number // RANKS_PER_HOST
        return f"tls://10.0.{host // 250}.{host % 250 + 1}:{port + number % RANKS_PER_HOST}"

    def message(step: str, number: int) -> dict[str, Any]:
        at = {"address": address_of(number, 40000)}
        if step == "nanny":
            return {"op": "register_nanny", "address": address_of(number, 50000)}
        if step == "heartbeat":
            return {
                "op": "heartbeat_worker", "reply": True, "now": time.time(), "metrics": metrics, "executing": {},
                "extensions": {}, **at,
            }  # fmt: skip
        return {
            "op": "register-worker", "reply": False, "status": "running", "nthreads": 1, "name": f"{number // 4}-{number % 4}",
            "now": time.time(), "resources": {"GPU": 1.0}, "memory_limit": 1 << 34, "local_directory": "/tmp/scratch/worker",
            "services": {}, "nanny": address_of(number, 50000), "pid": 1000 + number, "versions": get_versions(),
            "metrics": metrics, "extra": extra, "stimulus_id": f"worker-connect-{time.time()}",
            "server_id": f"Worker-{number}", **at,
        }  # fmt: skip

    turns = asyncio.Semaphore(AT_ONCE)

    async def take(step: str, number: int) -> None:
        async with turns:
            await take_turn(step, number)

    async def take_turn(step: str, number: int) -> None:
        comm = await connect(address, **arguments)
        comms[number].append(comm)
        await comm.write(message(step, number))
        answer = await comm.read()
        if answer["status"] != "OK":
            raise RuntimeError(f"{step}: {answer}")
        if step == "heartbeat":  # its worker is up: the nanny leaves
            await comms[number][0].write({"status": "ok"})
            await comms[number][0].close()

    found = {}
    for step in JOINING:
        begun, before = time.perf_counter(), cpu()
        await asyncio.gather(*(take(step, number) for number in range(count)))
        seconds = time.perf_counter() - begun
        await asyncio.sleep(0.2)  # the last connections of nannies close
        found[step] = {
            "seconds": round(seconds, 3),
            "scheduler_cpu_ms_each": round(1e3 * (cpu() - before) / count, 3),
        }
    for comm in itertools.chain.from_iterable(comms):
        comm.abort()
    return found


def join(count: int, deadline: float) -> dict[str, Any]:
    """CPU time of a job's scheduler for each of `count` workers that register at the same time, over TLS."""
    import dask
    import psutil

    credentials = make_credentials()
    # all workers come before the first heartbeats, which on a busy machine is later than Dask waits for one
    credentials |= {
        "distributed.admin.system-monitor.gil.enabled": False,
        "distributed.scheduler.worker-ttl": None,
    }
    config = {**credentials, **connection_settings(count, 0.5)}
    settings = SchedulerSettings("127.0.0.1", config, secrets.token_urlsafe(32))
    # with the recorder of a report; the port of the dashboard is open, and its pages follow the first client
    options = Options(report="report.json", dashboard_address="127.0.0.1:0")
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(options, settings, other), daemon=True)
    process.start()
    answer = pipe.recv() if pipe.poll(60) else None
    if answer is None or answer[0] != Kind.SCHEDULER_UP:
        raise RuntimeError(f"the scheduler did not start: {answer}")

    def cpu() -> float:
        times = psutil.Process(process.pid).cpu_times()
        return float(times.user + times.system)

    async def work() -> dict[str, dict[str, float]]:
        logging.getLogger("distributed").setLevel("ERROR")
        with dask.config.set(config):
            return await asyncio.wait_for(joined(answer[1][0], count, cpu), deadline)

    try:
        steps = asyncio.run(work())
    finally:
        pipe.send((Kind.CLOSE, None))
        process.join(30)
    return {
        "workers": count,
        "steps": steps,
        "scheduler_cpu_ms_each": round(sum(step["scheduler_cpu_ms_each"] for step in steps.values()), 2),
    }


def real(ranks: int, launcher: list[str], deadline: float) -> dict[str, Any]:
    """One job of this many ranks: seconds until it is ready and in total, registrations, and whether it succeeded."""
    with Job(SCRIPT, ranks) as job:
        job.start(cluster(launcher, ranks, *CPU, job.script))
        ready = job.wait("ready", limit=deadline)
        result = job.wait("result", limit=deadline if ready else 0.0)
        ended = job.wait_for_end(deadline if result else 0.0)
        seconds = time.time() - job.started
        words = job.output(1 << 20).splitlines()
        noise = [line for line in words if not line.startswith("dask_gpu_mpi: ")]
        right = bool(result and result["right"] and result["seen"] == ranks and ended and job.code == 0)
        if not right or noise:
            sys.stderr.write(f"--- {ranks} ranks: {result}\n{job.output(3000)}\n")
        rate = (result["joined"] - 1) / result["joining_s"] if result and result["joining_s"] else None
        return {
            "ranks": ranks,
            "ready_s": ready and round(ready["time"] - job.started, 2),
            "seconds": round(seconds, 2),
            "registrations_per_s": rate and round(rate, 1),
            "code": job.code,
            "right": right and not noise,
            "noise": noise[:5],
        }


def limit(ranks: int, launcher: list[str], deadline: float) -> float | None:
    """Seconds until as many ranks have imported what an agent imports."""
    with Job(IMPORTS + ALONE) as job:
        job.start([*launcher, "-np", str(ranks), sys.executable, str(job.script)])
        ready = job.wait("ready", ranks, deadline)
        job.go_on()
        job.wait_for_end()
        if ready is None:
            sys.stderr.write(f"--- {ranks} ranks that import:\n{job.output()}\n")
        return None if ready is None else round(ready["time"] - job.started, 2)


def jobs(ranks: int, launcher: list[str], options: Any) -> dict[str, Any]:
    """Real jobs of this many ranks and their baseline, interleaved."""
    limits, rows = [], []
    for _ in range(options.rounds):
        if options.limit:
            limits.append(limit(ranks, launcher, options.deadline))
        rows.append(real(ranks, launcher, options.deadline))
    pairs = zip(rows, limits, strict=False)
    ratios = [row["ready_s"] / least for row, least in pairs if row["ready_s"] and least]
    return {
        "ranks": ranks,
        **{key: middle([row[key] for row in rows]) for key in ("ready_s", "seconds", "registrations_per_s")},
        "limit_s": middle(limits),
        "ready_over_limit": middle(ratios),
        "right": all(row["right"] for row in rows),
        "runs": rows,
        "limits_s": limits,
    }


def plot(rows: list[dict[str, Any]], reals: list[dict[str, Any]], file: Path | None) -> None:
    """Seconds and bytes of each step by the number of ranks; real jobs beside their baseline."""
    pyplot = drawing(file)
    panels = 2 * bool(rows) + bool(reals)
    if pyplot is None or file is None or not panels:
        return
    figure, axes = pyplot.subplots(1, panels, figsize=(4.2 * panels, 3.4), squeeze=False)
    rest = list(axes.flat)
    for key, title in (("seconds", "seconds on the head rank"), ("bytes", "bytes through the head rank")):
        if not rows:
            break
        axis = rest.pop(0)
        for number, name in enumerate(rows[0]["steps"]):
            points = [
                (row["ranks"], row["steps"][name][key]) for row in rows if row["steps"][name][key] > 1e-4
            ]
            if len(points) > 1:
                axis.loglog(*zip(*points, strict=True), "o-", ms=3, label=name, color=COLOURS[number])
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("simulated ranks")
        axis.legend(fontsize=7, frameon=False)
    if reals:
        axis = rest.pop(0)
        for number, (key, name) in enumerate((("ready_s", "all workers"), ("limit_s", "imports only"))):
            points = [(row["ranks"], row[key]) for row in reals if row[key] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", ms=4, label=name, color=COLOURS[number])
        axis.set_title("real jobs on this host: seconds from the launch", fontsize=10, loc="left")
        axis.set_xlabel("ranks")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, frameon=False)
    save(figure, file)


def main() -> int:
    """Measure, print, write."""
    parser = parser_for(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="simulated ranks")
    parser.add_argument("--real", type=int, nargs="*", default=[], help="ranks of real jobs")
    parser.add_argument(
        "--register",
        type=int,
        nargs="*",
        default=[],
        help="ranks whose agents connect to one hub at the same time",
    )
    parser.add_argument(
        "--join", type=int, nargs="*", default=[], help="workers that join one scheduler at the same time"
    )
    parser.add_argument("--limit", action="store_true", help="with --real: ranks that only import, as well")
    parser.add_argument("--rounds", type=int, default=1, help="of real jobs; medians")
    parser.add_argument(
        "--deadline", type=float, default=300.0, help="seconds for a real job, or all that join"
    )
    options = parser.parse_args()
    launcher = default_launcher()
    become_reaper()
    document: dict[str, Any] = {"benchmark": "scale", **machine(launcher)}
    introduce(document)
    rows = [best([simulate(size) for _ in range(RUNS)]) for size in options.sizes]
    slopes = exponents(rows)
    if rows:
        print(f"{'ranks':>7} {'step':14} {'seconds':>9} {'bytes':>12} {'largest message':>16}")
    for row in rows:
        for name, step in row["steps"].items():
            print(
                f"{row['ranks']:7} {name:14} {step['seconds']:9.3f} {step['bytes']:12} {step['largest']:16}"
            )
    for name, slope in slopes.items():
        print(f"exponent of {name}: {slope}")
    worse = [name for name, slope in slopes.items() if any(value > LINEAR for value in slope.values())]
    print("worse than linear:", ", ".join(worse) or "nothing")
    document |= {"simulated": rows, "exponents": slopes, "worse_than_linear": worse}
    document["register"] = []
    for count in options.register:
        runs = [register(count, options.deadline) for _ in range(RUNS)]
        document["register"].append(min(runs, key=lambda run: run["register_cpu_ms_each"]) | {"runs": runs})
        print(document["register"][-1], flush=True)
    document["join"] = []
    for count in filter(None, options.join):
        document["join"].append(join(count, options.deadline))
        print(document["join"][-1], flush=True)
    document["real"] = []
    for ranks in options.real:
        row = jobs(ranks, launcher, options)
        document["real"].append(row)
        print(
            ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("runs", "limits_s")),
            flush=True,
        )
        write(options.json, document)
    write(options.json, document)
    plot(rows, document["real"], options.plot)
    return int(bool(worse) or not all(row["right"] for row in document["real"]))


if __name__ == "__main__":
    sys.exit(main())
