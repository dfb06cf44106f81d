"""Job scripts: the request of a job (`JobRequest`), in the options of a batch system (`ScriptFormat`), as the text of a script.

A script is made from a template in ``jobscripts/``, which users can submit as it is: the batch system's directives
(``#SBATCH --nodes=1``), the user's environment, and a line with ``dask-gpu-mpi launch``. `render` replaces directives and the
script with its arguments (``program=``), and adds settings (``export DGM_SETUP=...``) and modules. These are quoted shell words.
Directives can't be quoted, so their values must match a pattern, which `dask_gpu_mpi.cli.job_request` checks.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import CANNOT_RUN, NOT_FOUND, batch_system, run_command

#: The batch systems whose modules have a `ScriptFormat`. (To inspect them all would load them all, in every rank.)
SCRIPTED = ("slurm", "pbs", "lsf", "flux")
#: Seconds for the batch system to accept a job.
SUBMIT_TIMEOUT = 60.0
#: Seconds of each unit of a walltime, and how many of it make the next larger one.
_UNITS = {"D": (86400, 0), "H": (3600, 24), "M": (60, 60), "S": (1, 60)}


@dataclass(frozen=True)
class JobRequest:
    """The request and the program of a job script."""

    #: A name in `SCRIPTED`.
    system: str
    #: The script and its arguments, after options of ``dask-gpu-mpi launch`` if there are any.
    program: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    #: The walltime.
    seconds: int
    ranks_per_node: int = 1
    #: All GPUs of a job whose nodes the batch system chooses; it is then planned as one node. None: `nodes` are alike.
    gpus: int | None = None
    #: The type of the GPUs, in the words of the site; empty: any.
    gpu_type: str = ""
    #: Cores, and bytes of memory; None: those of the template.
    cpus_per_node: int | None = None
    memory_per_node: int | None = None
    #: Cores for each GPU, if it is known.
    cpus_per_gpu: int | None = None
    #: Whether other jobs may use the rest of the nodes; `cpus_per_node` is then set.
    shared: bool = False
    #: Texts for the options in `ScriptFormat.words`; without one, the user's or the site's default applies.
    words: Mapping[str, str] = field(default_factory=dict)
    #: One of the system's; None: its first.
    launcher: str | None = None
    #: Modules to load.
    modules: tuple[str, ...] = ()
    #: Options of the batch system. One replaces generated lines of the same meaning; with an empty value it only removes them.
    directives: tuple[str, ...] = ()
    #: File to source.
    setup: str | None = None

    @property
    def walltime(self) -> str:
        """``HH:MM:SS``."""
        return f"{self.seconds // 3600:02}:{self.seconds // 60 % 60:02}:{self.seconds % 60:02}"

    @property
    def mebibytes(self) -> int | None:
        """`memory_per_node` in a unit that all batch systems accept."""
        return None if self.memory_per_node is None else -(-self.memory_per_node // 2**20)


class ScriptFormat:
    """The differences between the job scripts of batch systems. A subclass overrides what applies to it."""

    #: The beginning of a line with an option of the batch system (a directive).
    prefix = ""
    #: The file in ``jobscripts/`` by launcher; the first launcher is the default.
    templates: Mapping[str, str] = {}
    #: Those of the launchers above that `launch` would choose anyway.
    default_launchers: tuple[str, ...] = ()
    #: The command that reads a script from its standard input.
    submit: tuple[str, ...] = ()
    #: A regular expression of its output, with the job's number as its group.
    job_id = ""
    #: Its formats of a walltime apart from HH:MM:SS. D, H, M and S are numbers.
    times: tuple[str, ...] = ()
    #: By an option of `jobscript`, the beginning of its own option with the same text.
    words: Mapping[str, str] = {}
    #: By a short option of its own with another meaning in `jobscript`, the name there.
    short: Mapping[str, str] = {}
    #: Names of options that exclude each other, or mean the same (`option_name`).
    alike: tuple[frozenset[str], ...] = ()
    #: Whether the environment of a job has the number of ranks on a node.
    tells_ranks = True
    #: Whether the environment of each job on GPUs has their number, even if the user changes it at submission.
    tells_gpus = False
    #: Whether its options may begin with two dashes.
    has_long_options = True
    #: Whether a job may name a type of GPU.
    has_types = False
    #: Whether a job that has whole nodes requests a number of cores.
    counts_cores = False
    #: Whether a job may request GPUs without a number of nodes.
    chooses_nodes = False

    def directives(self, job: JobRequest) -> dict[str, str | None]:
        """The values of a request, by the beginning of the option; None removes the line."""
        return {}

    def seconds(self, text: str) -> int | None:
        """The walltime in one of its formats; None: it is in another format, or zero."""
        for form in ("H:M:S", *self.times):
            # a number after a larger unit has at most two digits, and is too small for that unit
            pattern = re.sub("[DHMS]", lambda unit: rf"(?P<{unit[0]}>[0-9]+)", form)
            if (found := re.fullmatch(pattern, text)) is None:
                continue
            parts = {unit: int(number[:12]) for unit, number in found.groupdict().items()}
            if all(parts[unit] < _UNITS[unit][1] and len(found[unit]) <= 2 for unit in [*parts][1:]):
                return sum(_UNITS[unit][0] * number for unit, number in parts.items()) or None
        return None

    def option_name(self, directive: str) -> str:
        """The name of an option in a directive; with PBS's ``-l`` and ``-W`` also the name after it.

        >>> [ScriptFormat().option_name(each) for each in ("--mem=0", "--requeue", "-lselect=2:ncpus=8", "-q gpu")]
        ['--mem', '--requeue', '-l select', '-q']
        """
        if found := re.match(r"(-[lW])\s*(\w+)", directive):
            return f"{found[1]} {found[2]}"
        return directive.replace("=", " ", 1).split()[0] if directive.strip() else directive

    def replaced(self, directive: str) -> frozenset[str]:
        """The names of the generated options that a user's directive replaces."""
        name = self.option_name(directive)
        return frozenset({name}).union(*(names for names in self.alike if name in names))


def format_of(system: str) -> ScriptFormat:
    """The format of a batch system, by its name in `SCRIPTED`."""
    found: ScriptFormat = importlib.import_module(f"{__package__}.{system}").FORMAT
    return found


def template(name: str) -> str:
    """The text of a template, by its file name."""
    return Path(__file__).parents[1].joinpath("jobscripts", name).read_text(encoding="utf-8")


def render(job: JobRequest) -> str:
    """The script of a request; InputError if the batch system has no such launcher or option."""
    form = format_of(job.system)
    launcher = job.launcher or next(iter(form.templates))
    _check(job, form, launcher)
    job = replace(job, directives=tuple(_filled(text, job) for text in job.directives))
    lines = template(form.templates[launcher]).splitlines()
    _set_directives(lines, form, job)
    _set_users_directives(lines, form, job.directives)
    program = _first(lines, "program=")
    lines[program : program + 1] = [*_settings(job, form, launcher), f"program=({_words(job.program)})"]
    if job.modules:
        # below the examples of a user's environment
        setup = _first(lines, "setup=")
        lines[setup:setup] = [
            "type -t module > /dev/null || source /etc/profile",
            f"module load {_words(job.modules)} || exit 2",
        ]
    each = f"{counted(job.gpus_per_node, 'GPU')} and {counted(job.ranks_per_node, 'rank')}"
    shape = f"{counted(job.gpus, 'GPU')}" if job.gpus else f"{counted(job.nodes, 'node')}, {each} on each"
    # not the template's own head, with the command to submit it, nor its examples of directives
    lines[1 : _first(lines, "# shellcheck")] = [f"# {shape}. Made by dask-gpu-mpi jobscript."]
    return "\n".join(line for line in lines if not line.startswith(f"#{form.prefix}")) + "\n"


def submit(job: JobRequest, text: str) -> str:
    """Submit a script and return the job's number; InputError if there is no such batch system here, or if it fails."""
    form = format_of(job.system)
    done = run_command(form.submit, timeout=SUBMIT_TIMEOUT, text=text, cwd=".")
    answer, complaint = " ".join(done.stdout.split()), " ".join(done.stderr.split())
    found = re.search(form.job_id, answer)
    fix = f"run this on a login node of {batch_system(job.system).title}"
    if done.returncode == CANNOT_RUN and complaint.endswith(NOT_FOUND):
        raise InputError(f"submit: {complaint}", fix=fix)
    if done.returncode or found is None:
        if done.returncode:
            fix = f"correct what it names, such as the account, the partition or the number of GPUs, or {fix}"
        raise InputError(
            f"submit: {' '.join(form.submit)} exited with code {done.returncode}: {complaint or answer or 'no output'}",
            expected="" if done.returncode else "the job's number",
            fix=f"{fix}; check whether the job is in the queue before you submit again",
        )
    return found[1]


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


# The steps of `render`.


def _check(job: JobRequest, form: ScriptFormat, launcher: str) -> None:
    """Refuse what the batch system does not have, and options that contradict each other."""
    title = batch_system(job.system).title
    if launcher not in form.templates:
        raise InputError(
            f"--launcher {launcher}: not available under {title}",
            expected=f"one of {', '.join(form.templates)}",
        )
    if missing := sorted(job.words.keys() - form.words.keys()):
        raise InputError(
            f"--{missing[0].replace('_', '-')}: {title} has no such option",
            expected=f"one of {', '.join(form.words)}",
            fix=f"leave it out, or --directive with an option of {form.submit[0]}",
        )
    if job.cpus_per_node and not job.shared and not form.counts_cores:
        raise InputError(
            f"--cpus-per-node {job.cpus_per_node}: {title} gives whole nodes with all their cores",
            expected="with --shared",
            fix="leave it out",
        )
    if wrong := [each for each in job.directives if each.startswith("--") and not form.has_long_options]:
        raise InputError(
            f"--directive: {wrong[0]!r} is not an option of {title}",
            expected=f"one of {form.submit[0]}, such as '-q x'",
        )
    asked = {"--mem=": job.memory_per_node, "--ntasks-per-node=": job.ranks_per_node > 1}
    if lost := [each for each in job.directives if asked.get(each)]:
        option = "--memory-per-node" if lost[0] == "--mem=" else "--ranks-per-node"
        raise InputError(
            f"{option}: {lost[0]} among the directives takes it out", fix="leave one of them out"
        )
    if job.gpu_type and not form.has_types and "{gpu-type}" not in "".join(job.directives):
        raise InputError(
            f"--gpus-per-node {job.gpu_type}:{job.gpus_per_node}: {title} has no type there",
            expected="a number",
            fix="--directive in the site's words, such as '-l select={nodes}:ngpus={gpus}:gpu_type={gpu-type}' of PBS",
        )
    if job.gpus and not form.chooses_nodes:
        raise InputError(f"--gpus: {title} has no such request", fix="--nodes and --gpus-per-node")


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


def _set_directives(lines: list[str], form: ScriptFormat, job: JobRequest) -> None:
    """Set the directives of the request among the lines of a template."""
    words = {form.words[name]: text for name, text in job.words.items()}
    for beginning, value in (form.directives(job) | words).items():
        new = [] if value is None else [f"{form.prefix}{beginning}{value}"]
        # the template's own directive, or its example (one more ``#``); else a new one after the last
        places = (form.prefix + beginning, f"#{form.prefix}{beginning}")
        found = [place for place, line in enumerate(lines) if line.startswith(places)]
        if found:
            lines[found[0] : found[0] + 1] = new
        else:
            end = _end_of_directives(lines, form)
            lines[end:end] = new


def _set_users_directives(lines: list[str], form: ScriptFormat, directives: tuple[str, ...]) -> None:
    """Add the directives of ``--directive``, in place of those with their meaning."""
    replaced = frozenset[str]().union(*map(form.replaced, directives))
    end = _end_of_directives(lines, form)
    kept = [
        line
        for line in lines[:end]
        if not line.startswith(form.prefix)
        or form.option_name(line.removeprefix(form.prefix)) not in replaced
    ]
    # `--mem=`, without a value, only takes the template's out
    lines[:end] = [*kept, *(form.prefix + each for each in directives if not each.endswith("="))]


def _settings(job: JobRequest, form: ScriptFormat, launcher: str) -> list[str]:
    """The lines that set the variables of this job, which the template and `launch` read."""
    settings: dict[str, str] = {}
    if job.setup is not None:
        settings["SETUP"] = job.setup
    told = form.tells_gpus and "--gpus-per-node=" not in job.directives
    if not job.gpus_per_node or not (job.gpus or told):
        settings["EXPECT_GPUS"] = str(job.gpus_per_node)
    if job.launcher and launcher not in form.default_launchers:
        settings["LAUNCHER"] = launcher
    if not form.tells_ranks:
        settings["RANKS_PER_NODE"] = str(job.ranks_per_node)
    return [f"export DGM_{name}={quote(text)}" for name, text in settings.items()]


def _words(words: tuple[str, ...]) -> str:
    return " ".join(map(quote, words))


def _first(lines: list[str], beginning: str) -> int:
    """The index of the first line with this beginning."""
    return next(place for place, line in enumerate(lines) if line.startswith(beginning))


def _end_of_directives(lines: list[str], form: ScriptFormat) -> int:
    """The index after the last directive."""
    return max(place for place, line in enumerate(lines) if line.startswith(form.prefix)) + 1
