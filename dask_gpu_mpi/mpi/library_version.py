"""What an MPI library calls itself (``MPI.Get_library_version()``): its name, and the versions that are special."""

from __future__ import annotations

import re

__all__ = ["is_mpich_before_5", "library_name"]


def library_name(version: str) -> str:
    r"""The first few words, on one line.

    >>> library_name("Open MPI v5.0.11, package: Open MPI user@host")
    'Open MPI v5.0.11'
    >>> library_name("MPICH Version:      5.0.2\nMPICH Release date: ...\0")
    'MPICH Version: 5.0.2'
    """
    return " ".join(version.replace("\0", "").partition("\n")[0].partition(",")[0].split())


def is_mpich_before_5(version: str) -> bool:
    """Whether the library is MPICH itself (not Intel's, Cray's, MVAPICH's) of a version below 5.

    >>> [is_mpich_before_5(f"MPICH Version:      {number}") for number in ("4.0.2", "3.4", "5.0.2", "40.1")]
    [True, True, False, False]
    >>> is_mpich_before_5("MPI VERSION    : CRAY MPICH version 4.1")
    False
    """
    return re.match(r"MPICH Version:\s*[1-4]\.", version) is not None
