"""Makes what docs/design.md shows of the code: its pictures (docs/images) and its table of rooms.

    python docs/make_design.py             writes them
    python docs/make_design.py --check     says which are not current

The picture of the rooms is made from the imports of the package, and the table from its docstrings, so neither can say what is
not so. The other pictures are tables below.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dask_gpu_mpi"
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "design.md"
#: The table of rooms stands between these lines of the page.
BEGIN, END_OF_TABLE = "<!-- rooms: made by docs/make_design.py -->\n", "<!-- end of rooms -->\n"

#: Colours for light and dark pages; the pictures have no background of their own.
STYLE = """
  text { font: 13px sans-serif; fill: #1f2328 }
  .over { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
  .small { font-size: 11px; fill: #59636e }
  .head { font-weight: bold }
  .box { fill: #f6f8fa; stroke: #59636e }
  .group { fill: none; stroke: #59636e; stroke-dasharray: 5 4 }
  .gpu { fill: #dafbe1; stroke: #1a7f37 }
  .arrow { stroke: #0969da; fill: none; stroke-width: 1.3 }
  .tip { fill: #0969da }
  .life { stroke: #8c959f; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .over { stroke: #0d1117 }
    .small { fill: #9198a1 }
    .box { fill: #21262d; stroke: #9198a1 }
    .group { stroke: #9198a1 }
    .gpu { fill: #12361f; stroke: #3fb950 }
    .arrow { stroke: #4493f8 }
    .tip { fill: #4493f8 }
  }
"""
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
)
#: The rooms from top to bottom, as import-linter holds them (pyproject.toml).
LAYERS = (
    ("cli",),
    ("job", "check"),
    ("startup",),
    ("agent",),
    ("workers", "view", "gang"),
    ("plan", "mpi"),
    ("machine",),
    ("network",),
    ("options", "sites"),
    ("base",),
)


def picture(title: str, width: float, height: float, body: list[str]) -> str:
    """A whole SVG file."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        'role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{TIP}</defs>",
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    """A rectangle with round corners."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(path: str) -> str:
    """A line with a tip at its end."""
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'


# -- the rooms ------------------------------------------------------------------------------------------------------------------


def modules_of(room: str) -> list[str]:
    """Its modules."""
    return sorted(path.stem for path in (PACKAGE / room).glob("*.py") if path.stem != "__init__")


def sentence_of(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    found = ast.get_docstring(ast.parse(path.read_text())) or ""
    words = " ".join(found.partition("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".")


def purpose_of(room: str) -> str:
    """What a room is for."""
    return sentence_of(PACKAGE / room / "__init__.py") + "."


def table() -> str:
    """The top folder, all rooms, and their modules, as Markdown."""
    lines = ["### `dask_gpu_mpi/`", "", "The package itself; `errors` is below all rooms.", ""]
    lines += ["| module | content |", "|---|---|"]
    lines += [f"| `{path.stem}` | {sentence_of(path)} |" for path in sorted(PACKAGE.glob("*.py"))]
    lines.append("")
    for room in (name for layer in LAYERS for name in layer):
        lines += [f"### `{room}/`", "", purpose_of(room), "", "| module | content |", "|---|---|"]
        lines += [f"| `{name}` | {sentence_of(PACKAGE / room / f'{name}.py')} |" for name in modules_of(room)]
        lines.append("")
    return "\n".join(lines)


def imports_of(room: str) -> set[str]:
    """The rooms that it imports from."""
    rooms = {name for layer in LAYERS for name in layer}
    found = set()
    for path in (PACKAGE / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dask_gpu_mpi."):
                found.add((node.module or "").split(".")[1])
    return (found & rooms) - {room}


def rooms() -> str:
    """The rooms of the package, and who imports whom."""
    width, gap, line = 760.0, 26.0, 16.0
    places: dict[str, tuple[float, float]] = {}
    body: list[str] = []
    y = 10.0
    above: tuple[str, ...] = ()
    for layer in LAYERS:
        each = (width - 20 - 20 * (len(layer) - 1)) / len(layer)
        purposes = {room: fold(purpose_of(room).split(), int((each - 100) / 5.8), " ") for room in layer}
        modules = {room: fold(modules_of(room), int(each / 7.3), ", ") for room in layer}
        height = 30 + max(14 * len(purposes[room]) + line * len(modules[room]) for room in layer)
        for number, room in enumerate(layer):
            x = 10 + number * (each + 20)
            places[room] = (x, x + each)
            body += [box(x, y, each, height), text(x + 10, y + 20, f"{room}/", "head")]
            for row, words in enumerate(purposes[room]):
                body.append(text(x + 92, y + 20 + row * 14, words, "small"))
            for row, words in enumerate(modules[room]):
                body.append(text(x + 10, y + 28 + 14 * len(purposes[room]) + row * line, words))
            for other in above:
                if room in imports_of(other):
                    left, right = max(x, places[other][0]), min(x + each, places[other][1])
                    # straight down where both boxes are, else from the middle of one to that of the other
                    start = end = (left + right) / 2
                    if left > right:
                        start, end = sum(places[other]) / 2, x + each / 2
                    body.append(arrow(f"M{start:g} {y - gap:g} L{end:g} {y:g}"))
        y += height + gap
        above = layer
    return picture("The rooms of dask_gpu_mpi and their imports", width, y - gap + 10, body)


def fold(words: list[str], most: int, between: str) -> list[str]:
    """Lines of at most so many characters."""
    lines = [""]
    for number, word in enumerate(words):
        piece = word + (between if number + 1 < len(words) else "")
        if lines[-1] and len(lines[-1]) + len(piece) > most + 1:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


# -- the processes --------------------------------------------------------------------------------------------------------------


def processes() -> str:
    """The processes of a job of two nodes with two GPUs each."""
    body = [box(10, 84, 84, 36), text(52, 107, "launcher", "head", "middle")]
    for node in range(2):
        top = 10 + node * 190
        body += [box(130, top, 640, 172, "group"), text(142, top + 20, f"node {node}", "small")]
        body += [box(150, top + 60, 130, 52), text(215, top + 82, f"rank {node}", "head", "middle")]
        body.append(
            text(215, top + 100, "MPI, your script" if node == 0 else "MPI, waits", "small", "middle")
        )
        body += [box(330, top + 60, 110, 52), text(385, top + 82, f"agent {node}", "head", "middle")]
        body.append(text(385, top + 100, "Dask's nannies", "small", "middle"))
        body += [box(470, top + 60, 100, 52), text(520, top + 91, "fork server", "head", "middle")]
        body += [arrow(f"M280 {top + 86} L330 {top + 86}"), text(305, top + 80, "pipe", "small", "middle")]
        body.append(arrow(f"M440 {top + 86} L470 {top + 86}"))
        rows = [("scheduler", "box")] if node == 0 else []
        rows += [(f"worker {node}-{gpu}: GPU {gpu}", "gpu") for gpu in range(2)]
        for row, (name, kind) in enumerate(rows):
            y = top + (14 if node == 0 else 40) + row * 52
            body += [box(605, y, 150, 40, kind), text(680, y + 25, name, "head", "middle")]
            body.append(arrow(f"M570 {top + 86} C588 {top + 86} 588 {y + 20} 605 {y + 20}"))
        start = "M94 96" if node == 0 else "M52 120 L52 286"
        body.append(arrow(f"{start} L150 {top + 86}"))
    return picture("The processes of a job", 780, 382, body)


# -- the sequences --------------------------------------------------------------------------------------------------------------

LANES = ("agent of a rank", "rank", "rank 0", "agent 0", "scheduler")
#: From, to, what: one row each. A step of a lane's own has the same lane twice.
START = (
    (1, 0, "start: import Dask, probe the GPUs"),
    (1, 1, "MPI_Init"),
    (0, 1, "prepared: options are good, GPUs found"),
    (1, 2, "registration: what this rank sees, or why it can't take part"),
    (2, 2, "plan, credentials"),
    (2, 1, "connect: can you reach the scheduler's node? (several nodes)"),
    (1, 2, "reached"),
    (2, 3, "scheduler"),
    (3, 4, "fork"),
    (4, 3, "up: address"),
    (3, 2, "address"),
    (2, 1, "start: workers, address, credentials"),
    (1, 0, "workers"),
    (0, 4, "nannies and workers register"),
    (0, 1, "ready"),
    (1, 2, "ready"),
    (2, 1, "cluster-up, from the last ready on: the script begins"),
)
END = (
    (2, 2, "the script ends, in whatever way"),
    (2, 1, "end"),
    (1, 0, "close-workers"),
    (0, 1, "closed, within the shutdown deadline"),
    (1, 2, "closed"),
    (1, 1, "end of the pipe: the agent ends; exit 0"),
    (2, 3, "release, once all have closed"),
    (3, 4, "close"),
    (2, 2, "exit with the script's code"),
)


def sequence(title: str, steps: tuple[tuple[int, int, str], ...]) -> str:
    """Lanes from top to bottom, a row for each step."""
    apart, row = 170.0, 34.0
    height = 60 + row * len(steps)
    body = []
    for lane, name in enumerate(LANES):
        x = 90 + lane * apart
        body.append(f'<line class="life" x1="{x:g}" y1="40" x2="{x:g}" y2="{height - 6:g}"/>')
        body += [box(x - 70, 8, 140, 30), text(x, 28, name, "head", "middle")]
    for number, (source, target, words) in enumerate(steps):
        y = 68 + number * row
        x = 90 + source * apart
        if source == target:
            body.append(f'<circle class="tip" cx="{x:g}" cy="{y:g}" r="3"/>')
            body.append(text(x + 8, y + 4, words, "small over"))
            continue
        end = 90 + target * apart
        body.append(arrow(f"M{x:g} {y:g} L{end:g} {y:g}"))
        body.append(text((x + end) / 2, y - 6, words, "small over", "middle"))
    return picture(title, 180 + apart * (len(LANES) - 1), height, body)


def made() -> dict[Path, str]:
    """All files as they should be."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END_OF_TABLE)
    return {
        IMAGES / "rooms.svg": rooms(),
        IMAGES / "processes.svg": processes(),
        IMAGES / "start.svg": sequence("The start of a job", START),
        IMAGES / "end.svg": sequence("The end of a job", END),
        PAGE: f"{before}{begin}\n{table()}\n{end}{after}",
    }


def main() -> int:
    """Write them; with ``--check`` only say which are not current."""
    old = {path: text for path, text in made().items() if not path.is_file() or path.read_text() != text}
    if "--check" in sys.argv[1:]:
        for path in old:
            print(f"{path.relative_to(ROOT)} is not current: run python docs/make_design.py")
        return int(bool(old))
    IMAGES.mkdir(exist_ok=True)
    for path, text in old.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
