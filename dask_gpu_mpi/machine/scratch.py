"""The directory for the files of a rank's workers: its place and file system, whether it can be written, and its end."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dask_gpu_mpi.base.files import is_ours, located, others_may_write, unmapped_root
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.cgroups import parse_mountinfo
from dask_gpu_mpi.options.convert import import_config

MOUNTS = Path("/proc/self/mountinfo")
#: Bytes that are written as a test: more than a block, so that a full quota is detected.
_PROBE = 1 << 20
#: Seconds to continue trying when nothing can be removed any more.
STUCK = 1.0


@dataclass(frozen=True)
class Scratch:
    """A rank's local directory."""

    path: str
    #: Its type as the kernel calls it, such as ``"ext4"`` or ``"nfs4"``; empty: unknown.
    filesystem: str = ""
    #: Where that file system is mounted.
    mount: str = ""
    #: Bytes that this user may still write; -1: unknown.
    free: int = -1
    #: The reason why it can't be written; empty: it can.
    error: str = ""
    #: A ``TMPDIR`` that Python ignores, since it can't be written.
    ignored: str = ""


def local_directory(option: str | None) -> str:
    """The workers' directory: the option, Dask's ``temporary-directory``, or Python's choice (``TMPDIR``)."""
    return str(option or import_config().get("temporary-directory", None) or tempfile.gettempdir())


def name_error(path: str) -> str:
    """The reason why Dask, which sends the name as UTF-8, can't use this directory; empty: it can.

    Python decodes other bytes as lone surrogates (PEP 383); under LC_ALL=C with PYTHONUTF8=0 these are all but ASCII.
    """
    try:
        os.fsencode(path)
        path.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        return f"its name is not valid {encoding}" + (
            "" if encoding == "utf-8" else "; PYTHONUTF8=1 may help"
        )
    return ""


def inspect_scratch(path: str, tmpdir: str | None = None) -> Scratch:
    """Test a directory by writing a megabyte.

    `tmpdir` is ``TMPDIR``, if the directory comes from it, to detect that Python ignores it.
    """
    path = os.path.abspath(path)
    ignored = tmpdir if tmpdir and os.path.abspath(tmpdir) != path else ""
    free, error = -1, ""
    try:
        with tempfile.TemporaryFile(prefix="dgm-check-", dir=path) as file:
            file.write(b"\0" * _PROBE)
            file.flush()
            os.fsync(file.fileno())
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        if status.f_files and not status.f_favail:
            error = "no inode is left for new files"
    except OSError as failure:
        error = failure.strerror or str(failure)
    try:
        kind, mount = filesystem_of(os.path.realpath(path), MOUNTS.read_text(errors="replace"))
    except OSError:
        kind = mount = ""
    return Scratch(path, kind, mount, free, error, ignored)


def filesystem_of(path: str, mountinfo: str) -> tuple[str, str]:
    """The type and mount point of the file system of an absolute path without symbolic links; empty texts: unknown.

    Of several mounts on one point the last hides the others.
    """
    best = ("", "")
    for mount in parse_mountinfo(mountinfo):
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and len(mount.point) >= len(best[1]):
            best = (mount.kind, mount.point)
    return best


def exposed_folder(path: str) -> str:
    """The first folder on a path in which other users may replace our files; empty: none, or others can't reach it.

    It belongs to another user, or everyone or a shared group may write it and it has no sticky bit.
    """
    real = Path(os.path.realpath(path))
    for folder in (*reversed(real.parents), real):
        try:
            status = folder.stat()
        except OSError:
            return ""
        ours = is_ours(status) or status.st_uid == unmapped_root()
        if not ours or (others_may_write(folder) and not status.st_mode & stat.S_ISVTX):
            return str(folder)
        if not status.st_mode & (stat.S_IXOTH | stat.S_IXGRP):
            return ""
    return ""


def exposed_text(folder: str) -> str:
    """The problem with such a folder."""
    return f"other users may replace the workers' files in {folder!r}, which they may write, and run code by that"


def exposed_fix(folder: str, another: str) -> str:
    """The fix; `another`: the other one, if the sticky bit would not help, since it does not bind the folder's owner."""
    with contextlib.suppress(OSError):
        if not is_ours(os.stat(folder)):
            return another
    return f"chmod +t {folder}, or {another}"


def make_scratch(path: str) -> None:
    """Make an agent's directory, which only this user may read, and missing ones around it; raises an InputError."""
    parent = os.path.dirname(path)
    if wrong := name_error(parent):
        raise InputError(
            f"the local directory {parent!r} can't be used: {wrong}",
            fix="give another one with local_directory (--local-directory)",
            what="scratch",
        )
    try:
        with located(path, make=True, follow=False) as (folder, name):
            os.mkdir(name, 0o700, dir_fd=folder)
    except OSError as error:
        raise InputError(
            f"the local directory {parent!r} can't be written ({error.strerror})",
            fix="give a writable one of that node with local_directory (--local-directory; variables: DGM_SCRATCH, TMPDIR)",
            what="scratch",
        ) from None


def remove_scratch(path: str, *, within: float, settle: float = 0.0) -> None:
    """Remove an agent's directory, while processes that are just ending may still write to it.

    It takes at most `within` seconds, or `STUCK` seconds in which nothing could be removed. `settle` seconds after the removal it
    checks again, since a process may have made the directory once more.
    """
    limit = time.monotonic() + within
    stuck = time.monotonic() + STUCK
    while os.path.exists(path) and time.monotonic() < min(limit, stuck):
        removed = remove_contents(path, limit)
        with contextlib.suppress(OSError):
            os.rmdir(path)
            removed = True
        if removed:
            stuck = time.monotonic() + STUCK
        time.sleep(0.02 if os.path.exists(path) else settle)


def remove_contents(path: str, limit: float = math.inf) -> bool:
    """Remove entries of a folder until `limit` (monotonic seconds); whether anything was removed.

    `shutil.rmtree` can't be stopped, and a slow file system takes minutes for spilled data. `os.fwalk` works by descriptors: if
    others may write the parent folder, one may have put a link to another folder of ours in its place.
    """
    removed = False
    with contextlib.suppress(OSError):  # it is gone already
        for _, directories, files, folder in os.fwalk(path, topdown=False):
            with contextlib.suppress(OSError):
                os.fchmod(folder, 0o700)  # its owner can't remove entries of a folder that is not writable
            for name in (*files, *directories):
                if time.monotonic() > limit:
                    return removed
                removed |= _remove_entry(name, folder)
    return removed


def _remove_entry(name: str, folder: int) -> bool:
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.rmdir(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
        return True
    return False
