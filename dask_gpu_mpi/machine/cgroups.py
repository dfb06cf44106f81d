"""The memory, cores and CPU time that limits and control groups (cgroups, version 1 and 2) leave this process.

Batch systems and containers limit a job by cgroups. Any ancestor may have a limit, so all are read, up to the mount point,
which in a container is its own group. `distributed.system` reads fewer of them. See cgroups(7), cgroup_namespaces(7), and the
kernel's admin-guide/cgroup-v1/memory and admin-guide/cgroup-v2.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")
#: Numbers of the system calls get_mempolicy and set_mempolicy by architecture, for which libc has no functions; and
#: linux/mempolicy.h.
_MEMPOLICY = {"x86_64": (239, 238), "aarch64": (236, 237), "ppc64le": (260, 261)}
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    #: The directory of the file system that is mounted; of a cgroup hierarchy, the group.
    root: str
    point: str
    #: Type of the file system, as the kernel calls it: ``"ext4"``, ``"nfs4"``, ``"cgroup2"``.
    kind: str
    #: Options of the file system itself; of cgroups version 1, the controllers.
    options: tuple[str, ...] = ()


def parse_mountinfo(text: str) -> Iterator[Mount]:
    r"""Read ``/proc/self/mountinfo`` (proc(5)), in its order; invalid lines are ignored.

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


def host_memory(proc: Path = PROC, physical: int | None = None, resident: int | None = None) -> int:
    """Bytes of memory that this process may use: the least of physical memory, ``RLIMIT_RSS`` and all cgroups; 0: unknown.

    The kernel does not enforce ``RLIMIT_RSS``. Slurm passes ``--mem`` by it if no cgroup does, and distributed respects it as
    well.
    """
    limits = [
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if physical is None else physical,
        resource.getrlimit(resource.RLIMIT_RSS)[1] if resident is None else resident,
    ]
    for group in _groups(proc, "memory"):
        # above "high" the kernel takes pages away, which slows the processes down
        for file in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            # "no limit" is "max" in v2, which is no number, and 2**63 less a page in v1, which is no minimum
            limits += _numbers(_read(group / file))
        # has the limits of ancestors that a container hides, too
        limits += _numbers(
            "".join(re.findall(r"^hierarchical_memory_limit (\d+)$", _read(group / "memory.stat"), re.M))
        )
    return min((limit for limit in limits if limit > 0), default=0)


def allowed_cpus(proc: Path = PROC) -> tuple[int, ...]:
    """The cores that this process may use: its affinity mask, cut to its cgroups' cpusets."""
    cpus = set(os.sched_getaffinity(0))
    for group in _groups(proc, "cpuset"):
        for file in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            # An empty intersection would mean that the files belong to another group.
            cpus = cpus & parse_cpu_list(_read(group / file)) or cpus
    return tuple(sorted(cpus))


def cpu_quota(proc: Path = PROC) -> float | None:
    """The CPU time that this process and its siblings may use, in cores, such as 2.5; None: no quota.

    Containers have such limits (``docker run --cpus``, Kubernetes' ``limits.cpu``), and their affinity masks have all cores.
    """
    quotas = []
    for group in _groups(proc, "cpu"):
        # v2: "QUOTA PERIOD" in microseconds, in v1 a file for each; "max" and -1 are "no quota"
        pair = _read(group / "cpu.max").split() or [
            _read(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if len(numbers := [*map(_numbers, pair)]) == 2 and all(number and number[0] for number in numbers):
            quotas.append(numbers[0][0] / numbers[1][0])
    return min(quotas, default=None)


def parse_cpu_list(text: str) -> set[int]:
    """Read the kernel's list of cores; anything else is the empty set.

    >>> sorted(parse_cpu_list("0-3,8"))
    [0, 1, 2, 3, 8]
    >>> parse_cpu_list("all")
    set()
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        if found is None:
            return set()
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cpus


def _groups(proc: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's groups and of all their mounted ancestors."""
    mounts = [
        mount for mount in parse_mountinfo(_read(proc / "mountinfo")) if mount.kind in ("cgroup", "cgroup2")
    ]
    # cgroups(7): "ID:CONTROLLERS:PATH"; version 2 has no controllers here
    for line in _read(proc / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")
        if not colon:
            continue
        controllers = set(filter(None, names.split(",")))
        if controllers and controller not in controllers:
            continue
        for mount in mounts:
            if mount.kind == ("cgroup" if controllers else "cgroup2") and (
                not controllers or controllers <= set(mount.options)
            ):
                yield from _ancestors(mount, path)


def _ancestors(mount: Mount, path: str) -> Iterator[Path]:
    root, group = PurePosixPath(mount.root), PurePosixPath(path)
    # Only the mount point is known if the mount or the process is outside the root of the cgroup namespace (".."), or if a
    # container sees the host's path but has its own group mounted.
    known = ".." not in (*root.parts, *group.parts) and group.is_relative_to(root)
    relative = group.relative_to(root) if known else PurePosixPath()
    point = Path(mount.point)
    yield point
    for depth in range(len(relative.parts)):
        yield point.joinpath(*relative.parts[: depth + 1])


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except (OSError, ValueError):  # ValueError: a mount point with a NUL
        return ""


def _numbers(text: str) -> list[int]:
    return [int(text)] if re.fullmatch(r"\s*[0-9]{1,20}\s*", text) else []


def prefer_memory_of(node: int) -> bool:
    """Let this thread, and all that it starts from now on, use the memory of this NUMA node while it has some.

    False: the user has set a policy, the kernel or a container refuses it, or there is no such node.
    """
    get, put = _MEMPOLICY.get(os.uname().machine, (None, None))
    if get is None:
        return False
    libc, none, now = ctypes.CDLL(None), ctypes.c_ulong(0), ctypes.c_int(-1)
    libc.syscall(get, ctypes.byref(now), None, none, None, none)
    if now.value != _MPOL_DEFAULT:
        return False
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    # the kernel reads one bit less
    return bool(libc.syscall(put, _MPOL_PREFERRED, mask, ctypes.c_ulong(1025)) == 0)
