"""What batch systems, launchers, the kernel, drivers and programs write: an answer or one clear error, soon, whatever it is.

How many inputs: `fuzzing`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.base.versions import pin_warnings, untested
from dask_gpu_mpi.check.rules import known_bad
from dask_gpu_mpi.machine import Gpu
from dask_gpu_mpi.machine.cgroups import allowed_cpus, cpu_quota, host_memory
from dask_gpu_mpi.machine.nvidia import gpu_health, parse_visible, visible_gpus
from dask_gpu_mpi.machine.scratch import filesystem_of
from dask_gpu_mpi.mpi.library import cross_check, is_mpich_before_5
from dask_gpu_mpi.network.interfaces import Interface, choose_addresses
from dask_gpu_mpi.sites.batch import allocated_hosts, end_time, find_allocation, gpus_on_node, parse_hosts
from dask_gpu_mpi.sites.choice import Starter, parse_answer
from dask_gpu_mpi.sites.command import Request, decide, launch_environment
from dask_gpu_mpi.sites.launchers import (
    BY_COMMAND,
    LAUNCHERS,
    MPIRUNS,
    Launcher,
    all_on_one_host,
    detect,
    family_of,
    first_on_host,
    forwarded,
    library_name,
    reports_for_all,
)
from dask_gpu_mpi.sites.pbs import resources
from dask_gpu_mpi.sites.slurm import earliest
from support.mocks.fuzzing import fuzz, near, soon, texts, values, variables
from support.mocks.nvml.pynvml import Nvml, device

DEVICES = [Gpu(uuid=f"GPU-{letter}0", index=i, name="A100", memory=1 << 36) for i, letter in enumerate("abc")]


def file_of(factory: pytest.TempPathFactory, text: str, name: str = "fuzz") -> Path:
    path = Path(factory.getbasetemp(), name)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@fuzz
@given(texts, st.one_of(texts, values.map(json.dumps)))
def test_end_of_the_job(text: str, answer: str) -> None:
    for environ in ({"SLURM_JOB_END_TIME": text}, {"PBS_JOBID": text or "7"}, {"FLUX_JOB_ID": text or "f"}):
        found = soon(lambda environ=environ: end_time(environ, now=lambda: 0.0, ask=lambda _: answer))
        assert found is None or 0 <= found < float("inf")


#: Variables that a launcher sets, of every row of the table.
LAUNCHER_VARIABLES = sorted(
    {
        name
        for row in LAUNCHERS
        for name in (
            row.mark,
            row.rank_variable,
            row.local_rank_variable,
            row.local_size_variable,
            *row.size_variables,
        )
        if name
    }
    | {"SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"}
)


@fuzz
@given(st.dictionaries(st.sampled_from(LAUNCHER_VARIABLES), near("0", "1", "4", "1(x8)"), max_size=6), texts)
def test_what_launchers_say_of_a_rank(environ: dict[str, str], library: str) -> None:
    for ask in (detect, all_on_one_host, first_on_host, reports_for_all):
        soon(ask, environ)
    soon(lambda: cross_check(environ, 1, 0, "h", library=library))


#: Variables of batch systems that `launch` reads.
BATCH_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_JOB_ID", "SLURM_JOB_NUM_NODES_HET_GROUP_0", "PBS_NODEFILE", "PBS_NUM_PPN", "PBS_JOBID", "LSB_DJOB_HOSTFILE",
    "LSB_JOBID", "LSB_JOBINDEX", "FLUX_URI", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS",
    "CUDA_VISIBLE_DEVICES", "ENVIRONMENT", "DGM_LOGS", "DGM_SETUP", "DGM_SCRATCH",
)  # fmt: skip
STARTERS = [*BY_COMMAND.values(), *MPIRUNS]


@fuzz
@given(
    st.dictionaries(st.sampled_from(BATCH_VARIABLES), variables("1", "4", "a100:4,h100:2", "x"), max_size=6),
    near("n1\nn2\nn2\n"),
    near("2"),
    st.sampled_from(STARTERS),
    st.one_of(st.none(), st.integers(1, 1000)),
)
def test_allocations(
    tmp_path_factory: pytest.TempPathFactory,
    environ: dict[str, str],
    nodes: str,
    size: str,
    launcher: Launcher,
    ranks: int | None,
) -> None:
    file = str(file_of(tmp_path_factory, nodes))
    environ |= {name: file for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE") if name in environ}
    soon(parse_hosts, file)

    def commands() -> None:
        found = find_allocation(environ, ranks=ranks, ask=lambda _: size)
        assert found.nodes > 0 < found.ranks
        assert str(found)
        library, starter = "Open MPI v5", Starter(launcher, f"/bin/{launcher.kind}")
        launch_environment(environ, found, library, launcher, lambda _: size, root=True)
        forwarded(environ)
        launch = decide(
            Request((), ("s.py",)), environ, found, library, starter, python="/bin/python", cwd="/"
        )
        assert not any("\0" in word for word in launch.run)

    soon(commands)


@fuzz
@given(near("2026.7.1", "26.10.0", "0.52.0a1+cu12"), near("distributed==2026.7.1", "dask>=2026.1"))
def test_versions_of_packages(version: str, requirement: str) -> None:
    names = ("distributed", "dask-cuda", "ucxx", "bokeh", "libucx-cu12", "numba-cuda")
    versions = dict.fromkeys(names, version)
    soon(untested, versions)
    soon(pin_warnings, versions, [requirement])
    soon(lambda: [*known_bad(versions, gpus=True)])


MOUNTS = (
    "30 23 0:26 / {root} rw shared:9 - cgroup2 cgroup2 rw\n",
    "31 23 0:27 /a {root} rw - cgroup cgroup rw,memory,cpuset,cpu\n",
)


@fuzz
@given(
    near(*MOUNTS),
    near("0::/\n", "4:memory,cpuset,cpu:/a\n"),
    near("max\n", "100 200\n", "0-3,8\n", "hierarchical_memory_limit 5\n"),
)
def test_control_groups(
    tmp_path_factory: pytest.TempPathFactory, mounts: str, group: str, value: str
) -> None:
    proc = Path(tmp_path_factory.getbasetemp(), "proc")
    proc.mkdir(exist_ok=True)
    file_of(tmp_path_factory, mounts.replace("{root}", str(proc)), "proc/mountinfo")
    file_of(tmp_path_factory, group, "proc/cgroup")
    for name in (
        "memory.max",
        "memory.limit_in_bytes",
        "memory.stat",
        "cpuset.cpus.effective",
        "cpu.max",
        "cpu.cfs_quota_us",
    ):
        file_of(tmp_path_factory, value, f"proc/{name}")
    file_of(tmp_path_factory, "100000\n", "proc/cpu.cfs_period_us")
    assert soon(host_memory, proc, 1 << 30, -1) > 0
    assert soon(allowed_cpus, proc)
    quota = soon(cpu_quota, proc)
    assert quota is None or 0 < quota < float("inf")


@fuzz
@given(texts, texts, texts)
def test_what_nvml_says(name: str, pci: str, driver: str) -> None:
    nvml = Nvml(device(0, name=name, pci=pci, ecc=[7]), driver=driver)
    gpus = soon(visible_gpus, {}, nvml)
    assert len(gpus) == 1
    assert isinstance(soon(gpu_health, gpus, nvml)[0], str)


@fuzz
@given(
    near("ib0", "hsn0", "eth0"),
    near("10.0.0.1", "127.0.0.1"),
    near("10.0.0.0/24"),
    st.one_of(st.none(), near("ib0")),
)
def test_interfaces(name: str, address: str, network: str, wanted: str | None) -> None:
    interface = Interface(name, address, network)
    soon(choose_addresses, ["a", "b"], {0: [interface], 1: [interface]}, [wanted, None])


VERSIONS = (
    "Open MPI v5.0.11, package: x",
    "MPICH Version:      4.0.2\nMPICH Release",
    "mpirun (Open MPI) 5.0.11",
    "Intel(R) MPI",
)
QSTAT = "Job Id: 4\n    Resource_List.select = 2:ncpus=64\n    Resource_List.walltime = 01:00:00\n"
#: Readers of one text, texts as they should be, and what each result is.
READERS: dict[str, tuple[Callable[[str], Any], tuple[str, ...], Callable[[Any], bool]]] = {
    "CUDA_VISIBLE_DEVICES": (lambda text: parse_visible(text, DEVICES), ("0,GPU-a",), lambda found: True),
    "SLURM_GPUS_ON_NODE": (
        lambda text: gpus_on_node({"SLURM_GPUS_ON_NODE": text})[0],
        ("4",),
        lambda found: found >= 0,
    ),
    "hosts of the command line": (
        parse_hosts,
        ("h1,h2:2", "./h1"),
        lambda found: True,
    ),
    "squeue": (
        lambda text: earliest(text.split()),
        ("2026-08-01T12:00:00Z\n2026-08-01T12:00:00", "0001-01-01", "NONE", "9999-12-31T23:59:59"),
        lambda found: isinstance(found, str),
    ),
    "qstat": (
        lambda text: resources(text, 1),
        (QSTAT,),
        lambda found: all(option.startswith("-") for option in found),
    ),
    "mpi4py": (
        parse_answer,
        ('dask-gpu-mpi:["Open MPI v5.0.11", "/usr/lib/libmpi.so"]\n',),
        lambda found: found is None or len(found) == 2,
    ),
    "mountinfo": (
        lambda text: filesystem_of("/tmp/x", text),
        ("30 23 0:26 / /tmp rw - ext4 /dev/sda rw\n",),
        lambda found: all(isinstance(each, str) for each in found),
    ),
    "nodes": (
        lambda text: allocated_hosts({"PBS_NODEFILE": text}),
        ("n1\nn2\n",),
        lambda found: isinstance(found, str),
    ),
    "version of MPI": (
        lambda text: (family_of(text), library_name(text), is_mpich_before_5(text)),
        VERSIONS,
        lambda found: True,
    ),
}


@pytest.mark.parametrize("reader", READERS)
@fuzz
@given(data=st.data())
def test_readers_of_one_text(reader: str, data: st.DataObject) -> None:
    read, samples, fits = READERS[reader]
    assert fits(soon(read, data.draw(near(*samples))))
