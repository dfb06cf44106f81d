"""The directory in which a rank's workers put their files: where it is, on what file system, and whether it can be written."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dask_gpu_mpi.base.files import is_ours, located, make_folder, unmapped_root
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.cgroups import parse_mountinfo
from dask_gpu_mpi.options.dask_config import import_config

__all__ = [
    "Scratch",
    "exposed_folder",
    "exposed_text",
    "filesystem_of",
    "inspect_scratch",
    "local_directory",
    "make_scratch",
    "name_error",
    "remove_scratch",
]

MOUNTS = Path("/proc/self/mountinfo")
#: What is written to see that it can be: more than a block, so that a full quota shows.
_PROBE = 1 << 20
#: Seconds to go on trying where nothing can be removed any more.
STUCK = 1.0


@dataclass(frozen=True)
class Scratch:
    """What a rank found at its local directory."""

    #: The directory.
    path: str
    #: Its type as the kernel calls it, such as ``"ext4"`` or ``"nfs4"``; empty: unknown.
    filesystem: str = ""
    #: Where that file system is mounted.
    mount: str = ""
    #: Bytes that this user may still write; -1: unknown.
    free: int = -1
    #: Why it can't be written; empty: it can.
    error: str = ""
    #: A ``TMPDIR`` that Python passes over, since it can't be written.
    ignored: str = ""
    #: The folder in which everyone may replace it; empty: there is none.
    exposed: str = ""


def local_directory(option: str | None) -> str:
    """The directory that the workers would use: the option, Dask's ``temporary-directory``, or Python's choice (``TMPDIR``)."""
    return str(option or import_config().get("temporary-directory", None) or tempfile.gettempdir())


def name_error(path: str) -> str:
    """Why Dask can't use a directory of this name, which it sends as UTF-8; empty: it can.

    Python writes bytes of a name that it can't decode as lone surrogates (PEP 383), and under LC_ALL=C with PYTHONUTF8=0 that is
    every letter but ASCII.
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


def inspect_scratch(path: str, tmpdir: str | None = None, mounts: Path = MOUNTS) -> Scratch:
    """Write a megabyte to a directory, remove it again, and return what is known about the place.

    Parameters
    ----------
    path : str
        The directory; made if missing, as the workers would.
    tmpdir : str, optional
        ``TMPDIR`` where the directory comes from it, to notice when Python does not follow it.
    mounts : Path
        The process's ``mountinfo`` (proc(5)).
    """
    if error := name_error(path):
        return Scratch(path, error=error)
    path = os.path.abspath(path)
    ignored = tmpdir if tmpdir and os.path.abspath(tmpdir) != path else ""
    free = -1
    try:
        make_folder(path)
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
        kind, mount = filesystem_of(os.path.realpath(path), mounts.read_text(errors="replace"))
    except OSError:
        kind = mount = ""
    return Scratch(path, kind, mount, free, error, ignored, "" if error else exposed_folder(path))


def filesystem_of(path: str, mountinfo: str) -> tuple[str, str]:
    """Find the file system that a path lies on.

    Parameters
    ----------
    path : str
        Absolute, without symbolic links.
    mountinfo : str
        The text of ``/proc/self/mountinfo`` (proc(5)).

    Returns
    -------
    (type, mount point)
        Of the mount with the longest fitting mount point; of several on one point the last, which hides the others. Empty
        texts: none fits.
    """
    best = ("", "")
    for mount in parse_mountinfo(mountinfo):
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and len(mount.point) >= len(best[1]):
            best = (mount.kind, mount.point)
    return best


def exposed_folder(path: str) -> str:
    """The folder, of a path or around it, in which every user of the node may put something else in the place of what is ours.

    That is one that everyone may write, and which has no sticky bit or belongs to a stranger. Empty: there is none, or nobody
    else gets there.
    """
    real = Path(os.path.realpath(path))
    for folder in (*reversed(real.parents), real):
        try:
            status = folder.stat()
        except OSError:
            return ""
        ours = is_ours(status) or status.st_uid == unmapped_root()
        if status.st_mode & stat.S_IWOTH and not (status.st_mode & stat.S_ISVTX and ours):
            return str(folder)
        if ours and not status.st_mode & (stat.S_IXOTH | stat.S_IXGRP):
            return ""
    return ""


def exposed_text(folder: str) -> str:
    """What is wrong with such a folder."""
    return f"every user of the node may replace the workers' files in {folder!r}, which everyone may write, and run code by that"


def make_scratch(path: str) -> None:
    """Make an agent's directory, readable for nobody else, and the directory around it if that is missing.

    Raises
    ------
    InputError
        It can't be written there, or Dask can't use its name.
    """
    parent = os.path.dirname(path)
    if wrong := name_error(parent):
        raise InputError(
            f"the local directory {parent!r} can't be used: {wrong}",
            fix="give another one with local_directory (--local-directory)",
        )
    try:
        with located(path, make=True, follow=False) as (folder, name):
            os.mkdir(name, 0o700, dir_fd=folder)
    except OSError as error:
        raise InputError(
            f"the local directory {parent!r} can't be written ({error.strerror})",
            fix="give a writable one of that node with local_directory (--local-directory)",
        ) from None


def remove_scratch(path: str, *, within: float, settle: float = 0.0) -> None:
    """Remove an agent's directory, in which processes that are just ending may still be writing.

    Parameters
    ----------
    path : str
        The directory.
    within : float
        Seconds that it may take. Where nothing more can be removed, `STUCK` seconds are enough.
    settle : float
        Seconds after which to check once more whether it was made again.
    """
    limit = time.monotonic() + within
    stuck = time.monotonic() + STUCK
    while os.path.exists(path) and time.monotonic() < min(limit, stuck):
        if _remove_tree(path, limit):
            stuck = time.monotonic() + STUCK
        time.sleep(0.02 if os.path.exists(path) else settle)


def _remove_tree(path: str, limit: float) -> bool:
    """Remove what can be removed until `limit` (monotonic seconds); whether there was anything.

    Not `shutil.rmtree`, which can't be stopped: a slow file system takes minutes for what workers have spilled. By descriptors:
    where others may write the folder around it, one may have put a link to a folder of ours in its place.
    """
    removed = False
    with contextlib.suppress(OSError):  # it is gone
        for _, directories, files, folder in os.fwalk(path, topdown=False):
            for name in (*files, *directories):
                if time.monotonic() > limit:
                    return removed
                removed |= _remove_entry(name, folder)
    with contextlib.suppress(OSError):
        os.rmdir(path)
        removed = True
    return removed


def _remove_entry(name: str, folder: int) -> bool:
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.rmdir(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
        return True
    return False
