"""The mounts that this process sees: how ``/proc/self/mountinfo`` is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mount", "parse_mountinfo"]


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    #: The directory of the file system that is mounted; of a control group hierarchy, which group.
    root: str
    #: Where it is mounted.
    point: str
    #: Type of the file system, as the kernel calls it: ``"ext4"``, ``"nfs4"``, ``"cgroup2"``.
    kind: str
    #: Options of the file system itself; of control groups, version 1, the controllers.
    options: tuple[str, ...] = ()


def parse_mountinfo(text: str) -> Iterator[Mount]:
    r"""Read ``/proc/self/mountinfo`` (proc(5)), in its order; lines that are none are passed over.

    >>> line = r"31 23 0:28 / /home/fast\040disk rw shared:9 - xfs /dev/sdb1 rw,noquota"
    >>> next(parse_mountinfo(line))
    Mount(root='/', point='/home/fast disk', kind='xfs', options=('rw', 'noquota'))
    """
    # "31 23 0:28 ROOT POINT OPTIONS [TAGS...] - TYPE SOURCE SUPEROPTIONS"
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, system = before.split(), after.split()
        if len(fields) < 5 or not system:
            continue
        root, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), field) for field in fields[3:5])
        yield Mount(root, point, system[0], tuple(system[2].split(",")) if len(system) > 2 else ())
