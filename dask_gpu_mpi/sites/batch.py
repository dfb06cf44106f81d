"""Batch systems: what `launch` and the ranks need of each, the job of this process (`find_allocation`), and their commands.

Each system is a module of this package with a subclass of `BatchSystem`. contributing/add-a-batch-system.md adds one. Functions
such as `end_time` ask all systems whose variables are in the environment. Job scripts: `dask_gpu_mpi.sites.jobscript`.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dask_gpu_mpi.base.files import open_to_append
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted, one_line
from dask_gpu_mpi.errors import InputError, LauncherError

#: The batch systems, and the prefixes of their variables. A module is loaded only if there is such a variable, so that a rank
#: opens few files. If there are variables of several systems, the first one counts.
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "slurm": ("SLURM_", "SLURMD_"),
    "pbs": ("PBS_",),
    "lsf": ("LSB_", "LSF_", "LS_"),
    "flux": ("FLUX_",),
    "sge": ("SGE_",),
}
#: Runs a command and returns its output; empty if it can't be run or fails.
Ask = Callable[[Sequence[str]], str]


class BatchSystem:
    """The differences between batch systems. A subclass overrides the attributes and methods that apply to it.

    Nothing else in the package depends on the name of a batch system.
    """

    # -- the job

    #: Its name in messages and in the log.
    title = ""
    #: Whether its jobs may be parts of another batch system's job.
    is_inner = False
    #: Its variable that each job has; empty: none.
    job_variable = ""
    #: Its variable of the host on which the job was submitted; empty: none.
    login_variable = ""
    #: Its variable of the number of GPUs that the job has on this node; empty: none.
    gpus_variable = ""
    #: Its variable of the number of cores that the job has on this node, even if the job is not confined to them; empty: none.
    cpus_variable = ""

    def job(self, environ: Mapping[str, str]) -> str:
        """The number of the job; empty: this is none."""
        return environ.get(self.job_variable, "")

    def allocation(self, environ: Mapping[str, str], ask: Ask) -> Allocation | None:
        """The nodes of the job of this environment; None: there is no job."""
        return None

    def hosts(self, environ: Mapping[str, str]) -> str:
        """The nodes of the job in the environment of a rank, for messages; empty: unknown."""
        return ""

    def end_time(self, environ: Mapping[str, str], now: Callable[[], float], ask: Ask) -> float | None:
        """The end of the job's walltime, in seconds since the epoch; None: unknown."""
        return None

    # -- `launch`

    #: Its launcher (`launchers.Launcher.kind`), which `launch` prefers; empty: it has none.
    launcher = ""
    #: Whether any mpirun reads the job's nodes from its variables, so that `launch` need not list them.
    tells_mpirun = False
    #: Whether its jobs have one node only.
    is_one_node = False
    #: Whether a job can request a signal before its walltime.
    sends_signal = False
    #: Whether it sends each signal to all processes of the job, on all nodes.
    signals_all = False
    #: Whether it requeues a job by the exit code alone. A cancelled job must then end with another code.
    requeues_by_code = False
    #: Whether a requeued job keeps its number, and `requeue` returns None only for such a job. Then copies of `--stage` stay.
    keeps_number = False
    #: Variables that ranks on other nodes need, though most of the batch system's must not be copied there.
    forwarded: frozenset[str] = frozenset()

    def is_here(self, environ: Mapping[str, str], allocation: Allocation, ask: Ask) -> bool:
        """Whether this process runs on the only node of the allocation, and the job's signals reach it and its children."""
        return len(allocation.hosts) == 1 and is_this_host(*allocation.hosts)

    def environment(
        self, environ: Mapping[str, str], allocation: Allocation, ask: Ask, *, launcher: str, copies: bool
    ) -> dict[str, str | None]:
        """The variables to set, or (None) to unset, before the launcher of this kind starts the ranks.

        `copies`: the launcher copies this node's variables to all.
        """
        return {}

    def lingers(self, environ: Mapping[str, str], launcher: str) -> bool:
        """Whether processes of a cancelled job on other nodes are killed as soon as `launch` ends."""
        return False

    def ends_job(self, environ: Mapping[str, str], ask: Ask) -> bool:
        """Whether it is ending the job of `launch`, which was signalled."""
        return False

    def requeue(self, job: Requeue, environ: Mapping[str, str]) -> int | None:
        """Requeue the job, or report that it is not possible; return the exit code, None for 75."""
        say(f"launch: not requeued: {self.title} requeues no job. Fix: start it again")
        return None


# What the methods of a batch system are given or return: the nodes of a job, and a job that may run again.


@dataclass(frozen=True)
class Allocation:
    """The nodes of this job."""

    #: The batch system's name; ``hosts``: nodes of the command line; ``local``: this machine, without a batch system.
    system: str
    nodes: int
    #: All ranks.
    ranks: int
    #: The ranks of each node, by its name, if the launcher needs them. Slurm's and Flux's launchers do not.
    hosts: Mapping[str, int] = field(default_factory=dict)
    #: The job's number, which is the name of its log folder; empty: no batch system.
    job: str = ""
    #: Parts of a heterogeneous job of Slurm; 0: it is not heterogeneous.
    parts: int = 0

    @property
    def batch(self) -> BatchSystem:
        """The batch system."""
        return batch_system(self.system)

    @property
    def ranks_per_node(self) -> int:
        """The largest number of ranks on a node."""
        return -(-self.ranks // self.nodes)

    def __str__(self) -> str:
        """One line for the user."""
        job = f" job {self.job}" if self.job else ""
        return f"{self.batch.title}{job}: {counted(self.nodes, 'node')}, {counted(self.ranks, 'rank')}"


@dataclass(frozen=True)
class Requeue:
    """A job that may be run again."""

    allocation: Allocation
    #: The number of restarts, in all.
    limit: int
    #: Folder for the count of restarts, if the batch system counts none.
    logs: str = ""

    def may_restart(self, count: int) -> bool:
        """Whether the limit allows another restart; if not, report it."""
        if count < self.limit:
            return True
        say(f"launch: not requeued: {count} restarts so far (--requeue {self.limit})")
        return False

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command of the batch system here, where the next job starts, with the signals that `launch` has blocked."""
        unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, ())
        return run_command(command, environ, REQUEUE_TIMEOUT, cwd=".", prepare=unblock)

    def rerun(self, command: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Run the command that requeues the job; whether it succeeded, and if not, report it."""
        done = self.run(command, environ)
        if done.returncode:
            why = one_line(done.stderr or done.stdout)
            say(
                f"launch: not requeued: {' '.join(done.args[:2])} exited with code {done.returncode}: {why or 'no output'}"
            )
        return not done.returncode

    def by_exit_code(self) -> int | None:
        """The exit code of a job that the batch system requeues by its exit code, without a limit: 1 ends it, None requeues it.

        The lines of a file count the restarts.
        """
        # many jobs may share the folder
        file = Path(self.logs or ".", f"{self.allocation.job}.restarts")
        try:
            descriptor = open_to_append(file, readable=True)
            with open(descriptor, "a+", encoding="ascii", errors="replace") as lines:
                lines.write("75\n")
                lines.seek(0)
                count = len(lines.readlines())
        except OSError as error:
            say(
                f"launch: not requeued: {file} can't be written ({error.strerror}), so restarts can't be counted"
            )
            return 1
        return None if self.may_restart(count - 1) else 1  # without the line of this end


# The batch system, and the job, of this process.


def batch_system(name: str) -> BatchSystem:
    """A batch system by its name: `SYSTEMS`, ``hosts`` or ``local``."""
    if name in _WITHOUT:
        return _WITHOUT[name]
    system: BatchSystem = getattr(importlib.import_module(f"{__package__}.{name}"), name.upper())
    return system


class _Hosts(BatchSystem):
    """The nodes of the command line."""

    title = "the nodes of --hosts"


class _Local(BatchSystem):
    """The machine on which `launch` runs."""

    title = "this machine"
    is_one_node = True

    def is_here(self, environ: Mapping[str, str], allocation: Allocation, ask: Ask) -> bool:
        return True


#: No batch system.
_WITHOUT: Mapping[str, BatchSystem] = {"hosts": _Hosts(), "local": _Local()}


def systems_of(environ: Mapping[str, str]) -> list[BatchSystem]:
    """The batch systems whose variables are in this environment, the innermost first, inside and outside of a job."""
    found = [
        batch_system(name)
        for name, prefixes in SYSTEMS.items()
        if any(variable.startswith(prefixes) for variable in environ)
    ]
    return sorted(found, key=lambda system: not system.is_inner)


def find_allocation(
    environ: Mapping[str, str],
    *,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    hosts: Mapping[str, int] | None = None,
    ask: Ask = lambda command: "",
) -> Allocation:
    """The job that this environment belongs to, with its ranks: all (`ranks`), or on each node (`ranks_per_node`).

    By default a node has as many ranks as the job requests for it, else one. `hosts` are used instead of the batch system's
    nodes. InputError if a variable or a file of the batch system can't be used.
    """
    if hosts:
        found = Allocation("hosts", len(hosts), sum(hosts.values()), hosts)
    else:
        jobs = (system.allocation(environ, ask) for system in systems_of(environ))
        found = next(filter(None, jobs), Allocation("local", 1, 1))
    if ranks is None and ranks_per_node is not None:
        ranks = found.nodes * ranks_per_node
    if ranks is None:
        return found
    # as evenly as possible
    share, more = divmod(ranks, found.nodes)
    hosts = {name: share + (index < more) for index, name in enumerate(found.hosts)}
    return replace(
        found,
        nodes=min(ranks, found.nodes),
        ranks=ranks,
        hosts={name: count for name, count in hosts.items() if count},
    )


def end_time(
    environ: Mapping[str, str], *, now: Callable[[], float] = time.time, ask: Ask | None = None
) -> float | None:
    """The end of the job's walltime, in seconds since the epoch (None: unknown); of a job within a job, the first end."""
    ends = [system.end_time(environ, now, ask or output_of) for system in systems_of(environ)]
    return min((end for end in ends if end is not None), default=None)


def login_host(environ: Mapping[str, str]) -> str | None:
    """The host on which the job was submitted; empty: unknown; None: this is not a job of a batch system."""
    jobs = [system for system in systems_of(environ) if system.job(environ)]
    names = (environ.get(system.login_variable, "") for system in jobs)
    return next(filter(None, names), "") if jobs else None


def batch_job(environ: Mapping[str, str]) -> str:
    """The batch system and the job's number; empty: this is not a job.

    >>> batch_job({"SLURM_JOB_ID": "7"}), batch_job({})
    ('Slurm job 7', '')
    """
    jobs = [(system.title, system.job(environ)) for system in systems_of(environ)]
    return ", ".join(f"{title} job {number}" for title, number in jobs if number)


def allocated_hosts(environ: Mapping[str, str] | None = None) -> str:
    """The nodes of the batch job from its environment; empty: unknown."""
    environ = os.environ if environ is None else environ
    return next(filter(None, (system.hosts(environ) for system in systems_of(environ))), "")


def gpus_on_node(environ: Mapping[str, str]) -> tuple[int, str]:
    """GPUs that the batch system has allocated on this node, and the variable with their number; 0: unknown.

    >>> gpus_on_node({"SLURM_GPUS_ON_NODE": "4"}), gpus_on_node({})
    ((4, 'SLURM_GPUS_ON_NODE'), (0, ''))
    """
    return _count(environ, [system.gpus_variable for system in systems_of(environ)])


def cpus_on_node(environ: Mapping[str, str]) -> int:
    """Cores that the batch system has allocated on this node; 0: unknown.

    >>> cpus_on_node({"SLURM_CPUS_ON_NODE": "16"}), cpus_on_node({})
    (16, 0)
    """
    return _count(environ, [system.cpus_variable for system in systems_of(environ)])[0]


def _count(environ: Mapping[str, str], names: Sequence[str]) -> tuple[int, str]:
    counts = ((environ.get(name, ""), name) for name in names)
    return next(((int(count), name) for count, name in counts if re.fullmatch(r"[0-9]{1,9}", count)), (0, ""))


def number(environ: Mapping[str, str], name: str) -> int | None:
    """A number that a launcher or a batch system has set; None: it is not set; LauncherError if it is not a number."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise LauncherError(
            f"environment: invalid {name}={text[:40]!r}",
            expected="a number, which the launcher sets",
            fix="do not set it yourself",
        )
    return int(text)


#: A node of the command line, perhaps with its number of ranks.
_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([1-9]\d{0,5}))?")


def parse_hosts(text: str) -> Mapping[str, int]:
    """The ranks of each node of the command line: ``h1,h2:2`` (one on h1, two on h2), or a file with a node on each line."""
    if "/" in text or os.path.isfile(text):
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
            words = [line.split("#")[0].strip() for line in lines]
        except (OSError, ValueError) as error:
            raise InputError(
                f"--hosts {text}: can't be read ({error})", fix="a text file, or the nodes: h1,h2"
            ) from None
    else:
        words = text.split(",")
    hosts: Counter[str] = Counter()
    for word in filter(None, words):
        named = _HOST.fullmatch(word)
        if named is None:
            raise InputError(
                f"--hosts {text[:60]}: invalid node {word[:60]!r}",
                expected="NAME or NAME:RANKS, such as h1 or h2:2",
            )
        hosts[named[1]] += int(named[2] or 1)
    if not hosts:
        raise InputError(
            f"--hosts {text!r}: lists no node", expected="h1,h2, or a file with a node on each line"
        )
    return hosts


def is_this_host(name: str, own: str = "") -> bool:
    """Whether a node's name is certainly the name of the host (`own`: of another host); either may have no domain.

    >>> is_this_host("h1", "h1.site"), is_this_host("h1.site", "h1.elsewhere"), is_this_host("localhost")
    (True, False, True)
    """
    names = [name.lower(), (own or socket.gethostname()).lower()]
    if not all("." in each for each in names):
        names = [each.partition(".")[0] for each in names]
    return name == "localhost" or names[0] == names[1]


def count_hosts(
    environ: Mapping[str, str], name: str, words: Callable[[str], list[str]] = str.split
) -> Counter[str]:
    """The nodes in the file of a variable, and how often each occurs; `words` returns them from its text."""
    path = environ[name]
    try:
        found = Counter(words(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(
            f"environment: {name}={path}: can't be read ({error})", fix="run `launch` inside the job"
        ) from None
    if not found or not all(map(str.isprintable, found)):
        raise InputError(f"environment: {name}={path}: lists no node", fix="run `launch` inside the job")
    return found


# Commands of the batch system.

#: Seconds for a command during a start, and for one that requeues the job.
COMMAND_TIMEOUT, REQUEUE_TIMEOUT = 5.0, 60.0
#: The exit code of a shell for a command that it does not find.
CANNOT_RUN = 127
#: The end of the reason, if there is no such command.
NOT_FOUND = "not found in PATH"


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    timeout: float = COMMAND_TIMEOUT,
    *,
    text: str = "",
    cwd: str = "/",
    prepare: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command; exit code `CANNOT_RUN`, and the reason on stderr, if it can't be run, or does not end in time.

    `text` is its standard input. `prepare` is called in the child.

    It is not searched in the working directory, where another user may have put it, nor does it run there without `cwd`: it or
    its libraries may read files of it.
    """
    search = (os.environ if environ is None else environ).get("PATH", os.defpath)
    path = os.pathsep.join(filter(os.path.isabs, search.split(os.pathsep)))
    file = command[0] if os.path.isabs(command[0]) else shutil.which(command[0], path=path)
    if file is None:
        return subprocess.CompletedProcess(list(command), CANNOT_RUN, "", f"{command[0]}: {NOT_FOUND}")
    try:
        return subprocess.run(
            [file, *command[1:]],
            env=environ,
            input=text,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # names of jobs may not be UTF-8
            timeout=timeout,
            cwd=cwd,
            preexec_fn=prepare,
        )
    except subprocess.TimeoutExpired:
        why = f"no response within {timeout:.0f} s"
    except (OSError, ValueError) as error:
        why = str(error)
    return subprocess.CompletedProcess(list(command), CANNOT_RUN, "", why)


def output_of(command: Sequence[str], timeout: float = COMMAND_TIMEOUT) -> str:
    """The output of a command; empty if it can't be run, fails, or does not end in time."""
    done = run_command(command, timeout=timeout)
    return "" if done.returncode else done.stdout
