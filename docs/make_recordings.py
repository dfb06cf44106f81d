"""Makes the pictures of a terminal in docs/images (plan, top) from real runs on this machine.

    python docs/make_recordings.py           needs an MPI, dask[array] and a C compiler; takes half a minute

The four GPUs of `top` are emulated (tests/support/mocks).
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
    text = Text("\n").join(
        Text.from_ansi(line.rstrip()) for line in f"$ {command}\n{output.rstrip()}".split("\n")
    )
    width = max(80, *(len(line) for line in text.plain.splitlines()))
    console = Console(
        record=True, width=width, file=io.StringIO(), color_system="truecolor", force_terminal=True
    )
    console.print(text, soft_wrap=True)
    svg = console.export_svg(title=title, code_format=PLAIN_SVG, unique_id=f"terminal-{name}")
    (IMAGES / f"terminal-{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def main() -> None:
    """Record the two commands."""
    from support.mocks.gpus import GIB, emulated_environ, make_gpus

    with tempfile.TemporaryDirectory(prefix="recording") as made:
        folder = Path(made)
        (folder / "work.py").write_text(WORK)

        command = ["dask-gpu-mpi", "plan", "--nodes", "2", "--gpus-per-node", "4"]
        draw("plan", "the plan of a job", " ".join(command), record(command, folder, environ()))

        gpus = [
            replace(gpu, utilization=use, used=used * GIB)
            for gpu, use, used in zip(
                make_gpus(4, host="one", memory=80 * GIB), (98, 95, 91, 97), (61, 58, 60, 58), strict=True
            )
        ]
        env = environ(**emulated_environ(gpus, {"PYTHONPATH": str(ROOT)}))
        job = subprocess.Popen(
            ["dask-gpu-mpi", "launch", "-n", "1", "--scheduler-file", "cluster.json", "work.py"],
            cwd=folder, env=env, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert job.stderr is not None
            for line in job.stderr:
                if "ready after" in line:
                    break
            command = ["dask-gpu-mpi", "top", "--scheduler-file", "cluster.json"]
            written = record(command, folder, env, seconds=12)
        finally:
            job.terminate()
            job.communicate(timeout=60)
        draw("top", "a job while it runs (its GPUs are emulated)", " ".join(command), last_frame(written))


if __name__ == "__main__":
    main()
