"""The tabs of a report's page that are of the job: overview, start-up, events."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import Div, InlineStyleSheet

from dask_gpu_mpi.view import report_plots as plots
from dask_gpu_mpi.view.heartbeat import MOST_GPUS, of_gpu
from dask_gpu_mpi.view.report_html import STYLE, image, items, legend, note, preformatted, size, table

# The tabs of a report's page that are of the scheduler's record: GPUs, memory, tasks, transfers.

#: Bars that are shown.
MOST_BARS = 25
#: Quantities that each GPU of a worker has.
OF_GPUS = ("gpu", "gpu_memory")


def _quantity(record: Mapping[str, Any], quantity: str) -> dict[str, Sequence[float | None]]:
    found = {name: columns.get(quantity) for name, columns in record["series"]["workers"].items()}
    return {
        name: values
        for name, values in found.items()
        if values and any(value is not None for value in values)
    }


def _of_gpus(record: Mapping[str, Any], quantity: str) -> dict[str, Sequence[float | None]]:
    """A row for each GPU; where a worker has several, from its second one on with their number."""
    return {
        _gpu_name(worker, place): values
        for place in range(MOST_GPUS)
        for worker, values in _quantity(record, of_gpu(quantity, place)).items()
    }


def _gpu_name(worker: str, place: int) -> str:
    return worker if place == 0 else f"{worker} GPU {place + 1}"


def _series(record: Mapping[str, Any], charts: Sequence[tuple[str, str, str, float | None]]) -> list[Any]:
    """A figure for each quantity that some worker reports: title, quantity, format, end of the scale."""
    series = record["series"]
    return [
        plots.over_time(title, series["times"], rows, form, high=high)
        for title, quantity, form, high in charts
        if (rows := (_of_gpus if quantity in OF_GPUS else _quantity)(record, quantity))
        and (high is not None or any(any(row) for row in rows.values()))
    ]


def _sampling(record: Mapping[str, Any]) -> str:
    series = record["series"]
    text = f"A point every {series['interval']:g} s, of what workers report in their heartbeats."
    if not record["from_start"]:
        text += " Recorded from when the report was first asked for."
    if series["left_out"]:
        text += f" {series['left_out']} workers are left out; peaks are of all."
    return note(text)


def gpus(data: Mapping[str, Any]) -> list[Any]:
    """Use and memory of GPUs."""
    record = data["record"]
    if record is None:
        return [text(note(LOST, "bad"))]
    charts = _series(
        record,
        [
            ("GPU use, %", "gpu", plots.NUMBER, 100.0),
            (
                "GPU memory in use",
                "gpu_memory",
                plots.BYTES,
                max((each for w in record["workers"] for each in w["device_memory"]), default=0) or None,
            ),
            ("allocated by RMM", "rmm", plots.BYTES, None),
            ("spilled from the GPU", "gpu_spilled", plots.BYTES, None),
            ("spilled by cuDF", "cudf_spilled", plots.BYTES, None),
        ],
    )
    if not charts:
        return [text(note("No worker has reported a GPU."))]
    rows = [
        [
            _gpu_name(w["name"], place),
            w["host"],
            round(peaks.get(of_gpu("gpu", place), 0), 1),
            size(peaks.get(of_gpu("gpu_memory", place), 0)),
            size(w["device_memory"][place]) if place < len(w["device_memory"]) else "-",
            _known(peaks, "gpu_spilled") if place == 0 else "",
        ]
        for w in workers_of(record)
        for peaks in [w["peaks"]]
        for place in range(MOST_GPUS)
        if any(of_gpu(quantity, place) in peaks for quantity in OF_GPUS)
    ]
    return [
        text(
            _sampling(record),
            note("Memory is that of all processes on the GPU; what is spilled is that of the worker."),
        ),
        *charts,
        text("<h2>Peaks</h2>", table(["worker", "host", "use, %", "memory", "of", "spilled"], rows)),
    ]


def _known(peaks: Mapping[str, float], quantity: str) -> str:
    return size(peaks[quantity]) if quantity in peaks else "-"


def memory(data: Mapping[str, Any]) -> list[Any]:
    """Memory, spilled data and CPU of workers."""
    record = data["record"]
    if record is None:
        return [text(note(LOST, "bad"))]
    charts = _series(
        record,
        [
            ("memory of the worker's process", "memory", plots.BYTES, None),
            ("results that Dask holds (managed memory)", "managed", plots.BYTES, None),
            ("spilled to disk", "spilled", plots.BYTES, None),
            ("CPU, % of a core", "cpu", plots.NUMBER, None),
        ],
    )
    rows = [
        [
            worker["name"],
            worker["host"],
            size(worker["peaks"].get("memory", 0)),
            size(worker["memory_limit"]) if worker["memory_limit"] else "no limit",
            size(worker["peaks"].get("managed", 0)),
            _known(worker["peaks"], "spilled"),
            round(worker["peaks"].get("cpu", 0)),
        ]
        for worker in workers_of(record)
    ]
    header = ["worker", "host", "memory", "limit", "managed", "spilled to disk", "CPU, %"]
    return [text(_sampling(record)), *charts, text("<h2>Peaks</h2>", table(header, rows))]


def task_stream(data: Mapping[str, Any]) -> list[Any]:
    """Which thread ran which task when."""
    record = data["record"]
    if record is None:
        return [text(note(LOST, "bad"))]
    tasks = record["tasks"]
    if not tasks["start"]:
        return [text(note("No task has run since the record began."))]
    seconds: dict[str, float] = defaultdict(float)
    for name, action, length in zip(tasks["name"], tasks["action"], tasks["length"], strict=True):
        if tasks["actions"][action] == "compute":
            seconds[tasks["names"][name]] += length
    colours = plots.colours_of(list(seconds), seconds)
    shown = "All tasks."
    if tasks["shown"] < tasks["seen"]:
        shown = (
            f"{tasks['shown']:,} of {tasks['seen']:,} tasks are shown: about 1 of every {tasks['stride']:,}, and the "
            f"{tasks['longest']:,} longest. Gaps need not be idle time."
        )
    actions = {tasks["actions"][action] for action in tasks["action"]} - {"compute"}
    return [
        text(note(shown)),
        plots.tasks("task stream", tasks, colours),
        text(legend({**colours, **{action: plots.ACTION_COLOURS[action] for action in sorted(actions)}})),
    ]


def prefixes(data: Mapping[str, Any]) -> list[Any]:
    """Time by prefix of tasks."""
    record = data["record"]
    if record is None:
        return [text(note(LOST, "bad"))]
    prefixes = record["prefixes"]
    if not prefixes:
        return [text(note("There were no tasks."))]
    first = prefixes[:MOST_BARS]
    actions = sorted(
        {action for prefix in first for action in prefix["seconds"]}, key=lambda action: action != "compute"
    )
    rows = [
        [
            prefix["name"],
            prefix["tasks"],
            prefix["failed"],
            *(round(prefix["seconds"].get(action, 0.0), 3) for action in actions),
            round(1e3 * prefix["seconds"].get("compute", 0.0) / prefix["tasks"], 3) if prefix["tasks"] else 0,
            size(prefix["bytes"]),
        ]
        for prefix in prefixes[:MOST_ROWS]
    ]
    parts = {action: [prefix["seconds"].get(action, 0.0) for prefix in first] for action in actions}
    header = ["tasks", "number", "failed", *(f"{action}, s" for action in actions), "mean, ms", "results"]
    return [
        text(note("Tasks by Dask's prefix of their names, those that took longest first.")),
        *(
            [plots.stacks("time by prefix of tasks", [prefix["name"] for prefix in first], parts)]
            if actions
            else []
        ),
        text(table(header, rows)),
    ]


def transfers(data: Mapping[str, Any]) -> list[Any]:
    """Data between workers."""
    record = data["record"]
    if record is None:
        return [text(note(LOST, "bad"))]
    rows = record["transfers"]["rows"]
    if not rows:
        return [text(note("No worker has fetched data from another."))]
    by_bytes = any(row["bytes"] for row in rows)
    value, form, what = (
        ("bytes", plots.BYTES, "bytes") if by_bytes else ("count", plots.NUMBER, "number of transfers")
    )
    cells = {(row["from"], row["to"]): row[value] for row in rows}
    figures = [_matrix(f"{what}, by {record['transfers']['by']}", cells, form)]
    host = {worker["name"]: worker["host"] for worker in record["workers"]}
    if record["transfers"]["by"] == "worker" and len(set(host.values())) > 1:
        folded: dict[tuple[str, str], float] = defaultdict(float)
        for (sender, receiver), number in cells.items():
            folded[host.get(sender, "unknown"), host.get(receiver, "unknown")] += number
        figures.insert(0, _matrix(f"{what}, by node", folded, form))
    most = sorted(rows, key=lambda row: row[value], reverse=True)[:20]
    total = sum(row["bytes"] for row in rows)
    return [
        text(
            note(
                f"{sum(row['count'] for row in rows):,} transfers that tasks have waited for"
                + (f", {size(total)}." if by_bytes else "; their sizes were not recorded.")
            )
        ),
        *figures,
        text(
            "<h2>Most</h2>",
            table(
                ["from", "to", "transfers", "data", "seconds", "per second"],
                [
                    [
                        row["from"],
                        row["to"],
                        row["count"],
                        size(row["bytes"]) if by_bytes else "-",
                        round(row["seconds"], 3),
                        size(row["bytes"] / row["seconds"]) if by_bytes and row["seconds"] else "-",
                    ]
                    for row in most
                ],
            ),
        ),
    ]


def _matrix(title: str, cells: Mapping[tuple[str, str], float], form: str) -> Any:
    names = sorted({name for pair in cells for name in pair}, key=plots.by_name)
    return plots.matrix(title, names, cells, form)


#: Rows of tables that are shown.
MOST_ROWS = 256
#: Ranks all of whose processes are shown; of more, each rank has one row.
MOST_RANKS = 8
LOST = "The scheduler could not be asked at the end of the job: nothing is known of its work."


def text(*parts: str) -> Div:
    """A text of the page, made of HTML."""
    return Div(
        text="".join(parts),
        disable_math=True,
        sizing_mode="stretch_width",
        stylesheets=[InlineStyleSheet(css=STYLE)],
    )


def workers_of(record: Mapping[str, Any]) -> list[Any]:
    """The workers of a record, in the order of their names."""
    return sorted(record["workers"], key=lambda worker: plots.by_name(worker["name"]))[:MOST_ROWS]


def overview(data: Mapping[str, Any]) -> list[Any]:
    """Plan, versions, options, how it ended."""
    job, record = data["job"], data["record"]
    facts = [
        ["ended", job["how"] + ("" if job["exit_code"] is None else f" (exit code {job['exit_code']})")],
        ["workers ready after", f"{job['ready_after']:.1f} s"],
        ["script ended after", f"{job['ended_after']:.1f} s"],
        ["data between workers", job["transport"] or "over the connections of Dask's protocol"],
    ]
    if record is not None:
        tasks = record["tasks"]
        facts.append(["tasks that have run", f"{tasks['seen']:,}, of which {tasks['failed']:,} failed"])
        facts.append(
            ["workers at the end", f"{len(record['alive'])} of {len(data['plan']['workers'])} planned"]
        )
    warnings = list(data["warnings"])
    if record is not None:
        warnings += [f"after {each['at']:.1f} s: {each['text']}" for each in record["warnings"]]
    missing = LOST if record is None else "" if job["scheduler_answered"] else _until(record)
    return [
        text(
            note(missing, "bad") if missing else "",
            "<h2>Job</h2>",
            table(["", ""], facts),
            "<h2>Warnings</h2>",
            items(warnings or ["none"]),
            "<h2>Plan</h2>",
            image(data["plan_picture"], "the plan"),
            preformatted(data["plan_table"]),
            "<h2>Versions</h2>",
            table(["", ""], data["versions"].items()),
            "<h2>Options</h2>",
            table(
                ["option", "value", ""],
                [
                    [each["name"], _value(each["value"]), "set" if each["set"] else ""]
                    for each in data["options"]
                ],
            ),
        )
    ]


def _until(record: Mapping[str, Any]) -> str:
    return f"The scheduler did not answer at the end of the job: nothing is known of its work after {record['until']:.1f} s."


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def start(data: Mapping[str, Any]) -> list[Any]:
    """The steps of each rank."""
    steps = data["start"]["steps"]
    if not steps:
        return [
            text(
                note(
                    "No steps were kept: the report was asked for when the cluster was up, or the start is another job's."
                )
            )
        ]
    ranks = {step["rank"] for step in steps}
    all_processes = len(ranks) <= MOST_RANKS
    bars = [
        {
            **step,
            "row": f"rank {step['rank']} {step['host']}"
            + ("" if step["process"] == "rank" else f": {step['process']}"),
        }
        for step in steps
        if all_processes or step["process"] in ("rank", "scheduler")
    ]
    rows = list(dict.fromkeys(bar["row"] for bar in bars))
    left_out = data["start"]["left_out"]
    notes = [note("Steps of each process until the cluster was up, by the clock of its node.")]
    if not all_processes:
        notes.append(note("Of many ranks, their agents and workers are left out; the JSON file has them."))
    if left_out:
        notes.append(note(f"{left_out} ranks are left out: those shown were ready first and last."))
    slowest = sorted(bars, key=lambda bar: bar["end"] - bar["begin"], reverse=True)[:10]
    seconds: dict[str, float] = defaultdict(float)
    for bar in bars:
        seconds[bar["name"]] += bar["end"] - bar["begin"]
    colours = plots.colours_of(list(seconds), seconds)
    return [
        text(*notes),
        plots.steps("start-up", rows, bars, colours),
        text(
            legend(colours),
            "<h2>Longest steps</h2>",
            table(
                ["where", "step", "seconds"],
                [[bar["row"], bar["name"], round(bar["end"] - bar["begin"], 3)] for bar in slowest],
            ),
        ),
    ]


def events(data: Mapping[str, Any]) -> list[Any]:
    """Arrivals, deaths and restarts of workers."""
    record = data["record"]
    if record is None:
        return [text(note(LOST, "bad"))]
    deaths = [event for event in record["events"] if event["what"] == "process died"]
    again = [worker for worker in workers_of(record) if worker["starts"] > 1]
    rows = [
        [round(event["at"], 1), event["what"], event["worker"], event["why"], event["output"]]
        for event in record["events"]
        if event["what"] != "worker started"
    ]
    started = [round(event["at"], 1) for event in record["events"] if event["what"] == "worker started"]
    return [
        text(
            note(
                f"{len(deaths)} processes of workers died, {len(again)} workers were restarted.",
                "bad" if deaths else "faint",
            ),
            note(f"{len(started)} workers arrived between {min(started)} and {max(started)} s.")
            if started
            else "",
            table(["s", "event", "worker", "why", "last output"], rows) if rows else "",
        )
    ]
