"""Job scripts from the templates in ``jobscripts/``: the same files that users submit as they are.

A template is a working script: the batch system's directives (``#SBATCH --nodes=1``), the user's environment, and a line with
``dask-gpu-mpi launch``. `render` replaces directives and the script with its arguments (``program=``), and adds lines: settings
of ``launch`` (``export DGM_CONTAINER=...``) and modules. They are shell words and take any text, quoted. Directives can't be
quoted, so what goes there must match a pattern.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from dask_gpu_mpi.errors import InputError

__all__ = ["SYSTEMS", "JobRequest", "System", "quote", "render", "submit", "template"]

#: Seconds that the batch system gets to take a job.
SUBMIT_TIMEOUT = 60.0


@dataclass(frozen=True)
class JobRequest:
    """What a job script is to ask for and run.

    Attributes
    ----------
    system : str
        A name in `SYSTEMS`.
    program : tuple of str
        The script and its arguments, after options of ``dask-gpu-mpi run`` if there are any.
    nodes, gpus_per_node, ranks_per_node : int
        Hosts, GPUs and MPI ranks of each.
    seconds : int
        The walltime.
    cpus_per_node : int or None
        Cores of each host, which PBS has to be told; None: as the template has it.
    account, queue : str or None
        Account (project, bank) and queue (partition); None: the user's defaults.
    launcher : str or None
        One of the system's; None: its first.
    mpi : str or None
        How launcher and MPI library find each other (``srun --mpi``, ``flux run -o pmi``); None: as the library needs.
    modules, directives : tuple of str
        Modules to load; options of the batch system to add as they are.
    setup, container, scratch : str or None
        File to source; Apptainer image to run in; node-local directory.
    """

    system: str
    program: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    seconds: int
    ranks_per_node: int = 1
    cpus_per_node: int | None = None
    account: str | None = None
    queue: str | None = None
    launcher: str | None = None
    mpi: str | None = None
    modules: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    setup: str | None = None
    container: str | None = None
    scratch: str | None = None


@dataclass(frozen=True)
class System:
    """A batch system.

    Attributes
    ----------
    title, prefix : str
        Its name, and what its directives begin with.
    templates : mapping
        File name by launcher; the first launcher is the default.
    directives : callable
        Of a request: value by the beginning of the directive; None removes it.
    submit : tuple of str
        Command that takes a script on its standard input.
    job_id : str
        Regular expression of what it answers, with the job's number as its group.
    speaks : tuple of str
        Launchers that can be told how the MPI library is to be met (``--mpi``).
    """

    title: str
    prefix: str
    templates: Mapping[str, str]
    directives: Callable[[JobRequest], dict[str, str | None]]
    submit: tuple[str, ...]
    job_id: str
    speaks: tuple[str, ...] = ()


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _slurm(job: JobRequest) -> dict[str, str | None]:
    return {
        "--nodes=": str(job.nodes),
        "--ntasks-per-node=": str(job.ranks_per_node),
        "--gpus-per-node=": str(job.gpus_per_node) if job.gpus_per_node else None,
        "--time=": _clock(job.seconds),
        "--account=": job.account,
        "--partition=": job.queue,
    }


def _pbs(job: JobRequest) -> dict[str, str | None]:
    cpus = job.cpus_per_node or template_cpus("pbs.pbs")
    chunk = f"{job.nodes}:ncpus={cpus}:mpiprocs={job.ranks_per_node}"
    return {
        "-l select=": f"{chunk}:ngpus={job.gpus_per_node}" if job.gpus_per_node else chunk,
        "-l walltime=": _clock(job.seconds),
        "-A ": job.account,
        "-q ": job.queue,
    }


def _lsf(job: JobRequest) -> dict[str, str | None]:
    minutes = -(-job.seconds // 60)  # LSF knows no seconds
    return {
        "-n ": str(job.nodes * job.ranks_per_node),
        "-R ": f'"span[ptile={job.ranks_per_node}]"',
        "-gpu ": f'"num={job.gpus_per_node}:mode=shared:j_exclusive=yes"' if job.gpus_per_node else None,
        "-W ": f"{minutes // 60:02}:{minutes % 60:02}",
        "-P ": job.account,
        "-q ": job.queue,
    }


def _flux(job: JobRequest) -> dict[str, str | None]:
    return {
        "--nodes=": str(job.nodes),
        "--time-limit=": f"{job.seconds}s",
        "--bank=": job.account,
        "--queue=": job.queue,
    }


_MPIRUN = "slurm-mpirun.sbatch"
#: Batch systems by the name that the command line has for them.
SYSTEMS: Mapping[str, System] = {
    "slurm": System(
        "Slurm",
        "#SBATCH ",
        {"srun": "slurm.sbatch", "mpirun": _MPIRUN, "mpiexec": _MPIRUN},
        _slurm,
        ("sbatch", "--parsable"),
        r"(\d+)(?:;.*)?",
        ("srun",),
    ),
    "pbs": System(
        "PBS",
        "#PBS ",
        {"mpirun": "pbs.pbs", "mpiexec": "pbs.pbs", "pals": "pbs-pals.pbs"},
        _pbs,
        ("qsub",),
        r"(?<!\S)(\d+(\[\])?(\.\S+)?)$",
    ),
    "lsf": System(
        "LSF",
        "#BSUB ",
        {"auto": "lsf.bsub", "jsrun": "lsf.bsub", "mpirun": "lsf.bsub", "mpiexec": "lsf.bsub"},
        _lsf,
        ("bsub",),
        r"Job <(\d+)> is submitted.*",
    ),
    "flux": System(
        "Flux",
        "# flux: ",
        {"flux": "flux.sh"},
        _flux,
        ("flux", "batch"),
        r"(?<!\S)([fƒ]\w+)(?!\S)",
        ("flux",),
    ),
}


def template(name: str) -> str:
    """The text of a template, by its file name."""
    return resources.files("dask_gpu_mpi").joinpath("jobscripts", name).read_text(encoding="utf-8")


def template_cpus(name: str) -> int:
    """The cores of a node that a template of PBS asks for."""
    found = re.search(r"^#PBS -l select=\S*:ncpus=(\d+)", template(name), re.MULTILINE)
    assert found is not None, f"{name} asks for no cores"
    return int(found[1])


def quote(text: str) -> str:
    r"""One shell word for bash that stands for the text, on one line: ``$'a\012b'`` where it holds control characters.

    Bytes that are no UTF-8 (``surrogateescape``, as in ``sys.argv``) come out as they went in.
    """
    if text.isprintable():
        return shlex.quote(text)
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\{byte:03o}"
        for byte in os.fsencode(text)
    )
    return f"$'{''.join(plain)}'"


def render(job: JobRequest) -> str:
    """Write the script.

    Parameters
    ----------
    job : JobRequest
        What it asks for; checked already.

    Returns
    -------
    str
        The template with its directives and settings replaced.

    Raises
    ------
    InputError
        The system has no such launcher, or it can't be told about `mpi`.
    """
    system = SYSTEMS[job.system]
    launcher = job.launcher or next(iter(system.templates))
    if launcher not in system.templates:
        raise InputError(
            f"--launcher {launcher}: not available under {system.title} (expected one of {', '.join(system.templates)})"
        )
    if job.mpi is not None and launcher not in system.speaks:
        raise InputError(
            f"--mpi {job.mpi}: {launcher} under {system.title} has no such option. Fix: leave it out"
        )
    lines = template(system.templates[launcher]).splitlines()
    for beginning, value in system.directives(job).items():
        _set_directive(lines, system.prefix, beginning, value)
    for directive in job.directives:
        lines.insert(_last(lines, system.prefix) + 1, system.prefix + directive)
    program = _at(lines, "program=")
    lines[program] = f"program=({_words(job.program)})"
    _add_settings(lines, _settings(job, launcher))
    _add_modules(lines, job.modules)
    # the head of the template tells how to submit it; its examples of directives are done with
    lines[1 : _at(lines, "# shellcheck")] = [_head(job)]
    return "\n".join(line for line in lines if not line.startswith(f"#{system.prefix}")) + "\n"


def _head(job: JobRequest) -> str:
    shape = f"{job.nodes} nodes, {job.gpus_per_node} GPUs and {job.ranks_per_node} MPI ranks on each"
    return f"# {shape}. Made by dask-gpu-mpi jobscript."


def _settings(job: JobRequest, launcher: str) -> dict[str, str]:
    """The settings of this job by name, without the prefix of their variables."""
    settings = {"SETUP": job.setup, "CONTAINER": job.container, "SCRATCH": job.scratch, "MPI": job.mpi}
    if job.gpus_per_node and job.system != "slurm":
        # Slurm itself reports how many it gives, also if sbatch is told another number
        settings["EXPECT_GPUS"] = str(job.gpus_per_node)
    if launcher not in ("auto", "srun", "pals", "flux"):
        settings["LAUNCHER"] = launcher
    if job.system in ("lsf", "flux"):  # whose jobs don't say
        settings["RANKS_PER_NODE"] = str(job.ranks_per_node)
    return {name: text for name, text in settings.items() if text is not None}


def _add_settings(lines: list[str], settings: Mapping[str, str]) -> None:
    at = _at(lines, "program=")
    lines[at:at] = [f"export DGM_{name}={quote(text)}" for name, text in settings.items()]


def _add_modules(lines: list[str], modules: tuple[str, ...]) -> None:
    """Below the examples of a user's environment, of which they are one."""
    if modules:
        at = _at(lines, "setup=")
        lines[at:at] = [
            "type -t module > /dev/null || source /etc/profile",
            f"module load {_words(modules)} || exit 2",
        ]


def _words(words: tuple[str, ...]) -> str:
    return " ".join(map(quote, words))


def _last(lines: list[str], prefix: str) -> int:
    return max(i for i, line in enumerate(lines) if line.startswith(prefix))


def _set_directive(lines: list[str], prefix: str, beginning: str, value: str | None) -> None:
    """Replace a directive, or its example (one more ``#``), or add it after the last one; None removes it."""
    for i, line in enumerate(lines):
        if line.startswith((prefix + beginning, f"#{prefix}{beginning}")):
            lines[i : i + 1] = [] if value is None else [f"{prefix}{beginning}{value}"]
            return
    if value is not None:
        lines.insert(_last(lines, prefix) + 1, f"{prefix}{beginning}{value}")


def _at(lines: list[str], beginning: str) -> int:
    """The place of the first line that begins so."""
    return next(i for i, line in enumerate(lines) if line.startswith(beginning))


def submit(job: JobRequest, text: str) -> str:
    """Hand a script to the batch system; return the job's number.

    Raises
    ------
    InputError
        There is no such batch system here, or it refuses the job, or does not answer.
    """
    command = SYSTEMS[job.system].submit
    name = " ".join(command)
    if shutil.which(command[0]) is None:
        raise InputError(
            f"--submit: command {command[0]} not found. Fix: run this on a login node of {SYSTEMS[job.system].title}"
        )
    try:
        done = subprocess.run(command, input=os.fsencode(text), capture_output=True, timeout=SUBMIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"--submit: no response from {name} within {SUBMIT_TIMEOUT:.0f} s. Fix: check whether the job is in the queue "
            "before you submit again"
        ) from None
    except OSError as error:
        raise InputError(f"--submit: could not run {name}: {error.strerror}") from None
    answer, complaint = (" ".join(os.fsdecode(part).split()) for part in (done.stdout, done.stderr))
    found = re.search(SYSTEMS[job.system].job_id, answer)
    if done.returncode or found is None:
        raise InputError(
            f"--submit: {name} exited with code {done.returncode}: {complaint or answer or 'no output'}"
        )
    return found[1]
