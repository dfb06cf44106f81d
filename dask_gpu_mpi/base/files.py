"""Reading and writing files so that no other user can lead us elsewhere by a planted link, pipe or file.

`read_trusted`, `open_to_append`, `replace` and `remove` are for all modules that have files in folders which others may write.
They find their file by `located`.

A log in a folder that others may write would otherwise be appended to the file of ours to which a link there leads. The kernel
has rules against that (``fs.protected_symlinks``), but only for folders with the sticky bit, and a site may have disabled them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator

Path = str | os.PathLike[str]

#: Bytes of the largest file that is read.
LARGEST = 1 << 24
#: Symbolic links of one path, as many as the kernel's.
MOST_LINKS = 40
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: NONBLOCK: otherwise opening a pipe would wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class PlantedError(OSError):
    """Another user may have planted a link that is not followed, or a file that is not written to; `strerror` has the details."""


class UntrustedFileError(Exception):
    """Another user may have written the file; the message has the reason and the fix."""


# Reading.


def read_trusted(path: Path) -> str:
    """Read a text file that only this user or root can have written; otherwise raises an UntrustedFileError.

    Others may write neither the file nor its folder, unless the folder has the sticky bit, as ``/tmp``: they can't replace our
    files there. The same applies to the folder of a symbolic link, and its target. Also raises OSError, ValueError (not UTF-8).
    """
    try:
        with located(path, check=_check_folder) as (folder, name):
            descriptor = open_regular(folder, name)
            with open(descriptor, "rb") as file:
                what = repr(_name_of(descriptor))
                _check_owner(os.fstat(descriptor), what)
                _check_writers(descriptor, what)
                content = file.read(LARGEST + 1)
    except PlantedError as error:
        raise UntrustedFileError(f"{error.strerror}. Fix: the path of the file itself") from None
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, "far too large")
    return content.decode("utf-8")


def open_regular(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file in a folder; raises OSError if it is not a regular file."""
    descriptor = os.open(name, flags | _FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return descriptor


def _check_folder(folder: int) -> None:
    status = os.fstat(folder)
    what = f"its folder {_name_of(folder)!r}"
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


# Writing. All of these raise OSError, and PlantedError as `located`.


def open_to_append(path: Path, *, readable: bool = False) -> int:
    """A descriptor to append to a file, which only this user can read from then on; makes missing folders."""
    flags = os.O_APPEND | (os.O_RDWR if readable else os.O_WRONLY)
    with located(path, make=True) as (folder, name):
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        descriptor = open_regular(folder, name, flags)
        try:
            status = os.fstat(descriptor)
            if others_may_write(folder):
                if not is_ours(status):
                    raise PlantedError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})")
                if status.st_nlink > 1:  # it may be another file of ours
                    raise PlantedError(errno.EMLINK, "it has a second name, and others may write its folder")
            if status.st_uid == os.geteuid() and status.st_mode & 0o077:
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o700)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, whole or not at all, in place of the one that may be there; the umask applies to `mode`."""
    with _replacement(path, mode) as (folder, name, temporary, descriptor):
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def check_replaceable(path: Path) -> None:
    """Raise the error that `replace` would."""
    with _replacement(path, 0o600) as (_, _, _, descriptor):
        os.close(descriptor)


@contextlib.contextmanager
def _replacement(path: Path, mode: int) -> Iterator[tuple[int, str, str, int]]:
    """A new file with a name that nobody can guess, removed at the end: its folder, its future name, its name, a descriptor."""
    # /dev/stdout, for instance: the rest of the output would go to a file without a name
    if _is_output(path):
        raise OSError(errno.EINVAL, "the output of this process goes there", path)
    with located(path) as (folder, name):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(found):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(found):  # such as /dev/null, which root would replace
                raise OSError(errno.EINVAL, "not a regular file", path)
        temporary = f".dgm-{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            yield folder, name, temporary, descriptor
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)


def _is_output(path: Path) -> bool:
    """Whether standard output or standard error of this process goes to this file."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return True
    return False


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError), located(path, follow=False) as (folder, name):
        os.unlink(name, dir_fd=folder)


# Paths. One folder is opened after the other, so that a folder that has been checked can't be exchanged.


@contextlib.contextmanager
def located(
    path: Path, *, make: bool = False, follow: bool = True, check: Callable[[int], None] | None = None
) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder of a path, and the name of the file in it, which may be missing.

    A symbolic link is followed if it belongs to this user or root, or if only the link's owner may write its folder; otherwise
    this raises a PlantedError. `make`: missing folders. `follow`: a link with that name itself. `check` is called with the
    folder of the file, and of each such link.
    """
    try:
        folder, name = _walk(os.fspath(path), make, follow, check)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        yield folder, name
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and missing ones around it; raises as `located`."""
    try:
        with located(os.path.join(path, "file"), make=True, follow=False):
            pass
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def _walk(path: str, make: bool, follow: bool, check: Callable[[int], None] | None) -> tuple[int, str]:
    """As `located`: open one folder of the path after the other, and replace each link by the parts of its target."""
    # no abspath: the working directory may have been deleted, and ".." of a link is another folder
    rest = _names(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    folder, links = os.open("/", _FOLDER), 0
    try:
        while rest:
            name = rest.pop()
            is_file = not rest
            if is_file and check is not None:
                check(folder)
            target = _link_target(folder, name) if follow or not is_file else None
            if target is None and is_file:
                return folder, name
            if target is None:
                inner = _enter(folder, name, make)
            else:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                rest += _names(target)
                inner = os.open("/", _FOLDER) if target.startswith("/") else os.dup(folder)
            os.close(folder)
            folder = inner
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except BaseException:
        os.close(folder)
        raise


def _names(path: str) -> list[str]:
    """The parts of a path, the last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _enter(folder: int, name: str, make: bool) -> int:
    """A descriptor of a folder in a folder; `make`: make it if it is missing."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(name, 0o755, dir_fd=folder)
        return os.open(name, _FOLDER, dir_fd=folder)


def _link_target(folder: int, name: str) -> str | None:
    """The target of the link with this name; None: there is none. Raises a PlantedError if another user may have made it."""
    try:
        link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            return None
        if not is_ours(status) and (status.st_uid != os.fstat(folder).st_uid or others_may_write(folder)):
            raise PlantedError(
                errno.ELOOP,
                f"the symbolic link {os.path.join(_name_of(folder), name)!r} belongs to another user (uid {status.st_uid})",
            )
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _name_of(descriptor: int) -> str:
    """The path of an open file or folder."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


# The owner of a file or folder, and others who may write it.


def is_ours(status: os.stat_result) -> bool:
    """Whether it belongs to this user or to root."""
    return status.st_uid in (0, os.geteuid())


def others_may_write(file: int | Path) -> bool:
    """Whether the mode or an ACL lets anybody write but the owner, and a group with this user as its only member.

    `file`: a descriptor or a path.
    """
    status = os.stat(file)
    if status.st_mode & stat.S_IWOTH:
        return True
    # with an ACL the bits of the group are the mask of all its entries (acl(5))
    return bool(status.st_mode & stat.S_IWGRP) and not (_is_own_group(status.st_gid) and not _has_acl(file))


def unmapped_root() -> int | None:
    """The owner that root's files seem to have in a container without root (user_namespaces(7)); None: there is a root."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            if any(int(line.split()[0]) == 0 for line in file):
                return None
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError, IndexError):
        return None


@functools.cache  # a site's list of accounts may be long, and come over the network
def _is_own_group(gid: int) -> bool:
    """Whether it is the group that many systems make for each user, with the user's name and no other member."""
    uid = os.geteuid()
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    if (group.gr_gid, group.gr_name) != (user.pw_gid, user.pw_name) or set(group.gr_mem) - {user.pw_name}:
        return False
    accounts = pwd.getpwall()
    if all(account.pw_uid != uid for account in accounts):
        return uid == gid  # a directory that lists no accounts (sssd): by the convention of such groups
    return all(account.pw_uid == uid for account in accounts if account.pw_gid == gid)


def _has_acl(file: int | Path) -> bool:
    """Whether there are rights of other users or groups than the mode has."""
    # by path, since a descriptor of O_PATH has no attributes
    path = f"/proc/self/fd/{file}" if isinstance(file, int) else file
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:
        return False
