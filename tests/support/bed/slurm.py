"""A real Slurm over the test bed's hosts (ci/testbed/slurm-up), and batch jobs in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dask_gpu_mpi.sites.command import START
from support import ROOT, TESTBED
from support.bed.hosts import TestBed, unavailable_is
from support.jobs.clusters import environ_of
from support.jobs.mpi import MARK, JobError, JobTimeout, kill_marked, marked
from support.jobs.scripts import expanded
from support.mocks.gpus import GIB, SimGpu, SimHost, emulated_environ, make_gpus

#: Set by ci/slurm.sh, which is to fail where there is no Slurm; cgroups not every machine has.
REQUIRED = "DASK_GPU_MPI_TEST_SLURM"
#: Options of a job script for one GPU on each host; of a small job on h1 and h2.
ONE = ("--gpus-per-node=1",)
TWO = ("--nodes=2", "--ntasks-per-node=1", "--mem=1000", "--exclude=h3")
#: The job scripts that start ranks by srun and by mpirun.
NAMES = ("slurm.sbatch", "slurm-mpirun.sbatch")
#: What a script prints that waits for the test.
RUNS = "the script runs"
#: GPUs of h1, h2 and h3.
GPUS = (4, 4, 2)
POLL = 0.1
#: Seconds that processes and files may outlive the job in the queue.
GRACE = 5.0
#: Job states in which a job will change no more.
FINAL = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}


def template(name: str, asked: Sequence[str]) -> str:
    """Text of one of the project's job scripts, as a user edits it: with these options instead of its own about GPUs."""
    text = (ROOT / "jobscripts" / name).read_text()
    own = re.findall(r"^#SBATCH --gpus-per-node=\d+\n", text, re.MULTILINE)
    assert len(own) == 1
    return text.replace(own[0], "".join(f"#SBATCH {option}\n" for option in asked))


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    #: As Slurm has it: COMPLETED, FAILED, ...
    state: str
    #: Exit code of the batch script, and the signal that ended it.
    code: int
    signal: int
    #: All that the job wrote.
    output: str

    def check(self, state: str = "COMPLETED", code: int = 0) -> Ended:
        """Return self, or raise `JobError` with the whole output."""
        if (self.state, self.code) != (state, code):
            raise JobError(
                f"{self.state} with {self.code}:{self.signal}, expected {state} with {code}\n" + self.output
            )
        return self


@dataclass
class BatchJob:
    """A job in the queue."""

    slurm: Slurm
    #: Of the job; of a member of an array "12_0".
    number: str
    #: Its working directory and TMPDIR.
    directory: Path
    #: Its processes have it in their environment.
    mark: str
    #: The GPUs that Slurm gave it, by host: places on that host. Known once it was seen running.
    gpus: dict[str, list[int]] = field(default_factory=dict)
    #: What lay in the hosts' shared memory before it.
    before: frozenset[Path] = frozenset()

    @property
    def output(self) -> str:
        """What it wrote so far, on standard output and standard error."""
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.directory.glob("slurm-*.out"))
        )

    @property
    def given(self) -> dict[str, str]:
        """Host of each of its GPUs, by UUID."""
        return {
            self.slurm.gpus[host][place].uuid: host for host, places in self.gpus.items() for place in places
        }

    def show(self) -> dict[str, str]:
        """What ``scontrol show job`` tells of it."""
        return {key: value for key, _, value in (word.partition("=") for word in self._look().split())}

    def _look(self) -> str:
        """Ask Slurm; what it says about GPUs only while the job runs is kept."""
        text = self.slurm.ask("scontrol", "-d", "show", "job", self.number)
        if given := re.findall(r"Nodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=gpu:\w+:\d+\(IDX:([\d,-]+)\)", text):
            self.gpus = {
                host: [number for part in places.split(",") for number in _range(part)]
                for nodes, places in given
                for host in _hosts(nodes)
            }
        return text

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Wait until the regular expression matches its output."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.show()["JobState"] in FINAL
            if match := re.search(pattern, self.output, re.MULTILINE):
                return match
            if ended or time.monotonic() > deadline:
                raise JobTimeout(f"no {pattern!r}; {self.show()['JobState']}\n{self.output}")
            time.sleep(POLL)

    def start_again(self, timeout: float = 30) -> None:
        """Wait until it is requeued; then have it start soon: Slurm would wait two minutes (AuthInfo's cred_expire)."""
        deadline = time.monotonic() + timeout
        while (shown := self.show())["Reason"] != "BeginTime":
            if shown["JobState"] in FINAL or time.monotonic() > deadline:
                raise JobTimeout(f"not requeued: {shown['JobState']}\n{self.output}")
            time.sleep(POLL)
        # not at once: the daemons tell credentials of the first run from those of the second by their second
        self.slurm.ask("scontrol", "update", f"jobid={self.number}", "StartTime=now+2seconds")

    def wait(self, timeout: float = 90, *, allowed: str = "^$") -> Ended:
        """Wait for its end; then nothing of it may be left on any host, but files whose names match `allowed`.

        Raises `JobTimeout`: it did not end in time; it is cancelled.
        Raises `JobError`: processes or scratch directories are left.
        """
        deadline = time.monotonic() + timeout
        while (shown := self.show())["JobState"] not in FINAL:
            if time.monotonic() > deadline:
                self.slurm.ask("scancel", "-s", "KILL", "-f", self.number)
                raise JobTimeout(f"{shown['JobState']} after {timeout} s ({shown['Reason']})\n{self.output}")
            time.sleep(POLL)
        code, _, signal = shown["ExitCode"].partition(":")
        ended = Ended(shown["JobState"], int(code), int(signal), self.output)
        deadline = time.monotonic() + GRACE
        while left := [*self.processes().values(), *self.scratch(allowed)]:
            if time.monotonic() > deadline:
                raise JobError(f"left behind by {ended}:\n" + "\n".join(left) + "\n" + self.output)
            time.sleep(POLL)
        return ended

    def members(self, count: int) -> list[BatchJob]:
        """The members of this array, numbered from 0; they share a directory and, to `processes`, are one."""
        return [replace(self, number=f"{self.number}_{index}") for index in range(count)]

    def processes(self) -> dict[int, str]:
        """Live processes of the job, on all hosts: command line by PID."""
        return marked(self.mark)

    def ranks(self) -> dict[int, int]:
        """PID of each rank's process, by rank; not of the launcher, a daemon, an agent."""
        found = {}
        for pid in marked(self.mark, rf"^\S*python\S* -c {re.escape(START)} run "):
            environ = environ_of(pid)
            for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
                if name in environ:
                    found[int(environ[name])] = pid
        return found

    def scratch(self, allowed: str = "^$") -> list[str]:
        """What is left of it in its TMPDIR, and in the shared memory of its hosts."""
        patterns = ("dgm-*", "dask*", "distributed*", "ompi.*", "prte.*")
        left = [path for pattern in patterns for path in self.directory.glob(pattern)]
        left += self.slurm.shared_memory(self.gpus) - self.before
        return [str(path) for path in left if not re.match(allowed, path.name)]

    def close(self) -> None:
        """Cancel it and kill what is left."""
        with contextlib.suppress(JobError):
            self.slurm.ask("scancel", "-f", self.number)
        kill_marked(self.mark)
        shutil.rmtree(self.directory, ignore_errors=True)


def wait_all(jobs: Iterable[BatchJob], timeout: float = 90) -> None:
    """Look at several jobs until all have ended: which GPUs a job has Slurm tells while it runs."""
    left, deadline = list(jobs), time.monotonic() + timeout
    while left := [job for job in left if job.show()["JobState"] not in FINAL]:
        if time.monotonic() > deadline:
            raise JobTimeout("\n".join(f"{job.number} has not ended:\n{job.output}" for job in left))
        time.sleep(POLL)


def _range(text: str) -> Iterator[int]:
    first, _, last = text.partition("-")
    yield from range(int(first), int(last or first) + 1)


def _hosts(text: str) -> list[str]:
    """Names in ``h1``, ``h[1-3]``, ``h[1,3]``."""
    found = re.fullmatch(r"(\w+)\[([\d,-]+)\]", text)
    return (
        [text] if found is None else [f"{found[1]}{n}" for part in found[2].split(",") for n in _range(part)]
    )


@dataclass
class Slurm:
    """A Slurm that is up."""

    #: Its hosts.
    bed: TestBed
    #: Its slurm.conf.
    conf: Path
    #: Whether jobs are confined by cgroups.
    cgroups: bool
    #: GPUs of each host.
    gpus: Mapping[str, tuple[SimGpu, ...]]
    jobs: list[BatchJob] = field(default_factory=list)

    @classmethod
    def up(cls, bed: TestBed, *, cgroups: bool, env: Mapping[str, str] | None = None) -> Slurm:
        """Start it on a bed, with these variables of slurm-up; `Unavailable` says why there can be none."""
        done = bed.call("slurm-up", *(["--cgroups"] if cgroups else []), *map(str, GPUS), env=env)
        gpus = {
            host: make_gpus(count, host=host, name="NVIDIA A100", memory=80 * GIB)
            for host, count in zip(bed.hosts, GPUS, strict=True)
        }
        return cls(bed, Path(done.stdout.strip()), cgroups, gpus)

    def end_jobs(self) -> None:
        """Cancel all jobs, and remove their files."""
        for job in self.jobs:
            job.close()
        self.jobs.clear()

    def down(self) -> None:
        """End it."""
        self.end_jobs()
        self.bed.call("slurm-down")

    def ask(self, *argv: str) -> str:
        """Run one of Slurm's commands on h1."""
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(self.bed.on("h1", argv), env=env, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise JobError(f"{' '.join(argv)}: {done.stderr}")
        return done.stdout

    def shared_memory(self, hosts: Iterable[str]) -> set[Path]:
        """Files in the /dev/shm of these hosts."""
        folders = {host: Path(f"/proc/{self.bed.holder(host)}/root/dev/shm") for host in hosts}
        return {
            Path("/dev/shm") / host / path.name
            for host, folder in folders.items()
            for path in folder.iterdir()
        }

    def meeting_place(self) -> Path:
        """A folder for what several jobs share, removed with them."""
        return Path(tempfile.mkdtemp(prefix="meet-", dir=self.conf.parent.parent))

    def run(
        self,
        program: str,
        *options: str,
        name: str = "slurm.sbatch",
        asked: Sequence[str] = ONE,
        args: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        at: str = "",
    ) -> BatchJob:
        """Submit one of the project's job scripts (see `template`) with this program, ``script.py``, behind `args`.

        `at`: wait until it prints this.
        """
        files = {"script.py": program, **(files or {})}
        job = self.submit(template(name, asked), *options, args=[*args, "script.py"], files=files, env=env)
        if at:
            job.wait_for(at)
        return job

    def submit(
        self,
        script: str | Path,
        *options: str,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> BatchJob:
        """Submit a job script.

        `script`: its text, or the file.
        `options`: of sbatch; they take precedence over those in the script.
        `args`: of the script.
        `env`: variables of the job.
        `files`: names and texts of files in its working directory.
        """
        # a name of a socket has 107 characters at most
        base = tempfile.gettempdir()
        directory = Path(tempfile.mkdtemp(prefix="dgs-", dir=base if len(base) < 30 else "/tmp"))
        if isinstance(script, str):
            (directory / "job.sbatch").write_text(script)
            script = directory / "job.sbatch"
        for name, text in (files or {}).items():
            (directory / name).write_text(expanded(text))
        mark = uuid.uuid4().hex
        foreign = re.compile(
            r"DASK_|OMPI_|PRTE_|PMIX_|PMI|MPI_|HYDRA_|MPICH_|SLURM_|PBS_|PYTHONDONTWRITEBYTECODE$"
        )
        base_env = {name: value for name, value in os.environ.items() if not foreign.match(name)}
        device = str(self.conf.parent.parent / "dev" / "gpu")
        hosts = {host: SimHost(gpus, files=device) for host, gpus in self.gpus.items()}
        job_env = {
            **emulated_environ(hosts, base_env),
            MARK: mark,
            # CUDA is not emulated: the preflight refuses a GPU that runs no kernel
            "DGM_CHECK": "no",
            "TMPDIR": str(directory),
            "SLURM_CONF": str(self.conf),
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **(env or {}),
        }
        line = ["sbatch", "--parsable", "--chdir", str(directory), "--output", f"{directory}/slurm-%j.out"]
        line += [*options, str(script), *args]
        before = frozenset(self.shared_memory(self.bed.hosts))
        done = subprocess.run(
            self.bed.on("h1", line), env=job_env, capture_output=True, text=True, timeout=30
        )
        if done.returncode:
            raise JobError(f"{' '.join(line)}: {done.stderr}")
        job = BatchJob(self, done.stdout.strip(), directory, mark, before=before)
        self.jobs.append(job)
        return job


@contextlib.contextmanager
def new_slurm(*, cgroups: bool, env: Mapping[str, str] | None = None) -> Iterator[Slurm]:
    """Slurm over three hosts of its own, of which nothing is left however this ends; skips the test where there can be none."""
    required = REQUIRED in os.environ and not (cgroups and why_no_cgroups())
    with TestBed.for_tests(3, required=required) as bed:
        with unavailable_is(required=required):
            slurm = Slurm.up(bed, cgroups=cgroups, env=env)
        try:
            yield slurm
        finally:
            slurm.down()


def why_no_cgroups() -> str:
    """Why jobs can't be confined on this machine, as slurm-up has it; empty: they can."""
    line = ["bash", "-c", '. "$0" && why_no_cgroups', str(TESTBED / "lib.sh")]
    return subprocess.run(line, capture_output=True, text=True, timeout=10).stdout.strip()
