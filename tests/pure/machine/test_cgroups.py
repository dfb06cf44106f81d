"""Memory limits and cores from made-up cgroup trees, and the mounts by which they are found."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from dask_gpu_mpi.machine.cgroups import (
    Mount,
    allowed_cpus,
    cpu_quota,
    host_memory,
    parse_mountinfo,
)
from support.jobs.processes import run_python

GIB = 1024**3
NO_LIMIT_V1 = "9223372036854771712"
Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Write cgroup, mountinfo and the limit files (path below the mount -> text); give the proc directory."""

    def make(cgroup: str, mounts: list[tuple[str, str, str]], files: dict[str, object]) -> Path:
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "cgroup").write_text(cgroup)
        lines = ["23 1 0:5 / /proc rw - proc proc rw", "cut short"]
        for number, (kind, root, options) in enumerate(mounts):
            point = tmp_path / "sys fs" / str(number)
            point.mkdir(parents=True)
            escaped = str(point).replace(" ", "\\040")
            lines.append(
                f"{40 + number} 31 0:28 {root} {escaped} rw,relatime shared:9 - {kind} {kind} {options}"
            )
        (proc / "mountinfo").write_text("\n".join(lines) + "\n")
        for name, text in files.items():
            file = tmp_path / "sys fs" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return proc

    return make


V2 = [("cgroup2", "/", "rw")]


def test_without_a_cgroup_physical_and_resident_memory_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory(tmp_path) == physical
    assert (host_memory(tmp_path, 64 * GIB), host_memory(tmp_path, 0)) == (64 * GIB, 0)
    # Slurm's word for --mem where it confines no memory
    for resident, memory in ((4 * GIB, 4 * GIB), (80 * GIB, 64 * GIB), (resource.RLIM_INFINITY, 64 * GIB)):
        assert host_memory(tmp_path, 64 * GIB, resident=resident) == memory
    monkeypatch.setattr(resource, "getrlimit", lambda what: {resource.RLIMIT_RSS: (-1, 1 << 20)}[what])
    assert host_memory(tmp_path) == 1 << 20
    monkeypatch.undo()
    # this machine
    assert 0 < host_memory() <= physical
    assert allowed_cpus()
    assert (cpu_quota() or 1) > 0


STEP = "0::/job/step\n"
V1 = [("cgroup", "/", "rw,cpu,cpuacct"), ("cgroup", "/", "rw,memory")]


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        # version 2: every ancestor counts
        (STEP, V2, {"0/job/step/memory.max": 8 * GIB}, 8 * GIB),
        (STEP, V2, {"0/job/step/memory.max": "max", "0/job/memory.max": 4 * GIB}, 4 * GIB),
        (STEP, V2, {"0/job/step/memory.max": 8 * GIB, "0/job/memory.max": 4 * GIB}, 4 * GIB),
        (STEP, V2, {"0/job/step/memory.max": "max"}, 64 * GIB),
        (STEP, V2, {"0/job/step/memory.max": 500 * GIB}, 64 * GIB),
        # above it the kernel takes pages away, and slows the processes down; distributed reads it as well
        (STEP, V2, {"0/job/step/memory.high": GIB, "0/job/step/memory.max": 2 * GIB}, GIB),
        (STEP, V2, {"0/job/memory.high": "max"}, 64 * GIB),
        (STEP, V2, {"0/other/memory.max": GIB}, 64 * GIB),
        # version 1
        ("5:cpu,cpuacct:/elsewhere\n4:memory:/slurm/job_7/step_0\n1:name=systemd:/\n", V1,
         {"0/elsewhere/memory.limit_in_bytes": "1", "1/slurm/job_7/step_0/memory.limit_in_bytes": NO_LIMIT_V1,
          "1/slurm/job_7/memory.limit_in_bytes": 16 * GIB, "1/memory.limit_in_bytes": NO_LIMIT_V1}, 16 * GIB),
        # limits of ancestors that a container hides
        ("4:memory:/\n", [("cgroup", "/", "rw,memory")],
         {"0/memory.limit_in_bytes": NO_LIMIT_V1,
          "0/memory.stat": f"cache 12\nhierarchical_memory_limit {3 * GIB}\nhierarchical_memsw_limit 5"}, 3 * GIB),
        # both
        ("4:memory:/a\n0::/b\n", [("cgroup", "/", "rw,memory"), ("cgroup2", "/", "rw")],
         {"0/a/memory.limit_in_bytes": 9 * GIB, "1/b/memory.max": 7 * GIB}, 7 * GIB),
    ],
)  # fmt: skip
def test_memory(
    tree: Tree, cgroup: str, mounts: list[tuple[str, str, str]], files: dict[str, object], expected: int
) -> None:
    assert host_memory(tree(cgroup, mounts, files), 64 * GIB) == expected


@pytest.mark.parametrize(
    ("path", "root", "below"),
    [
        ("/", "/", ""),  # a cgroup namespace of its own
        ("/docker/abc", "/docker/abc", ""),  # the host's path, the container's own group mounted
        ("/docker/abc", "/docker/xyz", ""),  # a mount that does not hold the process
        ("/../other", "/", ""),  # moved out of the namespace
        ("/", "/../..", ""),  # the host's hierarchy, mounted before the namespace was left
        ("/docker/abc/job", "/docker/abc", "job/"),
    ],
)
def test_in_a_container_the_mount_point_counts(tree: Tree, path: str, root: str, below: str) -> None:
    files = {f"0/{below}memory.max": str(6 * GIB), f"0/{below}cpu.max": "200000 100000"}
    proc = tree(
        f"\n4\n7:memory\n0::{path}\n", [("cgroup2", root, "rw")], files
    )  # after lines that name no group
    assert host_memory(proc, 64 * GIB) == 6 * GIB
    assert cpu_quota(proc) == 2.0


@pytest.mark.parametrize(
    ("cpuset", "cpus"),
    [("1-2,8-10", (1, 2, 9)), *((text, (0, 1, 2, 3, 9)) for text in ("64-127", "0-99999999999", "a-b"))],
)
def test_cpus_are_cut_to_the_cpuset(
    tree: Tree, cpuset: str, cpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to a foreign one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9}, raising=False)
    assert allowed_cpus(tree("0::/job\n", V2, {"0/job/cpuset.cpus.effective": cpuset})) == cpus


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"0/job/step/cpu.max": "250000 100000"}, 2.5),
        ({"0/job/step/cpu.max": "max 100000", "0/job/cpu.max": "400000 100000"}, 4.0),
        ({"0/job/step/cpu.max": "800000 100000", "0/job/cpu.max": "400000 100000"}, 4.0),
        ({"0/job/step/cpu.max": "max 100000"}, None),
        ({"0/other/cpu.max": "100000 100000"}, None),
        ({"0/job/cpu.max": "² ²"}, None),
        ({"0/job/cpu.max": f"{'9' * 5000} 1"}, None),
        ({"0/job/cpu.max": "100000 0"}, None),
        ({"0/job/cpu.weight": "100"}, None),  # a share of what others leave, not a limit
        ({}, None),
    ],
)
def test_the_cpu_quota_of_v2_is_the_smallest_on_the_path(
    tree: Tree, files: dict[str, str], cores: float | None
) -> None:
    assert cpu_quota(tree(STEP, V2, files)) == cores


@pytest.mark.parametrize(
    ("step", "job", "cores"),
    [
        (("150000", "100000"), ("-1", "100000"), 1.5),
        (("-1", "100000"), ("300000", "50000"), 6.0),
        (("-1", "100000"), ("-1", "100000"), None),
    ],
)
def test_the_cpu_quota_of_v1(
    tree: Tree, step: tuple[str, str], job: tuple[str, str], cores: float | None
) -> None:
    quotas = {
        "1/job/step": ("1", "1"),  # another controller's hierarchy
        "0/job/step": step,
        "0/job": job,
        "0": (None, "100000"),  # the root has no quota
    }
    names = ("quota", "period")
    files = {
        f"{place}/cpu.cfs_{name}_us": value
        for place, values in quotas.items()
        for name, value in zip(names, values, strict=True)
        if value
    }
    assert cpu_quota(tree("5:cpu,cpuacct:/job/step\n4:memory:/job/step\n", V1, files)) == cores


TEXT = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
31 23 0:28 /job\\0407 /sys/fs\\011cgroup rw,nosuid shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct
32 23 0:29 / /nothing/more rw - tmpfs
cut short
33 23 0:30 / /no/separator rw tmpfs tmpfs rw
34 23 0:31 - too - few
35 23 0:32 / /five - bpf bpf
"""


def test_mountinfo() -> None:
    assert list(parse_mountinfo(TEXT)) == [
        Mount("/", "/", "ext4", ("rw",)),
        Mount("/job 7", "/sys/fs\tcgroup", "cgroup", ("rw", "cpu", "cpuacct")),
        Mount("/", "/nothing/more", "tmpfs", ()),
        Mount("/", "/five", "bpf", ()),
    ]
    assert list(parse_mountinfo("")) == []


PREFERS = """
import threading
from dask_gpu_mpi.machine.cgroups import prefer_memory_of

def policy(thread):
    return open(f"/proc/self/task/{thread}/numa_maps").readline().split()[1]

def of_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(policy(threading.get_native_id())))
    thread.start()
    thread.join()
    return found[0]

main = threading.main_thread().native_id
print(policy(main), prefer_memory_of(1023), policy(main), prefer_memory_of(0), policy(main), of_new_thread())
"""
# as of numactl, or of srun --mem-bind
OWN = """
from dask_gpu_mpi.machine import cgroups
cgroups._MPOL_PREFERRED = 3  # MPOL_INTERLEAVE
print(cgroups.prefer_memory_of(0))
cgroups._MPOL_PREFERRED = 1
print(cgroups.prefer_memory_of(0), open("/proc/thread-self/numa_maps").readline().split()[1])
"""


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_memory_of_a_node_is_preferred_from_now_on() -> None:
    """A node that is not there changes nothing, and the user's policy stays; threads that are started later have it as well."""
    done = run_python(PREFERS)
    assert done.stdout.split() == ["default", "False", "default", "True", "prefer:0", "prefer:0"], done.stderr
    assert (own := run_python(OWN)).stdout.split() == ["True", "False", "interleave:0"], own.stderr
