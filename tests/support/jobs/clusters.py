"""What the tests of whole clusters share: scripts that tell facts, and looks at a job's processes from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from support.jobs.mpi import CompletedJob, Job, Mpi
from support.jobs.processes import slack
from support.jobs.scripts import script

COMMAND = ("python", "-m", "dask_gpu_mpi")

#: Begins every script: `tell` is read by `facts`, `look` is for ``client.run``.
TELL = script("support/jobs/scripts/tell.py")
#: With a client of the job's cluster; and telling of its workers.
CLIENT = script("support/jobs/scripts/client.py")
LOOKS = CLIENT + "tell(workers=looks(client))\n"
PLAN = LOOKS + "from dask_gpu_mpi import current_session\ntell(plan=current_session().plan.as_json())\n"

#: Of scripts that call initialize() themselves.
INITIALIZED = "from dask_gpu_mpi import initialize\nsession = initialize()\nfrom distributed import Client\n"

#: Tells how many bytes the workers ask of each other at a time; after `TELL`, where there is a client.
MESSAGES = """
def messages(dask_worker):
    return dask_worker.state.transfer_message_bytes_limit
tell(messages=sorted(set(client.run(messages).values())))
"""


def small_environment(folder: Path) -> Path:
    """A virtual environment of a few files, which uses the packages of this one."""
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    # a folder of a .pth file has no .pth files of its own, such as that of this checkout
    (packages / "these.pth").write_text(f"{sysconfig.get_path('purelib')}\n{Path(__file__).parents[3]}\n")
    for library in Path(sys.prefix, "lib").glob("[!p]*"):  # mpi4py searches for its MPI there
        (folder / "lib" / library.name).symlink_to(library)
    (folder / "bin").mkdir()
    base = Path(sys.executable).resolve()
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    return folder


def packed_environment(folder: Path) -> Path:
    """An archive of the environment in ``env`` of a folder, which is made if it is missing."""
    if not (folder / "env").exists():
        small_environment(folder / "env")
    archive = folder / "env.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", folder / "env", "."], check=True, timeout=60)
    return archive


def foreign_launcher(name: str, *words: str, extra: str = "") -> list[str]:
    """A command line that starts `dask_gpu_mpi` as two ranks of a launcher whose world the MPI library `name` does not find.

    `extra`: more variables; ``$r`` is the rank.
    """
    env = f"OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_LOCAL_RANK=$r OMPI_COMM_WORLD_SIZE=2 {extra}"
    if name == "openmpi":
        env = "PMI_RANK=$r PMI_SIZE=2 MPI_LOCALRANKID=$r"
    start = f"env {env} {sys.executable} -m dask_gpu_mpi {' '.join(words)} & pids[$r]=$!"
    shell = f"for r in 0 1; do {start}; done; code=0; for p in ${{pids[@]}}; do wait $p || code=$?; done; exit $code"
    return ["bash", "-c", shell]


def facts(text: str | CompletedJob | Job) -> dict[str, Any]:
    """Everything that scripts told, later words winning; ranks may share a line of output."""
    if not isinstance(text, str):
        text = text.stdout
    told: dict[str, Any] = {}
    for match in re.finditer("FACTS ", text):
        told |= json.JSONDecoder().raw_decode(text, match.end())[0]
    return told


def workers_of(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The workers' looks by name, as text."""
    rows = {str(row["name"]): row for row in told["workers"]}
    assert len(rows) == len(told["workers"]), "two workers share a name"
    return rows


def scratch_of(job: Job, pattern: str = "dgm-*") -> list[str]:
    """What agents (and with the pattern ``"d*"`` Dask itself) have in the job's temporary directory."""
    return sorted(path.name for path in job.directory.glob(pattern) if path.is_dir())


def until(true: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
    """Look until it is true; return what it is."""
    deadline = time.monotonic() + seconds * slack()
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or true}"
        time.sleep(0.02)
    return found


def gone(job: Job, seconds: float) -> bool:
    """Whether all processes of the job end within `seconds`."""
    deadline = time.monotonic() + seconds * slack()
    while job.processes():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def parent(pid: int) -> int:
    """PID of a process's parent; 0: it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def environ_of(pid: int) -> dict[str, str]:
    """A process's environment; empty: it is gone."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(item.partition("=")[::2] for item in raw.split("\0") if item)
    return {}


def network_of(pid: int) -> str:
    """A process's network; empty: it is gone."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def _rank(pid: int) -> int | None:
    environ = environ_of(pid)
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "DGM_RANK")
    rank = next((environ[name] for name in names if name in environ), None)
    return None if rank is None else int(rank)


def ranks_of(job: Job) -> dict[int, int]:
    """PID of each rank, by rank: the processes with a rank's variables that have no such parent."""
    ranks = {pid: _rank(pid) for pid in job.processes("python")}
    found = {rank: pid for pid, rank in ranks.items() if rank is not None and _rank(parent(pid)) is None}
    return dict(sorted(found.items()))


def without_mpi(job: Job) -> list[int]:
    """The agents and all below them: Python processes of the job that are no ranks."""
    return [pid for pid in job.processes("python") if _rank(pid) is None and pid != job.launcher.pid]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """Address and port of each TCP socket on which the process listens, in whatever network namespace."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                yield socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)


def up(mpirun: Mpi, file: Path, ranks: int | None, *options: str, workers: int = 0, **how: Any) -> Job:
    """A job without a script and with this scheduler file, once its workers are up: one of each rank, or so many."""
    job = mpirun.start([*COMMAND, *options, "--scheduler-file", str(file)], ranks, **how)
    number = workers or ranks or 1
    job.wait_for(f"{number} worker{'s' * (number > 1)} on 1 host", stream="stderr")
    return job


class Partner:
    """A process with which a test talks: lines of text there, lines of JSON back. It ends with the block."""

    def __init__(self, *argv: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(argv, text=True, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def say(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What comes back."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the other process ended: {self._process.communicate()[1]}"
        return json.loads(line)

    def end(self, seconds: float) -> None:
        """Wait for its end, which has to be good."""
        _, errors = self._process.communicate(timeout=seconds)
        assert self._process.returncode == 0, errors


class Driver(Partner):
    """Holds a client of a cluster, and evaluates what it is asked."""

    LOOP = """
import json, os, sys
import dask_gpu_mpi
client = dask_gpu_mpi.connect(sys.argv[1])
print(json.dumps("connected"), flush=True)
def names():
    return sorted(str(worker["name"]) for worker in client.scheduler_info(n_workers=-1)["workers"].values())
for line in sys.stdin:
    try:
        print(json.dumps(eval(line)), flush=True)
    except Exception as error:
        print(json.dumps(repr(error)), flush=True)
"""

    def __init__(self, scheduler_file: Path) -> None:
        super().__init__(sys.executable, "-c", self.LOOP, str(scheduler_file))
        assert self.answer() == "connected"

    def ask(self, expression: str) -> Any:
        """Evaluate an expression there; `client` and `names()` are known."""
        self.say(expression)
        return self.answer()
