"""The tabs of a report's page that are of the job: overview, start-up, events."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from bokeh.models import Div, InlineStyleSheet

from . import report_plots as plots
from .report_html import STYLE, image, items, legend, note, preformatted, table

__all__ = ["LOST", "events", "overview", "start", "text", "workers_of"]

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
