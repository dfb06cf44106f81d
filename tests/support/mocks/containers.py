"""Stand-ins for container runtimes: they record their arguments, and run the rest of the line as the real ones would.

What they show of a container: the program is the image's `python`, which is this one; podman-hpc passes the variables that it is
told and no others; a line that does not fit the runtime's documentation ends with 125.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

RUNTIMES = ("podman-hpc", "shifter", "apptainer")
PROGRAM = """#!{python} -SE
import fnmatch, json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open({record!r}, "a") as record:
    record.write(json.dumps([name, *words]) + "\\n")
env = dict(os.environ)
begin = {{"podman-hpc": ["run"], "shifter": [], "apptainer": ["exec"]}}[name]
at = len(begin)
while words[:len(begin)] == begin and words[at].startswith("-") and words[at] != "--":
    at += 1
options, rest = words[len(begin):at], words[at:]
if name in ("podman-hpc", "shifter") and rest.pop(0) != "--":
    sys.exit(125)
image = rest.pop(0) if name != "shifter" else options.pop(0).removeprefix("--image=")
if image != {image!r}:
    sys.exit(125)
if name == "podman-hpc":
    patterns = [word[6:] for word in options if word.startswith("--env=")]
    env = {{key: env[key] for key in env if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)}}
    os.chdir(next(word[10:] for word in options if word.startswith("--workdir=")))
env |= {{"HOME": "/", "PATH": {path!r}, "PYTHONPATH": {modules!r}, "IN_CONTAINER": name}}
os.execvpe(rest[0], rest, env)
"""

#: srun with Pyxis, in front of the real one.
SRUN = """#!{python} -SE
import json, os, subprocess, sys
words = sys.argv[1:]
if words == ["--help"]:
    print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH", flush=True)
elif any(word.startswith("--container-") for word in words):
    with open({record!r}, "a") as record:
        record.write(json.dumps(["srun", *words]) + "\\n")
    if "--container-image=" + {image!r} not in words:
        sys.exit(125)
    (folder,) = [word[20:] for word in words if word.startswith("--container-workdir=")]
    words = ["--chdir=" + folder, *(word for word in words if not word.startswith("--container-"))]
    os.environ["IN_CONTAINER"] = "pyxis"
os.execv({srun!r}, ["srun", *words])
"""


def mock_pyxis(folder: Path, image: str) -> Path:
    """An srun in this folder that has Pyxis, with one image. Returns where it records."""
    record = folder / "record"
    text = SRUN.format(python=sys.executable, record=str(record), image=image, srun=shutil.which("srun"))
    (folder / "srun").write_text(text)
    (folder / "srun").chmod(0o755)
    return record


def mock_runtime(folder: Path, name: str, image: str, modules: str) -> Path:
    """A stand-in in this folder, with one image; `modules` is the PYTHONPATH in it. Returns where it records."""
    record = folder / "record"
    text = PROGRAM.format(
        python=sys.executable,
        record=str(record),
        image=image,
        path=f"{sys.prefix}/bin:/usr/bin:/bin",
        modules=modules,
    )
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return record


def recorded(record: Path) -> list[list[Any]]:
    """The command lines, in the order of their starts."""
    return [json.loads(line) for line in record.read_text().splitlines()]
