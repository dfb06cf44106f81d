"""The options of the command ``launch``, which is in `dask_gpu_mpi.sites`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dask_gpu_mpi.base.streams import is_public, say
from dask_gpu_mpi.base.text import counted
from dask_gpu_mpi.cli.options import RunCommand, fail, is_given, read_texts
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, LauncherError, Problem
from dask_gpu_mpi.job.program import Program
from dask_gpu_mpi.options.convert import convert
from dask_gpu_mpi.options.model import Setting
from dask_gpu_mpi.sites.batch import Allocation, Requeue, batch_job, find_allocation, output_of, parse_hosts
from dask_gpu_mpi.sites.launchers import BY_COMMAND, FOREIGN, LOCAL, detect, library_name

if TYPE_CHECKING:
    from dask_gpu_mpi.sites.choice import Starter
    from dask_gpu_mpi.sites.command import Stage
    from dask_gpu_mpi.sites.containers import Container

#: The output of a command of the batch system, such as `flux getattr` and `squeue`.
_ask = partial(output_of, timeout=20.0)


# fmt: off
#: The options of `launch` that `run` does not have.
LAUNCH_OPTIONS = [
    click.Option(["-n", "--ranks"], type=click.IntRange(1, 1_000_000), metavar="N",
                 help="Ranks in all. Default: those that the job has requested for each node, else one a node."),
    click.Option(["--ranks-per-node"], type=click.IntRange(1, 1_000_000), metavar="R", help="Ranks on each node, without -n.",
                 envvar="DGM_RANKS_PER_NODE"),
    click.Option(["--check", "preflight"], is_flag=True,
                 help="Check the allocation first, and end there if something is wrong, or without SCRIPT."),
    click.Option(["--expect-gpus"], type=click.IntRange(min=0), metavar="G", help="Check first that each node has as many GPUs.",
                 envvar="DGM_EXPECT_GPUS"),
    click.Option(["--requeue", "restarts"], type=click.IntRange(min=0), metavar="N",
                 help="After exit code 75 (a checkpoint) or a lost node, requeue the job, N times at most."),
    click.Option(["--stage"], metavar="ARCHIVE", help="Start the ranks from a copy of this environment on each node's own "
                 "disk: a tar file or a SquashFS image. It pays only if the shared file system is slow."),
    click.Option(["--container"], metavar="IMAGE", help="Run the ranks in this image: a file, a name in a registry, or options "
                 "of srun that choose it.",
                 envvar="DGM_CONTAINER"),
    click.Option(["--container-runtime"], metavar="NAME", help="srun, pyxis, podman-hpc, shifter, apptainer or singularity. "
                 "Default: the first one on this node that runs the image."),
    click.Option(["--container-mount", "container_mounts"], metavar="SOURCE[:TARGET[:ro]]", multiple=True,
                 help="Mount this file or folder in the container too; repeat it for several."),
    click.Option(["--hosts"], metavar="LIST|FILE", help="Nodes to use, h1,h2:2 or a file: ranks start there by mpirun."),
    click.Option(["--launcher"], metavar="NAME|PATH", help="Command that starts the ranks: srun, mpirun, mpiexec, pals, flux, "
                 "or an mpirun by its path. Default: on one node none (`launch` itself "
                 "starts the ranks), else the batch system's, if it fits the MPI library, or the library's mpirun."),
    click.Option(["--launcher-command"], metavar="COMMAND", help="Command that starts the ranks by itself, as many as the job "
                 "has, such as ibrun. It gets no options but those of --launcher-option."),
    click.Option(["--launcher-option", "launcher_options"], metavar="OPTION", multiple=True,
                 help="Add an option to the launcher's, as in --launcher-option=--mem-bind=local; repeat it for several."),
    click.Option(["--profile"], metavar="nsys|COMMAND",
                 help="Start each rank under Nsight Systems (nsys), or under this command. "
                 "nsys writes a file for each rank into the folder of the log files."),
    click.Option(["--mpi"], metavar="NAME", help="srun --mpi=NAME or flux run -o pmi=NAME. Default: what the MPI library needs.",
                 envvar="DGM_MPI"),
    click.Option(["--dry-run"], is_flag=True, help="Print the commands, and start no rank."),
]
# fmt: on

#: Ranks for each core from which on there is a warning.
MOST_PER_CORE = 4
#: Variables that only job scripts read, and what to do without one.
OF_JOB_SCRIPTS = {
    "DGM_SETUP": "source it before `launch`",
    "DGM_PROGRAM": "give the script to `launch`",
    "DGM_LAUNCHER": "--launcher",
    "DGM_RESTARTS": "--requeue",
}
#: The variables that users set.
VARIABLES = (
    *("DGM_CHECK", "DGM_LOGS", "DGM_SCRATCH", *OF_JOB_SCRIPTS),
    *(str(option.envvar) for option in LAUNCH_OPTIONS if option.envvar),
)
#: Commands that all ranks of an allocation carry out.
RANK_COMMANDS = ("check", "plan")


@click.command(
    cls=RunCommand,
    params=[*LAUNCH_OPTIONS],
    short=("ranks", "preflight", "restarts", "hosts", "dry_run"),
    examples=(
        "dask-gpu-mpi launch analysis.py --input data",
        "dask-gpu-mpi launch -n 2 --check -m package.module",
    ),
    short_help="Start the ranks as well, if needed with the fitting launcher.",
)
def launch(
    ranks: int | None,
    ranks_per_node: int | None,
    preflight: bool,
    expect_gpus: int | None,
    restarts: int | None,
    stage: str | None,
    container: str | None,
    container_runtime: str | None,
    container_mounts: tuple[str, ...],
    hosts: str | None,
    launcher: str | None,
    launcher_command: str | None,
    launcher_options: tuple[str, ...],
    profile: str | None,
    mpi: str | None,
    dry_run: bool,
    program: tuple[str, ...],
    **given: Any,
) -> None:
    """Start ranks and run SCRIPT on the cluster that they become.

    In a job of Slurm, PBS, LSF, Flux or Grid Engine, or on this machine. Options of `run` come before SCRIPT. Exits with the
    script's exit code. `launch check` and `launch plan` inspect the allocation.
    """
    from dask_gpu_mpi.sites.choice import Starter, ask_library, choose_launcher
    from dask_gpu_mpi.sites.command import Request, as_text, decide, library_command, needs_launcher
    from dask_gpu_mpi.sites.execute import run_launch

    # if SIGCHLD were ignored, as a parent may have left it, all exit codes would be 0
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        environ = dict(os.environ)
        command, program, preflight = _commands(program, given, preflight=preflight)
        _refuse_ranks(environ)
        where = _allocation(environ, ranks, ranks_per_node, hosts, dry_run=dry_run)
        launcher = "" if launcher in (None, "auto") else launcher
        # a command that starts all ranks by itself excludes the choice of a launcher, and of ranks
        excluded = {"--launcher": launcher, "--stage": stage, "-n": ranks, "--mpi": mpi, "--hosts": hosts}
        excluded["--ranks-per-node"] = ranks_per_node
        users_starter, users_words = _launcher_command(launcher_command or "", excluded)
        _refuse_contradictions(stage, container, container_runtime, container_mounts)

        # the ranks, as the user wants them
        try:
            resolved = read_texts(given)
        except InputError:  # the ranks report it
            resolved = None
        if resolved is not None and resolved.walltime_signal:
            # perhaps in a file, which the job's default must not override
            environ.setdefault("DASK_GPU_MPI__WALLTIME_SIGNAL", resolved.walltime_signal)
        local = given["local_directory"] or environ.get("DGM_SCRATCH")
        if not local and resolved is not None:
            local = resolved.local_directory
        kind = FOREIGN.kind if users_starter else launcher or where.batch.launcher
        request = Request(
            options=run_options(launch.params, given),
            program=program,
            command=command,
            check=preflight,
            expect_gpus=expect_gpus,
            container=_container(container, container_runtime, container_mounts, kind, environ),
            stage=_stage(stage, local, where, requeues=restarts is not None),
            log_directory=given["log_directory"] or (resolved and resolved.log_directory) or "",
            local_directory=local or "",
            launcher_options=(*users_words, *_words(launcher_options)),
            profile=tuple(_split(f"--profile {profile!r}", profile or "", "nsys, or words of a shell")),
            tolerates=resolved.tolerate_lost_ranks if resolved is not None else 0,
        )
        cwd = _working_directory(environ)
        if command == "run" and program:
            Program.of(program).check_name()  # `python -m dask_gpu_mpi launch` may import it, too

        # the launcher, and the commands by which it starts them
        starter, library = users_starter, ""
        if needs_launcher(request, environ, where, _ask, chosen=bool(launcher or starter or mpi)):
            library, file = ask_library(library_command(request, environ, sys.executable, cwd), environ)
            starter = starter or choose_launcher(
                where, library, environ, sys.executable, file=file, launcher=launcher, mpi=mpi or ""
            )
        starter = starter or Starter(LOCAL, "")
        commands = decide(
            request,
            environ,
            where,
            library,
            starter,
            python=sys.executable,
            cwd=cwd,
            root=os.geteuid() == 0,
            is_public=not dry_run and is_public(environ),
            has_input=not os.path.samestat(os.fstat(0), os.stat(os.devnull)),
            run_name="" if dry_run else secrets.token_hex(8),
            ask=_ask,
        )

        if dry_run:
            notes = [f"{library_name(library)}: {starter.launcher.kind}"] if starter.path else []
            click.echo(os.fsencode(as_text(commands, str(where), *notes)))  # names of files may not be UTF-8
            code = 0
        else:
            for problem in _warnings(where, starter, environ, program):
                say(f"warning: {problem}")
            # even for 0 restarts: a batch system that requeues by the exit code must not do it
            again = None
            if restarts is not None:
                again = partial(where.batch.requeue, Requeue(where, restarts, commands.logs), environ)
            code = run_launch(commands, environ, again)
    except DaskGpuMpiError as error:
        fail(error)
    sys.exit(code)


def _commands(
    words: tuple[str, ...], given: dict[str, Any], *, preflight: bool
) -> tuple[str, tuple[str, ...], bool]:
    """The command of the ranks, its arguments, and whether the preflight comes first, which the user may have requested."""
    command, program = split_command(words)
    preflight = preflight or (command == "run" and is_given("expect_gpus"))
    if (preflight or command == "run") and (wanted := os.environ.get("DGM_CHECK")):
        preflight = convert(Setting("bool"), wanted, "environment DGM_CHECK", "configuration")
    if preflight and command == "run" and not program:
        options = read_texts(given)
        if options.scheduler and options.scheduler_file is None:
            # without a client, the cluster would run until the walltime
            return "check", program, False
    return command, program, preflight


def split_command(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The command of the ranks, and its arguments: ``plan`` and ``check`` are commands, unless there is such a script.

    >>> split_command(("plan", "--json")), split_command(("analysis.py", "plan"))
    (('plan', ('--json',)), ('run', ('analysis.py', 'plan')))
    """
    is_script = bool(words) and (
        os.path.isfile(words[0]) or os.path.isfile(os.path.join(words[0], "__main__.py"))
    )
    if words and words[0] in RANK_COMMANDS and not is_script:
        return words[0], words[1:]
    return "run", words


def _allocation(
    environ: dict[str, str],
    ranks: int | None,
    ranks_per_node: int | None,
    hosts: str | None,
    *,
    dry_run: bool,
) -> Allocation:
    """The nodes and ranks of this job: those of ``--hosts``, or of the batch system."""
    # `ranks_per_node` may be DGM_RANKS_PER_NODE, of the job script
    if ranks is not None and is_given("ranks_per_node"):
        raise InputError(
            f"launch: -n {ranks} with --ranks-per-node {ranks_per_node}",
            expected="one of them",
            fix="-n for ranks in total, --ranks-per-node for those on each node",
        )
    named = parse_hosts(hosts) if hosts is not None else None
    if named:
        ranks_per_node = None  # --hosts has the ranks of each node already
        total = sum(named.values())
        if ranks == total:
            ranks = None
        elif ranks is not None and total > len(named):
            raise InputError(
                f"launch: -n {ranks} with --hosts {hosts}, which has {total} ranks",
                fix="leave -n, or the numbers of ranks, out",
            )
        if not dry_run:
            _refuse_unknown_hosts(named)
    return find_allocation(environ, ranks=ranks, ranks_per_node=ranks_per_node, hosts=named, ask=_ask)


def _refuse_contradictions(
    stage: str | None, container: str | None, runtime: str | None, mounts: Sequence[str]
) -> None:
    if stage and container:
        raise InputError(
            "launch: --stage with --container: the environment of the ranks is that of the image",
            fix="leave one out",
        )
    if not container and (runtime or mounts):
        option = "--container-runtime" if runtime else "--container-mount"
        raise InputError(f"launch: {option} without --container", fix="add --container IMAGE")


def _container(
    image: str | None, runtime: str | None, mounts: Sequence[str], launcher: str, environ: Mapping[str, str]
) -> Container | None:
    """The container of ``--container``. `launcher`: the kind of the user's choice, or of the batch system's launcher."""
    from dask_gpu_mpi.sites.containers import choose_container

    if not image:
        return None
    return choose_container(
        image, runtime=runtime or "", mounts=mounts, launcher=launcher, environ=environ, ask=_ask
    )


def _stage(archive: str | None, local: str | None, where: Allocation, *, requeues: bool) -> Stage | None:
    """The copies of ``--stage``, in the local directory of each node; a job that comes again after a requeue finds them."""
    from dask_gpu_mpi.machine.scratch import local_directory
    from dask_gpu_mpi.machine.staging import find_stage

    if archive is None:
        return None
    # a requeued job has this command line again, and another `launch` in this job has not
    digest = hashlib.sha256(ascii(sys.argv[1:]).encode()).hexdigest()[:8]
    kept = f"{where.job}-{digest}" if requeues and where.batch.keeps_number else ""
    return find_stage(archive, local_directory(local), job=kept)


def _working_directory(environ: Mapping[str, str]) -> str:
    """The working directory, by the name of the shell: the script's arguments may have the same symbolic link in their paths."""
    name = environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(name) and os.path.samefile(name, "."):
            return name
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InputError(
            "launch: the working directory was deleted",
            expected="one in which the ranks can start",
            fix="cd to another",
        ) from None


def run_options(parameters: Sequence[click.Parameter], given: dict[str, Any]) -> tuple[str, ...]:
    """The words of a command line for these values of options."""
    words: list[str] = []
    for parameter in parameters:
        value = given.get(parameter.name or "")
        if value is None or not isinstance(parameter, click.Option):
            continue
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [parameter.opts[0], str(value)]
    return tuple(words)


def _split(option: str, text: str, expected: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"launch: {option}: {error}", expected=expected) from None


def _words(options: Sequence[str]) -> tuple[str, ...]:
    """The words of ``--launcher-option``, each of which is an option, perhaps with values after it."""
    words: list[str] = []
    for option in options:
        found = _split(f"--launcher-option={option}", option, "words of a shell")
        if not found or not found[0].startswith("-"):
            raise InputError(
                f"launch: --launcher-option={option}: is not an option of a launcher",
                expected="one that begins with -",
                fix="--launcher-option=--mem-bind=local",
            )
        words += found
    return tuple(words)


def _launcher_command(text: str, excluded: Mapping[str, object]) -> tuple[Starter | None, Sequence[str]]:
    """The command of the user that starts all ranks by itself, and its options; None: there is none.

    `excluded`: the values of options that such a command excludes.
    """
    from dask_gpu_mpi.sites.choice import Starter

    words = _split(f"--launcher-command {text!r}", text, "a command")
    if not words:
        return None, ()
    if given := [option for option, value in excluded.items() if value]:
        raise InputError(
            f"launch: {given[0]} with --launcher-command: {words[0]} starts the ranks that the job has",
            fix=f"leave {given[0]} out; --launcher-option for options of {words[0]}",
        )
    if (path := shutil.which(words[0])) is None:
        raise LauncherError(
            f"launch: --launcher-command {words[0]}: not found in PATH", fix="load its module"
        )
    return Starter(FOREIGN, path), words[1:]


def _warnings(
    where: Allocation, starter: Starter, environ: Mapping[str, str], program: Sequence[str]
) -> Iterator[Problem]:
    """Warnings of ranks that the user may not expect."""
    from dask_gpu_mpi.machine.cgroups import allowed_cpus

    kind = starter.launcher.kind
    if kind in BY_COMMAND and kind != where.batch.launcher and not batch_job(environ):
        yield Problem(
            f"launch: --launcher {kind}: no job of its batch system was found here, so {kind} itself requests one",
            fix="start it in a job, as by `dask-gpu-mpi jobscript`, or leave --launcher out for ranks on this machine",
        )
    if is_given("mpi") and not starter.mpi:
        yield Problem(f"launch: --mpi: no effect, since {starter.path} starts the ranks", fix="leave it out")
    for name, fix in OF_JOB_SCRIPTS.items():
        if (value := environ.get(name)) and not batch_job(environ):
            yield Problem(f"launch: {name}: {value!r} is not read: only job scripts do that", fix=fix)
    # a restarted job of PBS has DGM_RESTART
    for name in sorted(environ.keys() - {*VARIABLES, "DGM_RESTART"}):
        for meant in get_close_matches(name, VARIABLES, 1, 0.85) if name.startswith("DGM_") else ():
            yield Problem(f"launch: environment {name}: no effect", fix=f"did you mean {meant}?")
    is_alone = (
        starter.launcher is LOCAL and where.ranks == 1 and not (is_given("ranks") or batch_job(environ))
    )
    if is_alone and _asks_for_ranks(program):
        yield Problem(
            "launch: one rank starts: -n comes after the script, which gets it",
            fix="options of launch before the script",
        )
    cores = len(allowed_cpus())
    if starter.launcher is LOCAL and where.ranks > MOST_PER_CORE * cores:
        yield Problem(
            f"launch: {where.ranks} ranks on {counted(cores, 'core')}: the start takes long, and workers share cores",
            fix=f"-n {cores}, or fewer with more threads each (--nthreads)",
        )


def _asks_for_ranks(program: Sequence[str]) -> bool:
    """Whether ``-n N`` comes after the script, perhaps by mistake."""
    place = program.index("-n") + 1 if "-n" in program[1:] else len(program)
    return re.fullmatch(r"[2-9]|[1-9][0-9]", "".join(program[place : place + 1])) is not None


def _refuse_unknown_hosts(names: Iterable[str]) -> None:
    """Refuse a node that has no address: a misspelt one, or a file that is not there. It may be an alias of ssh."""
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            alias = re.search(r"^hostname (.+)$", _ask(["ssh", "-G", name]), re.MULTILINE)
            if alias is None or alias[1] == name.lower():
                raise InputError(
                    f"--hosts: {name!r} has no address, and there is no such file",
                    expected="names of nodes, or a file with a node on each line",
                    fix="correct it",
                ) from None


def _refuse_ranks(environ: dict[str, str]) -> None:
    launched = detect(environ)
    if launched is not None and (launched.size or 1) > 1:
        raise LauncherError(
            f"launch: this is already rank {launched.rank} of {launched.size} of {launched.launcher.name}",
            fix="`dask-gpu-mpi run` below a launcher, or `dask-gpu-mpi launch` without one",
            reported=launched.rank > 0,  # rank 0 reports it
        )
