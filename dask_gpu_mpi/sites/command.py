"""The commands of a job of ``launch`` (`Launch`): `decide` makes them of the user's options (`Request`) and the launcher.

`dask_gpu_mpi.cli.launch` calls it, and `dask_gpu_mpi.sites.execute` runs what it returns. It is a pure function, but for the
commands of the batch system that it may `ask`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dask_gpu_mpi.base.streams import PUBLIC, RUN, of_run
from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.batch import Allocation, Ask, BatchSystem
from dask_gpu_mpi.sites.choice import Starter
from dask_gpu_mpi.sites.containers import Container, rank_variables
from dask_gpu_mpi.sites.launchers import (
    CRAY,
    LOCAL,
    Launcher,
    detect,
    family_of,
    scrub,
)


def _main_of(module: str) -> str:
    """Code that runs a `main` of ours, but imports nothing from the working directory, where others may have put a module.

    -P or PYTHONSAFEPATH would do the same, but the script and its children would inherit them.
    """
    return f"import sys; sys.flags.safe_path or sys.path.pop(0); from {module} import main; main()"


#: Our command line, as by ``-m dask_gpu_mpi``; the process of a node that makes, or removes, its copy of the environment
#: (``--stage``).
START, STAGE = _main_of("dask_gpu_mpi.__main__"), _main_of("dask_gpu_mpi.machine.staging")


@dataclass(frozen=True)
class Stage:
    """The environment that each node gets a copy of (``--stage``)."""

    #: An archive that each node can read.
    source: str
    #: The folder of the copy on each node.
    folder: str
    #: Bytes and SHA-256 of the archive.
    size: int
    sha256: str

    @property
    def bin(self) -> str:
        """The folder of the copy's programs."""
        return os.path.join(self.folder, "env", "bin")

    @property
    def words(self) -> tuple[str, ...]:
        """Its fields, for a command line."""
        return self.source, self.folder, str(self.size), self.sha256


@dataclass(frozen=True)
class Request:
    """The options of `launch`."""

    #: Options of ``run``, as words of a command line.
    options: tuple[str, ...]
    #: The script and its arguments, or ``-m MODULE`` and the like; the arguments of another `command`.
    program: tuple[str, ...]
    #: The command of the ranks: ``run``, ``plan`` or ``check``.
    command: str = "run"
    #: Whether the preflight comes first.
    check: bool = False
    #: GPUs that each node must have, for the preflight.
    expect_gpus: int | None = None
    #: The container of the ranks; None: they run on the nodes.
    container: Container | None = None
    #: The environment of the ranks; None: the one of `launch`.
    stage: Stage | None = None
    #: Folder of the log files; empty: the one of the batch system's job. `options` contains it as well.
    log_directory: str = ""
    #: Node-local directory of the workers, for the container.
    local_directory: str = ""
    #: Ranks that may be lost (``--tolerate-lost-ranks``).
    tolerates: int = 0
    #: Words for the launcher's command line (``--launcher-option``).
    launcher_options: tuple[str, ...] = ()
    #: The command under which each rank of ``run`` starts (``--profile``); ``nsys`` alone has words added.
    profile: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """The commands, and how to run them."""

    #: Variables to set, or (None) to unset, before them.
    environment: Mapping[str, str | None]
    #: The preflight; empty: none.
    check: tuple[str, ...]
    run: tuple[str, ...]
    #: Makes the copies of the environment before, and removes them after; empty: there are none.
    stage: tuple[str, ...] = ()
    unstage: tuple[str, ...] = ()
    #: Folder of the log files; empty: none.
    logs: str = ""
    #: Folder to make first, since a container mounts it, or a profiler writes into it.
    make: str = ""
    #: Whether others must not enter it if it is new: a profiler's files are for all.
    private: bool = False
    #: File that exists at the end of a job that has completed, if the launcher's exit code does not prove it.
    mark: str = ""
    #: Of the job.
    batch: BatchSystem = field(default_factory=BatchSystem)
    #: Whether SIGTERM and SIGINT are forwarded to the launcher.
    forwards_end: bool = True
    #: Whether processes of a cancelled job on other nodes are killed as soon as this process ends, though they clean up.
    lingers: bool = False
    #: The number of ranks that `launch` itself starts by the commands `check` and `run`; 0: these start a launcher.
    ranks: int = 0
    #: Whether these ranks continue after the loss of one other than rank 0.
    tolerant: bool = False


def needs_launcher(
    request: Request, environ: Mapping[str, str], allocation: Allocation, ask: Ask, *, chosen: bool
) -> bool:
    """Whether a launcher must start the ranks, since `launch` is not on their only node, or the user's options need one.

    `chosen`: the user has chosen a launcher.
    """
    if chosen or request.launcher_options or request.stage or allocation.nodes > 1 or allocation.parts:
        return True
    if request.container is not None and not request.container.runtime.inherits:
        return True
    return not allocation.batch.is_here(environ, allocation, ask)


def decide(
    request: Request,
    environ: Mapping[str, str],
    allocation: Allocation,
    library: str,
    starter: Starter,
    *,
    python: str,
    cwd: str,
    root: bool = False,
    is_public: bool = False,
    has_input: bool = True,
    run_name: str = "",
    ask: Ask = lambda command: "",
) -> Launch:
    """The commands of a job with an MPI library of this version text; LauncherError if the launcher can't start it.

    `library` may be empty if `launch` itself starts the ranks (`LOCAL`).

    `root`: `launch` runs as the superuser. `is_public`: others can read the output of `launch`, which ranks on other nodes can't
    detect. `has_input`: the standard input is not empty. `run_name`: of this run, which nobody can guess.
    `ask` returns the output of a command of the batch system.
    """
    batch, launcher = allocation.batch, starter.launcher
    launcher.check(allocation, starter.path, starter.mpi)
    logs, mounted, log_option = _log_folders(request, environ, allocation)
    may_lose = request.tolerates or (launcher.may_lose_nodes and allocation.nodes > 1)
    marks = bool(logs and may_lose and request.command == "run")

    changes = launch_environment(environ, allocation, library, launcher, ask, root=root)
    if request.container is not None:
        changes |= request.container.runtime.environment(environ)
    if is_public:
        changes[PUBLIC] = "1"
    if run_name or RUN in environ:
        changes[RUN] = run_name if marks else None  # the ranks leave a mark if it is set
    after = {name: value for name, value in {**environ, **changes}.items() if value is not None}

    # the words of the launcher, and those of a rank: of its container, of its profiler, and of its Python
    options = launcher.options(allocation, after, starter.mpi)
    options += () if has_input else launcher.without_input
    options += launcher.surviving(library) if request.tolerates else ()
    contained: list[str] = []
    main = [os.path.join(request.stage.bin, "python") if request.stage else python, "-c", START]
    if (container := container_of(request, environ, cwd, mounted)) is not None:
        container = _for_ranks(container, starter, allocation)
        options += container.runtime.launcher_options(container)
        contained, main = container.runtime.command(container, after), ["python", "-c", START]
    profiled = _profiler(request.profile, launcher.rank_variable, logs) if request.command == "run" else []
    by_launcher = (
        [] if launcher is LOCAL else [starter.path, *with_options(options, request.launcher_options)]
    )

    expect = () if request.expect_gpus is None else (f"--expect-gpus={request.expect_gpus}",)
    ours = {"run": log_option, "check": expect}.get(request.command, ())
    users = (*request.options, *request.program)
    check = (*by_launcher, *contained, *main, "check", *expect, *users)
    run = (*by_launcher, *contained, *profiled, *main, request.command, *ours, *users)
    stage, copies = request.stage, _copies(request, allocation, starter, after, python)
    return Launch(
        environment=changes,
        check=check if request.check else (),
        run=run,
        ranks=allocation.ranks if launcher is LOCAL else 0,
        tolerant=bool(request.tolerates),
        batch=batch,
        stage=(*copies, *stage.words, library.partition("\n")[0].rstrip("\0")) if stage else (),
        unstage=(*copies, stage.folder) if stage else (),
        logs=logs,
        make=logs if request.container or request.profile else "",
        private=bool(request.profile),
        mark=os.path.join(logs, of_run("ended", {RUN: run_name})) if marks else "",
        forwards_end=not batch.signals_all and not launcher.batch_signals_ranks(environ),
        lingers=batch.lingers(environ, launcher.kind),
    )


def _for_ranks(container: Container, starter: Starter, allocation: Allocation) -> Container:
    """The container with what the ranks of this launcher need in it; LauncherError if it can't start them there."""
    runtime, launcher = container.runtime, starter.launcher
    if runtime.launcher not in ("", launcher.kind):
        raise LauncherError(
            f"launch: --container: {launcher.kind} starts the ranks, which can't start containers of {runtime.name}",
            expected=runtime.launcher,
            fix=f"an image whose MPI library {runtime.launcher} can start, or another --container-runtime",
        )
    return replace(container, variables=rank_variables(launcher, allocation.system), mpi=starter.mpi)


def _copies(
    request: Request, allocation: Allocation, starter: Starter, environ: Mapping[str, str], python: str
) -> tuple[str, ...]:
    """The command that runs one process on each node for ``--stage``, without its arguments; empty: there are no copies."""
    if request.stage is None:
        return ()
    one_each = replace(allocation, ranks=allocation.nodes, hosts=dict.fromkeys(allocation.hosts, 1))
    options = [*starter.launcher.options(one_each, environ, starter.mpi), *starter.launcher.patient]
    return (starter.path, *with_options(options, request.launcher_options), python, "-c", STAGE)


def _log_folders(
    request: Request, environ: Mapping[str, str], allocation: Allocation
) -> tuple[str, str, tuple[str, ...]]:
    """The folder of the log files; the one that a container mounts; and the option for ranks, if they don't have it already."""
    logs = request.log_directory or environ.get("DASK_GPU_MPI__LOG_DIRECTORY", "")
    if logs or not allocation.job:
        return logs, logs, ()
    # the folder of all jobs, which other nodes may have, though not yet that of this job
    folder = environ.get("DGM_LOGS") or "logs"
    logs = os.path.join(folder, allocation.job)
    return logs, folder, ("--log-directory", logs)


def _profiler(words: Sequence[str], rank: str, logs: str) -> list[str]:
    """The command of a profiler for all ranks; nsys puts in the rank, from the launcher's variable, and the node.

    >>> _profiler(["nsys"], "PMI_RANK", "logs/42")
    ['nsys', 'profile', '--trace=cuda,nvtx', '--sample=none', ..., '--output=logs/42/rank-%q{PMI_RANK}-%h']
    """
    if list(words) != ["nsys"]:
        return list(words)
    name = f"rank-%q{{{rank}}}-%h" if rank else "rank-%p-%h"
    output = f"--output={os.path.join(logs, name)}"
    # Samples of the CPU are not about GPUs, and need rights that a cluster's users may not have.
    light = ("--sample=none", "--cpuctxsw=none", "--force-overwrite=true")
    return ["nsys", "profile", "--trace=cuda,nvtx", *light, output]


def launch_environment(
    environ: Mapping[str, str],
    allocation: Allocation,
    library: str,
    launcher: Launcher,
    ask: Ask,
    *,
    root: bool,
) -> dict[str, str | None]:
    """The variables to set, or (None) to unset, before the launcher starts. Open MPI refuses to start as `root` by default."""
    batch = allocation.batch
    changes: dict[str, str | None] = {}
    # in a shell that is a rank, as in `srun --pty bash`: the launcher must not become one
    if detect(environ) is not None:
        changes.update(dict.fromkeys(sorted(environ.keys() - scrub(environ).keys())))
    changes |= launcher.environment(root=root)
    if family_of(library) == "cray":
        changes |= CRAY
    if scratch := environ.get("DGM_SCRATCH"):
        changes["DASK_GPU_MPI__LOCAL_DIRECTORY"] = scratch
    if batch.sends_signal:
        changes["DASK_GPU_MPI__WALLTIME_SIGNAL"] = environ.get("DASK_GPU_MPI__WALLTIME_SIGNAL") or "USR1"
    changes |= batch.environment(environ, allocation, ask, launcher=launcher.kind, copies=launcher.copies)
    return {
        name: value
        for name, value in changes.items()
        if (name in environ if value is None else environ.get(name) != value)
    }


#: Options of launchers that may be there several times, and add up.
_REPEATED = frozenset({"x", "o", "container-mounts"})


def with_options(ours: Sequence[str], users: Sequence[str]) -> list[str]:
    """The launcher's options with the user's, which win: an mpirun refuses most options that are there twice.

    >>> with_options(["run", "-np", "2", "--bind-to", "none", "-x", "A"], ["--bind-to", "core", "-x", "B"])
    ['run', '-np', '2', '-x', 'A', '--bind-to', 'core', '-x', 'B']
    """
    given = {_option_name(word) for word in users if word.startswith("-")} - _REPEATED
    kept, keeps = [], True
    for word in ours:
        if word.startswith("-"):
            keeps = _option_name(word) not in given
        if keeps:
            kept.append(word)
    return [*kept, *users]


def _option_name(option: str) -> str:
    return option.partition("=")[0].lstrip("-")


def container_of(request: Request, environ: Mapping[str, str], cwd: str, logs: str = "") -> Container | None:
    """The container of the ranks, in which the folders of the job are mounted; None: they run on the nodes."""
    if request.container is None:
        return None
    script = next((word for word in request.program if os.path.isfile(word)), "")
    files = [os.path.abspath(file) for file in (script, environ.get("DGM_SETUP", "")) if file]
    local = request.local_directory
    # workers make it on each node if it is not there
    folders = [cwd, *map(os.path.dirname, files), logs, local if os.path.isdir(local) else ""]
    return request.container.at(cwd, filter(None, folders))


def library_command(request: Request, environ: Mapping[str, str], python: str, cwd: str) -> list[str]:
    """The Python with the MPI library of the ranks: this one, or the container's, run once without a launcher."""
    container = container_of(request, environ, cwd)
    return [python] if container is None else [*container.runtime.alone(container, environ), "python"]


def as_text(launch: Launch, *notes: str) -> str:
    """The commands for a shell."""
    lines = [f"# {' '.join(note.split())}" for note in notes]
    lines += [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in launch.environment.items()
    ]
    if launch.ranks:
        lines.append(
            f"# without a launcher: launch itself starts {counted(launch.ranks, 'rank')} by the last command, and sets DGM_RANK, "
            "DGM_SIZE and DGM_MEETING_FD for each. Without these it is a job of one rank"
        )
    if launch.make:
        mode = ["-m", "700"] if launch.private else []
        lines.append(shlex.join(["mkdir", "-p", *mode, launch.make]))
    lines += [f"{shlex.join(command)} &&" for command in (launch.stage, launch.check) if command]
    lines.append(shlex.join(launch.run))
    if launch.unstage:
        lines += ["code=$?", shlex.join(launch.unstage), "(exit $code)"]
    return "\n".join(lines)
