"""Files that nobody can have written but this user or root."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["UntrustedFileError", "read_trusted"]

#: Bytes of the largest file that is read.
LARGEST = 1 << 24


class UntrustedFileError(Exception):
    """Somebody else may have written the file; the message says who or how, and how to mend it."""


def read_trusted(path: str | os.PathLike[str]) -> str:
    """Text of a file, if it is this user's or root's, and so is its folder, and others may write neither.

    Others may write a folder with the sticky bit, as ``/tmp``: they can't replace what is ours there. The same holds for the
    place of a symbolic link, and for where it leads.

    Raises
    ------
    UntrustedFileError
        Somebody else may have written it.
    OSError
        It is not there, no regular file, too large, or can't be read.
    ValueError
        It is no UTF-8, or the path has a NUL.
    """
    place, real = Path(path).absolute(), Path(os.path.realpath(path))
    _check_folder(place.parent)
    _check_owner(os.lstat(place), f"{str(place)!r}")
    _check_folder(real.parent)
    # NONBLOCK: to open a pipe would wait for its writer
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise OSError(0, "no regular file" if not stat.S_ISREG(status.st_mode) else "far too large")
        _check_owner(status, f"{str(real)!r}")
        _check_writers(status, f"{str(real)!r}")
        return file.read()


def _check_folder(folder: Path) -> None:
    status = folder.stat()
    _check_owner(status, f"its folder {str(folder)!r}")
    if not status.st_mode & stat.S_ISVTX:
        _check_writers(status, f"its folder {str(folder)!r}")


def _check_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedFileError(
            f"{what} belongs to another user (uid {status.st_uid}; expected {os.geteuid()} or root). "
            "Fix: a copy in a folder of yours"
        )


def _check_writers(status: os.stat_result, what: str) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(
            f"others may write {what} (mode {stat.S_IMODE(status.st_mode):04o}). Fix: chmod go-w, or a copy in a folder of yours"
        )
