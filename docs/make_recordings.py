"""Makes the pictures of a terminal in docs/images (plan, top, job) from real runs on this machine.

    python docs/make_recordings.py           needs an MPI, dask[array] and a C compiler; takes half a minute

The four GPUs of `top` are emulated (tests/support/mocks). The job of three frames has CPU workers.
"""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests"))
COLUMNS, LINES = 100, 30
#: Rich's SVG without its fonts, which a browser would fetch from another server, and without a limit that cuts the last line.
PLAIN_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
 line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
#: What the workers do while `top` is recorded.
WORK = """
import time
import numpy as np
from distributed import Client

def make(i):
    time.sleep(0.3)
    return np.ones(2_000_000 + i)

def add(one, other):
    time.sleep(0.3)
    return float(one.sum() + other.sum())

with Client() as client:
    made = client.map(make, range(400), pure=False)
    client.gather([client.submit(add, made[i], made[(i + 7) % 400], pure=False) for i in range(400)])
"""


def environ(**more: str) -> dict[str, str]:
    """A terminal with colours; the checkout's package."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    known = {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES), "PATH": path}
    return {**os.environ, "PYTHONPATH": str(ROOT), **known, **more}


def record(words: list[str], folder: Path, env: dict[str, str], seconds: float | None = None) -> str:
    """What the command writes to its terminal until it ends; after `seconds`, q is pressed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(words[0], words, env)
    written, end, asked = b"", None if seconds is None else time.monotonic() + seconds, False
    while True:
        if end is not None and time.monotonic() > end and not asked:
            asked = True
            os.write(terminal, b"q")
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            read = os.read(terminal, 65536)
        except OSError:  # it has ended
            break
        if not read:
            break
        written += read
    os.waitpid(pid, 0)
    return written.decode().replace("\r\n", "\n")


def last_frame(written: str) -> str:
    """The last full picture of a live view that draws from the top left corner each time."""
    frames = [part for part in written.split("\x1b[H") if part.count("\n") > 3]
    return re.sub(r"\x1b\[[?\d;]*[hlJK]", "", frames[-1])


def draw(name: str, title: str, command: str, output: str) -> None:
    """Write the picture."""
    svg = picture(name, title, f"$ {command}\n{output}")
    (IMAGES / f"terminal-{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


#: Three frames, each for a third of the time; the last one stays, if the reader wants no motion.
FILM = """\
<svg viewBox="{box}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>{title}</title>
<style>
.frame {{ opacity: 0; animation: shown 18s step-end infinite }}
.frame:nth-of-type(2) {{ animation-delay: -12s }}
.frame:nth-of-type(3) {{ animation-delay: -6s }}
@keyframes shown {{ 0% {{ opacity: 1 }} 33.3% {{ opacity: 0 }} }}
@media (prefers-reduced-motion) {{ .frame {{ animation: none }} .frame:nth-of-type(3) {{ opacity: 1 }} }}
</style>
{frames}
</svg>
"""


def film(name: str, title: str, texts: list[str]) -> None:
    """Write a picture whose frames follow each other, in one size."""
    lines = max(text.rstrip().count("\n") for text in texts)
    width = max(len(line) for text in texts for line in Text.from_ansi(text).plain.splitlines())
    svgs = [
        picture(f"{name}-{number}", title, text.rstrip() + "\n" * (lines - text.rstrip().count("\n")), width)
        for number, text in enumerate(texts)
    ]
    [box] = set(re.findall(r'viewBox="([^"]+)"', "".join(svgs)))
    frames = "\n".join(f'<g class="frame">\n{svg.rstrip()}\n</g>' for svg in svgs)
    text = FILM.format(box=box, title=title, frames=frames)
    (IMAGES / f"terminal-{name}.svg").write_text(
        "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    )


def picture(name: str, title: str, shown: str, least: int = 80) -> str:
    """The text of a terminal as SVG."""
    text = Text("\n").join(Text.from_ansi(line.rstrip()) for line in shown.split("\n"))
    width = max(least, *(len(line) for line in text.plain.splitlines()))
    console = Console(
        record=True, width=width, file=io.StringIO(), color_system="truecolor", force_terminal=True
    )
    console.print(text, soft_wrap=True)
    return console.export_svg(title=title, code_format=PLAIN_SVG, unique_id=f"terminal-{name}")


class Job(NamedTuple):
    """A job in the background, and its first lines."""

    process: subprocess.Popen[str]
    first: str

    def end(self) -> str:
        """The other lines, at its end."""
        return self.process.communicate(timeout=120)[1]


def start_job(ranks: str, *options: str, folder: Path, env: dict[str, str]) -> Job:
    """Start the work, and wait until its cluster is ready."""
    process = subprocess.Popen(
        ["dask-gpu-mpi", "launch", "-n", ranks, "--scheduler-file", "cluster.json", *options, "work.py"],
        cwd=folder, env=env, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    first = ""
    for line in process.stderr:
        first += line
        if "ready after" in line:
            break
    return Job(process, first)


def main() -> None:
    """Record the commands."""
    from support.mocks.gpus import GIB, emulated_environ, make_gpus

    with tempfile.TemporaryDirectory(prefix="recording") as made:
        folder = Path(made)
        (folder / "work.py").write_text(WORK)

        command = ["dask-gpu-mpi", "plan", "--nodes", "2", "--gpus-per-node", "4"]
        draw("plan", "the plan of a job", " ".join(command), record(command, folder, environ()))

        job = start_job("4", "--summary", "--no-dashboard", folder=folder, env=environ())
        command = ["dask-gpu-mpi", "top", "--scheduler-file", "cluster.json"]
        shown = last_frame(record(command, folder, environ(), seconds=15))
        begin, end = job.first, job.end()
        launch = "$ dask-gpu-mpi launch -n 4 --scheduler-file cluster.json --summary --no-dashboard work.py\n"
        film("job", "a job of four CPU workers, from its start to its end", [
            launch + begin, f"$ {' '.join(command)}\n{shown}", launch + begin + end,
        ])  # fmt: skip

        gpus = [
            replace(gpu, utilization=use, used=used * GIB)
            for gpu, use, used in zip(
                make_gpus(4, host="one", memory=80 * GIB), (98, 95, 91, 97), (61, 58, 60, 58), strict=True
            )
        ]
        env = environ(**emulated_environ(gpus, {"PYTHONPATH": str(ROOT)}))
        job = start_job("1", folder=folder, env=env)
        try:
            command = ["dask-gpu-mpi", "top", "--scheduler-file", "cluster.json"]
            written = record(command, folder, env, seconds=12)
        finally:
            job.process.terminate()
            job.process.communicate(timeout=60)
        draw("top", "a job while it runs (its GPUs are emulated)", " ".join(command), last_frame(written))


if __name__ == "__main__":
    main()
