"""Jobs with faults: how the rows of tests/faults start theirs, and what must hold for each that has ended.

A script comes in two forms, one that calls ``initialize()`` and one that the command runs; a third form is a cluster without
a script. Whatever the row does to it, afterwards no process is left, no scheduler file and no scratch directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from support.bed.hosts import TestBed
from support.jobs.clusters import COMMAND, ranks_of, until
from support.jobs.mpi import CompletedJob, Job, JobError, Mpi
from support.jobs.processes import slack
from support.jobs.scripts import script

#: How a script meets its cluster.
FORMS = ("initialize", "command")
SCHEDULER_FILE = "cluster.json"
#: Seconds that scratch directories may outlive the launcher, like the processes that remove them (see `Job.wait`).
AFTER = 3.0

_PREAMBLE = script("support/jobs/scripts/faults.py")

_BEGIN = {
    "initialize": "from dask_gpu_mpi import initialize\nsession = CALL\n",
    "command": "from dask_gpu_mpi import current_session\nsession = current_session()\n",
    # the body calls it; `client` is to be False
    "execute": "from dask_gpu_mpi import execute\nfrom distributed import Client\n",
}
_CLIENT = "from distributed import Client\nclient = Client()\n"


def start(
    mpirun: Mpi,
    form: str,
    body: str = "",
    ranks: int | None = 2,
    *,
    at: str = "",
    before: str = "",
    client: bool = True,
    options: Mapping[str, Any] | None = None,
    env: Mapping[str, str | None] | None = None,
    per_rank_env: Sequence[Mapping[str, str]] | None = None,
    bed: TestBed | None = None,
    through: Sequence[str] = (),
    call: str = "initialize()",
) -> Job:
    """Start a job, and wait until the script is at the mark `at`; without a script, until the cluster is up.

    `mpirun`: the fixture.
    `form`: one of `FORMS`, "execute" for a body that calls that, or "bare": the command without a script.
    `body`: what the script does once the cluster is there; it may use `session` and `client`, `mark` and the other helpers.
    `ranks`: as in `Mpi.start`.
    `before`: what it does before, with the form "initialize" on all ranks.
    `client`: false: the script makes no client.
    `options`: options of dask_gpu_mpi, by way of the environment.
    `through`: command on each rank that runs the rest of its line.
    `call`: how the form "initialize" calls it.
    """
    added = {f"DASK_GPU_MPI__{name.upper()}": str(value) for name, value in (options or {}).items()}
    added.setdefault("DASK_GPU_MPI__SCHEDULER_FILE", SCHEDULER_FILE)
    environ = {**added, **(env or {})}
    more: dict[str, Any] = {"env": environ, "per_rank_env": per_rank_env, "bed": bed}
    if form == "bare":
        # without a launcher, the command without any word prints its help
        words = ["--nthreads", "1"] if ranks is None else []
        job = mpirun.start([*through, *COMMAND, *words], ranks, **more)
        await_cluster(job)
        return job
    text = (
        _PREAMBLE
        + before
        + _BEGIN[form].replace("CALL", call)
        + (_CLIENT if client else "")
        + "mark('up')\n"
        + body
    )
    script = write("script.py", text)
    line = [*COMMAND, str(script)] if form == "command" else ["python", str(script)]
    job = mpirun.start([*through, *line], ranks, **more)
    if at:
        mark_time(job, at)
    return job


def write(name: str, text: str) -> Path:
    """A file for a job to use."""
    path = Path(os.environ["DASK_GPU_MPI_TEST_FOLDER"]) / name
    path.write_text(text)
    return path


def preload(name: str, text: str, what: str = "WORKER") -> dict[str, str]:
    """The environment of a rank whose workers, nannies or scheduler import this file first."""
    return {f"DASK_DISTRIBUTED__{what}__PRELOAD": f"['{write(name, text)}']"}


def hangs(rank: int, seconds: float) -> dict[str, Any]:
    """For `start`: this rank inspects its node for so long, as if its local directory were on a file server that is gone."""
    folder = write(
        "sitecustomize.py",
        "import os\nif 'HANGS' in os.environ:\n    import time\n    from dask_gpu_mpi.machine import scratch\n"
        f"    scratch.exposed_folder = lambda folder: time.sleep({seconds})\n",
    ).parent
    before = f"if rank() == {rank}:\n    os.environ['HANGS'] = 'yes'\n"
    return {"before": before, "env": {"PYTHONPATH": str(folder)}}


def strike(job: Job, *victims: int | str, number: int = signal.SIGKILL, below: bool = False) -> None:
    """Send a signal to ranks by their numbers, to "launcher" or "everybody" (of Python); the script may wait for "struck".

    `below`: to all their child processes, too.
    """
    ranks = ranks_of(job)
    groups = {"launcher": [job.launcher.pid], "everybody": [*job.processes(r"^\S*python[\d.]*( |$)")]}
    pids = [pid for each in victims for pid in (groups[each] if isinstance(each, str) else [ranks[each]])]
    if below:
        pids += [each.pid for pid in pids for each in psutil.Process(pid).children(recursive=True)]
    job.struck = time.time()
    for pid in pids:
        os.kill(pid, number)
    set_mark(job, "struck")


def set_mark(job: Job, name: str) -> None:
    """Make a mark for which the script waits."""
    (job.directory / f"mark-{name}").touch()


def marks(job: Job) -> list[str]:
    """All marks of the script's."""
    return sorted(path.name.removeprefix("mark-") for path in job.directory.glob("mark-*"))


def mark_time(job: Job, name: str = "up", timeout: float = 40.0) -> float:
    """When the script was at this mark; waits for it.

    Raises `JobError`: the job ended without it.
    """
    path = job.directory / f"mark-{name}"

    def there() -> bool:
        if not path.exists() and job.launcher.poll() is not None and not path.exists():
            done = job.wait(allow_leaks=True)
            raise JobError(f"ended with {done.rc} before the mark {name!r}\n{done.output}")
        return path.exists()

    try:
        until(there, timeout, f"mark {name}")
    except AssertionError as error:
        error.add_note(job.output)
        raise
    return float(path.read_text())


def await_cluster(job: Job) -> None:
    """Wait until the cluster of a job without a script is up."""
    until(lambda: (job.directory / SCHEDULER_FILE).exists() and "ready after" in job.stderr, 40)


def end(
    job: Job,
    codes: int | Collection[int] | Mapping[str, Collection[int]] | None,
    within: float,
    *,
    since: float | None = None,
    says: Sequence[str] = (),
    tracebacks: int | None = 0,
    timeout: float = 60.0,
    scratch: bool = False,
) -> CompletedJob:
    """Wait for the end, and check all that must hold.

    `codes`: exit codes of the launcher; None: any but 0.
    `within`: seconds from the fault until the launcher has ended.
    `since`: when the fault was, seconds since the epoch; None: at the script's mark "end", else at the last `strike`.
    `says`: what standard error must have, each exactly once.
    `tracebacks`: how many there must be; None: any number.
    `scratch`: whether scratch may be left.
    """
    try:
        job.launcher.wait(timeout)
    except subprocess.TimeoutExpired:
        job.wait(0.01)  # raises, with all that is known
    ended = time.time()
    done = job.wait()
    within *= slack()
    if since is None:
        since = job.struck if job.struck and "end" not in marks(job) else mark_time(job, "end")
    seconds = ended - since
    if isinstance(codes, Mapping):
        codes = codes[job.mpi]
    if isinstance(codes, int):
        codes = {codes}
    good = done.rc != 0 if codes is None else done.rc in codes
    if not good:
        raise JobError(f"exit code {done.rc}, expected {codes or 'any but 0'}\n{done.output}")
    if seconds > within:
        raise JobError(f"ended {seconds:.1f} s after the fault, allowed were {within}\n{done.output}")
    for text in says:
        if done.stderr.count(text) != 1:
            raise JobError(f"said {done.stderr.count(text)} times: {text!r}\n{done.output}")
    if tracebacks is not None and done.stderr.count("Traceback") != tracebacks:
        raise JobError(f"{done.stderr.count('Traceback')} tracebacks, expected {tracebacks}\n{done.output}")
    if not scratch:
        until(lambda: not _left(job), AFTER, f"left behind: {_left(job)}")
    return done


def _left(job: Job) -> list[str]:
    """Scratch directories and scheduler files of the job."""
    patterns = ("dgm-*", "dask*", "distributed*", SCHEDULER_FILE + "*", "." + SCHEDULER_FILE + "*")
    return sorted(path.name for pattern in patterns for path in job.directory.glob(pattern))
