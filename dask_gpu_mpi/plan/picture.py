"""A plan as an SVG picture: nodes as boxes, in them their GPUs with their workers; problems are red."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dask_gpu_mpi.base.tables import share_entries
from dask_gpu_mpi.base.text import counted, fold_names, printable
from dask_gpu_mpi.plan.model import Plan
from dask_gpu_mpi.plan.nodes import GpuBox, NodeBox, WorkerBox, node_boxes

# Parts of an SVG picture, and their layout in rows and columns. Text can't be measured here: its width is estimated.

#: Pixels between parts, and from one line of text to the next.
GAP, LINE = 8, 16
#: Widths of a letter in sizes of its font, on average; those of wide fonts.
LETTER, BOLD_LETTER = 0.61, 0.64
#: Classes of text whose size is another than 12, and those that are bold, as the style sheet has them.
SIZES = {"top": 15, "small": 11, "on": 11}
BOLD = ("top", "head", "bad", "on")
#: Lines of each text of a paragraph.
MOST_LINES = 4
INDENT = "   "


@dataclass(frozen=True)
class Part:
    """A part of the picture, its upper left corner at 0, 0."""

    markup: str
    width: int
    height: int


def flow(parts: Iterable[Part], limit: int, gap: int) -> Part:
    """Parts in rows, from left to right, not wider than the limit unless a single part is."""
    placed, x, y, row, width = [], 0, 0, 0, 0
    for part in parts:
        if x and x + part.width > limit:
            x, y, row = 0, y + row + gap, 0
        placed.append(at(x, y, part))
        width, row = max(width, x + part.width), max(row, part.height)
        x += part.width + gap
    return Part("".join(placed), width, y + row)


def stack(parts: Sequence[Part]) -> Part:
    """Parts below each other."""
    return flow(parts, 0, GAP)


def at(x: int, y: int, part: Part) -> str:
    """The markup of a part with its corner at that place."""
    if not part.markup:
        return ""
    return f'<g transform="translate({x} {y})">{part.markup}</g>\n' if x or y else part.markup


def rectangle(kind: str, width: int, height: int, *, radius: int = 6) -> str:
    """A box with its corner at 0, 0."""
    return f'<rect class="{kind}" width="{width}" height="{height}" rx="{radius}"/>'


def extent(letters: int, kind: str) -> float:
    """The width of so many letters."""
    return letters * SIZES.get(kind, 12) * (BOLD_LETTER if kind in BOLD else LETTER)


def text(x: int, y: int, words: str, kind: str = "", *, limit: float = 0, anchor: str = "") -> str:
    """A line of text, shortened to so many pixels if there is a `limit`."""
    words = printable(words)
    letters = int(limit / extent(1, kind))
    if limit and len(words) > letters:
        words = words[: max(letters - 1, 0)] + "…"
    classes = f' class="{kind}"' if kind else ""
    anchors = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{classes} x="{x}" y="{y}"{anchors}>{escape(words)}</text>' if words else ""


def titled(title: str, part: Part) -> Part:
    """A part with a text that appears when the mouse is on it."""
    return Part(f"<g><title>{escape(printable(title))}</title>{part.markup}</g>", part.width, part.height)


def paragraph(texts: Iterable[str], width: int, kind: str) -> Part:
    """Texts in lines of that width; of long ones the beginning."""
    lines = [
        line
        for words in texts
        for line in textwrap.wrap(
            printable(words),
            int(width / extent(1, kind)),
            max_lines=MOST_LINES,
            placeholder=" …",
            subsequent_indent=INDENT,
        )
    ]
    markup = "".join(
        text(12 if line.startswith(INDENT) else 0, LINE * number, line.strip(), kind)
        for number, line in enumerate(lines, start=1)
    )
    return Part(markup, width, LINE * len(lines) + 4)


#: In pixels, as all numbers here.
PAD, GPU_WIDTH, WORKER_HEIGHT = 12, 176, 54
#: A domain's GPUs in one row, and a node's workers on CPUs.
IN_A_ROW = 4
LEAST_NODE, LEAST_PAGE, MOST_PAGE = 250, 640, 1600
#: Nodes with GPUs in one column: two side by side are small print on a page of text.
IN_A_COLUMN = 4
#: Warnings that are spelled out.
MOST_WARNINGS = 12

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
.dgm-plan .on { fill: #ffffff; font-weight: bold; font-size: 11px }
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


def svg(plan: Plan, *, warnings: bool = True) -> str:
    """Draw a plan; `warnings`: with their texts.

    The result is one SVG element without scripts, ids or anything from elsewhere. Its colours and background follow the reader's
    setting (light or dark).
    """
    boxes, left_out = node_boxes(plan)
    contents = [_content(box) for box in boxes]
    width = max([LEAST_NODE, *(content.width for content in contents)]) + 2 * PAD
    limit = MOST_PAGE if len(boxes) > IN_A_COLUMN else MOST_PAGE // 2
    nodes = flow(
        (_node(box, content, width) for box, content in zip(boxes, contents, strict=True)), limit, PAD
    )
    inner = max(nodes.width, LEAST_PAGE)
    texts = _warnings([*map(str, plan.warnings)], inner) if warnings else []
    page = stack([_head(plan, inner), nodes, *_more(left_out, inner), *texts])
    size_x, size_y = inner + 2 * PAD, page.height + 2 * PAD
    title = escape(printable(_title(plan)))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="dgm-plan" viewBox="0 0 {size_x} {size_y}" width="{size_x}" '
            f'height="{size_y}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            rectangle("page", size_x, size_y),
            at(PAD, PAD, page),
            "</svg>",
            "",
        ]
    )


def _title(plan: Plan) -> str:
    return (
        f"Plan: {plan.summary}; scheduler on {plan.scheduler.host}, client on {plan.client.host}; "
        f"{counted(len(plan.warnings), 'warning')}"
    )


def _head(plan: Plan, width: int) -> Part:
    devices = {device for worker in plan.workers for device in worker.devices}
    idle = sum(gpu.uuid not in devices for host in plan.hosts for gpu in host.gpus)
    red = [f"{counted(idle, 'GPU')} without a worker"] if idle else []
    red += [counted(len(plan.warnings), "warning")] if plan.warnings else []
    lines = [text(0, 16, plan.summary, "top", limit=width), text(0, 36, plan.roles, limit=width)]
    if red:
        lines.append(text(0, 54, ", ".join(red), "bad", limit=width))
    return Part("".join(lines), width, 60 if red else 42)


def _more(hosts: Sequence[str], width: int) -> list[Part]:
    """The nodes that have no box."""
    if not hosts:
        return []
    words = f"{counted(len(hosts), 'more node')}, of other kinds: {fold_names(hosts)}"
    return [paragraph([words], width, "head")]


def _warnings(warnings: Sequence[str], width: int) -> list[Part]:
    if not warnings:
        return []
    lines = [f"{number}. {warning}" for number, warning in enumerate(warnings[:MOST_WARNINGS], start=1)]
    if len(warnings) > MOST_WARNINGS:
        lines.append(f"{len(warnings) - MOST_WARNINGS} more warnings; the table has them all")
    return [
        Part(text(0, LINE, "Warnings", "bad", limit=width), width, LINE),
        paragraph(lines, width, "warning"),
    ]


def _node(box: NodeBox, content: Part, width: int) -> Part:
    chips, right = [], width - PAD
    for role in reversed(box.roles):
        length = int(extent(len(role), "on")) + 16
        right -= length
        chip = rectangle("chip client" if role == "client" else "chip", length, 20, radius=10)
        chip += text(length // 2, 14, role, "on", anchor="middle")
        chips.append(at(right, 8, Part(chip, length, 20)))
        right -= 6
    top = 52
    below = top + content.height + (GAP if content.height else 0)
    alarms = [
        text(PAD, below + LINE * number, alarm, "bad", limit=width - 2 * PAD)
        for number, alarm in enumerate(box.alarms, start=1)
    ]
    height = below + LINE * len(alarms) + (GAP + 4 if alarms else 4)
    sheets = "" if len(box.hosts) == 1 else "".join(_sheet(width, height, shift) for shift in (6, 3))
    markup = [
        sheets,
        rectangle("node red" if box.is_red else "node", width, height),
        text(PAD, 23, box.title, "head", limit=right - PAD),
        text(PAD, 42, box.subtitle, "small", limit=width - 2 * PAD),
        *chips,
        at(PAD, top, content),
        *alarms,
    ]
    part = Part("".join(markup), width, height + (6 if sheets else 0))
    return titled(f"{box.title}: {box.subtitle}", part)


def _sheet(width: int, height: int, shift: int) -> str:
    """A sheet below the box of several nodes."""
    return at(shift, shift, Part(rectangle("node", width, height), width, height))


def _content(box: NodeBox) -> Part:
    tall = any(gpu.in_use for gpu in box.gpus)
    domains = [_domain(gpus, tall) for gpus in share_entries(box.gpus, lambda gpu: gpu.cores)]
    workers = [titled(_all_of(worker), _worker(worker, GPU_WIDTH)) for worker in box.cpu_workers]
    parts = [flow(domains, IN_A_ROW * (GPU_WIDTH + GAP) + 4 * GAP, GAP)] if domains else []
    parts += [flow(workers, IN_A_ROW * (GPU_WIDTH + GAP), GAP)] if workers else []
    if box.reserved:
        parts.append(
            Part(text(0, 14, "no workers: ranks reserved for scheduler and client", "small"), 0, LINE)
        )
    return stack(parts)


def _domain(gpus: Sequence[GpuBox], tall: bool) -> Part:
    """The GPUs near the same cores, which is a NUMA domain."""
    part = flow((_gpu(gpu, tall) for gpu in gpus), IN_A_ROW * (GPU_WIDTH + GAP), GAP)
    if not gpus[0].cores:
        return part
    width, height = part.width + 2 * GAP, part.height + 20 + GAP
    label = text(GAP, 14, f"NUMA domain: cores {gpus[0].cores}", "small", limit=width - 2 * GAP)
    return Part(rectangle("domain", width, height) + label + at(GAP, 20, part), width, height)


def _gpu(gpu: GpuBox, tall: bool) -> Part:
    kind = "gpu idle" if gpu.worker is None else "gpu red" if gpu.in_use else "gpu"
    inside = GPU_WIDTH - 2 * GAP
    top = 40 + (LINE if tall else 0)
    height = top + WORKER_HEIGHT + GAP
    markup = [
        rectangle(kind, GPU_WIDTH, height),
        text(GAP, 16, gpu.label, "head", limit=inside - extent(len(gpu.memory), "small") - GAP),
        text(GPU_WIDTH - GAP, 16, gpu.memory, "small", anchor="end"),
        text(GAP, 32, gpu.product, "small", limit=inside),
        text(GAP, 32 + LINE, gpu.in_use, "bad", limit=inside),
    ]
    if gpu.worker is None:
        markup.append(text(GAP, top + WORKER_HEIGHT // 2, "no worker", "bad"))
    else:
        markup.append(at(GAP, top, _worker(gpu.worker, inside)))
    return titled(_all_of_gpu(gpu), Part("".join(markup), GPU_WIDTH, height))


def _all_of_gpu(gpu: GpuBox) -> str:
    """All about a GPU, for a reader who points at it."""
    worker = _all_of(gpu.worker) if gpu.worker else "no worker"
    return "; ".join(
        filter(None, (f"{gpu.label}: {gpu.product}", gpu.memory, gpu.identity, gpu.in_use, worker))
    )


def _all_of(worker: WorkerBox) -> str:
    return ", ".join(filter(None, (worker.label, worker.threads, worker.memory, worker.cores)))


def _worker(worker: WorkerBox, width: int) -> Part:
    inside = width - 2 * GAP
    markup = [
        rectangle("worker" if worker.kind == "gpu" else "worker cpu", width, WORKER_HEIGHT, radius=4),
        text(GAP, 16, worker.label, "head", limit=inside),
        text(GAP, 31, f"{worker.threads} · {worker.memory}", "small", limit=inside),
        text(GAP, 46, worker.cores, "small", limit=inside),
    ]
    return Part("".join(markup), width, WORKER_HEIGHT)
