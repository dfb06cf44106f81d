"""Texts and tables of a report's page, as HTML whose every text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dask_gpu_mpi.base.text import format_bytes

__all__ = [
    "PAGE_STYLE",
    "STYLE",
    "TABS_STYLE",
    "TEMPLATE",
    "image",
    "items",
    "legend",
    "note",
    "preformatted",
    "size",
    "table",
]

#: Light and dark, as the reader's system has it.
PAGE_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --faint: #59636e; --line: #d0d7de;
  --soft: #f6f8fa; --bad: #cf222e }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --faint: #9198a1; --line: #3d444d; --soft: #161b22;
    --bad: #f85149 }
}
body { background: var(--page); color: var(--text); font: 14px/1.5 system-ui, sans-serif; margin: 0 auto;
  padding: 12px 24px; max-width: 1500px }
header h1 { font-size: 20px; margin: 4px 0 }
header p { margin: 0 0 12px; color: var(--faint) }
"""
#: Of each text, which Bokeh keeps apart from the page's.
STYLE = """
:host { color: var(--text); font: 14px/1.5 system-ui, sans-serif }
h2 { font-size: 15px; margin: 16px 0 4px }
p { margin: 4px 0 }
.faint { color: var(--faint) } .bad { color: var(--bad) }
img { max-width: 100% }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
th, td { text-align: left; vertical-align: top; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line) }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px; overflow-x: auto;
  font-size: 12px; line-height: 1.4 }
td pre { margin: 2px 0; white-space: pre-wrap; overflow-wrap: anywhere }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 4px 0 12px }
"""
TABS_STYLE = """
.bk-header { border-color: var(--line) }
.bk-tab { color: var(--faint); font: 14px system-ui, sans-serif }
.bk-tab:hover { background-color: var(--soft) }
.bk-tab.bk-active { color: var(--text); background-color: var(--soft); border-color: var(--line) }
"""
TEMPLATE = (
    "{% block postamble %}<meta name='viewport' content='width=device-width'><link rel='icon' href='data:,'>"
    "<style>{{ style }}</style>{% endblock %}\n"
    "{% block contents %}<header><h1>{{ heading }}</h1><p>{{ summary }}</p></header>{{ super() }}{% endblock %}"
)


def note(text: str, kind: str = "faint") -> str:
    """A paragraph; `kind`: "faint" or "bad"."""
    return f'<p class="{kind}">{escape(text)}</p>'


def items(texts: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def preformatted(text: str) -> str:
    """Text as it is."""
    return f"<pre>{escape(text)}</pre>"


def image(svg: str, title: str) -> str:
    """A picture, as an image: it can run nothing."""
    source = base64.b64encode(svg.encode("utf-8", "backslashreplace")).decode()
    return f'<p><img alt="{escape(title)}" src="data:image/svg+xml;base64,{source}"></p>'


def size(number: float) -> str:
    """Bytes for people."""
    return format_bytes(int(number)) if number else "0"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers are on the right, what has several lines is preformatted.

    >>> table(["a", "b"], [["<x>", 1]])
    '<div class="scroll"><table><tr><th>a</th><th>b</th></tr><tr><td>&lt;x&gt;</td><td class="number">1</td></tr></table></div>'
    """
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    text = str(value)
    return f"<td>{preformatted(text) if chr(10) in text else escape(text)}</td>"


def legend(colours: Mapping[str, str]) -> str:
    """What each colour means."""
    parts = (
        f'<span class="swatch" style="background: {colour}"></span>{escape(name)}'
        for name, colour in colours.items()
    )
    return f"<p>{''.join(parts)}</p>"
