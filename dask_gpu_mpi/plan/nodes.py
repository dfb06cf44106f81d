"""A plan for people, by node: as a table (`display`), in which many nodes that look alike share an entry, and a picture (`svg`).

The commands ``plan`` and ``check`` print the table, the report and notebooks show the picture. Both ask `Nodes` what there is
to show of a node. The end of this module has the parts that any picture is made of, such as rectangles and lines of text.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from dask_gpu_mpi.base.text import (
    counted,
    fold_names,
    fold_numbers,
    format_bytes,
    grouped,
    listed,
    printable,
    ranks_text,
    styled,
    table,
    widths_of,
)
from dask_gpu_mpi.machine import Gpu, near
from dask_gpu_mpi.plan import HostPlan, Plan, WorkerPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


# Many nodes have the same sets of cores.
_near = functools.lru_cache(near)


class Nodes:
    """A plan, by host: what is to be shown of each."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: The ranks that take no workers.
        self.reserved = {plan.scheduler.rank, plan.client.rank} if plan.layout == "exclusive" else set()
        self.workers: dict[str, list[WorkerPlan]] = {host.host: [] for host in plan.hosts}
        for worker in plan.workers:
            self.workers[worker.host].append(worker)

    def roles(self, host: HostPlan) -> list[str]:
        """``"scheduler"``, ``"client"``."""
        found = (("scheduler", self.plan.scheduler), ("client", self.plan.client))
        return [name for name, role in found if role.rank in host.ranks]

    def idle(self, host: HostPlan) -> list[int]:
        """The places of the GPUs without a worker."""
        devices = {device for worker in self.workers[host.host] for device in worker.devices}
        return [place for place, gpu in enumerate(host.gpus) if gpu.uuid not in devices]

    def busy(self, host: HostPlan) -> list[int]:
        """The places of the GPUs on which others hold memory."""
        return [place for place, gpu in enumerate(host.gpus) if gpu.processes]

    def alarms(self, host: HostPlan) -> list[str]:
        """The problems of the node as a whole."""
        alarms = []
        starting = {worker.rank for worker in self.workers[host.host]}
        if without := sorted({*host.ranks} - self.reserved - starting):
            alarms.append(f"no worker: {ranks_text(without)}")
        numbers = [n for n, warning in enumerate(self.plan.warnings, start=1) if host.host in warning.hosts]
        if numbers:
            alarms.append(f"see warning{'' if len(numbers) == 1 else 's'} {fold_numbers(numbers)}")
        return alarms

    def has_problem(self, host: HostPlan) -> bool:
        """Whether there is anything about it that the user may want to change."""
        return bool(self.alarms(host) or self.idle(host) or self.busy(host))

    def appearance(self, host: HostPlan) -> Hashable:
        """What the entry of a host shows, without names, ranks and UUIDs: equal for hosts that can share an entry."""
        workers = [
            (
                worker.rank - host.ranks[0],
                _device(worker, host.gpus, alone=False),
                worker.nthreads,
                short(worker.memory_limit),
                cores_of(worker),
            )
            for worker in self.workers[host.host]
        ]
        gpus = (len(host.gpus), *self.idle(host), "busy", *self.busy(host))
        return (len(host.ranks), short(host.memory), gpus, tuple(workers))

    def rows(self, hosts: Sequence[HostPlan]) -> list[tuple[str, ...]]:
        """The table of an entry: a cell for each name in `HEADER`."""
        first, last = self.workers[hosts[0].host], self.workers[hosts[-1].host]
        return [
            (
                _span(worker.name, other.name),
                _span(worker.rank, other.rank),
                _device(worker, hosts[0].gpus, alone=len(hosts) == 1),
                str(worker.nthreads),
                format_bytes(worker.memory_limit) if worker.memory_limit else "unlimited",
                cores_of(worker) or "-",
            )
            for worker, other in zip(first, last, strict=True)
        ]

    def troubles(self, hosts: Sequence[HostPlan]) -> Iterator[str]:
        """The GPUs of an entry that nobody uses, and those that others use."""
        for what, places_of in (("without a worker", self.idle), ("in use by others", self.busy)):
            found = [f"GPU {fold_numbers(places)} of {h.host}" for h in hosts if (places := places_of(h))]
            if found:
                yield f"{what}: {listed(found)}"


def short(size: int) -> str:
    """Bytes with three digits: nodes of one kind differ in more."""
    number, unit = format_bytes(size).split()
    value = float(number)
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def cores_of(worker: WorkerPlan) -> str:
    """The cores that a worker may use, its NUMA node and network devices, in words; empty: unknown."""
    return _near(worker.cpus, worker.numa, worker.nics)


#: Up to so many nodes have an entry each; of more, those that look alike share one.
MANY_NODES = 16
HEADER = ("worker", "rank", "device", "threads", "memory", "cores")
#: Those of them that are numbers.
NUMBERS = ("rank", "threads", "memory")
_ROLES = {"scheduler": "bold blue", "client": "bold magenta"}
_RED = "bold red"


def display(plan: Plan, *, terminal: bool = False) -> Iterator[RenderableType]:
    """The plan as lines and tables: roles, then each node with its workers, then the warnings.

    `terminal`: what is to be warned of is marked as well.
    """
    view = Nodes(plan)
    ranks, hosts = counted(plan.world_size, "rank"), counted(len(plan.hosts), "host")
    first = f"layout {plan.layout}: {ranks} on {hosts}, {counted(len(plan.workers), 'worker')}"
    yield styled(plan.summary if terminal else first, "bold")
    text = styled(plan.roles)
    for role, style in _ROLES.items():
        text.highlight_words([role], style)
    yield text
    entries = [[host] for host in plan.hosts]
    if len(entries) > MANY_NODES:
        entries = grouped(plan.hosts, view.appearance)
    tables = [view.rows(entry) for entry in entries]
    widths = () if terminal else widths_of([HEADER, *(row for rows in tables for row in rows)])
    for entry, rows in zip(entries, tables, strict=True):
        yield ""
        title = styled(_title(entry), "bold")
        for role in {role: None for host in entry for role in view.roles(host)} if terminal else ():
            title.append("  ").append(role, _ROLES[role])
        yield title
        if rows:
            yield table(HEADER, map(_coloured, rows), right=NUMBERS, widths=widths)
        else:
            yield styled("  no worker", "dim")
        if terminal:
            yield from (styled(f"  {text}", _RED) for text in view.troubles(entry))
    if plan.warnings:
        yield ""
    for warning in plan.warnings:
        yield styled("warning", _RED).append(styled(f": {warning}", "red"))


def _title(hosts: Sequence[HostPlan]) -> str:
    first, *others = hosts
    memory = format_bytes(first.memory) if first.memory else "memory unknown"
    gpus = counted(len(first.gpus), "GPU")
    if not others:
        return f"host {first.host}: {ranks_text(first.ranks)}, {memory}, {gpus}"
    ranks = ranks_text(rank for host in hosts for rank in host.ranks)
    return f"{len(hosts)} hosts {fold_names(host.host for host in hosts)}: {ranks}; on each {memory}, {gpus}"


def _coloured(row: Sequence[str]) -> list[Text]:
    colour = "cyan" if row[HEADER.index("device")] == "-" else "green"
    return [
        styled(cell, colour if name in ("worker", "device") else "")
        for name, cell in zip(HEADER, row, strict=True)
    ]


def _span(first: object, last: object) -> str:
    return f"{first}" if first == last else f"{first} .. {last}"


def _device(worker: WorkerPlan, gpus: Sequence[Gpu], *, alone: bool) -> str:
    if worker.gpu_index is None:
        return "-"
    gpu = gpus[worker.gpu_index]
    places = fold_numbers(place for place, other in enumerate(gpus) if other.uuid in worker.devices)
    # The first place is the one of the worker's name; the UUID differs between nodes that share an entry.
    return f"{places} {gpu.name}" + (f" {gpu.uuid[:12]}" if alone else "")


# The plan as an SVG picture: nodes as boxes, in them their GPUs with their workers; problems are red.

#: In pixels, as all numbers here.
PAD, GPU_WIDTH, WORKER_HEIGHT = 12, 176, 54
#: A domain's GPUs in one row, and a node's workers on CPUs.
IN_A_ROW = 4
LEAST_NODE, LEAST_PAGE, MOST_PAGE = 250, 640, 1600
#: Nodes with GPUs in one column: two side by side are small print on a page of text.
IN_A_COLUMN = 4
#: Nodes that are drawn, workers on CPUs of each, and warnings that are spelled out.
MOST_NODES, MOST_CPU_WORKERS, MOST_WARNINGS = 16, 8, 12


def svg(plan: Plan, *, warnings: bool = True) -> str:
    """Draw a plan; `warnings`: with their texts. Of more than `MOST_NODES` nodes, those with a role or a problem are drawn first.

    The result is one SVG element without scripts, ids or anything from elsewhere. Its colours and background follow the reader's
    setting (light or dark).
    """
    nodes = Nodes(plan)
    drawn = sorted(plan.hosts, key=lambda host: (not nodes.roles(host), not nodes.has_problem(host)))[
        :MOST_NODES
    ]
    drawn = [host for host in plan.hosts if host in drawn]
    contents = [_content(nodes, host) for host in drawn]
    width = max([LEAST_NODE, *(content.width for content in contents)]) + 2 * PAD
    boxes = [_node(nodes, host, content, width) for host, content in zip(drawn, contents, strict=True)]
    rows = flow(boxes, MOST_PAGE if len(drawn) > IN_A_COLUMN else MOST_PAGE // 2, PAD)
    inner = max(rows.width, LEAST_PAGE)
    parts = [_head(nodes, inner), rows]
    if others := [host for host in plan.hosts if host not in drawn]:
        words = f"{counted(len(others), 'more node')}: {fold_names(host.host for host in others)}"
        parts.append(paragraph([words], inner, "head"))
    if warnings and plan.warnings:
        parts += _warnings(plan, inner)
    page = stack(parts)
    size_x, size_y = inner + 2 * PAD, page.height + 2 * PAD
    roles_text = f"scheduler on {plan.scheduler.host}, client on {plan.client.host}"
    title = f"Plan: {plan.summary}; {roles_text}; {counted(len(plan.warnings), 'warning')}"
    title = escape(printable(title))
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


def _head(nodes: Nodes, width: int) -> Part:
    """The job in two lines, and the number of its problems."""
    plan = nodes.plan
    idle = sum(len(nodes.idle(host)) for host in plan.hosts)
    red = [f"{counted(idle, 'GPU')} without a worker"] if idle else []
    red += [counted(len(plan.warnings), "warning")] if plan.warnings else []
    lines = [text(0, 16, plan.summary, "top", limit=width), text(0, 36, plan.roles, limit=width)]
    if red:
        lines.append(text(0, 54, ", ".join(red), "bad", limit=width))
    return Part("".join(lines), width, 60 if red else 42)


def _warnings(plan: Plan, width: int) -> list[Part]:
    """The warnings with their numbers, to which the nodes refer."""
    lines = [f"{number}. {warning}" for number, warning in enumerate(plan.warnings[:MOST_WARNINGS], start=1)]
    if len(plan.warnings) > MOST_WARNINGS:
        lines.append(f"{len(plan.warnings) - MOST_WARNINGS} more warnings; the table has them all")
    title = Part(text(0, LINE, "Warnings", "bad", limit=width), width, LINE)
    return [title, paragraph(lines, width, "warning")]


def _node(nodes: Nodes, host: HostPlan, content: Part, width: int) -> Part:
    """A node: its name, its roles as chips on the right, its ranks and memory, its GPUs and workers (`content`), its problems."""
    chips, right = [], width - PAD
    for role in reversed(nodes.roles(host)):
        length = int(extent(len(role), "on")) + 16
        right -= length
        chip = rectangle("chip client" if role == "client" else "chip", length, 20, radius=10)
        chip += text(length // 2, 14, role, "on", anchor="middle")
        chips.append(at(right, 8, Part(chip, length, 20)))
        right -= 6
    alarms = nodes.alarms(host)
    top = 52
    below = top + content.height + (GAP if content.height else 0)
    problems = [
        text(PAD, below + LINE * number, alarm, "bad", limit=width - 2 * PAD)
        for number, alarm in enumerate(alarms, start=1)
    ]
    height = below + LINE * len(alarms) + (GAP + 4 if alarms else 4)
    memory = short(host.memory) if host.memory else "memory unknown"
    subtitle = f"{ranks_text(host.ranks)} · {memory}, {counted(len(host.gpus), 'GPU')}"
    markup = [
        rectangle("node red" if nodes.has_problem(host) else "node", width, height),
        text(PAD, 23, host.host, "head", limit=right - PAD),
        text(PAD, 42, subtitle, "small", limit=width - 2 * PAD),
        *chips,
        at(PAD, top, content),
        *problems,
    ]
    return titled(f"{host.host}: {subtitle}", Part("".join(markup), width, height))


def _content(nodes: Nodes, host: HostPlan) -> Part:
    """The GPUs of a node with their workers, then its workers on CPUs."""
    workers = nodes.workers[host.host]
    of_gpu = {device: worker for worker in workers for device in worker.devices}
    tall = any(gpu.processes for gpu in host.gpus)
    domains = [
        _domain([(place, gpu, of_gpu.get(gpu.uuid)) for place, gpu in places], tall)
        for places in grouped(enumerate(host.gpus), lambda each: each[1].cpus)
    ]
    on_cpus = [worker for worker in workers if worker.gpu_index is None]
    boxes = []
    for worker in on_cpus[:MOST_CPU_WORKERS]:
        name = f"worker {worker.name}"
        boxes.append(titled(_all_of(name, worker), _worker(name, worker, GPU_WIDTH)))
    parts = [flow(domains, IN_A_ROW * (GPU_WIDTH + GAP) + 4 * GAP, GAP)] if domains else []
    parts += [flow(boxes, IN_A_ROW * (GPU_WIDTH + GAP), GAP)] if boxes else []
    lines = []
    if (more := len(on_cpus) - len(boxes)) > 0:
        lines.append(counted(more, "more CPU worker"))
    if {*host.ranks} <= nodes.reserved:
        lines.append("no workers: ranks reserved for scheduler and client")
    return stack([*parts, *(Part(text(0, 14, line, "small"), 0, LINE) for line in lines)])


def _domain(gpus: Sequence[tuple[int, Gpu, WorkerPlan | None]], tall: bool) -> Part:
    """The GPUs near the same cores, which is a NUMA domain; each with its place on the host, and its worker."""
    part = flow(
        (_gpu(place, gpu, worker, tall) for place, gpu, worker in gpus), IN_A_ROW * (GPU_WIDTH + GAP), GAP
    )
    if not (cores := fold_numbers(gpus[0][1].cpus)):
        return part
    width, height = part.width + 2 * GAP, part.height + 20 + GAP
    label = text(GAP, 14, f"NUMA domain: cores {cores}", "small", limit=width - 2 * GAP)
    return Part(rectangle("domain", width, height) + label + at(GAP, 20, part), width, height)


def _gpu(place: int, gpu: Gpu, worker: WorkerPlan | None, tall: bool) -> Part:
    """A GPU with its worker; `tall`: one of its node's is in use by others, which takes a line more."""
    in_use = ""
    if gpu.processes:
        in_use = "in use by others" if gpu.busy is None else f"{short(gpu.busy)} used by others"
    kind = "gpu idle" if worker is None else "gpu red" if in_use else "gpu"
    label = f"GPU {place}" + (f" MIG {gpu.slice}" if gpu.slice >= 0 else "")
    memory = short(gpu.memory) if gpu.memory else ""
    inside = GPU_WIDTH - 2 * GAP
    top = 40 + (LINE if tall else 0)
    height = top + WORKER_HEIGHT + GAP
    markup = [
        rectangle(kind, GPU_WIDTH, height),
        text(GAP, 16, label, "head", limit=inside - extent(len(memory), "small") - GAP),
        text(GPU_WIDTH - GAP, 16, memory, "small", anchor="end"),
        text(GAP, 32, gpu.name, "small", limit=inside),
        text(GAP, 32 + LINE, in_use, "bad", limit=inside),
    ]
    about = [f"{label}: {gpu.name}", memory, f"{gpu.uuid}, NVML index {gpu.index}", in_use]
    if worker is None:
        markup.append(text(GAP, top + WORKER_HEIGHT // 2, "no worker", "bad"))
        about.append("no worker")
    else:
        name = f"worker {worker.name}"
        if len(worker.devices) > 1:
            name = f"{worker.name}, device {worker.devices.index(gpu.uuid)}"
        markup.append(at(GAP, top, _worker(name, worker, inside)))
        about.append(_all_of(name, worker))
    return titled("; ".join(filter(None, about)), Part("".join(markup), GPU_WIDTH, height))


def _lines(worker: WorkerPlan) -> tuple[str, str, str]:
    """Threads, memory and cores of a worker."""
    cores = cores_of(worker) if worker.cpus else ""
    memory = short(worker.memory_limit) if worker.memory_limit else "unlimited"
    return counted(worker.nthreads, "thread"), memory, f"cores {cores}" if cores else ""


def _all_of(label: str, worker: WorkerPlan) -> str:
    """All about a worker, for a reader who points at it."""
    return ", ".join(filter(None, (label, *_lines(worker))))


def _worker(label: str, worker: WorkerPlan, width: int) -> Part:
    """A worker in three lines."""
    inside = width - 2 * GAP
    threads, memory, cores = _lines(worker)
    markup = [
        rectangle("worker" if worker.kind == "gpu" else "worker cpu", width, WORKER_HEIGHT, radius=4),
        text(GAP, 16, label, "head", limit=inside),
        text(GAP, 31, f"{threads} · {memory}", "small", limit=inside),
        text(GAP, 46, cores, "small", limit=inside),
    ]
    return Part("".join(markup), width, WORKER_HEIGHT)


# The parts of a picture, which are laid out in rows and columns. Text can't be measured here: its width is estimated.

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
