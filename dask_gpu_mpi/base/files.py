"""Files: whose they are, which are read as the user's, and reading and writing them without following planted links."""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator

# Whose a file or folder is, and who else may write it.


def is_ours(status: os.stat_result) -> bool:
    """Whether it is this user's or root's."""
    return status.st_uid in (0, os.geteuid())


def others_may_write(descriptor: int) -> bool:
    """Whether the mode or an ACL of a file or folder lets anybody write but its owner, and a group that has this user alone."""
    status = os.fstat(descriptor)
    if status.st_mode & stat.S_IWOTH:
        return True
    # with an ACL the bit is the mask of all whom it names (acl(5))
    return bool(status.st_mode & stat.S_IWGRP) and not (
        _is_own_group(status.st_gid) and not _has_acl(descriptor)
    )


def unmapped_root() -> int | None:
    """What root's files seem to belong to in a container in which it does not exist (user_namespaces(7)); None: root exists."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            if any(int(line.split()[0]) == 0 for line in file):
                return None
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError, IndexError):
        return None


def name_of(descriptor: int) -> str:
    """The path of an open file or folder, for messages."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _is_own_group(gid: int) -> bool:
    """Whether it is the group that many systems make for each user, with the user's name, and nobody else is in it."""
    return _is_group_of(gid, os.geteuid())


@functools.cache
def _is_group_of(gid: int, uid: int) -> bool:
    """The answer is kept: a site's list of accounts may be long, and come over the network."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    if (group.gr_gid, group.gr_name) != (user.pw_gid, user.pw_name) or set(group.gr_mem) - {user.pw_name}:
        return False
    accounts = pwd.getpwall()
    if all(
        account.pw_uid != uid for account in accounts
    ):  # a directory that lists no accounts (sssd): by the convention
        return uid == gid
    return all(account.pw_uid == uid for account in accounts if account.pw_gid == gid)


def _has_acl(descriptor: int) -> bool:
    try:
        # not by the descriptor: one of O_PATH has no attributes
        return bool(os.getxattr(f"/proc/self/fd/{descriptor}", "system.posix_acl_access"))
    except OSError:
        return False


# Files that nobody can have written but this user or root.

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


# Paths that no other user can lead elsewhere: which symbolic links are followed, and how files are opened, made and removed.
#
# A log in a folder that others may write would else be appended to whatever of ours a link there names. The kernel has rules
# against that (``fs.protected_symlinks``), for folders with the sticky bit only, and a site may have switched them off.

Path = str | os.PathLike[str]

#: Symbolic links of one path, as many as the kernel's.
MOST_LINKS = 40
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: NONBLOCK: to open a pipe would wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class PlantedError(OSError):
    """Another user may have put there what is not followed, or not written to; `strerror` says what."""


@contextlib.contextmanager
def located(
    path: Path, *, make: bool = False, follow: bool = True, descriptors: bool = False
) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder of a path, and the name of the file in it, which need not be there.

    A symbolic link is followed if it belongs to this user or root, or if its folder is one that nobody but the link's owner may
    write.

    Parameters
    ----------
    path : str or PathLike
        What to look for.
    make : bool
        Make the folders that are missing.
    follow : bool
        Whether a link of that name itself is followed.
    descriptors : bool
        Whether a descriptor of this process, such as ``/dev/stdout`` is, counts as the file; else what it leads to.

    Raises
    ------
    PlantedError
        Another user may have made a link on the way.
    OSError
        A folder is missing, or none, or may not be searched.
    """
    try:
        folder, name = _walk(path, make, to_file=True, follow=follow, descriptors=descriptors)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        yield folder, name
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make a folder and those around it, where they are missing; raises as `located`."""
    try:
        os.close(_walk(path, make=True, to_file=False, follow=True)[0])
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def open_to_append(path: Path, *, make: bool = False, readable: bool = False) -> int:
    """A descriptor of the file, at whose end is written: for this user alone, even if others could read what is there.

    Raises
    ------
    PlantedError
        Another user may have put there what has that name.
    OSError
        It can't be written.
    """
    flags = os.O_APPEND | (os.O_RDWR if readable else os.O_WRONLY)
    with located(path, make=make) as (folder, name):
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        descriptor = open_regular(folder, name, flags)
        try:
            status = os.fstat(descriptor)
            if others_may_write(folder):
                if not is_ours(status):
                    raise PlantedError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})")
                if status.st_nlink > 1:  # of a file of ours that is something else
                    raise PlantedError(errno.EMLINK, "it has a second name, and others may write its folder")
            if status.st_uid == os.geteuid() and status.st_mode & 0o077:
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o700)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def open_regular(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file in a folder; OSError where it is no regular file."""
    descriptor = os.open(name, flags | _FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", name)
    return descriptor


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, whole or not at all, in place of the one that may be there.

    Parameters
    ----------
    mode : int
        Of the file, less the umask.

    Raises
    ------
    PlantedError
        Another user may have made a link on the way.
    OSError
        It can't be written.
    """
    with _replacement(path, mode) as (folder, name, temporary, descriptor):
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def write(path: Path, content: bytes) -> None:
    """Write into the pipe, terminal or other device that is there, and replace anything else; raises as `replace`."""
    with located(path, descriptors=True) as (folder, name):
        descriptor = _stream(folder, name)
    if descriptor is None:
        replace(path, content, 0o666)
        return
    with open(descriptor, "wb") as stream:
        stream.write(content)


def _stream(folder: int, name: str) -> int | None:
    """A descriptor of what can't be replaced, but be written to; None: it is something else, or not there.

    Raises
    ------
    PlantedError
        Another user may have put it there.
    """
    if _is_descriptor(folder, name):
        return os.dup(int(name))
    try:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(found)
        if not (stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            return None
        if others_may_write(folder) and not is_ours(status):
            raise PlantedError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})")
        # not by its name, which may be another's by now
        return os.open(f"/proc/self/fd/{found}", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(found)


def _is_descriptor(folder: int, name: str) -> bool:
    return name.isdecimal() and name_of(folder) == f"/proc/{os.getpid()}/fd"


def check_replaceable(path: Path) -> None:
    """Raise what `replace` would."""
    with _replacement(path, 0o600) as (_, _, _, descriptor):
        os.close(descriptor)


@contextlib.contextmanager
def _replacement(path: Path, mode: int) -> Iterator[tuple[int, str, str, int]]:
    """A new file of a name that nobody can guess, gone at the end: its folder, its future name, its name, a descriptor."""
    with located(path) as (folder, name):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(found):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(found):  # such as /dev/null, which root would replace
                raise OSError(errno.EINVAL, "no regular file", path)
        temporary = f".dgm-{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            yield folder, name, temporary, descriptor
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)


def remove(path: Path) -> None:
    """Remove a file, if it is there; raises as `located`, or where it may not be removed."""
    with contextlib.suppress(FileNotFoundError), located(path, follow=False) as (folder, name):
        os.unlink(name, dir_fd=folder)


def link_target(folder: int, name: str) -> str | None:
    """Where the link of this name leads; None: it is none, or not there.

    Raises
    ------
    PlantedError
        Another user may have made it.
    """
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
                f"the symbolic link {os.path.join(name_of(folder), name)!r} belongs to another user (uid {status.st_uid})",
            )
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _walk(
    path: Path, make: bool, *, to_file: bool, follow: bool, descriptors: bool = False
) -> tuple[int, str]:
    """Open one folder after the other, so that what has been checked can't be exchanged."""
    path = os.fspath(path)
    # The working directory may be gone.
    rest = _names(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    folder, links = os.open("/", _FOLDER), 0
    try:
        while rest:
            name = rest.pop()
            if to_file and not rest:
                target = link_target(folder, name) if follow else None
                if target is None or (descriptors and _is_descriptor(folder, name)):
                    return folder, name
            else:
                inner, target = _enter(folder, name, make)
                if inner is not None:
                    os.close(folder)
                    folder = inner
            if target is not None:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith("/"):
                    os.close(folder)
                    folder = os.open("/", _FOLDER)
                rest += _names(target)
        if to_file:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return folder, ""
    except BaseException:
        os.close(folder)
        raise


def _names(path: str) -> list[str]:
    """What a path is made of, the last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _enter(folder: int, name: str, make: bool) -> tuple[int | None, str | None]:
    """A descriptor of the folder in a folder, or where the link of that name leads."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder), None
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):  # another rank's
            os.mkdir(name, 0o755, dir_fd=folder)
        return _enter(folder, name, make=False)
    except NotADirectoryError:
        target = link_target(folder, name)
        if target is None:
            raise
        return None, target
