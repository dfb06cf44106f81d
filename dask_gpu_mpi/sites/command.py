"""What ``launch`` runs, as a pure function of the environment, the allocation, the MPI library and the options."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpu_mpi.base.streams import PUBLIC
from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.batch import Allocation
from dask_gpu_mpi.sites.launchers import CRAY, detect, scrub
from dask_gpu_mpi.sites.starter import MpiLibrary, Starter

__all__ = ["START", "Launch", "Request", "as_text", "decide", "launch_environment", "python_command"]

#: Runs our command line as ``-m dask_gpu_mpi`` does, but imports nothing from the working directory, where others may have put a
#: module. Not by -P or PYTHONSAFEPATH: the script, and what it starts, would inherit that.
START = "import sys; sys.flags.safe_path or sys.path.pop(0); from dask_gpu_mpi.__main__ import main; main()"


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    #: Options of ``run``, as words of a command line.
    options: tuple[str, ...]
    #: The script and its arguments, or ``-m MODULE`` and the like; the arguments of another `command`.
    program: tuple[str, ...]
    #: What the ranks do: ``run``, ``plan`` or ``check``.
    command: str = "run"
    #: Whether the preflight comes first.
    check: bool = False
    #: GPUs that each node must have, for the preflight.
    expect_gpus: int | None = None
    #: Apptainer image to run in; empty: none.
    container: str = ""
    #: Folder of the log files; empty: the batch system's job decides. Not None where `options` has it.
    log_directory: str = ""
    #: Node-local directory of the workers, for the container.
    local_directory: str = ""
    #: Ranks that may be lost (``--tolerate-lost-ranks``).
    tolerates: int = 0
    #: ``flux run --signal``: before the walltime, to all ranks; empty: none.
    signal: str = ""


@dataclass(frozen=True)
class Launch:
    """The commands, and what to know of them."""

    #: Variables to set, or (None) to unset, before them.
    environment: Mapping[str, str | None]
    #: The preflight; empty: none.
    check: tuple[str, ...]
    run: tuple[str, ...]
    #: Folder of the log files; empty: none.
    logs: str = ""
    #: Folder to make first: a container binds it.
    make: str = ""
    #: File that exists at the end of a job that has completed, where the launcher's exit code does not prove it.
    mark: str = ""
    #: Whether SIGTERM and SIGINT are forwarded to the launcher, and the signals before the walltime.
    forwards_end: bool = True
    forwards_warning: bool = True
    #: Whether what is left of a cancelled job on other nodes needs time to clean up, which it has as long as this process lives.
    lingers: bool = False
    #: Whether the batch system itself runs the job again after exit code 75 (LSF): one that was cancelled ends with another.
    requeues_by_code: bool = False


def decide(
    request: Request,
    environ: Mapping[str, str],
    allocation: Allocation,
    library: MpiLibrary,
    starter: Starter,
    mpi: str,
    *,
    python: str,
    cwd: str,
    root: bool = False,
    told: Mapping[str, str] | None = None,
    is_public: bool = False,
) -> Launch:
    """The commands of a job.

    Parameters
    ----------
    environ : mapping
        The environment of `launch`.
    starter, mpi : Starter, str
        What `choose_launcher` returns.
    python, cwd : str
        The Python that runs `launch`, and its working directory.
    root : bool
        Whether this is the superuser.
    told : mapping, optional
        Variables that the batch system's commands have told (`BatchSystem.told`).
    is_public : bool
        Whether others may read the output of `launch`, which ranks on other nodes can't find out.

    Raises
    ------
    LauncherError
        The launcher can't start this job.
    """
    batch, launcher = allocation.batch, starter.launcher
    launcher.check(allocation, starter.path, mpi)
    changes = launch_environment(environ, allocation, library, starter, root=root) | dict(told or {})
    if is_public:
        changes[PUBLIC] = "1"
    after = {name: value for name, value in {**environ, **changes}.items() if value is not None}
    if request.signal and not launcher.sends_signal:
        raise LauncherError(
            f"launch: --signal {request.signal}: {starter.kind} sends none",
            expected="flux",
            fix="have the batch system send it: sbatch --signal, bsub -wa",
        )
    start = [starter.path, *launcher.options(allocation, after, mpi)]
    if request.signal:
        start.append(f"--signal={request.signal}")
    if request.tolerates:
        start += launcher.surviving(library.version, mpi)
    logs = bound = request.log_directory or environ.get("DASK_GPU_MPI__LOG_DIRECTORY", "")
    own: tuple[str, ...] = ()
    if not logs and allocation.job:
        # all jobs' folder: on other nodes it may be there, when this job's is not yet
        bound = environ.get("DGM_LOGS") or "logs"
        logs = os.path.join(bound, allocation.job)
        own = ("--log-directory", logs)
    inner = (*python_command(request, environ, python, cwd, bound), "-c", START)
    expect = () if request.expect_gpus is None else (f"--expect-gpus={request.expect_gpus}",)
    check = (*start, *inner, "check", *expect, *request.options, *request.program)
    match request.command:
        case "run":
            words: tuple[str, ...] = own
        case "check":
            words = expect
        case _:
            words = ()
    run = (*start, *inner, request.command, *words, *request.options, *request.program)
    return Launch(
        environment=changes,
        check=check if request.check else (),
        run=run,
        logs=logs,
        make=logs if request.container else "",
        mark=os.path.join(logs, "ended")
        if logs
        and request.command == "run"
        and (request.tolerates or (launcher.may_lose_nodes and allocation.nodes > 1))
        else "",
        forwards_end=not batch.signals_all and not launcher.is_ended(environ),
        forwards_warning=not batch.signals_all,
        lingers=batch.lingers(environ, own_launcher=starter.kind == batch.launcher),
        requeues_by_code=batch.requeues_by_code,
    )


def launch_environment(
    environ: Mapping[str, str], allocation: Allocation, library: MpiLibrary, starter: Starter, *, root: bool
) -> dict[str, str | None]:
    """The variables to set, or (None) to unset, before the launcher starts.

    Parameters
    ----------
    root : bool
        Whether this is the superuser, whom Open MPI refuses.
    """
    batch, launcher = allocation.batch, starter.launcher
    changes: dict[str, str | None] = {}
    # a shell that is a rank itself, as in `srun --pty bash`: what it starts must not be
    if detect(environ) is not None:
        changes.update(dict.fromkeys(sorted(environ.keys() - scrub(environ).keys())))
    changes |= launcher.environment(root=root)
    if library.family == "cray":
        changes |= CRAY
    if scratch := environ.get("DGM_SCRATCH"):
        changes["DASK_GPU_MPI__LOCAL_DIRECTORY"] = scratch
    if batch.sends_signal:
        changes["DASK_GPU_MPI__WALLTIME_SIGNAL"] = environ.get("DASK_GPU_MPI__WALLTIME_SIGNAL") or "USR1"
    changes |= batch.environment(
        environ, allocation, own_launcher=starter.kind == batch.launcher, copies=launcher.copies
    )
    return {
        name: value
        for name, value in changes.items()
        if (name in environ if value is None else environ.get(name) != value)
    }


def python_command(
    request: Request, environ: Mapping[str, str], python: str, cwd: str, logs: str
) -> tuple[str, ...]:
    """The Python of the ranks: this one, or the container's, in which the folders of the job are bound."""
    if not request.container:
        return (python,)
    script = next((word for word in request.program if os.path.isfile(word)), "")
    setup = environ.get("DGM_SETUP", "")
    local = (
        request.local_directory
        or environ.get("DGM_SCRATCH")
        or environ.get("DASK_GPU_MPI__LOCAL_DIRECTORY", "")
    )
    places = [
        cwd,
        os.path.dirname(os.path.abspath(script)) if script else "",
        os.path.dirname(os.path.abspath(setup)) if setup else "",
        logs,
        local if os.path.isdir(local) else "",
    ]
    # by the names that the user has for them, symbolic links or not
    bound = sorted({os.path.abspath(os.path.join(cwd, place)) for place in places if place})
    if odd := [place for place in bound if set(place) & set(",:")]:
        raise LauncherError(
            f"launch: --container: apptainer can't bind {odd[0]!r}",
            expected="a path without ',' and ':'",
            fix="another directory",
        )
    return ("apptainer", "exec", "--nv", *(f"--bind={place}" for place in bound), request.container, "python")


def as_text(launch: Launch, *notes: str) -> str:
    """The commands as a shell would take them."""
    lines = [f"# {' '.join(note.split())}" for note in notes]
    lines += [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in launch.environment.items()
    ]
    if launch.make:
        lines.append(shlex.join(["mkdir", "-p", launch.make]))
    if launch.check:
        lines.append(f"{shlex.join(launch.check)} &&")
    lines.append(shlex.join(launch.run))
    return "\n".join(lines)
