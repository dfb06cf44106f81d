"""A plan as an SVG picture: nodes as boxes, in them their GPUs with their workers; what is to be warned of in red."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dask_gpu_mpi.base.hostlist import counted, fold_names
from dask_gpu_mpi.base.printable import printable

from .model import Planned
from .nodes import DomainBox, GpuBox, NodeBox, WorkerBox, node_boxes, roles, summary

__all__ = ["svg"]

#: In pixels. Text has no measure here: a letter is taken for this many times the size of its font.
LETTER, BOLD_LETTER = 0.56, 0.62
PAD, GAP = 12, 8
GPU_WIDTH, WORKER_HEIGHT, LINE = 176, 54, 16
#: A domain's GPUs in one row, and a node's workers on CPUs.
IN_A_ROW = 4
LEAST_NODE, LEAST_PAGE, MOST_PAGE = 250, 640, 1600
#: Nodes with GPUs in one column: two beside each other are small print on a page of text.
IN_A_COLUMN = 4
#: Warnings that are spelled out, and lines of each.
MOST_WARNINGS, MOST_LINES = 12, 4

# All selectors below one class: in a page that the SVG is put into, they apply to nothing else.
STYLE = """
.dgm-plan text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2328 }
.dgm-plan .small { font-size: 11px; fill: #59636e }
.dgm-plan .head { font-weight: bold }
.dgm-plan .top { font-size: 15px; font-weight: bold }
.dgm-plan .bad { fill: #cf222e; font-weight: bold }
.dgm-plan .warning { fill: #cf222e }
.dgm-plan .page { fill: #ffffff }
.dgm-plan .node { fill: #f6f8fa; stroke: #8c959f }
.dgm-plan .domain { fill: none; stroke: #8c959f; stroke-dasharray: 5 4 }
.dgm-plan .gpu { fill: #dafbe1; stroke: #1a7f37 }
.dgm-plan .worker { fill: #ffffff; stroke: #1a7f37 }
.dgm-plan .cpu { fill: #ddf4ff; stroke: #0969da }
.dgm-plan .idle { fill: #ffebe9; stroke: #cf222e; stroke-width: 2 }
.dgm-plan .red { stroke: #cf222e; stroke-width: 2 }
.dgm-plan .chip { fill: #0969da }
.dgm-plan .client { fill: #8250df }
.dgm-plan .on { fill: #ffffff; font-weight: bold; font-size: 11px; text-anchor: middle }
@media (prefers-color-scheme: dark) {
.dgm-plan text { fill: #e6edf3 }
.dgm-plan .small { fill: #9198a1 }
.dgm-plan .bad, .dgm-plan .warning { fill: #ff7b72 }
.dgm-plan .page { fill: #0d1117 }
.dgm-plan .node { fill: #161b22; stroke: #6e7681 }
.dgm-plan .domain { stroke: #6e7681 }
.dgm-plan .gpu { fill: #12361f; stroke: #3fb950 }
.dgm-plan .worker { fill: #0d1117; stroke: #3fb950 }
.dgm-plan .cpu { fill: #0c2d4d; stroke: #4493f8 }
.dgm-plan .idle { fill: #4a1418; stroke: #ff7b72 }
.dgm-plan .red { stroke: #ff7b72 }
.dgm-plan .chip { fill: #1f6feb }
.dgm-plan .client { fill: #8957e5 }
.dgm-plan .on { fill: #ffffff }
}
"""


@dataclass(frozen=True)
class _Part:
    """A part of the picture, its upper left corner at 0, 0."""

    markup: str
    width: int
    height: int


def svg(plan: Planned, *, warnings: bool = True) -> str:
    """Draw a plan; `warnings`: with their texts.

    Returns
    -------
    str
        One self-contained SVG element: no scripts, nothing from elsewhere, no ids. Its colours follow the reader's setting
        (light or dark), on a background of its own.
    """
    boxes, left_out = node_boxes(plan)
    contents = [_content(box) for box in boxes]
    width = max([LEAST_NODE, *(content.width for content in contents)]) + 2 * PAD
    limit = MOST_PAGE if len(boxes) > IN_A_COLUMN else MOST_PAGE // 2
    nodes = _flow(
        (_node(box, content, width) for box, content in zip(boxes, contents, strict=True)), limit, PAD
    )
    inner = max(nodes.width, LEAST_PAGE)
    texts = _warnings(plan.warnings, inner) if warnings else []
    page = _stack([_head(plan, inner), nodes, *_more(left_out, inner), *texts])
    size_x, size_y = inner + 2 * PAD, page.height + 2 * PAD
    title = escape(printable(_title(plan)))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dgm-plan" viewBox="0 0 {size_x} {size_y}" width="{size_x}" '
            f'height="{size_y}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            _rectangle("page", size_x, size_y),
            _at(PAD, PAD, page),
            "</svg>",
            "",
        ]
    )


def _title(plan: Planned) -> str:
    return (
        f"Plan: {summary(plan)}; scheduler on {plan.scheduler.host}, client on {plan.client.host}; "
        f"{counted(len(plan.warnings), 'warning')}"
    )


def _head(plan: Planned, width: int) -> _Part:
    devices = {device for worker in plan.workers for device in worker.devices}
    idle = sum(gpu.uuid not in devices for host in plan.hosts for gpu in host.gpus)
    red = [f"{counted(idle, 'GPU')} without a worker"] if idle else []
    red += [counted(len(plan.warnings), "warning")] if plan.warnings else []
    lines = [_text(0, 16, summary(plan), "top", width)]
    lines.append(_text(0, 36, roles(plan), "", width))
    if red:
        lines.append(_text(0, 54, ", ".join(red), "bad", width))
    return _Part("".join(lines), width, 60 if red else 42)


def _more(hosts: Sequence[str], width: int) -> list[_Part]:
    """The nodes that have no box."""
    if not hosts:
        return []
    text = f"{counted(len(hosts), 'more node')}, each of its own kind: {fold_names(hosts)}"
    return [_paragraph([text], width, "head")]


def _warnings(warnings: Sequence[str], width: int) -> list[_Part]:
    if not warnings:
        return []
    lines = [f"{number}. {warning}" for number, warning in enumerate(warnings[:MOST_WARNINGS], start=1)]
    if len(warnings) > MOST_WARNINGS:
        lines.append(f"{len(warnings) - MOST_WARNINGS} more warnings; the table has them all")
    return [_Part(_text(0, LINE, "Warnings", "bad", width), width, LINE), _paragraph(lines, width, "warning")]


def _paragraph(texts: Iterable[str], width: int, kind: str) -> _Part:
    letters = int(width / (12 * LETTER))
    lines = [
        line
        for text in texts
        for line in textwrap.wrap(
            printable(text), letters, max_lines=MOST_LINES, placeholder=" …", subsequent_indent="   "
        )
    ]
    markup = "".join(
        _text(3 * (len(line) - len(line.lstrip())), LINE * number, line.strip(), kind)
        for number, line in enumerate(lines, start=1)
    )
    return _Part(markup, width, LINE * len(lines) + 4)


def _node(box: NodeBox, content: _Part, width: int) -> _Part:
    chips, right = [], width - PAD
    for role in reversed(box.roles):
        length = int(len(role) * 11 * BOLD_LETTER) + 16
        right -= length
        chip = _rectangle("chip client" if role == "client" else "chip", length, 20, radius=10)
        chip += _text(length // 2, 14, role, "on")
        chips.append(_at(right, 8, _Part(chip, length, 20)))
        right -= 6
    top = 52
    below = top + content.height + (GAP if content.height else 0)
    alarms = [
        _text(PAD, below + LINE * number, alarm, "bad", width - 2 * PAD)
        for number, alarm in enumerate(box.alarms, start=1)
    ]
    height = below + LINE * len(alarms) + 6
    sheets = "" if len(box.hosts) == 1 else "".join(_sheet(width, height, shift) for shift in (6, 3))
    markup = [
        sheets,
        _rectangle("node red" if box.is_red else "node", width, height),
        _text(PAD, 23, box.title, "head", right - PAD),
        _text(PAD, 42, box.subtitle, "small", width - 2 * PAD),
        *chips,
        _at(PAD, top, content),
        *alarms,
    ]
    part = _Part("".join(markup), width, height + (6 if sheets else 0))
    return _titled(f"{box.title}: {box.subtitle}", part)


def _sheet(width: int, height: int, shift: int) -> str:
    """What lies below a box of several nodes."""
    return _at(shift, shift, _Part(_rectangle("node", width, height), width, height))


def _content(box: NodeBox) -> _Part:
    content = box.content
    tall = any(gpu.in_use for domain in content.domains for gpu in domain.gpus)
    domains = [_domain(domain, tall) for domain in content.domains]
    workers = [_titled(_all_of(worker), _worker(worker, GPU_WIDTH)) for worker in content.cpu_workers]
    parts = [_flow(domains, IN_A_ROW * (GPU_WIDTH + GAP) + 4 * GAP, GAP)] if domains else []
    parts += [_flow(workers, IN_A_ROW * (GPU_WIDTH + GAP), GAP)] if workers else []
    if content.reserved:
        parts.append(
            _Part(_text(0, 14, "no workers: ranks reserved for scheduler and client", "small"), 0, LINE)
        )
    return _stack(parts)


def _domain(domain: DomainBox, tall: bool) -> _Part:
    gpus = _flow((_gpu(gpu, tall) for gpu in domain.gpus), IN_A_ROW * (GPU_WIDTH + GAP), GAP)
    if not domain.cores:
        return gpus
    width, height = gpus.width + 2 * GAP, gpus.height + 20 + GAP
    label = _text(GAP, 14, f"NUMA domain: cores {domain.cores}", "small", width - 2 * GAP)
    return _Part(_rectangle("domain", width, height) + label + _at(GAP, 20, gpus), width, height)


def _gpu(gpu: GpuBox, tall: bool) -> _Part:
    height = 40 + WORKER_HEIGHT + GAP + (LINE if tall else 0)
    inside = GPU_WIDTH - 2 * GAP
    place = 16 + LINE + (LINE if tall else 0)
    if gpu.worker is None:
        worker = _text(GAP, 40 + (LINE if tall else 0) + WORKER_HEIGHT // 2, "no worker", "bad")
    else:
        worker = _at(GAP, place + 8, _worker(gpu.worker, inside))
    room = len(gpu.memory) * 11 * LETTER + GAP
    markup = [
        _rectangle(
            "gpu idle" if gpu.worker is None else "gpu red" if gpu.in_use else "gpu", GPU_WIDTH, height
        ),
        _text(GAP, 16, gpu.label, "head", inside - room),
        f'<text class="small" x="{GPU_WIDTH - GAP}" y="16" text-anchor="end">{escape(gpu.memory)}</text>',
        _text(GAP, 32, gpu.product, "small", inside),
        _text(GAP, 32 + LINE, gpu.in_use, "bad", inside) if gpu.in_use else "",
        worker,
    ]
    return _titled(_told(gpu), _Part("".join(markup), GPU_WIDTH, height))


def _told(gpu: GpuBox) -> str:
    """All about a GPU, for who points at it."""
    worker = _all_of(gpu.worker) if gpu.worker else "no worker"
    return "; ".join(
        filter(None, (f"{gpu.label}: {gpu.product}", gpu.memory, gpu.identity, gpu.in_use, worker))
    )


def _all_of(worker: WorkerBox) -> str:
    return ", ".join(filter(None, (worker.label, worker.threads, worker.memory, worker.cores)))


def _worker(worker: WorkerBox, width: int) -> _Part:
    inside = width - 2 * GAP
    markup = [
        _rectangle("worker" if worker.kind == "gpu" else "worker cpu", width, WORKER_HEIGHT, radius=4),
        _text(GAP, 16, worker.label, "head", inside),
        _text(GAP, 31, f"{worker.threads} · {worker.memory}", "small", inside),
        _text(GAP, 46, worker.cores, "small", inside),
    ]
    return _Part("".join(markup), width, WORKER_HEIGHT)


def _titled(title: str, part: _Part) -> _Part:
    """A part, with a text for who points at it."""
    return _Part(f"<g><title>{escape(printable(title))}</title>{part.markup}</g>", part.width, part.height)


def _flow(parts: Iterable[_Part], limit: int, gap: int) -> _Part:
    """Parts in rows, from left to right, none wider than the limit where that can be."""
    placed, x, y, row, width = [], 0, 0, 0, 0
    for part in parts:
        if x and x + part.width > limit:
            x, y, row = 0, y + row + gap, 0
        placed.append(_at(x, y, part))
        width, row = max(width, x + part.width), max(row, part.height)
        x += part.width + gap
    return _Part("".join(placed), width, y + row)


def _stack(parts: Sequence[_Part]) -> _Part:
    """Parts below each other."""
    return _flow(parts, 0, GAP)


def _at(x: int, y: int, part: _Part) -> str:
    if not part.markup:
        return ""
    return f'<g transform="translate({x} {y})">{part.markup}</g>\n' if x or y else part.markup


def _rectangle(kind: str, width: int, height: int, *, radius: int = 6) -> str:
    return f'<rect class="{kind}" width="{width}" height="{height}" rx="{radius}"/>'


def _text(x: int, y: int, words: str, kind: str, room: float = 0) -> str:
    """A line of text, shortened where there is a room for it and it is longer."""
    words = printable(words)
    size = {"top": 15, "small": 11}.get(kind, 12)
    letters = int(room / (size * (LETTER if kind in ("small", "") else BOLD_LETTER)))
    if room and len(words) > letters:
        words = words[: max(letters - 1, 0)] + "…"
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>' if words else ""
