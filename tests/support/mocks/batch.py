"""Stand-ins for the commands that a job script calls: they record their arguments and run what they are given to run.

One program under many names: launchers (`srun`, `mpirun`, ...), which run the command behind their own options once; `python`,
`apptainer` and `module`; and the batch systems' commands (`squeue`, `scontrol`, `qstat`, `qsub`, ...). `dask-gpu-mpi` is the
real one, for which the stand-in is Python.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dask_gpu_mpi.sites.command import START
from dask_gpu_mpi.sites.jobscript import SCRIPTED, format_of
from support.mocks.inputs import command

__all__ = ["ENVIRON", "MPICH", "OPEN_MPI", "FakeBatch", "Ran", "directives", "requested", "script"]

ROOT = Path(__file__).resolve().parents[3]
OPEN_MPI, MPICH = "Open MPI v5.0.11, package: ...", "MPICH Version:      5.0.2"
COMMANDS = (
    *("srun", "mpirun", "mpiexec", "flux", "python", "apptainer", "module"),
    *("sbatch", "scontrol", "squeue", "qsub", "qstat", "bsub"),
)

PROGRAM = """#!{python} -SE
import json, os, subprocess, sys
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
said = json.loads(os.environ["FAKE_ANSWERS"])
answer = said.get(" ".join([name, *argv[:2]]), said.get(name))
starts = name == "python" and argv[:2] == ["-c", {start!r}]
answer = said.get("start", answer) if starts else answer
if name == "python" and not starts and "-c" in argv[:2]:  # `launch` asks mpi4py what its library is
    answer = ("dask-gpu-mpi:" + json.dumps([said["python -m mpi4py"][0], ""]), 0)
env = {{key: value for key, value in os.environ.items() if not key.startswith("FAKE_")}}
takes_script = name in ("sbatch", "qsub", "bsub") or argv[:1] == ["batch"]
read = sys.stdin.buffer.read().decode(errors="surrogateescape") if takes_script else ""
row = json.dumps({{"name": name, "argv": argv, "env": env, "stdin": read, "cwd": os.getcwd()}}) + "\\n"
handle = os.open(os.environ["FAKE_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(handle, row.encode())
os.close(handle)
inner = [i for i, word in enumerate(argv) if os.path.basename(word) in ("python", "apptainer")]
if answer is None and inner and name in ("srun", "mpirun", "mpiexec", "flux", "apptainer"):
    sys.exit(subprocess.run(argv[inner[0]:]).returncode)
text, code = answer or ("", 0)
if starts and argv[2:4] == ["run", "--log-directory"] and code == 0 and "DGM_RUN" in os.environ:
    os.makedirs(argv[4], exist_ok=True)
    open(os.path.join(argv[4], "ended-" + os.environ["DGM_RUN"]), "w").close()
sys.stdout.write(text)
sys.exit(code)
"""

LAUNCH = """#!{python}
import sys
sys.path.insert(0, {root!r})
sys.executable = {fake!r}
from dask_gpu_mpi.cli.main import main
main()
"""

#: What each batch system has in the environment of a job.
ENVIRON = {
    "slurm": {
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",
    },
    "pbs": {"PBS_JOBID": "42.server", "PBS_O_WORKDIR": ".", "PBS_NODEFILE": "nodes", "PBS_O_QUEUE": "batch"},
    "lsf": {"LSB_JOBID": "42", "LSB_DJOB_NUMPROC": "2", "LSB_DJOB_HOSTFILE": "nodes"},
    "flux": {"FLUX_URI": "local:///run/flux/local"},
}


def directives(text: str, prefix: str) -> list[str]:
    """The directives that a batch system would read: those before the first command."""
    found = []
    for line in text.splitlines():
        if line.startswith(prefix):
            found.append(line.removeprefix(prefix))
        elif line and not line.startswith("#"):
            break
    return found


def script(words: str, *, program: Sequence[str] = ("my.py",), rc: int = 0) -> str:
    """The job script that `jobscript` makes of these words, or its error. They may have the program as well, behind ``--``."""
    behind = ["--", *program] if program and " -- " not in words else []
    return command("jobscript", *shlex.split(words), *behind, rc=rc)


def requested(words: str) -> list[str]:
    """The directives of that script."""
    text = script(words)
    prefixes = [format_of(name).prefix for name in SCRIPTED]
    return next(found for prefix in prefixes if (found := directives(text, prefix)))


@dataclass(frozen=True)
class Ran:
    """What a script did: its end, and one row per command (name, argv, env, stdin, cwd)."""

    rc: int
    output: str
    rows: list[dict[str, Any]]

    def of(self, name: str) -> list[list[str]]:
        """Arguments of each call of a command."""
        return [row["argv"] for row in self.rows if row["name"] == name]

    def program(self) -> list[str] | None:
        """What followed ``run --log-directory DIRECTORY``; None: it was not run."""
        return next(
            (words[3:] for words in self.started() if words[:2] == ["run", "--log-directory"]),
            None,
        )

    def started(self) -> list[list[str]]:
        """Each command of ours that ranks were started with, and its arguments."""
        return [argv[2:] for argv in self.of("python") if argv[:2] == ["-c", START]]

    def launched(self, name: str) -> list[str]:
        """The launcher's own options in its last call."""
        argv = self.of(name)[-1]
        return argv[
            : next(i for i, word in enumerate(argv) if os.path.basename(word) in ("python", "apptainer"))
        ]


class FakeBatch:
    """A directory of stand-ins.

    `answers`: What a command prints and exits with, by ``"name"`` or ``"name first-argument second-argument"``; ``"start"``:
    a rank.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "fake").write_text(PROGRAM.format(python=sys.executable, start=START))
        (self.bin / "fake").chmod(0o755)
        for name in COMMANDS:
            (self.bin / name).symlink_to("fake")
        command = LAUNCH.format(python=sys.executable, root=str(ROOT), fake=str(self.bin / "python"))
        (self.bin / "dask-gpu-mpi").write_text(command)
        (self.bin / "dask-gpu-mpi").chmod(0o755)
        self.answers: dict[str, tuple[str, int]] = {
            "python -m mpi4py": (OPEN_MPI, 0),
            "mpirun --version": ("mpirun (Open MPI) 5.0.11", 0),
            "mpiexec --version": ("mpiexec (Open MPI) 5.0.11", 0),
            "flux getattr size": ("2", 0),
            "flux getattr jobid": ("f42", 0),
            "squeue": ("2030-01-02T03:04:05", 0),
        }

    def mock_launch(self) -> None:
        """Make a stand-in of `dask-gpu-mpi` as well, which is quick: for tests of what a script does before it."""
        (self.bin / "dask-gpu-mpi").unlink()
        (self.bin / "dask-gpu-mpi").symlink_to("fake")

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a batch script: nothing of whoever runs the tests."""
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.directory),
            "TZ": "UTC",
            "FAKE_ANSWERS": json.dumps(self.answers),
            "FAKE_RECORD": str(self.directory / "record"),
            **(env or {}),
        }

    def run(self, script: Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Ran:
        """Run a script with bash."""
        record = self.directory / "record"
        record.unlink(missing_ok=True)
        done = subprocess.run(
            ["/bin/bash", str(script), *args],
            env=self.environ(env),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        output = (done.stdout + done.stderr).decode(errors="replace")
        return Ran(done.returncode, output, self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """What was recorded so far."""
        record = self.directory / "record"
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
