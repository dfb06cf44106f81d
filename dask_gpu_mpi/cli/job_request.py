"""The request of a job script: what `jobscript` and the Python API make of the user's options, the configuration and a site.

A site is a YAML file with the options that a computing centre wants. It is the lowest layer, Dask's configuration comes next, and
the user's options win. The result is checked now, as far as it can be: the job may wait for hours before it would fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted, one_line
from dask_gpu_mpi.cli.launch import launch
from dask_gpu_mpi.cli.options import is_given, read_texts
from dask_gpu_mpi.errors import InputError, OptionError, Problem
from dask_gpu_mpi.options.convert import convert, import_config, nearest, show, suggest
from dask_gpu_mpi.options.model import OPTIONS, Option, Options, Source
from dask_gpu_mpi.options.resolve import register_defaults, settings_of
from dask_gpu_mpi.sites.batch import batch_system
from dask_gpu_mpi.sites.jobscript import SCRIPTED, JobRequest, ScriptFormat, format_of

# Directives can't be quoted: these texts must be safe as they are.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*"
_NAMED = "letters, digits and _ . , @ + - (it can't be quoted in a directive)"
_GPUS = r"([A-Za-z_][A-Za-z0-9_.-]*:)?[0-9]{1,6}"
_EXPRESSION = r"[A-Za-z0-9_.,@+:&|*()\[\]^-]+"
#: Ranks, or GPUs, of the largest job that is planned. No machine has more, and the plan takes seconds.
_LARGEST = 100_000

# fmt: off
#: The options of a job script by name; their keys are those below ``gpu-mpi.jobscript`` in Dask's configuration.
JOB_OPTIONS: Mapping[str, Option] = {option.name: option for option in (
    Option("str", "site", None, "Defaults for a computing centre, by name or from a YAML file; without a value, list the names.",
           ("--site",)),
    Option("int", "nodes", None, "Nodes.", ("--nodes", "-N"), minimum=1),
    Option("str", "gpus_per_node", None, "GPUs of each node: 4, or a100:4 (Slurm).", ("--gpus-per-node",), pattern=_GPUS,
           expected="a number, or TYPE:NUMBER"),
    Option("int", "gpus", None, "GPUs of the whole job, on nodes of the batch system's choice, instead of --nodes and "
           "--gpus-per-node (Slurm, PBS).", ("--gpus",), minimum=1, maximum=_LARGEST),
    Option("int", "ranks_per_node", None, "Ranks on each node; one is enough. Default: 1.",
           ("--ranks-per-node",), minimum=1),
    Option("int", "cpus_per_node", None, "Cores of each node; PBS: default 64.", ("--cpus-per-node",),
           minimum=1),
    Option("int", "cpus_per_gpu", None, "Cores for each GPU, instead of --cpus-per-node.", ("--cpus-per-gpu",), minimum=1),
    Option("str", "memory_per_node", None, "Memory of each node, such as 64G. "
           "Default: all (Slurm without --shared), or the site's.",
           ("--memory-per-node", "--mem"), pattern=r"(?i:[1-9][0-9]{0,11} ?[KMGT]i?B?)", expected="a size such as 64G"),
    Option("bool", "shared", None, "Share the nodes with other jobs, or have whole nodes. Default: whole nodes.",
           ("--shared/--exclusive",)),
    Option("str", "time", None, "Walltime, HH:MM:SS or as the batch system has it: 60, 1-12:00:00 (Slurm).", ("--time", "-t")),
    Option("str", "account", None, "Account, project or bank to charge.", ("--account", "-A"), pattern=_NAME, expected=_NAMED),
    Option("str", "queue", None, "Queue or partition (Slurm: -q is --qos).", ("--queue", "--partition", "-q", "-p"),
           pattern=_NAME, expected=_NAMED),
    Option("str", "qos", None, "Quality of service (Slurm; there also -q).", ("--qos",), pattern=_NAME, expected=_NAMED),
    Option("str", "constraint", None, "Features of the nodes (Slurm, Flux).", ("--constraint", "-C"), pattern=_EXPRESSION,
           expected="names of features, with & or | between them (it can't be quoted in a directive)"),
    Option("str", "mail_user", None, "Address for mail of the batch system (not Flux).", ("--mail-user",), pattern=_NAME,
           expected=_NAMED),
    Option("str", "output", None, "Log file of the job, as the batch system writes it: %x-%j.log (Slurm).", ("--output", "-o"),
           pattern=r"[A-Za-z0-9_.,@+%{}^/:=-]+", expected="a path of letters, digits and _ . , @ + - % { } ^ / : ="),
    Option("choice", "launcher", None, "Command that starts the ranks. Default: as launch; Slurm: srun.",
           ("--launcher",), choices=("srun", "mpirun", "mpiexec", "pals", "flux")),
    Option("path", "setup", None, "File to source first, for modules, a venv or conda.", ("--setup",)),
)}
#: Options that can be given several times.
LISTS: Mapping[str, Option] = {option.name: option for option in (
    Option("str", "modules", None, "Module to load.", ("--module",)),
    Option("str", "directives", None, "Option of the batch system, such as '--reservation=x'. It replaces a generated one of the "
           "same meaning; '--mem=' takes one out. {nodes}, {gpus} and the like become numbers of this job.", ("--directive",),
           pattern=r"-[ -~]+", expected="an option of the batch system as it stands in a script, such as '--reservation=x'"),
    Option("str", "launch_options", None, "Option of launch, which you can also put before SCRIPT.", ("--launch-option",)),
)}
# fmt: on
#: Options whose texts go into directives as they are (`ScriptFormat.words`).
_WORDS = ("account", "queue", "qos", "constraint", "mail_user", "output")


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
    form = format_of(system)
    values: dict[str, Any] = {}
    for layer in _layers(system, given, source):
        values = _above(values, layer, form, source)
    words = {name: values.pop(name) for name in _WORDS if name in values}
    program = (*values.pop("launch_options", ()), *program)
    if "gpus" in values:  # planned as one node
        values |= {"nodes": 1, "gpus_per_node": values["gpus"]}
    expected = {"time": "a walltime such as 01:30:00", "gpus_per_node": "a number, 0 for CPU workers alone"}
    if missing := [name for name in ("nodes", "gpus_per_node", "time") if name not in values]:
        first, *others = (_origin(name, source) for name in missing)
        names = ", ".join([first, *(each.split(": ")[-1] for each in others)])
        raise OptionError(
            f"{names} {'are' if others else 'is'} missing",
            expected="; ".join(dict.fromkeys(expected.get(name, "a number") for name in missing)),
        )
    text = values.pop("time")
    if (seconds := form.seconds(text)) is None:
        title = batch_system(system).title
        raise OptionError(
            f"{_origin('time', source)}: invalid value {show(text)}",
            expected=f"a walltime of {title} above zero, such as 01:30:00; also {', '.join(form.times)}",
        )
    # another than users may think
    if (text.isdecimal() and form.times[0] == "S") or (
        "M:S" in form.times and re.fullmatch("[0-9]+:[0-9]+", text)
    ):
        say(f"--time {text}: {counted(seconds, 'second')} with {batch_system(system).title}")
    _settle_resources(values, source)
    if (setup := values.get("setup")) and not os.path.isfile(setup):
        raise OptionError(
            f"{_origin('setup', source if given.get('setup') else 'configuration')} {show(setup)} "
            f"{'is no file' if os.path.exists(setup) else 'does not exist'}",
            expected="a file that the job can source",
        )
    _check_log(words.get("output", ""), source)
    job = JobRequest(system=system, program=tuple(program), seconds=seconds, words=words, **values)
    _check_plan(job, _check_program(job))
    return job


# The layers: options of the site, of Dask's configuration, and of the user.

#: The variable with the user's site.
SITE = "DASK_GPU_MPI_SITE"
#: The folder of the sites that have a name.
_SITES = Path(__file__).parents[1] / "sites" / "named"
#: Keys of a site's file that are not options.
_ABOUT = ("title", "page", "note", "system")
#: Options of which a job has those on one side only. A layer's own ones replace those on the other side in the layers below.
_INSTEAD = (
    ({"gpus"}, {"nodes", "gpus_per_node", "cpus_per_node", "ranks_per_node"}),
    ({"cpus_per_gpu"}, {"cpus_per_node"}),
)


def _layers(system: str, given: Mapping[str, Any], source: Source) -> list[dict[str, Any]]:
    """The options of each layer by name, each of which wins over those before."""
    configured, users = _converted(_configured(), "configuration"), _converted(given, source)
    own, told = users.pop("site", None), os.environ.get(SITE)
    name = own or told or configured.get("site")
    configured.pop("site", None)
    site = load_site(name) if name else {"system": system}
    if site["system"] != system:
        raise OptionError(
            f"--site {name}: its batch system is {site['system']}, not {system}",
            fix=f"name {site['system']}, or {'no site' if own or not told else f'unset {SITE}'}",
        )
    if "note" in site:
        say(f"--site {name}: {site['note']}")
    options = {key: value for key, value in site.items() if key not in _ABOUT}
    sites = _converted(options, "configuration", f"--site {name}: ")
    for each in ("modules", "launch_options"):  # what the site needs, below what the user adds
        users[each] = (*sites.pop(each, ()), *(users.get(each) or configured.get(each, ())))
    return [sites, configured, users]


def _above(
    below: Mapping[str, Any], layer: Mapping[str, Any], form: ScriptFormat, source: Source
) -> dict[str, Any]:
    """The values of a layer and of those below it, over which it wins."""
    new = dict(layer)
    # TYPE:NUMBER; a number alone leaves the type of the layers below
    gpu_type, _, number = new.pop("gpus_per_node", "").rpartition(":")
    if number:
        new["gpus_per_node"] = int(number)
        new["gpu_type"] = (gpu_type or below.get("gpu_type", "")) if int(number) else ""
    gone: set[str] = set()
    for one_side, other_side in _INSTEAD:
        one, other = sorted(new.keys() & one_side), sorted(new.keys() & other_side)
        if one and other:
            raise OptionError(
                f"{_origin(other[0], source)}: can't be combined with {JOB_OPTIONS[one[0]].flags[0]}",
                fix="leave one out",
            )
        gone |= other_side if one else one_side if other else set()
    if directives := new.get("directives"):
        # they add up, but one replaces those of its meaning in the layers below
        replaced = frozenset[str]().union(*map(form.replaced, directives))
        kept = [text for text in below.get("directives", ()) if form.option_name(text) not in replaced]
        new["directives"] = (*kept, *directives)
    return {name: value for name, value in below.items() if name not in gone} | new


def default_site() -> str | None:
    """The site of the user's environment or of Dask's configuration."""
    return os.environ.get(SITE) or _configured().get("site")


def site_names() -> list[str]:
    """The sites that have a name."""
    return sorted(file.name.removesuffix(".yaml") for file in _SITES.iterdir())


def load_site(name: str) -> dict[str, Any]:
    """The file of a site, by its name or its path; InputError if there is none, or if it can't be used."""
    import yaml

    is_file, names = name.endswith((".yaml", ".yml")), site_names()
    if not is_file and name not in names:
        raise OptionError(
            f"--site {name}: unknown site{suggest(name, names)}",
            expected="a name of `dask-gpu-mpi jobscript --site`, or a file NAME.yaml",
        )
    try:
        path = Path(name) if is_file else _SITES / f"{name}.yaml"
        if path.exists() and not path.is_file():  # a pipe would block
            raise OSError("not a regular file")
        # as texts: other loaders read an account 0123 as 83, and a time 1:30:00 as 5400
        found = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        origin = f"{SITE}={name}" if os.environ.get(SITE) == name else f"--site {name}"
        raise InputError(f"{origin}: can't be read ({one_line(error)})", expected="a YAML file") from None
    if not isinstance(found, dict):
        found = {}
    found = {key: value for key, value in found.items() if value not in ("", "null", "~")}
    if "site" in found:
        raise InputError(f"--site {name}: the file names another site", fix="leave out its line `site`")
    if (system := found.get("system")) not in SCRIPTED:
        raise InputError(
            f"--site {name}: the batch system is missing"
            if system is None
            else f"--site {name}: unknown batch system {show(system)}",
            expected=f"system: one of {', '.join(SCRIPTED)}",
            fix=f"system: {near}" if (near := nearest(str(system), SCRIPTED)) else "",
        )
    return found


def _configured() -> Mapping[Any, Any]:
    """The section gpu-mpi.jobscript of Dask's configuration, from YAML files and environment."""
    config = import_config()
    register_defaults(config)
    # Dask has guessed the type of a variable, whose text is known
    return {
        key: os.environ[variable] if variable and isinstance(value, (int, float)) else value
        for key, value, variable in settings_of(config, "gpu-mpi.jobscript")
    }


def _converted(given: Mapping[Any, Any], source: Source, place: str = "") -> dict[str, Any]:
    """The values of options by name, without those that are None or an empty list. `place`: of errors, before the key."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_").lower()
        origin = f"{place}{key}" if place else _origin(key, source)
        option = JOB_OPTIONS.get(name) or LISTS.get(name)
        if option is None:
            known = {**JOB_OPTIONS, **LISTS}
            flags = {flag.strip("-").replace("-", "_"): each for each in known for flag in known[each].flags}
            spell = str if source == "keyword" else _key
            raise OptionError(f"{origin}: unknown option{suggest(flags.get(name, name), known, spell)}")
        if name in LISTS:
            texts = value if isinstance(value, (list, tuple)) else (value,)
            if texts := [text for text in texts if text is not None]:
                values[name] = tuple(convert(option, text, origin, source) for text in texts)
        elif value is not None:
            if name == "gpus_per_node" and type(value) is int:
                value = str(value)
            if source == "configuration" and option.kind == "str" and isinstance(value, (int, float)):
                raise OptionError(
                    f"{origin}: invalid value {show(value)}",
                    expected="a text: YAML reads 0123 as the number 83, and 1:30:00 as 5400",
                    fix="put it in quotes",
                )
            values[name] = convert(option, value, origin, source)
    return values


def _origin(name: str, source: Source) -> str:
    """The name of an option in messages."""
    if source == "keyword":
        return f"keyword {name}"
    if source == "configuration":
        return f"configuration gpu-mpi.jobscript.{_key(name)}"
    return f"command line: {(JOB_OPTIONS.get(name) or LISTS[name]).flags[0].partition('/')[0]}"


def _key(name: str) -> str:
    """An option's name as YAML and the command line have it."""
    return name.replace("_", "-")


# The checks of the whole request.

#: Endings of job scripts, which a log does not have.
_SCRIPTS = (".sbatch", ".slurm", ".pbs", ".bsub", ".sh", ".bash", ".job")


def _settle_resources(values: dict[str, Any], source: Source) -> None:
    """Turn cores and memory into the fields of a `JobRequest`; an OptionError if the job is too large, or lacks its cores."""
    of_gpus, of_gpu = "gpus" in values, values.get("cpus_per_gpu")
    if of_gpu and not of_gpus:
        values["cpus_per_node"] = of_gpu * values["gpus_per_node"] or None
    for name in ("ranks_per_node", "gpus_per_node"):
        count = values.get(name, 1)
        if values["nodes"] * count > _LARGEST or values["nodes"] > _LARGEST:
            raise OptionError(
                f"{source}: --nodes {values['nodes']} {JOB_OPTIONS[name].flags[0]} {count}: too many",
                expected=f"at most {_LARGEST} in the whole job",
            )
    if memory := values.get("memory_per_node"):
        # as batch systems write it: 64G are 64 GiB
        number, unit = re.findall(r"[0-9]+|[A-Za-z]", memory)[:2]
        values["memory_per_node"] = int(number) << 10 * (1 + "KMGT".index(unit.upper()))
    if values.get("shared") and not values.get("cpus_per_node") and not (of_gpus and of_gpu):
        raise OptionError(
            f"{_origin('shared', source)}: the cores of the job are missing",
            fix=f"add --cpus-per-{'gpu' if of_gpus else 'node'}",
        )


def _check_log(log: str, source: Source) -> None:
    """Refuse a log file that is the script, or whose folder does not exist: the job would end without a log."""
    if log.endswith(_SCRIPTS):
        raise OptionError(
            f"{_origin('output', source)}: {log} is the name of a script",
            expected="the log of the job, such as job.log",
            fix=f"--save {log} writes the job script there",
        )
    folder = os.path.dirname(log)
    if folder and not re.search("[%{^:]", folder) and not os.path.isdir(folder):
        raise OptionError(
            f"{_origin('output', source)}: the folder {folder} does not exist", fix=f"mkdir -p {folder}"
        )


def _check_program(job: JobRequest) -> Options:
    """Read the command line of `launch` and find the script, to refuse now a job that would fail hours later."""
    from dask_gpu_mpi.job.program import Program

    no_script = "command line: the script is missing (expected -- SCRIPT ARGS...)"
    try:
        with launch.make_context("launch", list(job.program)) as context:
            given = dict(context.params)
            shape = [name for name in ("ranks", "ranks_per_node", "hosts") if is_given(name, context)]
    except click.ClickException as error:
        raise InputError(f"command line: {error.format_message()} (before the script)") from None
    except click.exceptions.Exit:
        raise InputError(no_script) from None
    if shape:
        raise InputError(
            f"command line: --{shape[0].replace('_', '-')} of launch: the job script has it",
            fix="--nodes and --ranks-per-node before the --",
        )
    program = given.pop("program")
    if not program and given["scheduler_file"] is None:
        raise InputError(no_script)
    if program and not given["container"]:
        found = Program.of(program)
        found.check()
        if not (job.setup or job.modules):  # they may choose another Python
            found.check_syntax()
    return read_texts({name: given[name] for name in OPTIONS if name in given})


def _check_plan(job: JobRequest, options: Options) -> None:
    """Plan the job, and refuse one that would leave GPUs without a worker."""
    from dask_gpu_mpi.machine.inventory import NODE_MEMORY, hypothetical_job
    from dask_gpu_mpi.plan.planner import make_plan

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
