"""The summary of a report: were the GPUs busy, where did the time go, what to change (docs/report.md).

Pure functions of the report's data, which `view.report_data` puts together. First the figures are made (`_usage`), then lines
of them; `RULES` is the list of the functions with advice. The job prints the lines with ``--summary`` (`printed`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dask.utils import natural_sort_key

from dask_gpu_mpi.base.text import counted, format_bytes
from dask_gpu_mpi.machine.nvidia import INSPECT_COMMAND, reasons_of
from dask_gpu_mpi.view.heartbeat import MOST_GPUS, of_gpu

Data = Mapping[str, Any]

#: The uses of a worker's time while the script runs, with their names in lines. The shares of one worker add up to 1.
CALLED = {
    "computing": "computing",
    "data": "waiting for data",
    "tasks": "waiting for tasks",
    "idle": "idle",
    "absent": "not there",
}
SHARES = tuple(CALLED)
#: The part of the time in which a worker has a task, and neither computes nor waits for data.
SCHEDULER = "scheduler and its messages"
#: Prefixes of tasks that are listed.
MOST_PREFIXES = 5

#: Columns of a printed line, which begins with "dask_gpu_mpi: summary: ".
PRINTED_COLUMNS = 100 - len("dask_gpu_mpi: summary: ")

# Thresholds of the rules. Shares are of the script's time.

#: Seconds of the script, and bytes of data, below which there is no advice.
LEAST_SECONDS, LEAST_BYTES = 5.0, 256 << 20
#: Waiting for the scheduler, for data, for tasks; no task at all.
MOST_SCHEDULER, MOST_DATA, MOST_WAITING, MOST_IDLE = 0.15, 0.15, 0.15, 0.3
#: Seconds of tasks that are short.
SHORT_TASK = 0.1
#: A straggler is a task that takes so many times the mean of its prefix, and this share of the script's time.
STRAGGLER, STRAGGLER_SHARE = 4.0, 0.1
#: Least use of the GPUs, if their workers compute for this share.
LEAST_GPU_USE, COMPUTING = 0.2, 0.4
#: Share of the time with clocks that are lowered by heat or hardware.
MOST_SLOWED = 0.05


def summarize(data: Data) -> dict[str, Any]:
    """The figures, and the lines for each question; no figures without a record of the scheduler."""
    usage = _usage(data)
    data = {**data, "summary": usage}
    lines = {"busy": _busy_lines(usage), "where": _where_lines(usage), "change": _advice(data)}
    return {**usage, "lines": lines}


def headline(data: Data) -> str:
    """The job in one line.

    >>> plan = {"workers": [{"device": "GPU-1,GPU-2"}], "hosts": [{}], "world_size": 2}
    >>> job = {"ended_after": 62.25, "how": "the script ended", "exit_code": 0}
    >>> headline({"plan": plan, "job": job, "record": None})
    '1 worker on 1 host, 2 GPUs, 2 ranks; 62.2 s; the script ended, exit code 0'
    """
    plan, job, record = data["plan"], data["job"], data["record"]
    gpus = len({gpu for worker in plan["workers"] for gpu in (worker["device"] or "").split(",") if gpu})
    where = (
        f"{counted(len(plan['workers']), 'worker')} on {counted(len(plan['hosts']), 'host')}, "
        f"{counted(gpus, 'GPU')}, {counted(plan['world_size'], 'rank')}"
    )
    code = "" if job["exit_code"] is None else f", exit code {job['exit_code']}"
    tasks = "" if record is None else f"; {counted(record['tasks']['seen'], 'task')}"
    return f"{where}; {job['ended_after']:.1f} s{tasks}; {job['how']}{code}"


def printed(data: Data) -> list[str]:
    """The lines of the summary for the end of the job's output."""
    lines = data["summary"]["lines"]
    texts = [
        *lines["busy"],
        f"time: {'; '.join(lines['where']) or 'not known'}",
        *(f"change: {line}" for line in lines["change"] or ["nothing was found"]),
    ]
    return [
        f"summary: {line}".replace("\xa0", " ")
        for text in texts
        for line in textwrap.wrap(
            text.replace(" %", "\xa0%"),
            PRINTED_COLUMNS,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


# -- were the GPUs busy, and where did the time go -------------------------------------------------------------


def _usage(data: Data) -> dict[str, Any]:
    """The shares of each worker, their mean, and the parts of the time of all."""
    record = data["record"]
    if record is None or not record["workers"]:
        nothing: dict[str, Any] = {"seconds": 0.0, "threads": 0, "kind": None, "worst": None, "energy": None}
        return nothing | {"mean": {}, "workers": [], "where": []}
    begin = max(record["since"], data["job"]["ready_after"])
    seconds = round(max(record["until"] - begin, 0.001), 3)
    kinds = {str(worker["name"]): worker["kind"] for worker in data["plan"]["workers"]}
    workers = [
        {**_shares(worker, record, begin, seconds), "kind": kinds.get(worker["name"], "cpu")}
        for worker in sorted(record["workers"], key=lambda worker: natural_sort_key(worker["name"]))
    ]
    # in a job with GPUs, the question is not about CPU workers
    kind = "gpu" if any(worker["kind"] == "gpu" for worker in workers) else "cpu"
    asked = [worker for worker in workers if worker["kind"] == kind]
    readings = [joules for worker in record["workers"] for joules in worker["energy"] if joules is not None]
    all_threads = sum(worker["threads"] for worker in workers)
    return {
        "seconds": seconds,
        "threads": sum(worker["threads"] for worker in asked),
        "kind": kind,
        "worst": min(asked, key=lambda worker: worker["computing"])["name"],
        "energy": round(sum(readings), 1) if readings else None,
        "mean": _mean(asked),
        "workers": workers,
        "where": _where(data, _mean(workers), begin, seconds, all_threads),
    }


def _shares(worker: Data, record: Data, begin: float, seconds: float) -> dict[str, Any]:
    """The shares of one worker. A thread that has a task, but neither computes nor waits for data, waits for the scheduler.

    The sums may be of slightly different times, so each share is at most what those before it have left.
    """
    spent, threads = worker["seconds"], max(1, worker["threads"])
    of_all = seconds * threads
    left = 1.0

    def cut(part: float) -> float:
        nonlocal left
        share = min(left, max(0.0, part))
        left -= share
        return share

    waits = (spent["transfer"] + spent["disk"]) / of_all
    computing, data = cut(spent["computing"] / of_all), cut(waits)
    scheduler = cut(spent["assigned"] / of_all - computing - data)
    absent = cut(1.0 - spent["present"] / seconds)
    idle = cut(1.0 - record["busy"]["seconds"] / seconds)
    shares = {
        "computing": computing,
        "data": data,
        "tasks": left + scheduler,
        "idle": idle,
        "absent": absent,
        "scheduler": scheduler,
        "disk": data * spent["disk"] / of_all / waits if waits else 0.0,
        "gpu": _gpu_use(record["series"], worker["name"], begin),
    }
    return {
        "name": worker["name"],
        "host": worker["host"],
        "threads": threads,
        **{name: None if share is None else round(share, 4) for name, share in shares.items()},
    }


def _gpu_use(series: Data, worker: str, begin: float) -> float | None:
    """The mean use of a worker's GPUs since then; None: not known."""
    columns = series["workers"].get(worker, {})
    known = [
        value
        for place in range(MOST_GPUS)
        for at, value in zip(series["times"], columns.get(of_gpu("gpu", place), ()), strict=False)
        if value is not None and at >= begin
    ]
    return sum(known) / len(known) / 100 if known else None


def _mean(workers: Sequence[Data]) -> dict[str, Any]:
    """The mean share of some workers, each as often as it has threads."""
    mean = {}
    for name in (*SHARES, "scheduler", "disk", "gpu"):
        known = [(worker[name], worker["threads"]) for worker in workers if worker[name] is not None]
        threads = sum(number for _, number in known)
        mean[name] = round(sum(share * number for share, number in known) / threads, 4) if known else None
    return mean


def _where(data: Data, mean: Data, begin: float, seconds: float, threads: int) -> list[dict[str, Any]]:
    """Parts of the script's time, as a mean of all threads of workers, the largest first; and the start before it."""
    record = data["record"]
    parts = {
        **_computing_parts(record["prefixes"], mean["computing"], seconds * threads),
        "transfers": mean["data"] - mean["disk"],
        "reading spilled data": mean["disk"],
        SCHEDULER: mean["scheduler"],
        "too few tasks": mean["tasks"] - mean["scheduler"],
        "workers not there": mean["absent"],
        **_idle_parts(record["busy"], mean["idle"], begin, seconds),
    }
    found = [
        {"what": what, "share": round(share, 4), "seconds": round(share * seconds, 3)}
        for what, share in sorted(parts.items(), key=lambda part: -part[1])
        if share >= 0.0005
    ]
    start = data["job"]["ready_after"]
    return [*found, {"what": "before the cluster was ready", "share": None, "seconds": start}]


def _computing_parts(prefixes: Sequence[Data], computing: float, seconds: float) -> dict[str, float]:
    """The share of computing, divided by prefixes of tasks; `seconds`: the time of all threads."""
    by_prefix = {each["name"]: each["seconds"].get("compute", 0.0) for each in prefixes}
    # tasks that still run, or have run before the record, are in one of the two only
    of_all = max(sum(by_prefix.values()), computing * seconds)
    largest = sorted(by_prefix, key=lambda name: -by_prefix[name])[:MOST_PREFIXES]
    parts = {f"tasks: {name}": computing * by_prefix[name] / of_all for name in largest if of_all}
    return parts | {"other and unfinished tasks": computing - sum(parts.values())}


def _idle_parts(busy: Data, idle: float, begin: float, seconds: float) -> dict[str, float]:
    """The share of idle time, divided into that before, between and after the job's tasks."""
    before = seconds if busy["first"] is None else min(seconds, max(0.0, busy["first"] - begin))
    after = 0.0 if busy["last"] is None else max(0.0, begin + seconds - busy["last"])
    between = max(0.0, seconds * idle - before - after)
    parts = {"no task yet": before, "no more tasks": after, "no tasks between": between}
    scale = idle / (sum(parts.values()) or 1.0)
    return {name: value * scale for name, value in parts.items()}


def _busy_lines(usage: Data) -> list[str]:
    if not usage["workers"]:
        return ["the scheduler has no record of the workers"]
    mean, kind = usage["mean"], usage["kind"]
    workers = [worker for worker in usage["workers"] if worker["kind"] == kind]
    of = f"{counted(len(workers), f'{kind.upper()} worker')}, {usage['seconds']:.1f} s of the script"
    lines = [f"mean of {of}: {_in_words(mean)}"]
    if len(workers) > 1:
        worst = next(worker for worker in workers if worker["name"] == usage["worst"])
        lines.append(f"least: worker {worst['name']} on {worst['host']}: {_in_words(worst)}")
    if (joules := usage["energy"]) is not None:
        lines.append(f"energy of the GPUs: {_energy(joules)}")
    return lines


def _energy(joules: float) -> str:
    """Energy in words.

    >>> _energy(525.5), _energy(9_000_000)
    ('0.146 Wh (525.5 J)', '2.500 kWh (9,000,000.0 J)')
    """
    number, unit = (joules / 3600, "Wh") if joules < 3_600_000 else (joules / 3_600_000, "kWh")
    return f"{number:,.3f} {unit} ({joules:,.1f} J)"


def _in_words(shares: Data) -> str:
    """The shares of a worker or of the mean.

    >>> _in_words({"computing": 0.5, "data": 0.25, "tasks": 0.25, "idle": 0.0, "absent": 0.0, "gpu": 0.42})
    'computing 50 %, waiting for data 25 %, waiting for tasks 25 %, idle 0 %; GPU in use 42 %'
    """
    parts = [
        f"{CALLED[name]} {_percent(shares[name])}" for name in SHARES if shares[name] or name != "absent"
    ]
    return ", ".join(parts) + ("" if shares["gpu"] is None else f"; GPU in use {_percent(shares['gpu'])}")


def _where_lines(usage: Data) -> list[str]:
    return [
        f"{part['what']}: {part['seconds']:.1f} s"
        + ("" if part["share"] is None else f", {_percent(part['share'])}")
        for part in usage["where"]
        if part["share"] is None or part["share"] >= 0.01
    ]


# -- what to change --------------------------------------------------------------------------------------------


def script_alone(data: Data) -> list[str]:
    """The script works, and its cluster has no task."""
    summary = data["summary"]
    if summary["mean"]["idle"] < MOST_IDLE:
        return []
    if not data["record"]["tasks"]["seen"]:
        return [
            "the workers had no task. Fix: client = Client() before the first compute(), without a cluster of its own"
        ]
    parts = {part["what"]: part["seconds"] for part in summary["where"]}
    told = ", ".join(
        f"{parts[name]:.1f} s {when}"
        for name, when in (
            ("no task yet", "before the first task"),
            ("no tasks between", "between tasks"),
            ("no more tasks", "after the last"),
        )
        if parts.get(name, 0.0) >= 0.05
    )
    return [
        f"the script had no task for the workers for {_percent(summary['mean']['idle'])} of its time: {told}. Fix: compute "
        "several results with one dask.compute(), leave results on the workers (persist), or use fewer workers"
    ]


def too_few_tasks(data: Data) -> list[str]:
    """Workers wait for tasks while others work: one task is long, the last round is not full, or there are few partitions."""
    mean = data["summary"]["mean"]
    lacking = mean["tasks"] - mean["scheduler"]
    if lacking < MOST_WAITING:
        return []
    waited = f"workers waited for tasks for {_percent(lacking)} of the script's time"
    prefixes = [each for each in data["record"]["prefixes"] if each["tasks"]]
    by_time = {each["name"]: each["seconds"].get("compute", 0.0) for each in prefixes}
    largest = max(prefixes, key=lambda each: by_time[each["name"]], default=None)
    if largest is not None and by_time[largest["name"]] >= 0.5 * sum(by_time.values()):
        usual = by_time[largest["name"]] / largest["tasks"]
        line = _straggler(data, largest, usual, waited) or _last_round(data, largest, usual, waited, lacking)
        if line:
            return [line]
    return [
        f"{waited}: fewer tasks could run than there were {_units(data)}. Fix: more and smaller partitions, or fewer workers"
    ]


def _straggler(data: Data, prefix: Data, usual: float, waited: str) -> str:
    """The line if one task of this prefix took far longer than is usual; else empty."""
    longest = _longest(data["record"]["tasks"], prefix["name"])
    if longest < STRAGGLER * usual or longest < STRAGGLER_SHARE * data["summary"]["seconds"]:
        return ""
    return (
        f"one task of {prefix['name']!r} took {_time(longest)}, the mean of {prefix['tasks']} is {_time(usual)}; {waited}. "
        "Fix: partitions of equal size (repartition), or smaller ones"
    )


def _last_round(data: Data, prefix: Data, usual: float, waited: str, lacking: float) -> str:
    """The line if the tasks of this prefix do not fill all threads in their last round, and that explains much; else empty."""
    tasks, threads = prefix["tasks"], data["summary"]["threads"]
    idle = -tasks % threads
    if 2 * idle * usual < lacking * data["summary"]["seconds"] * threads:
        return ""
    when = "at the end" if tasks > threads else "all the time"
    return (
        f"{counted(tasks, 'task')} of {prefix['name']!r} for {_units(data)}: {idle} idle {when}; {waited}. Fix: a multiple "
        f"of {threads} partitions, or many more than {threads}"
    )


def short_tasks(data: Data) -> list[str]:
    """Tasks that are too short for the scheduler."""
    summary = data["summary"]
    if not (tasks := data["record"]["tasks"]["seen"]):
        return []
    parts = {part["what"]: part["share"] for part in summary["where"]}
    scheduler = parts.get(SCHEDULER, 0.0)
    computing = sum(worker["computing"] * worker["threads"] for worker in summary["workers"])
    length = computing * summary["seconds"] / tasks
    if scheduler < MOST_SCHEDULER or length > SHORT_TASK:
        return []
    mean = computing / sum(worker["threads"] for worker in summary["workers"])
    return [
        f"{tasks:,} tasks of {_time(length)}: {_percent(scheduler / (scheduler + mean))} of the time for them is the "
        "scheduler's and its messages'. Fix: larger partitions or chunks, or several items in each task"
    ]


def waited_for_data(data: Data) -> list[str]:
    """Workers wait for data of other workers."""
    waited = data["summary"]["mean"]["data"] - data["summary"]["mean"]["disk"]
    if waited < MOST_DATA:
        return []
    rows = data["record"]["transfers"]["rows"]
    size, number = sum(row["bytes"] for row in rows), sum(row["count"] for row in rows)
    told = f"{format_bytes(size)} in {counted(number, 'transfer')}" if size else counted(number, "transfer")
    fix = "fewer shuffles and joins, columns selected before them, or a faster transport (docs/transports.md)"
    # without a pool UCX maps each piece of memory by itself, again and again
    on_gpus = any(worker["kind"] == "gpu" for worker in data["plan"]["workers"])
    (options,) = (each["value"] for each in data["options"] if each["name"] == "worker_options")
    if on_gpus and "rmm_pool_size" not in options:
        fix = f"a memory pool (worker option rmm_pool_size, docs/gpus.md), {fix}"
    return [
        f"workers waited for data of others for {_percent(waited)} of the script's time: {told}. Fix: {fix}"
    ]


def uneven_data(data: Data) -> list[str]:
    """One worker holds most of the results."""
    held = {
        name: columns["managed"]
        for name, columns in data["record"]["series"]["workers"].items()
        if "managed" in columns
    }
    totals = [sum(filter(None, values)) for values in zip(*held.values(), strict=True)]
    if len(held) < 2 or max(totals, default=0) < LEAST_BYTES:
        return []
    at = totals.index(max(totals))
    largest = max(held, key=lambda name: held[name][at] or 0)
    share = (held[largest][at] or 0) / totals[at]
    if share < min(0.8, 3 / len(held)):
        return []
    return [
        f"one of {len(held)} workers ({largest}) held {_percent(share)} of the data: {format_bytes(int(held[largest][at]))} of "
        f"{format_bytes(int(totals[at]))}, after {data['record']['series']['times'][at]:.0f} s. Fix: read partitions "
        "on the workers instead of sending them, or client.rebalance()"
    ]


def spilled(data: Data) -> list[str]:
    """Data that did not fit."""
    lines = []
    for quantity, where, limit in (
        ("spilled", "to disk", "memory_limit"),
        ("gpu_spilled", "from GPUs", "device_memory_limit"),
        ("cudf_spilled", "from GPUs by cuDF", "rmm_pool_size"),
    ):
        peaks = [worker["peaks"].get(quantity, 0) for worker in data["record"]["workers"]]
        if sum(peaks) < LEAST_BYTES:
            continue
        disk = data["summary"]["mean"]["disk"]
        read = f"; workers waited {_percent(disk)} of the script's time to read it" if disk >= 0.01 else ""
        lines.append(
            f"{format_bytes(int(sum(peaks)))} spilled {where} (sum of the peaks of {sum(map(bool, peaks))} of "
            f"{counted(len(peaks), 'worker')}){read}. Fix: smaller partitions, or a larger limit ({limit})"
        )
    return lines


def unused_gpus(data: Data) -> list[str]:
    """Tasks run, but hardly on the GPUs."""
    use, computing = data["summary"]["mean"]["gpu"], data["summary"]["mean"]["computing"]
    if use is None or use > LEAST_GPU_USE or computing < COMPUTING:
        return []
    return [
        f"GPUs were in use for {_percent(use)} of the time, while tasks computed for {_percent(computing)}. Fix: check that the "
        "tasks use the GPU (CuPy, cuDF), and give each more data"
    ]


def slowed_of(columns: Data, place: int) -> list[list[str]]:
    """The reasons for which the clocks of one of a worker's GPUs were lowered, for each point in time at which they are known."""
    return [reasons_of(bits) for bits in columns.get(of_gpu("gpu_slowed", place), ()) if bits is not None]


def slowed_gpus(data: Data) -> list[str]:
    """Clocks of GPUs that were lowered although they had work; by their power limit they often are."""
    found: dict[str, float] = {}
    for name, columns in data["record"]["series"]["workers"].items():
        for place in range(MOST_GPUS):
            known = slowed_of(columns, place)
            bad = sum(any(why != "power" for why in reasons) for reasons in known)
            if known and (part := bad / len(known)) >= MOST_SLOWED:
                found[name] = max(part, found.get(name, 0.0))
    if not found:
        return []
    worst = max(found, key=lambda name: found[name])
    return [
        f"heat or the hardware lowered the clocks of GPUs of {counted(len(found), 'worker')}, of {worst} for "
        f"{_percent(found[worst])} of the time. Fix: report the node to the site ({INSPECT_COMMAND} -q -d PERFORMANCE)"
    ]


#: Each rule is a function from the report's data to lines, none if all is well.
RULES: tuple[Callable[[Data], list[str]], ...] = (
    script_alone,
    too_few_tasks,
    short_tasks,
    waited_for_data,
    uneven_data,
    spilled,
    unused_gpus,
    slowed_gpus,
)


def _advice(data: Data) -> list[str]:
    """The warnings of the start and of the run, and the lines of the rules if the job was long enough and has a record."""
    in_run = (data["record"] or {}).get("warnings", ())
    lines = [*data["warnings"], *(f"after {each['at']:.1f} s: {each['text']}" for each in in_run)]
    if data["summary"]["workers"] and data["summary"]["seconds"] >= LEAST_SECONDS:
        lines += [line for rule in RULES for line in rule(data)]
    return lines


def _longest(tasks: Data, prefix: str) -> float:
    """Seconds of the longest task of a prefix: the sample has the longest of all."""
    places = zip(tasks["name"], tasks["action"], tasks["length"], strict=True)
    return max(
        (
            float(length)
            for name, action, length in places
            if tasks["names"][name] == prefix and tasks["actions"][action] == "compute"
        ),
        default=0.0,
    )


def _units(data: Data) -> str:
    """The threads that run tasks, in words."""
    threads, kind = data["summary"]["threads"], data["summary"]["kind"]
    if any(worker["threads"] > 1 for worker in data["summary"]["workers"] if worker["kind"] == kind):
        return counted(threads, "thread")
    return counted(threads, "GPU" if kind == "gpu" else "worker")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _time(seconds: float) -> str:
    """A duration of a task.

    >>> _time(0.0031), _time(2.51), _time(61)
    ('3 ms', '2.5 s', '61 s')
    """
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.{int(seconds < 10)}f} s"
