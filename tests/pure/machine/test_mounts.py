from __future__ import annotations

from dask_gpu_mpi.machine.cgroups import Mount, parse_mountinfo

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


def test_this_process() -> None:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        mounts = list(parse_mountinfo(file.read()))
    assert "/" in [mount.point for mount in mounts]
