"""The command ``jobscript``, and the same from Python: print a job script, write it to a file, or submit it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import show, table
from dask_gpu_mpi.cli.job_request import JOB_OPTIONS, LISTS, default_site, load_site, request, site_names
from dask_gpu_mpi.cli.options import HelpCommand, click_options, complete_files, fail, write_file
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.job import outcome
from dask_gpu_mpi.sites.jobscript import SCRIPTED, format_of, quote, render
from dask_gpu_mpi.sites.jobscript import submit as submit_script


def job_script(system: str, program: str | os.PathLike[str] | Sequence[str], **options: Any) -> str:
    """Write a job script for a batch system, as ``dask-gpu-mpi jobscript`` does.

    Parameters
    ----------
    system : {"slurm", "pbs", "lsf", "flux"}
        The batch system.
    program : str, path or sequence of str
        The script; or a command line of ``dask-gpu-mpi launch``: options, the script and its arguments.
    **options
        The job's request. `nodes` and `gpus_per_node` (or `gpus`) and `time` are required, unless `site` or section
        ``gpu-mpi.jobscript`` of Dask's configuration has them. Other options are those of a job in
        ``dask-gpu-mpi jobscript --help-all``, such as `account`, `queue`, `qos`, `shared`, `setup`, and lists of `modules` and
        `directives`.

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
    outcome.report_uncaught()
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
    outcome.report_uncaught()
    job = request(system, _words(program), options, "keyword")
    return submit_script(job, render(job))


def _words(program: str | os.PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    return (os.fspath(program),) if isinstance(program, (str, os.PathLike)) else tuple(map(_text, program))


def _text(word: object) -> str:
    return os.fspath(word) if isinstance(word, os.PathLike) else str(word)


class _Jobscript(HelpCommand):
    """A command with the short options of each batch system, which may be that of a site."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as Click does. Without a batch system before the options, it is the site's; ``--site`` alone lists all sites."""
        end = args.index("--") if "--" in args else len(args)
        ours, program = args[:end], args[end:]
        if ours[-1:] == ["--site"] and not ctx.resilient_parsing:
            sites = {name: load_site(name) for name in site_names()}
            rows = [(name, site["system"], site["title"], site["page"]) for name, site in sites.items()]
            show([table(("site", "system", "machine", "written from, and not run there"), rows)])
            ctx.exit()
        if args and args[0].startswith("-") and not {"--help", "--help-all"} & {*args}:
            given = re.search(r"(?:^|\0)--site[=\0]([^\0]+)", "\0".join(ours))
            try:
                if name := given[1] if given else default_site():
                    ours = [load_site(name)["system"], *ours]
            except DaskGpuMpiError as error:
                fail(error)
        if ours and ours[0] in SCRIPTED:
            short = format_of(ours[0]).short
            ours = [short.get(word, word) for word in ours]
        return super().parse_args(ctx, [*ours, *program])


@click.command(
    cls=_Jobscript,
    params=[*click_options(JOB_OPTIONS.values()), *click_options(LISTS.values(), multiple=True)],
    short=("nodes", "gpus_per_node", "time", "account", "queue", "setup", "save", "submits"),
    examples=(
        "dask-gpu-mpi jobscript slurm -N 2 --gpus-per-node 4 -t 01:00:00 -- analysis.py",
        "dask-gpu-mpi jobscript pbs -N 2 --gpus-per-node 4 -t 1:00:00 --submit -- my.py",
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
                command = " ".join(word for word in format_of(system).submit if not word.startswith("-"))
                say(f"{save} is written. Submit it: {command} < {quote(save)}")
        elif not submits:
            sys.stdout.buffer.write(os.fsencode(text))
            sys.stdout.flush()
        if submits:
            print(submit_script(job, text))
    except DaskGpuMpiError as error:
        fail(error)
