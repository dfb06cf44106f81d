"""Job scripts from the templates in ``jobscripts/``, which users can submit as they are.

A template is a working script: the batch system's directives (``#SBATCH --nodes=1``), the user's environment, and a line with
``dask-gpu-mpi launch``. `render` replaces directives and the script with its arguments (``program=``), and adds settings
(``export DGM_SETUP=...``) and modules. These are quoted shell words. Directives can't be quoted, so their values must match a
pattern.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from importlib import resources

from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import BatchSystem, JobRequest, batch_system, run_command

#: The batch systems that have `templates` for job scripts. (Asking each for them would load all modules, in every rank.)
SCRIPTED = ("slurm", "pbs", "lsf", "flux")
#: Seconds for the batch system to accept a job.
SUBMIT_TIMEOUT = 60.0


def template(name: str) -> str:
    """The text of a template, by its file name."""
    return resources.files("dask_gpu_mpi").joinpath("jobscripts", name).read_text(encoding="utf-8")


def quote(text: str) -> str:
    r"""A shell word for bash with this text, on one line: ``$'a\012b'`` if it has control characters.

    Bytes that are not UTF-8 (``surrogateescape``, as in ``sys.argv``) do not change.
    """
    if text.isprintable():
        return shlex.quote(text)
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\{byte:03o}"
        for byte in os.fsencode(text)
    )
    return f"$'{''.join(plain)}'"


def render(job: JobRequest) -> str:
    """The script of a request; InputError if the batch system has no such launcher or option."""
    system = batch_system(job.system)
    launcher = job.launcher or next(iter(system.templates))
    _check(job, system, launcher)
    job = replace(job, directives=tuple(_filled(text, job) for text in job.directives))
    lines = template(system.templates[launcher]).splitlines()
    _set_directives(lines, system, job)
    program = _at(lines, "program=")
    settings = _settings(job, system, launcher)
    lines[program] = f"program=({_words(job.program)})"
    lines[program:program] = [f"export DGM_{name}={quote(text)}" for name, text in settings.items()]
    if job.modules:
        # below the examples of a user's environment
        setup = _at(lines, "setup=")
        lines[setup:setup] = [
            "type -t module > /dev/null || source /etc/profile",
            f"module load {_words(job.modules)} || exit 2",
        ]
    each = f"{counted(job.gpus_per_node, 'GPU')} and {counted(job.ranks_per_node, 'rank')}"
    shape = f"{counted(job.gpus, 'GPU')}" if job.gpus else f"{counted(job.nodes, 'node')}, {each} on each"
    # not the template's own head, with the command to submit it, nor its examples of directives
    lines[1 : _at(lines, "# shellcheck")] = [f"# {shape}. Made by dask-gpu-mpi jobscript."]
    return "\n".join(line for line in lines if not line.startswith(f"#{system.prefix}")) + "\n"


def _set_directives(lines: list[str], system: BatchSystem, job: JobRequest) -> None:
    """Set those of the request among the lines of a template; then those by ``--directive``, which replace others."""
    words = {system.words[name]: text for name, text in job.words.items()}
    for beginning, value in (system.directives(job) | words).items():
        _set_directive(lines, system.prefix, beginning, value)
    replaced = frozenset[str]().union(*map(system.replaced, job.directives))
    end = _last(lines, system.prefix) + 1
    kept = [
        line
        for line in lines[:end]
        if not line.startswith(system.prefix)
        or system.option_name(line.removeprefix(system.prefix)) not in replaced
    ]
    # `--mem=`, without a value, only takes the template's out
    lines[:end] = [*kept, *(system.prefix + each for each in job.directives if not each.endswith("="))]


def _check(job: JobRequest, system: BatchSystem, launcher: str) -> None:
    """Refuse what the batch system does not have, and options that contradict each other."""
    if launcher not in system.templates:
        raise InputError(
            f"--launcher {launcher}: not available under {system.title}",
            expected=f"one of {', '.join(system.templates)}",
        )
    if missing := sorted(job.words.keys() - system.words.keys()):
        raise InputError(
            f"--{missing[0].replace('_', '-')}: {system.title} has no such option",
            expected=f"one of {', '.join(system.words)}",
            fix=f"leave it out, or --directive with an option of {system.submit[0]}",
        )
    if job.cpus_per_node and not job.shared and not system.counts_cores:
        raise InputError(
            f"--cpus-per-node {job.cpus_per_node}: {system.title} gives whole nodes with all their cores",
            expected="with --shared",
            fix="leave it out",
        )
    asked = {"--mem=": job.memory_per_node, "--ntasks-per-node=": job.ranks_per_node > 1}
    if lost := [each for each in job.directives if asked.get(each)]:
        option = "--memory-per-node" if lost[0] == "--mem=" else "--ranks-per-node"
        raise InputError(
            f"{option}: {lost[0]} among the directives takes it out", fix="leave one of them out"
        )
    if job.gpu_type and not system.has_types and "{gpu-type}" not in "".join(job.directives):
        raise InputError(
            f"--gpus-per-node {job.gpu_type}:{job.gpus_per_node}: {system.title} has no type there",
            expected="a number",
            fix="--directive in the site's words, such as '-l select={nodes}:ngpus={gpus}:gpu_type={gpu-type}' of PBS",
        )
    if job.gpus and not system.chooses_nodes:
        raise InputError(f"--gpus: {system.title} has no such request", fix="--nodes and --gpus-per-node")


def _filled(directive: str, job: JobRequest) -> str:
    """A directive with the numbers of this job: ``--gpus={all-gpus}``; InputError if one of them is not known."""
    numbers = {
        "nodes": None if job.gpus else job.nodes,
        "ranks": job.ranks_per_node,
        "cpus": job.cpus_per_node or job.cpus_per_gpu,
        "memory": job.mebibytes and f"{job.mebibytes}mb",
        "gpus": None if job.gpus else job.gpus_per_node,
        "all-gpus": job.nodes * job.gpus_per_node,
        "gpu-type": job.gpu_type,
    }

    def number(found: re.Match[str]) -> str:
        if (name := found[1]) not in numbers or numbers[name] in (None, ""):
            fix = "add the option with that number, such as --nodes, or write the number itself"
            if name in numbers and (name == "gpu-type" or job.gpus):
                fix = f"--nodes N --gpus-per-node {'TYPE:NUMBER' if name == 'gpu-type' else 'NUMBER'}"
            raise InputError(
                f"--directive {directive}: {{{name}}} is not known for this job",
                expected=f"one of {', '.join(numbers)}",
                fix=fix,
            )
        return str(numbers[name])

    return re.sub(r"(?<!\{)\{([a-z-]+)\}(?!\})", number, directive)  # {{id}} is Flux's


def _settings(job: JobRequest, system: BatchSystem, launcher: str) -> dict[str, str]:
    """The settings of this job by name, without the prefix of their variables."""
    settings = {"SETUP": job.setup}
    # a batch system that reports the number of GPUs does so even if the user changes it at submission
    told = system.always_tells_gpus and "--gpus-per-node=" not in job.directives
    if job.gpus_per_node and not job.gpus and not told:
        settings["EXPECT_GPUS"] = str(job.gpus_per_node)
    if job.launcher and launcher not in system.default_launchers:
        settings["LAUNCHER"] = launcher
    if not system.tells_ranks:
        settings["RANKS_PER_NODE"] = str(job.ranks_per_node)
    return {name: text for name, text in settings.items() if text is not None}


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
    """The index of the first line with this beginning."""
    return next(i for i, line in enumerate(lines) if line.startswith(beginning))


def submit(job: JobRequest, text: str) -> str:
    """Submit a script and return the job's number; InputError if there is no such batch system here, or if it fails."""
    system = batch_system(job.system)
    done = run_command(system.submit, timeout=SUBMIT_TIMEOUT, text=text, cwd=".")
    answer, complaint = " ".join(done.stdout.split()), " ".join(done.stderr.split())
    found = re.search(system.job_id, answer)
    if done.returncode or found is None:
        fix = f"run this on a login node of {system.title}"
        if done.returncode:
            fix = f"correct what it names, such as the account, the partition or the number of GPUs, or {fix}"
        raise InputError(
            f"submit: {' '.join(system.submit)} exited with code {done.returncode}: {complaint or answer or 'no output'}",
            expected="" if done.returncode else "the job's number",
            fix=f"{fix}; check whether the job is in the queue before you submit again",
        )
    return found[1]
