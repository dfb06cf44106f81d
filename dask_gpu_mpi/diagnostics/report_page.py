"""The page of a report: one HTML file with all that it needs, made of the figures alone (`report_data.assemble`).

python -m dask_gpu_mpi.diagnostics.report_page FILE.json FILE.html    makes it of a JSON file that was written before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import InlineStyleSheet, TabPanel, Tabs
from bokeh.resources import INLINE

from . import report_tabs, report_work_tabs
from .report_data import SCHEMA, summary
from .report_html import PAGE_STYLE, TABS_STYLE, TEMPLATE

__all__ = ["TABS", "page"]

#: What makes each tab of the data.
TABS = {
    "Overview": report_tabs.overview,
    "Start-up": report_tabs.start,
    "GPUs": report_work_tabs.gpus,
    "Memory & spill": report_work_tabs.memory,
    "Tasks": report_work_tabs.task_stream,
    "Task groups": report_work_tabs.groups,
    "Transfers": report_work_tabs.transfers,
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


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        page(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8"
    )
