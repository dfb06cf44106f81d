"""Files that nobody can have written but this user or root."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

__all__ = ["UntrustedFileError", "read_trusted"]

#: Bytes of the largest file that is read.
LARGEST = 1 << 24


class UntrustedFileError(Exception):
    """Somebody else may have written the file; the message says who or how, and how to mend it."""


def read_trusted(path: str | os.PathLike[str]) -> str:
    """Text of a file, if it is this user's or root's, and so is its folder, and others may write neither.

    Others may write a folder with the sticky bit, as ``/tmp``: they can't replace what is ours there. A group that has this user
    alone counts as the user. The same holds for the place of a symbolic link, and for where it leads.

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
    sticky = bool(status.st_mode & stat.S_ISVTX)
    if not (sticky and status.st_uid == _unmapped_root()):
        _check_owner(status, f"its folder {str(folder)!r}")
    if not sticky:
        _check_writers(status, f"its folder {str(folder)!r}")


def _check_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedFileError(
            f"{what} belongs to another user (uid {status.st_uid}; expected {os.geteuid()} or root). "
            "Fix: a copy in a folder of yours"
        )


def _check_writers(status: os.stat_result, what: str) -> None:
    others = status.st_mode & stat.S_IWOTH
    group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if others or group:
        raise UntrustedFileError(
            f"others may write {what} (mode {stat.S_IMODE(status.st_mode):04o}). Fix: chmod go-w, or a copy in a folder of yours"
        )


def _is_own_group(gid: int) -> bool:
    """Whether it is the group that many systems make for each user, with the user's name."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    )


def _unmapped_root() -> int | None:
    """What root's files seem to belong to in a container in which it does not exist (user_namespaces(7)); None: root exists."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        if any(int(line.split()[0]) == 0 for line in lines):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError, IndexError):
        return None
