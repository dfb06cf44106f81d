"""The page of a report: one HTML file with all that it needs, made of the figures alone (`report_data.assemble`).

python -m dask_gpu_mpi.view.report_page FILE.json FILE.html    makes it of a JSON file that was written before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import InlineStyleSheet, TabPanel, Tabs
from bokeh.resources import INLINE

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.view import report_tabs
from dask_gpu_mpi.view.report_data import SCHEMA, summary
from dask_gpu_mpi.view.report_html import PAGE_STYLE, TABS_STYLE, TEMPLATE

__all__ = ["TABS", "main", "page"]

#: What makes each tab of the data.
TABS = {
    "Overview": report_tabs.overview,
    "Start-up": report_tabs.start,
    "GPUs": report_tabs.gpus,
    "Memory & spill": report_tabs.memory,
    "Tasks": report_tabs.task_stream,
    "Task prefixes": report_tabs.prefixes,
    "Transfers": report_tabs.transfers,
    "Events": report_tabs.events,
}


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


def main(arguments: Sequence[str]) -> int:
    """Make a page of a JSON file; the exit code."""
    where, fix = "report_page", "Fix: python -m dask_gpu_mpi.view.report_page FILE.json FILE.html"
    if len(arguments) != 2:
        say(f"error: {where}: {len(arguments)} arguments (expected FILE.json and FILE.html). {fix}")
        return 2
    source, target = map(Path, arguments)
    try:
        target.write_text(page(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
    except OSError as error:
        say(f"error: {where}: {error.filename}: {error.strerror}. {fix}")
        return 2
    except (ValueError, KeyError, TypeError) as error:  # no JSON, of something else, or of a later version
        reason = " ".join(str(error).split())
        say(f"error: {where}: {source} is no report that is known here: {reason}. {fix}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
