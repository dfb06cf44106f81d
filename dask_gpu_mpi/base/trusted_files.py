"""Files that nobody can have written but this user or root."""

from __future__ import annotations

import errno
import os
import stat

from .owners import is_ours, name_of, others_may_write, unmapped_root
from .safe_paths import MOST_LINKS, PlantedError, link_target, located, open_regular

__all__ = ["UntrustedFileError", "read_text", "read_trusted"]

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
    place = os.fspath(path)
    try:
        for _ in range(MOST_LINKS):
            with located(place, follow=False) as (folder, name):
                _check_folder(folder)
                target = link_target(folder, name)
                if target is None:
                    return read_text(open_regular(folder, name), check=True)
                place = os.path.join(name_of(folder), target)
    except PlantedError as error:
        raise UntrustedFileError(f"{error.strerror}. Fix: the path of the file itself") from None
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def read_text(descriptor: int, *, check: bool = False) -> str:
    """The text of an open file, which is closed; OSError where it is too large, UntrustedFileError as `read_trusted`."""
    with open(descriptor, "rb") as file:
        if check:
            what = repr(name_of(descriptor))
            _check_owner(os.fstat(descriptor), what)
            _check_writers(descriptor, what)
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, "far too large")
    return content.decode("utf-8")


def _check_folder(folder: int) -> None:
    status = os.fstat(folder)
    what = f"its folder {name_of(folder)!r}"
    sticky = bool(status.st_mode & stat.S_ISVTX)
    if not (sticky and status.st_uid == unmapped_root()):
        _check_owner(status, what)
    if not sticky:
        _check_writers(folder, what)


def _check_owner(status: os.stat_result, what: str) -> None:
    if not is_ours(status):
        raise UntrustedFileError(
            f"{what} belongs to another user (uid {status.st_uid}; expected {os.geteuid()} or root). "
            "Fix: a copy in a folder of yours"
        )


def _check_writers(descriptor: int, what: str) -> None:
    if others_may_write(descriptor):
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        raise UntrustedFileError(
            f"others may write {what} (mode {mode:04o}). Fix: chmod go-w, or a copy in a folder of yours"
        )
