"""The page of a report: one HTML file with all that it needs, made of the figures alone (`report_data.assemble`).

python -m dask_gpu_mpi.diagnostics.report_page FILE.json FILE.html    makes it of a JSON file that was written before.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import Div, InlineStyleSheet, TabPanel, Tabs
from bokeh.resources import INLINE

from . import report_plots as plots
from .report_data import SCHEMA, summary
from .report_html import (
    PAGE_STYLE,
    STYLE,
    TABS_STYLE,
    TEMPLATE,
    items,
    legend,
    note,
    preformatted,
    size,
    table,
)

__all__ = ["TABS", "page"]

#: Rows of tables and bars that are shown.
MOST_BARS, MOST_ROWS = 25, 256
#: Ranks all of whose processes are shown; of more, each rank has one row.
MOST_RANKS = 8
LOST = "The scheduler could not be asked at the end of the job: nothing is known of its work."


def page(data: Mapping[str, Any]) -> str:
    """The page as text; ValueError for data of a later schema."""
    if data["schema"] > SCHEMA:
        raise ValueError(f"report of schema {data['schema']} (expected {SCHEMA} at most)")
    tabs = Tabs(
        tabs=[
            TabPanel(title=title, child=column(*make(data), sizing_mode="stretch_width"))
            for title, make in TABS.items()
        ],
        sizing_mode="stretch_width",
        stylesheets=[InlineStyleSheet(css=TABS_STYLE)],
    )
    began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(data["job"]["began"]))
    text: str = file_html(
        tabs,
        INLINE,
        title="dask-gpu-mpi report",
        template=TEMPLATE,
        template_variables={
            "style": PAGE_STYLE,
            "heading": f"dask-gpu-mpi: job of {escape(began)}",
            "summary": escape(summary(data)),
        },
    )
    return text


def _text(*parts: str) -> Div:
    return Div(
        text="".join(parts),
        disable_math=True,
        sizing_mode="stretch_width",
        stylesheets=[InlineStyleSheet(css=STYLE)],
    )


def _overview(data: Mapping[str, Any]) -> list[Any]:
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
    warnings = list(data["warnings"]) or ["none"]
    return [
        _text(
            note(LOST, "bad") if record is None else "",
            "<h2>Job</h2>",
            table(["", ""], facts),
            "<h2>Warnings</h2>",
            items(warnings),
            "<h2>Plan</h2>",
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


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _start(data: Mapping[str, Any]) -> list[Any]:
    steps = data["start"]["steps"]
    if not steps:
        return [
            _text(
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
    return [
        _text(*notes),
        plots.steps("start-up", rows, bars),
        _text(
            "<h2>Longest steps</h2>",
            table(
                ["where", "step", "seconds"],
                [[bar["row"], bar["name"], round(bar["end"] - bar["begin"], 3)] for bar in slowest],
            ),
        ),
    ]


def _quantity(record: Mapping[str, Any], quantity: str) -> dict[str, Sequence[float | None]]:
    found = {name: columns.get(quantity) for name, columns in record["series"]["workers"].items()}
    return {
        name: values
        for name, values in found.items()
        if values and any(value is not None for value in values)
    }


def _series(record: Mapping[str, Any], charts: Sequence[tuple[str, str, str, float | None]]) -> list[Any]:
    """A figure for each quantity that some worker reports: title, quantity, format, end of the scale."""
    series = record["series"]
    return [
        plots.over_time(title, series["times"], rows, form, high=high)
        for title, quantity, form, high in charts
        if (rows := _quantity(record, quantity))
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


def _gpus(data: Mapping[str, Any]) -> list[Any]:
    record = data["record"]
    if record is None:
        return [_text(note(LOST, "bad"))]
    charts = _series(
        record,
        [
            ("GPU use, %", "gpu", plots.NUMBER, 100.0),
            (
                "GPU memory in use",
                "gpu_memory",
                plots.BYTES,
                max((w["device_memory"] for w in record["workers"]), default=0) or None,
            ),
            ("allocated by RMM", "rmm", plots.BYTES, None),
            ("spilled by cuDF", "cudf_spilled", plots.BYTES, None),
        ],
    )
    if not charts:
        return [_text(note("No worker has reported a GPU."))]
    rows = [
        [
            w["name"],
            w["host"],
            round(w["peaks"].get("gpu", 0), 1),
            size(w["peaks"].get("gpu_memory", 0)),
            size(w["device_memory"]),
        ]
        for w in _workers(record)
        if "gpu_memory" in w["peaks"] or "gpu" in w["peaks"]
    ]
    return [
        _text(
            _sampling(record),
            note("Of a worker with several GPUs, the first. Memory is that of all processes on the GPU."),
        ),
        *charts,
        _text("<h2>Peaks</h2>", table(["worker", "host", "use, %", "memory", "of"], rows)),
    ]


def _workers(record: Mapping[str, Any]) -> list[Any]:
    return sorted(record["workers"], key=lambda worker: plots.by_name(worker["name"]))[:MOST_ROWS]


def _memory(data: Mapping[str, Any]) -> list[Any]:
    record = data["record"]
    if record is None:
        return [_text(note(LOST, "bad"))]
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
            size(worker["peaks"].get("spilled", 0)),
            round(worker["peaks"].get("cpu", 0)),
        ]
        for worker in _workers(record)
    ]
    header = ["worker", "host", "memory", "limit", "managed", "spilled", "CPU, %"]
    return [_text(_sampling(record)), *charts, _text("<h2>Peaks</h2>", table(header, rows))]


def _task_stream(data: Mapping[str, Any]) -> list[Any]:
    record = data["record"]
    if record is None:
        return [_text(note(LOST, "bad"))]
    tasks = record["tasks"]
    if not tasks["start"]:
        return [_text(note("No task has run since the record began."))]
    seconds: dict[str, float] = defaultdict(float)
    for name, action, length in zip(tasks["name"], tasks["action"], tasks["length"], strict=True):
        if tasks["actions"][action] == "compute":
            seconds[tasks["names"][name]] += length
    colours = plots.colours_of(list(seconds), seconds)
    shown = "All tasks."
    if tasks["shown"] < tasks["seen"]:
        shown = (
            f"{tasks['shown']:,} of {tasks['seen']:,} tasks are shown: 1 of every {tasks['stride']:,}, and the "
            f"{tasks['longest']:,} longest. Gaps need not be idle time."
        )
    actions = {tasks["actions"][action] for action in tasks["action"]} - {"compute"}
    return [
        _text(note(shown)),
        plots.tasks("task stream", tasks, colours),
        _text(legend({**colours, **{action: plots.ACTION_COLOURS[action] for action in sorted(actions)}})),
    ]


def _groups(data: Mapping[str, Any]) -> list[Any]:
    record = data["record"]
    if record is None:
        return [_text(note(LOST, "bad"))]
    groups = record["groups"]
    if not groups:
        return [_text(note("There were no tasks."))]
    first = groups[:MOST_BARS]
    actions = sorted(
        {action for group in first for action in group["seconds"]}, key=lambda action: action != "compute"
    )
    rows = [
        [
            group["name"],
            group["tasks"],
            group["failed"],
            *(round(group["seconds"].get(action, 0.0), 3) for action in actions),
            round(1e3 * group["seconds"].get("compute", 0.0) / group["tasks"], 3) if group["tasks"] else 0,
            size(group["bytes"]),
        ]
        for group in groups[:MOST_ROWS]
    ]
    parts = {action: [group["seconds"].get(action, 0.0) for group in first] for action in actions}
    header = ["tasks", "number", "failed", *(f"{action}, s" for action in actions), "mean, ms", "results"]
    return [
        _text(note("Tasks by the first part of their names, those that took longest first.")),
        *(
            [plots.stacks("time by group of tasks", [group["name"] for group in first], parts)]
            if actions
            else []
        ),
        _text(table(header, rows)),
    ]


def _transfers(data: Mapping[str, Any]) -> list[Any]:
    record = data["record"]
    if record is None:
        return [_text(note(LOST, "bad"))]
    rows = record["transfers"]["rows"]
    if not rows:
        return [_text(note("No worker has fetched data from another."))]
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
        _text(
            note(
                f"{sum(row['count'] for row in rows):,} transfers that tasks have waited for"
                + (f", {size(total)}." if by_bytes else "; their sizes were not recorded.")
            )
        ),
        *figures,
        _text(
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


def _events(data: Mapping[str, Any]) -> list[Any]:
    record = data["record"]
    if record is None:
        return [_text(note(LOST, "bad"))]
    deaths = [event for event in record["events"] if event["what"] == "process died"]
    again = [worker for worker in _workers(record) if worker["starts"] > 1]
    rows = [
        [round(event["at"], 1), event["what"], event["worker"], event["why"], event["output"]]
        for event in record["events"]
        if event["what"] != "worker started"
    ]
    started = [round(event["at"], 1) for event in record["events"] if event["what"] == "worker started"]
    return [
        _text(
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


#: What makes each tab of the data.
TABS = {
    "Overview": _overview,
    "Start-up": _start,
    "GPUs": _gpus,
    "Memory & spill": _memory,
    "Tasks": _task_stream,
    "Task groups": _groups,
    "Transfers": _transfers,
    "Events": _events,
}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        page(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8"
    )
