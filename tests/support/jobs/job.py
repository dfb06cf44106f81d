"""MPI jobs of the tests: their output, their end, and what they left behind (see `support.jobs.mpi`)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MARK", "CompletedJob", "Job", "JobError", "JobTimeout", "LeakedProcesses"]

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
    """What is left of a job.

    Attributes
    ----------
    argv : tuple of str
        The whole command line, launcher included.
    rc : int
        Exit code of the launcher; negative: the signal that ended it.
    stdout, stderr : str
        Of the launcher, all ranks mixed.
    seconds : float
        From start to the end of the launcher.
    leaked : tuple of str
        "PID command" of each process that had to be killed afterwards.
    """

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str
    seconds: float
    leaked: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """Standard output and standard error, for messages."""
        return f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}"

    def check(self, rc: int = 0) -> CompletedJob:
        """Return self, or raise `JobError` with the whole output when the exit code is not `rc`."""
        if self.rc != rc:
            raise JobError(f"exit code {self.rc}, expected {rc}, after {self.seconds:.1f} s\n{self.output}")
        return self


class Job:
    """A job that runs. Made by `Mpi.start`.

    Attributes
    ----------
    directory : Path
        The job's own scratch folder: its TMPDIR and, unless told otherwise, where it runs. Removed with the job.
    launcher : subprocess.Popen
        The launcher, or the program itself where there is none.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], directory: Path, cwd: Path | None
    ) -> None:
        self.argv = tuple(argv)
        self.directory = directory
        self.mark = env[MARK]
        self.result: CompletedJob | None = None
        self._out, self._err = directory / "stdout", directory / "stderr"
        self._start = time.monotonic()
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
        found = {}
        needle = f"{MARK}={self.mark}".encode()
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

    def wait_for(self, pattern: str, timeout: float = 30, *, stream: str = "stdout") -> re.Match[str]:
        """Wait until the regular expression matches what the job printed so far; return the match.

        Raises
        ------
        JobTimeout
            After `timeout` seconds.
        JobError
            The job ended and it does not match.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.launcher.poll() is not None  # before the look: what is printed last still counts
            if match := re.search(pattern, getattr(self, stream), re.MULTILINE):
                return match
            if ended:
                raise JobError(f"ended with {self.launcher.returncode} without {pattern!r}\n{self._output()}")
            if time.monotonic() > deadline:
                raise JobTimeout(f"no {pattern!r} within {timeout} s\n{self._output()}")
            time.sleep(POLL)

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        self.launcher.send_signal(number)

    def wait(self, timeout: float = 60, *, grace: float = 3.0, allow_leaks: bool = False) -> CompletedJob:
        """Wait for the end of the launcher and then, `grace` seconds at most, of all its processes.

        Raises
        ------
        JobTimeout
            The launcher did not end within `timeout` seconds. Its Python processes are asked for their tracebacks,
            which are in the message, and everything is killed.
        LeakedProcesses
            Processes outlived the launcher by `grace` seconds, unless `allow_leaks`. They are killed.
        """
        if self.result is not None:
            return self.result
        try:
            rc = self.launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            running = "\n".join(f"{pid} {command}" for pid, command in self.processes().items())
            self._dump_tracebacks()
            self.kill()
            raise JobTimeout(
                f"still running after {timeout} s: {' '.join(self.argv)}\n--- processes\n{running}\n{self._output()}"
            ) from None
        seconds = time.monotonic() - self._start
        leaked = self._leaked(grace)
        self.result = CompletedJob(self.argv, rc, self.stdout, self.stderr, seconds, leaked)
        if leaked and not allow_leaks:
            raise LeakedProcesses(
                f"left behind {grace} s after exit code {rc}:\n"
                + "\n".join(leaked)
                + f"\n{self.result.output}"
            )
        return self.result

    def kill(self) -> None:
        """Kill every process of the job, until none is found any more."""
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL)
        self.launcher.kill()
        self.launcher.wait()

    def close(self) -> None:
        """Kill what is left and remove the job's folder."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _output(self) -> str:
        return f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}"

    def _leaked(self, grace: float) -> tuple[str, ...]:
        deadline = time.monotonic() + grace
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
