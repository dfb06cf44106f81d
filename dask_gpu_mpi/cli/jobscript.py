"""The command ``jobscript``: what a job script is to request, from the command line and Dask's configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dask_gpu_mpi.base.files import write
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.cli.options import (
    HelpCommand,
    click_option,
    complete_files,
    fail,
    help_of,
    parse_run,
    resolve_texts,
    usable,
)
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, OptionError, Problem
from dask_gpu_mpi.options.convert import convert, show, suggest
from dask_gpu_mpi.options.dask_config import import_config
from dask_gpu_mpi.options.model import Option
from dask_gpu_mpi.sites.batch import JobRequest, batch_system
from dask_gpu_mpi.sites.jobscript import SCRIPTED, render, submit

__all__ = ["JOB_OPTIONS", "jobscript", "request"]

# Directives can't be quoted: these texts must be safe as they are.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*"
_NAMED = "letters, digits and _ . , @ + - (it can't be quoted in a directive)"
#: Ranks, or GPUs, of the largest job that is planned: more than any machine has, and planned in seconds.
_LARGEST = 100_000
#: Seconds that a walltime of four digits of hours can't have.
_LONGEST = 10_000 * 3600
_WALLTIME = r"(?!0+:00:00)\d{1,4}:[0-5]\d:[0-5]\d"

_NO_SCRIPT = "command line: the script is missing (expected -- SCRIPT ARGS...)"

# fmt: off
#: The options of a job script by name; their keys are those below ``gpu-mpi.jobscript`` in Dask's configuration.
JOB_OPTIONS: Mapping[str, Option] = {option.name: option for option in (
    Option("int", "nodes", None, "Nodes.", ("--nodes", "-N"), minimum=1),
    Option("int", "gpus_per_node", None, "GPUs of each node.", ("--gpus-per-node",), minimum=0),
    Option("int", "ranks_per_node", None, "MPI ranks on each node; one is enough. Default: 1.",
           ("--ranks-per-node",), minimum=1),
    Option("int", "cpus_per_node", None, "Cores of each node; PBS has to know them.", ("--cpus-per-node",), minimum=1),
    Option("str", "time", None, "Walltime.", ("--time", "-t"), pattern=_WALLTIME,
           expected="HH:MM:SS above zero, such as 01:30:00"),
    Option("str", "account", None, "Account, project or bank to charge.", ("--account", "-A"), pattern=_NAME, expected=_NAMED),
    Option("str", "queue", None, "Queue or partition.", ("--queue", "--partition", "-q", "-p"), pattern=_NAME, expected=_NAMED),
    Option("choice", "launcher", None, "Command that starts the ranks. Default: srun, mpirun (PBS), flux; jsrun or mpirun (LSF).",
           ("--launcher",), choices=("srun", "mpirun", "mpiexec", "pals", "jsrun", "flux")),
    Option("str", "mpi", None, "srun --mpi=... or flux run -o pmi=... Default: what the MPI library of mpi4py needs.",
           ("--mpi",), pattern=r"[A-Za-z0-9_]+", expected="a name such as pmix or pmi2"),
    Option("path", "setup", None, "File to source first, for modules, a venv or conda.", ("--setup",)),
    Option("path", "container", None, "Apptainer image to run in.", ("--container",)),
    Option("path", "scratch", None, "Node-local directory, a short path. Default: each node's TMPDIR or /tmp.", ("--scratch",)),
)}
#: Options that can be given several times.
_LISTS: Mapping[str, Option] = {option.name: option for option in (
    Option("str", "modules", None, "Module to load.", ("--module",)),
    Option("str", "directives", None, "Further option of the batch system, such as '--constraint=gpu'.", ("--directive",),
           pattern=r"-[ -~]+", expected="an option of the batch system as it stands in a script, such as '--constraint=gpu'"),
)}
# fmt: on


def _clicks(function: Any) -> Any:
    for table in (_LISTS, JOB_OPTIONS):
        for option in reversed(list(table.values())):
            function = click_option(option, multiple=table is _LISTS)(function)
    return function


def _complete_systems(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    return [name for name in SCRIPTED if name.startswith(begun)]


@help_of(
    short=("nodes", "gpus_per_node", "time", "account", "queue", "setup", "output", "submits"),
    examples=(
        "dask-gpu-mpi jobscript slurm -N 2 --gpus-per-node 4 -t 01:00:00 -- analysis.py",
        "dask-gpu-mpi jobscript pbs -N 2 --gpus-per-node 4 --submit -- analysis.py",
    ),
)
@click.command(cls=HelpCommand)
@click.argument("system", metavar="|".join(SCRIPTED), shell_complete=_complete_systems)
@_clicks
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=complete_files,
    help="Write the script there instead of printing it.",
)
@click.option("--submit", "submits", is_flag=True, help="Submit it, and print the job's number.")
@click.argument(
    "program", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...", shell_complete=complete_files
)
def jobscript(system: str, program: tuple[str, ...], output: str | None, submits: bool, **given: Any) -> None:
    """Print a job script for a batch system, or submit it.

    Options that are not given come from the section gpu-mpi.jobscript of Dask's configuration.
    """
    try:
        job = request(system, program, given)
        text = render(job)
        if output is not None:
            try:
                write(output, os.fsencode(text))
            except OSError as error:
                raise InputError(f"--output {output!r} can't be written: {error.strerror}") from None
        elif not submits:
            sys.stdout.buffer.write(os.fsencode(text))
            sys.stdout.flush()
        if submits:
            print(submit(job, text))
    except DaskGpuMpiError as error:
        fail(error)


def request(system: str, program: Sequence[str], given: Mapping[str, Any]) -> JobRequest:
    """Merge command line and configuration, and check that the job can be planned.

    Parameters
    ----------
    system : str
        A name in `SCRIPTED`.
    program : sequence of str
        The script and its arguments, after options of ``dask-gpu-mpi run`` if there are any.
    given : mapping
        Texts of the command line by option name; None or empty: not set.

    Raises
    ------
    OptionError
        An option is missing, unknown or of the wrong form.
    InputError
        GPUs of the job would have no worker, or the program's options can't be used.
    """
    if system not in SCRIPTED:
        raise OptionError(
            f"command line: unknown batch system {show(system)}", expected=f"one of {', '.join(SCRIPTED)}"
        )
    values: dict[str, Any] = _configured()
    for name, value in given.items():
        option = JOB_OPTIONS.get(name) or _LISTS[name]
        origin = f"command line: {option.flags[0]}"
        if name in _LISTS:
            # the user's directives come after those of the site, the user's modules instead of them
            added = tuple(convert(option, text, origin, "command line") for text in value or ())
            values[name] = (
                values.get(name, ()) + added if name == "directives" else added or values.get(name, ())
            )
        elif value is not None:
            values[name] = convert(option, value, origin, "command line")
    for name in ("nodes", "gpus_per_node", "time"):
        if values.get(name) is None:
            option = JOB_OPTIONS[name]
            raise OptionError(
                f"command line: {option.flags[0]} is missing", expected=option.expected or "a number"
            )
    hours, minutes, seconds = map(int, values.pop("time").split(":"))
    values["ranks_per_node"] = values.get("ranks_per_node") or 1
    for name in ("ranks_per_node", "gpus_per_node"):
        if values["nodes"] * values[name] > _LARGEST or values["nodes"] > _LARGEST:
            raise OptionError(
                f"command line: --nodes {values['nodes']} {JOB_OPTIONS[name].flags[0]} {values[name]}: too many",
                expected=f"at most {_LARGEST} in the whole job",
            )
    job = JobRequest(
        system=system, program=tuple(program), seconds=3600 * hours + 60 * minutes + seconds, **values
    )
    if remark := batch_system(system).remark(job):
        say(remark)
    _check_workers(job)
    return job


def _configured() -> dict[str, Any]:
    """The section gpu-mpi.jobscript of Dask's configuration, from YAML files and environment."""
    from dask_gpu_mpi.options.resolve import register_defaults

    config = import_config()
    register_defaults()
    section = config.get("gpu-mpi.jobscript", None) or {}
    if not isinstance(section, Mapping):
        raise OptionError(
            f"configuration gpu-mpi.jobscript: invalid value {show(section)}", expected="names and values"
        )
    values: dict[str, Any] = {}
    for key, value in section.items():
        origin, name = f"configuration gpu-mpi.jobscript.{key}", str(key).replace("-", "_").lower()
        if name in _LISTS:
            texts = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
            values[name] = tuple(convert(_LISTS[name], text, origin, "configuration") for text in texts)
        elif name in JOB_OPTIONS:
            if name == "time" and type(value) is int and 0 <= value < _LONGEST:
                # YAML 1.1 reads 01:30:00 as a number of base 60
                value = f"{value // 3600:02}:{value // 60 % 60:02}:{value % 60:02}"
            values[name] = convert(JOB_OPTIONS[name], value, origin, "configuration")
        else:
            raise OptionError(f"{origin}: unknown option{suggest(name, [*JOB_OPTIONS, *_LISTS])}")
    return values


def _check_workers(job: JobRequest) -> None:
    """Plan the job as its ranks will, to refuse now what would fail, or leave GPUs unused, hours later."""
    from dask_gpu_mpi.plan.planner import make_plan
    from dask_gpu_mpi.plan.synthetic import hypothetical_job

    try:
        given = parse_run(job.program)
    except click.ClickException as error:
        raise InputError(f"command line: {error.format_message()} (before the script)") from None
    except click.exceptions.Exit:
        raise InputError(_NO_SCRIPT) from None
    program = given.pop("program")
    if not program and given["scheduler_file"] is None:
        raise InputError(_NO_SCRIPT)
    options = usable(resolve_texts(given))
    inventories = hypothetical_job(job.nodes, job.ranks_per_node, job.gpus_per_node)
    plan = make_plan(inventories, options, device_options={})  # how much memory its GPUs have is not known
    gpus, busy = job.nodes * job.gpus_per_node, sum(worker.kind == "gpu" for worker in plan.workers)
    if busy < gpus and options.worker_kind != "cpu":
        why = plan.warnings[0] if plan.warnings else Problem("see dask-gpu-mpi plan")
        raise InputError(
            f"{gpus - busy} of {gpus} GPUs would have no worker, with {job.ranks_per_node} ranks on each of {job.nodes} nodes: "
            f"{why.text}",
            fix=why.fix,
        )
    for warning in plan.warnings:
        say(str(warning))
