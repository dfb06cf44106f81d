"""Job scripts, from Python and by the command ``jobscript``: the request of a job, from the user and Dask's configuration."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.cli.launch import launch
from dask_gpu_mpi.cli.options import (
    HelpCommand,
    click_options,
    complete_files,
    fail,
    is_given,
    read_texts,
    write_file,
)
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, OptionError, Problem
from dask_gpu_mpi.options.convert import convert, import_config, show, suggest
from dask_gpu_mpi.options.model import OPTIONS, Option, Source
from dask_gpu_mpi.sites.batch import BatchSystem, JobRequest, batch_system
from dask_gpu_mpi.sites.jobscript import SCRIPTED, quote, render
from dask_gpu_mpi.sites.jobscript import submit as submit_script

# Directives can't be quoted: these texts must be safe as they are.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*"
_NAMED = "letters, digits and _ . , @ + - (it can't be quoted in a directive)"
_EXPRESSION = r"[A-Za-z0-9_.,@+:&|*()\[\]^-]+"
#: Ranks, or GPUs, of the largest job that is planned. No machine has more, and the plan takes seconds.
_LARGEST = 100_000

_NO_SCRIPT = "command line: the script is missing (expected -- SCRIPT ARGS...)"
#: Endings of job scripts, which a log does not have.
_SCRIPTS = (".sbatch", ".slurm", ".pbs", ".bsub", ".sh", ".bash", ".job")

# fmt: off
#: The options of a job script by name; their keys are those below ``gpu-mpi.jobscript`` in Dask's configuration.
JOB_OPTIONS: Mapping[str, Option] = {option.name: option for option in (
    Option("int", "nodes", None, "Nodes.", ("--nodes", "-N"), minimum=1),
    Option("str", "gpus_per_node", None, "GPUs of each node: 4, or a100:4 (Slurm).", ("--gpus-per-node",),
           pattern=r"([A-Za-z_][A-Za-z0-9_.-]*:)?[0-9]{1,6}", expected="a number, or TYPE:NUMBER"),
    Option("int", "ranks_per_node", None, "Ranks on each node; one is enough. Default: 1.",
           ("--ranks-per-node",), minimum=1),
    Option("int", "cpus_per_node", None, "Cores of each node; required by PBS and --shared.", ("--cpus-per-node",),
           minimum=1),
    Option("str", "memory_per_node", None, "Memory of each node, such as 64G. Default: all; with --shared the site's default.",
           ("--memory-per-node", "--mem"), pattern=r"(?i:[1-9][0-9]{0,11} ?[KMGT]i?B?)", expected="a size such as 64G"),
    Option("bool", "shared", None, "Share the nodes with other jobs, or have whole nodes. Default: whole nodes.",
           ("--shared/--exclusive",)),
    Option("str", "time", None, "Walltime, HH:MM:SS or as the batch system has it: 60, 1-12:00:00 (Slurm).", ("--time", "-t")),
    Option("str", "account", None, "Account, project or bank to charge.", ("--account", "-A"), pattern=_NAME, expected=_NAMED),
    Option("str", "queue", None, "Queue or partition.", ("--queue", "--partition", "-q", "-p"), pattern=_NAME, expected=_NAMED),
    Option("str", "qos", None, "Quality of service (Slurm; there also -q).", ("--qos",), pattern=_NAME, expected=_NAMED),
    Option("str", "constraint", None, "Features of the nodes (Slurm, Flux).", ("--constraint", "-C"), pattern=_EXPRESSION,
           expected="names of features, with & or | between them (it can't be quoted in a directive)"),
    Option("str", "mail_user", None, "Address for mail of the batch system.", ("--mail-user",), pattern=_NAME, expected=_NAMED),
    Option("str", "output", None, "Log file of the job, as the batch system writes it: %x-%j.log (Slurm).", ("--output", "-o"),
           pattern=r"[A-Za-z0-9_.,@+%{}^/:=-]+", expected="a path of letters, digits and _ . , @ + - % { } ^ / : ="),
    Option("choice", "launcher", None, "Command that starts the ranks. Default: srun, mpirun (PBS, LSF), flux.",
           ("--launcher",), choices=("srun", "mpirun", "mpiexec", "pals", "flux")),
    Option("path", "setup", None, "File to source first, for modules, a venv or conda.", ("--setup",)),
)}
#: Options that can be given several times.
_LISTS: Mapping[str, Option] = {option.name: option for option in (
    Option("str", "modules", None, "Module to load.", ("--module",)),
    Option("str", "directives", None, "Option of the batch system, such as '--reservation=x'. It replaces a generated one of the "
           "same meaning; '--mem=' takes one out.", ("--directive",),
           pattern=r"-[ -~]+", expected="an option of the batch system as it stands in a script, such as '--reservation=x'"),
)}
# fmt: on
#: Options whose texts go into directives as they are (`BatchSystem.words`).
_WORDS = ("account", "queue", "qos", "constraint", "mail_user", "output")


def job_script(system: str, program: str | os.PathLike[str] | Sequence[str], **options: Any) -> str:
    """Write a job script for a batch system, as ``dask-gpu-mpi jobscript`` does.

    Parameters
    ----------
    system : {"slurm", "pbs", "lsf", "flux"}
        The batch system.
    program : str, path or sequence of str
        The script; or a command line of ``dask-gpu-mpi launch``: options, the script and its arguments.
    **options
        The job's request. `nodes`, `gpus_per_node` and `time` are required, unless section ``gpu-mpi.jobscript`` of Dask's
        configuration has them. All other options of ``dask-gpu-mpi jobscript --help-all`` are possible, such as `account`,
        `queue`, `qos`, `shared`, `setup`, and lists of `modules` and `directives`.

    Returns
    -------
    str
        The text of the script.

    Raises
    ------
    InputError
        An option is missing, unknown or wrong. Or the script does not exist, or GPUs of the job would have no worker.

    Examples
    --------
    >>> text = job_script("slurm", ["-c", "print(1)"], nodes=2, gpus_per_node=4, time="1-12", account="abc")
    >>> [line for line in text.splitlines() if "--time" in line or "--account" in line]
    ['#SBATCH --time=36:00:00', '#SBATCH --account=abc']
    """
    return render(request(system, _words(program), options, "keyword"))


def submit(system: str, program: str | os.PathLike[str] | Sequence[str], **options: Any) -> str:
    """Submit a job to a batch system.

    Parameters
    ----------
    system, program, **options
        Those of `job_script`.

    Returns
    -------
    str
        The job's id, for commands of the batch system such as ``squeue -j``.

    Raises
    ------
    InputError
        As `job_script` does. Or the batch system is not installed here, or it refuses the job.

    Examples
    --------
    >>> submit("slurm", ["train.py", "--epochs", "3"], nodes=2, gpus_per_node=4, time="1:00:00")  # doctest: +SKIP
    '4711'
    """
    job = request(system, _words(program), options, "keyword")
    return submit_script(job, render(job))


def _words(program: str | os.PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    return (os.fspath(program),) if isinstance(program, (str, os.PathLike)) else tuple(program)


class _Jobscript(HelpCommand):
    """A command with the short options of each batch system."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as Click does."""
        system = batch_system(args[0]) if args and args[0] in SCRIPTED else BatchSystem()
        end = args.index("--") if "--" in args else len(args)
        args = [*(system.short.get(word, word) for word in args[:end]), *args[end:]]
        return super().parse_args(ctx, args)


@click.command(
    cls=_Jobscript,
    params=[*click_options(JOB_OPTIONS.values()), *click_options(_LISTS.values(), multiple=True)],
    short=("nodes", "gpus_per_node", "time", "account", "queue", "setup", "save", "submits"),
    examples=(
        "dask-gpu-mpi jobscript slurm -N 2 --gpus-per-node 4 -t 01:00:00 -- analysis.py",
        "dask-gpu-mpi jobscript pbs -N 2 --gpus-per-node 4 --submit -- analysis.py",
    ),
)
@click.argument(
    "system",
    metavar="|".join(SCRIPTED),
    shell_complete=lambda _, __, begun: [name for name in SCRIPTED if name.startswith(begun)],
)
@click.option(
    "--save",
    metavar="FILE",
    shell_complete=complete_files,
    help="Write the script there instead of printing it.",
)
@click.option("--submit", "submits", is_flag=True, help="Submit it, and print the job's number.")
@click.argument(
    "program", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...", shell_complete=complete_files
)
def jobscript(system: str, program: tuple[str, ...], save: str | None, submits: bool, **given: Any) -> None:
    """Print a job script for a batch system, or submit it.

    Options of `launch` come between -- and SCRIPT. Options that are not given come from the section gpu-mpi.jobscript of Dask's
    configuration.
    """
    try:
        job = request(system, program, given)
        text = render(job)
        if save is not None:
            if os.path.isfile(save):
                raise InputError(
                    f"command line: --save {save!r} exists", fix="remove it, or choose another name"
                )
            write_file("--save", save, os.fsencode(text))
            if not submits:
                command = " ".join(word for word in batch_system(system).submit if not word.startswith("-"))
                say(f"{save} is written. Submit it: {command} < {quote(save)}")
        elif not submits:
            sys.stdout.buffer.write(os.fsencode(text))
            sys.stdout.flush()
        if submits:
            print(submit_script(job, text))
    except DaskGpuMpiError as error:
        fail(error)


def request(
    system: str, program: Sequence[str], given: Mapping[str, Any], source: Source = "command line"
) -> JobRequest:
    """The request of a job, from the user's values by option name and the configuration; InputError if it can't be planned."""
    if system not in SCRIPTED:
        raise OptionError(
            f"{source}: unknown batch system {show(system)}",
            expected=f"one of {', '.join(SCRIPTED)}",
            fix="name it before all options, as in jobscript slurm --nodes 2 -- SCRIPT",
        )
    sites, users = _converted(_configured(), "configuration"), _converted(given, source)
    values = sites | users
    if directives := sites.get("directives", ()) + users.get("directives", ()):
        values["directives"] = directives  # all other options of the user replace those of the site
    batch = batch_system(system)
    for name in ("nodes", "gpus_per_node", "time"):
        if name not in values:
            expected = {
                "time": "a walltime such as 01:30:00",
                "gpus_per_node": "a number, 0 for CPU workers alone",
            }
            raise OptionError(f"{_origin(name, source)} is missing", expected=expected.get(name, "a number"))
    seconds = batch.seconds(text := values.pop("time"))
    if seconds is None:
        spelled = ", ".join(("HH:MM:SS", *batch.times))
        raise OptionError(
            f"{_origin('time', source)}: invalid value {show(text)}",
            expected=f"a walltime of {batch.title} above zero: {spelled}",
        )
    values["gpu_type"], _, number = values["gpus_per_node"].rpartition(":")
    values["gpus_per_node"] = int(number)
    for name in ("ranks_per_node", "gpus_per_node"):
        each = values.get(name, 1)
        if values["nodes"] * each > _LARGEST or values["nodes"] > _LARGEST:
            raise OptionError(
                f"{source}: --nodes {values['nodes']} {JOB_OPTIONS[name].flags[0]} {each}: too many",
                expected=f"at most {_LARGEST} in the whole job",
            )
    if memory := values.pop("memory_per_node", None):
        values["memory_per_node"] = _bytes(memory)
    if values.get("shared") and "cpus_per_node" not in values:
        raise OptionError(
            f"{_origin('shared', source)}: the cores of the job are missing", fix="add --cpus-per-node"
        )
    if (setup := values.get("setup")) and not os.path.isfile(setup):
        raise OptionError(
            f"{_origin('setup', source if 'setup' in users else 'configuration')} {show(setup)} does not exist",
            expected="a file that the job can source",
        )
    words = {name: values.pop(name) for name in _WORDS if name in values}
    if (log := words.get("output", "")).endswith(_SCRIPTS):
        raise OptionError(
            f"{_origin('output', source)}: {log} is the name of a script",
            expected="the log of the job, such as job.log",
            fix=f"--save {log} writes the job script there",
        )
    job = JobRequest(system=system, program=tuple(program), seconds=seconds, words=words, **values)
    _check_program(job)
    return job


def _converted(given: Mapping[Any, Any], source: Source) -> dict[str, Any]:
    """The values of options by name, without those that are None or an empty list."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_").lower()
        option, origin = JOB_OPTIONS.get(name) or _LISTS.get(name), _origin(key, source)
        if option is None:
            raise OptionError(f"{origin}: unknown option{suggest(name, [*JOB_OPTIONS, *_LISTS])}")
        if name in _LISTS:
            texts = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
            if texts:
                values[name] = tuple(convert(option, text, origin, source) for text in texts)
        elif source == "configuration" and name == "time" and isinstance(value, (int, float)):
            raise OptionError(
                f"{origin}: invalid value {show(value)}",
                expected="a text: YAML reads 1:30:00 as the number 5400",
                fix="put it in quotes",
            )
        elif value is not None:
            if name == "gpus_per_node" and type(value) is int:
                value = str(value)
            values[name] = convert(option, value, origin, source)
    return values


def _origin(name: str, source: Source) -> str:
    """The name of an option in messages."""
    if source == "keyword":
        return f"keyword {name}"
    if source == "configuration":
        return f"configuration gpu-mpi.jobscript.{name}"
    return f"command line: {(JOB_OPTIONS.get(name) or _LISTS[name]).flags[0].partition('/')[0]}"


def _bytes(text: str) -> int:
    """Bytes of a size as batch systems write it: ``64G`` are 64 GiB."""
    number, unit = re.findall(r"[0-9]+|[A-Za-z]", text)[:2]
    return int(number) << 10 * (1 + "KMGT".index(unit.upper()))


def _configured() -> Mapping[Any, Any]:
    """The section gpu-mpi.jobscript of Dask's configuration, from YAML files and environment."""
    from dask_gpu_mpi.options.resolve import register_defaults

    config = import_config()
    register_defaults()
    section = config.get("gpu-mpi.jobscript", None) or {}
    if not isinstance(section, Mapping):
        raise OptionError(
            f"configuration gpu-mpi.jobscript: invalid value {show(section)}", expected="names and values"
        )
    return section


def _check_program(job: JobRequest) -> None:
    """Find the script and plan the job, to refuse now a job that would fail, or leave GPUs without a worker, hours later."""
    from dask_gpu_mpi.job.program import Program
    from dask_gpu_mpi.machine.inventory import NODE_MEMORY, hypothetical_job
    from dask_gpu_mpi.plan.planner import make_plan

    try:
        with launch.make_context("launch", list(job.program)) as context:
            given = dict(context.params)
            shape = [name for name in ("ranks", "ranks_per_node", "hosts") if is_given(name, context)]
    except click.ClickException as error:
        raise InputError(f"command line: {error.format_message()} (before the script)") from None
    except click.exceptions.Exit:
        raise InputError(_NO_SCRIPT) from None
    if shape:
        raise InputError(
            f"command line: --{shape[0].replace('_', '-')} of launch: the job script has it",
            fix="--nodes and --ranks-per-node before the --",
        )
    program = given.pop("program")
    if not program and given["scheduler_file"] is None:
        raise InputError(_NO_SCRIPT)
    if program and not given["container"]:
        Program.of(program).check()
    options = read_texts({name: given[name] for name in OPTIONS if name in given})
    inventories = hypothetical_job(
        job.nodes,
        job.ranks_per_node,
        job.gpus_per_node,
        cpus_per_node=job.cpus_per_node or 64,
        memory_per_node=job.memory_per_node or NODE_MEMORY,
    )
    plan = make_plan(inventories, options)
    gpus, busy = job.nodes * job.gpus_per_node, sum(worker.kind == "gpu" for worker in plan.workers)
    if busy < gpus and options.worker_kind != "cpu":
        why = plan.warnings[0] if plan.warnings else Problem("see dask-gpu-mpi plan")
        raise InputError(
            f"{gpus - busy} of {gpus} GPUs would have no worker, with {counted(job.ranks_per_node, 'rank')} on each of "
            f"{counted(job.nodes, 'node')}: {why.text}",
            fix=why.fix,
        )
    for warning in plan.warnings:
        say(str(warning))
