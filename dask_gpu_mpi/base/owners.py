"""Whose a file or folder is, and who else may write it."""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat

__all__ = ["is_ours", "name_of", "others_may_write", "unmapped_root"]


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
