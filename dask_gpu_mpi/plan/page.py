"""A plan as HTML: a page of its own, and a card for notebooks. Both need nothing from elsewhere, and run no script."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

from dask_gpu_mpi.base.printable import printable

from .model import Planned
from .nodes import roles, summary
from .picture import svg
from .table import HEADER, NO_WORKER, NUMERIC, Block, blocks

__all__ = ["card", "page"]

# Even markup that slipped through could load and run nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; margin: 16px; color: #1f2328; background: #ffffff }
svg { max-width: 100%; height: auto }
h1 { font-size: 20px }
h2 { font-size: 15px; overflow-wrap: anywhere }
table { border-collapse: collapse }
th, td { text-align: left; padding: 3px 12px; border-bottom: 1px solid #d1d9e0 }
th { color: #59636e; font-weight: normal }
.number { text-align: right }
.bad { color: #cf222e; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
body { color: #e6edf3; background: #0d1117 }
th, td { border-color: #3d444d }
th { color: #9198a1 }
.bad { color: #ff7b72 }
}
"""


def page(plan: Planned) -> str:
    """One HTML file: the picture, the warnings and the table."""
    title = _safe(f"Plan: {summary(plan)}")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style></head>",
            "<body><h1>Plan</h1>",
            svg(plan, warnings=False).rstrip(),
            *_warnings(plan),
            *(_block(block) for block in blocks(plan.hosts, plan.workers)),
            "</body></html>",
            "",
        ]
    )


def card(plan: Planned) -> str:
    """What a notebook shows for a plan.

    The picture is an image: its style sheet applies to nothing else in the notebook, and it can run nothing.
    """
    title = _safe(f"Plan: {summary(plan)}; {roles(plan)}")
    picture = base64.b64encode(svg(plan, warnings=False).encode()).decode()
    return "\n".join(
        [
            "<div>",
            f'<img alt="{title}" style="max-width: 100%" src="data:image/svg+xml;base64,{picture}">',
            '<div style="color: #dd4444">',  # legible on light and on dark
            *_warnings(plan),
            "</div>",
            "<details><summary>Table</summary>",
            *(_block(block) for block in blocks(plan.hosts, plan.workers)),
            "</details></div>",
        ]
    )


def _warnings(plan: Planned) -> list[str]:
    if not plan.warnings:
        return []
    return [
        '<p class="bad"><strong>Warnings</strong></p>\n<ol class="bad">',
        *(f"<li>{_safe(text)}</li>" for text in plan.warnings),
        "</ol>",
    ]


def _block(block: Block) -> str:
    title = f"<h2>{_safe(block.title)}</h2>"
    if not block.rows:
        return f"{title}<p>{NO_WORKER}</p>"
    rows = "".join(_row("td", row) for row in block.rows)
    return f"{title}\n<table><thead>{_row('th', HEADER)}</thead><tbody>\n{rows}</tbody></table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    marked = (
        f"<{tag}{' class=number' if numeric else ''}>{_safe(cell)}</{tag}>"
        for cell, numeric in zip(cells, NUMERIC, strict=True)
    )
    return f"<tr>{''.join(marked)}</tr>\n"


def _safe(text: str) -> str:
    return escape(printable(text))
