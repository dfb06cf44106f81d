"""What ``launch`` runs, as a pure function of the environment, the allocation, the MPI library and the options."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpu_mpi.base.streams import PUBLIC
from dask_gpu_mpi.errors import LauncherError

from .allocation import Allocation
from .environment import forwarded, launch_environment
from .mpi_library import MpiLibrary
from .starter import Starter

__all__ = ["START", "Launch", "Request", "as_text", "decide", "python_command"]

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
    #: File that exists at the end of a job that has completed, where the launcher's exit code 0 does not prove it.
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
    job_end: str = "",
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
    job_end : str
        When Slurm ends the job, in seconds since the epoch: its older versions do not set it for `session.on_walltime`.
    is_public : bool
        Whether others may read the output of `launch`, which ranks on other nodes can't find out.

    Raises
    ------
    LauncherError
        The launcher can't start this job.
    """
    if allocation.parts and (starter.kind != "srun" or mpi.startswith("pmix")):
        how = f"srun --mpi={mpi}" if starter.kind == "srun" else os.path.basename(starter.path)
        raise LauncherError(
            f"launch: heterogeneous jobs of Slurm can't be started by {how} (expected srun and MPICH). Fix: a homogeneous job"
        )
    changes = launch_environment(environ, allocation, library, starter, root=root)
    if job_end:
        changes["SLURM_JOB_END_TIME"] = job_end
    if is_public:
        changes[PUBLIC] = "1"
    after = {name: value for name, value in {**environ, **changes}.items() if value is not None}
    if request.signal and starter.kind != "flux":
        raise LauncherError(
            f"launch: --signal {request.signal}: {starter.kind} sends none (expected flux). Fix: have the batch system send it: "
            "sbatch --signal, bsub -wa"
        )
    launcher = [starter.path, *_launcher_options(allocation, starter, mpi, after)]
    if request.signal:
        launcher.append(f"--signal={request.signal}")
    logs = bound = request.log_directory or environ.get("DASK_GPU_MPI__LOG_DIRECTORY", "")
    own: tuple[str, ...] = ()
    if not logs and allocation.job:
        # all jobs' folder: on other nodes it may be there, when this job's is not yet
        bound = environ.get("DGM_LOGS") or "logs"
        logs = os.path.join(bound, allocation.job)
        own = ("--log-directory", logs)
    inner = (*python_command(request, environ, python, cwd, bound), "-c", START)
    expect = () if request.expect_gpus is None else (f"--expect-gpus={request.expect_gpus}",)
    check = (*launcher, *inner, "check", *expect, *request.options, *request.program)
    match request.command:
        case "run":
            words: tuple[str, ...] = own
        case "check":
            words = expect
        case _:
            words = ()
    run = (*launcher, *inner, request.command, *words, *request.options, *request.program)
    batch = environ.get("ENVIRONMENT") == "BATCH"
    return Launch(
        environment=changes,
        check=check if request.check else (),
        run=run,
        logs=logs,
        make=logs if request.container else "",
        # Open MPI's mpirun exits with 0 when it has lost a daemon
        mark=os.path.join(logs, "ended")
        if logs and request.command == "run" and starter.kind == "openmpi" and allocation.nodes > 1
        else "",
        # Slurm sends TERM to the ranks itself, and srun would kill them for it; LSF sends every signal to all processes.
        forwards_end=allocation.system != "lsf" and not (starter.kind == "srun" and batch),
        forwards_warning=allocation.system != "lsf",
        lingers=allocation.system == "slurm" and batch and starter.kind != "srun",
        requeues_by_code=allocation.system == "lsf",
    )


def _launcher_options(
    allocation: Allocation, starter: Starter, mpi: str, environ: Mapping[str, str]
) -> list[str]:
    """One rank on each node, unless others are requested; all cores and GPUs of its node for each."""
    ranks, per_node, nodes = allocation.ranks, allocation.ranks_per_node, allocation.nodes
    match starter.kind:
        case "srun":
            return _srun(allocation, mpi, environ)
        case "flux":
            size = f"--ntasks={ranks}" if ranks % nodes else f"--tasks-per-node={per_node}"
            meet = ["-o", f"pmi={mpi}"] if mpi else []
            return [
                "run",
                f"--nodes={nodes}",
                size,
                *("--exclusive", "-o", "cpu-affinity=off", "-o", "gpu-affinity=off"),
                *meet,
            ]
        case "jsrun":
            if ranks % nodes:
                raise LauncherError(
                    f"launch: jsrun can't start {ranks} ranks on {nodes} nodes (expected a multiple of {nodes})"
                )
            sets = "ALL_HOSTS" if allocation.whole else nodes
            return f"-n {sets} -r 1 -a {per_node} -c ALL_CPUS -g ALL_GPUS -b none".split()
        case "pals":
            return ["-n", f"{ranks}", "--ppn", f"{per_node}", "--cpu-bind", "none"]
        case "openmpi":
            return _open_mpi(allocation, environ)
        case "hydra" | "intel" as kind:
            where = []
            if allocation.hosts and kind == "hydra":
                where = ["-hosts", _named(allocation)]
            elif allocation.hosts:  # Intel's -hosts takes no numbers
                where = ["-hosts", ",".join(host.name for host in allocation.hosts), "-ppn", f"{per_node}"]
            elif allocation.system == "slurm":
                where = ["-ppn", f"{per_node}"]
            return ["-n", f"{ranks}", *where, "-bind-to", "none"]


def _srun(allocation: Allocation, mpi: str, environ: Mapping[str, str]) -> list[str]:
    options = [f"--mpi={mpi}"] if mpi else []
    options.append("--cpu-bind=none")
    if allocation.parts:
        options.append(f"--het-group=0-{allocation.parts - 1}")
    else:
        options += [
            f"--nodes={allocation.nodes}",
            f"--ntasks={allocation.ranks}",
            f"--ntasks-per-node={allocation.ranks_per_node}",
        ]
    if environ.get("ENVIRONMENT") != "BATCH":
        options.append("--overlap")  # the shell of `salloc` or `srun --pty` may be a step, which has the node
    # when a rank has died, not while all end, which would change the exit code
    return [*options, "--kill-on-bad-exit=0", "--wait=30"]


def _open_mpi(allocation: Allocation, environ: Mapping[str, str]) -> list[str]:
    options = ["-np", f"{allocation.ranks}"]
    if allocation.hosts:  # a node that is named once would count for all its cores
        options += ["--host", _named(allocation), "--map-by", "slot"]
    elif allocation.system == "slurm":
        options += ["--map-by", f"ppr:{allocation.ranks_per_node}:node"]
    else:
        options += [
            "--map-by",
            "slot:OVERSUBSCRIBE",
        ]  # ranks wait rather than compute: there may be more than cores
    options += ["--bind-to", "none"]
    if allocation.system != "local":
        options += [word for name in forwarded(environ) for word in ("-x", name)]
    return options


def _named(allocation: Allocation) -> str:
    return ",".join(f"{host.name}:{host.ranks}" for host in allocation.hosts)


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
            f"launch: --container: apptainer can't bind {odd[0]!r} (expected a path without ',' and ':'). Fix: another directory"
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
