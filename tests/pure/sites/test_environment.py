"""What `launch` changes in the environment, and what Open MPI forwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from dask_gpu_mpi.sites import pbs
from dask_gpu_mpi.sites.batch import Allocation
from dask_gpu_mpi.sites.command import launch_environment
from dask_gpu_mpi.sites.launchers import BY_COMMAND, LOCAL, MPIRUNS, forwarded

SLURM = {"SLURM_JOB_ID": "42", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
KINDS = {**BY_COMMAND, "local": LOCAL, **{each.kind: each for each in MPIRUNS}}
SIGNAL = {"DASK_GPU_MPI__WALLTIME_SIGNAL": "USR1"}


def changes(
    environ: dict[str, str],
    system: str = "local",
    kind: str = "hydra",
    *,
    nodes: int = 2,
    library: str = "MPICH Version: 5.0.2",
    root: bool = False,
    **answers: str,
) -> dict[str, str | None]:
    """The changes if commands, by their names, print these `answers`."""
    where = Allocation(system, nodes, nodes, {f"h{i}": 1 for i in range(nodes)})
    known = {"srun": "slurm 24.05", **answers}
    return launch_environment(
        environ, where, library, KINDS[kind], lambda command: known.get(command[0], ""), root=root
    )


def test_nothing_on_a_laptop_but_leave_for_root() -> None:
    assert changes({"PATH": "/bin", "OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": "1"}) == {}
    assert changes({}, root=True) == {}
    assert changes({"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}, kind="local", root=True) == {}
    leave = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert changes({}, kind="openmpi", root=True) == leave
    assert changes(leave, kind="openmpi", root=True) == {}  # what is so already is not said again


@pytest.mark.parametrize("kind", ["srun", "local"])
def test_shell_that_is_a_rank_starts_none_below_itself(kind: str) -> None:
    """``srun --pty bash``."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "PMI_FD": "9"}
    found = changes({"SLURM_JOB_ID": "42", "SLURM_NTASKS": "1", **step}, "slurm", kind)
    assert {name for name, value in found.items() if value is None} == step.keys()


def qstat(place: str, last: str = "ncpus=3:ngpus=2") -> str:
    """The part of a job on two nodes. Two chunks on one host count together."""
    vnodes = f"(h1:ncpus=2:ngpus=1)+(h1:ncpus=2:ngpus=1)+(h2:{last})"
    return f"    Resource_List.place = {place}\n    exec_vnode = {vnodes}\n"


PART = {"DGM_PBS_CPUS": "3", "DGM_PBS_GPUS": "2"}


@pytest.mark.parametrize(
    ("environ", "nodes", "described", "expected"),
    [
        ({"OMP_NUM_THREADS": "8", "NCPUS": "8"}, 2, "", {"OMP_NUM_THREADS": None}),
        ({"OMP_NUM_THREADS": "1", "NCPUS": "8"}, 2, "", {}),  # the user's
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 2, "", {"CUDA_VISIBLE_DEVICES": None}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 1, "", {}),  # true on the only node
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, "", {}),  # the job has no GPU
        # nodes that other jobs may share; NCPUS is that of the first chunk
        ({"NCPUS": "2"}, 2, qstat("scatter:shared"), PART),
        ({}, 2, qstat("free"), PART),
        ({}, 2, qstat("scatter:excl"), {}),
        ({}, 2, qstat("exclhost"), {}),
        (
            {},
            2,
            qstat("free", "ncpus=3:ngpus=1"),
            {"DGM_PBS_CPUS": "3"},
        ),  # one number would be wrong on a host
        (
            PART,
            2,
            qstat("exclhost"),
            dict.fromkeys(PART),
        ),  # of another job, from which this one was submitted
    ],
)
def test_pbs(environ: dict[str, str], nodes: int, described: str, expected: dict[str, str | None]) -> None:
    assert changes(environ, "pbs", nodes=nodes, qstat=described) == expected


@pytest.mark.parametrize(
    ("programs", "environ", "nodes", "expected"),
    [
        # daemons are started by PBS if there is no ssh
        (
            "pbs_tmrsh",
            {},
            2,
            dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), str(pbs.TMRSH)),
        ),
        ("pbs_tmrsh", {"PRTE_MCA_plm_ssh_agent": "mine"}, 2, {"OMPI_MCA_plm_rsh_agent": str(pbs.TMRSH)}),
        ("pbs_tmrsh ssh", {}, 2, {}),
        ("", {}, 2, {}),
        # Open MPI 5.0.11 crashed: segmentation fault (a real OpenPBS). On several nodes it may need them to start its daemons.
        ("pbs_tmrsh", {}, 1, {"PRTE_MCA_ras": "^pbs"}),
    ],
)
def test_open_mpi_in_pbs(
    tmp_path: Path, programs: str, environ: dict[str, str], nodes: int, expected: dict[str, str]
) -> None:
    for name in programs.split():
        (tmp_path / name).touch(0o755)
    assert changes({"PATH": str(tmp_path), **environ}, "pbs", "openmpi", nodes=nodes) == expected


def test_cray_leaves_gpus_to_dask() -> None:
    assert changes({}, "pbs", "pals") == {}
    found = changes({}, "slurm", "srun", library="MPI VERSION    : CRAY MPICH version 8.1")
    assert found == {"MPICH_GPU_SUPPORT_ENABLED": "0", **SIGNAL}


@pytest.mark.parametrize("system", ["slurm", "lsf", "flux"])
def test_signal_before_the_walltime(system: str) -> None:
    assert changes({}, system, "srun") == SIGNAL
    assert changes({"DASK_GPU_MPI__WALLTIME_SIGNAL": "USR2"}, system, "srun") == {}


@pytest.mark.parametrize(
    ("more", "kind", "expected"),
    [
        ({}, "srun", {}),
        # no rank is hidden a GPU of its node
        ({"SLURM_GPU_BIND": "single:1"}, "srun", {"SLURM_GPU_BIND": None}),
        (
            {"SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "gres:gpu:1"},
            "srun",
            {"SLURM_GPUS_PER_TASK": None, "SLURM_TRES_PER_TASK": None},
        ),
        # the ranks get all variables of this shell, and all cores of the job (sbatch --export=NONE; some sites set the others)
        (
            {"SLURM_EXPORT_ENV": "NONE", "SRUN_EXPORT_ENV": "PATH", "SRUN_CPUS_PER_TASK": "2"},
            "srun",
            {"SLURM_EXPORT_ENV": None, "SRUN_EXPORT_ENV": None, "SRUN_CPUS_PER_TASK": None},
        ),
        ({"SLURM_EXPORT_ENV": "NONE"}, "openmpi", {"SLURM_CPU_BIND": "none", "SLURM_EXPORT_ENV": None}),
        # without a launcher, ranks have what the shell has
        ({"SLURM_GPUS_PER_NODE": "8"}, "local", {}),
        # daemons of mpirun: all cores; Hydra copies this node's GPUs to all
        ({}, "hydra", {"SLURM_CPU_BIND": "none", "CUDA_VISIBLE_DEVICES": None}),
        ({}, "openmpi", {"SLURM_CPU_BIND": "none"}),
        # of an exclusive job this node has all GPUs, not those that were requested
        (
            {"SLURM_GPUS_PER_NODE": "a100:2"},
            "openmpi",
            {"SLURM_CPU_BIND": "none", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
        ),
        (
            {"SLURM_GPUS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": ""},  # as if unset: not to be hidden by us
            "openmpi",
            {"SLURM_CPU_BIND": "none", "SLURM_GPUS_ON_NODE": "2"},
        ),
        ({"SLURM_GPUS_PER_NODE": "4"}, "openmpi", {"SLURM_CPU_BIND": "none"}),
        ({"SLURM_GPUS_PER_NODE": "8"}, "openmpi", {"SLURM_CPU_BIND": "none", "SLURM_GPUS_PER_NODE": None}),
        ({"SLURM_GPUS": "a100:4,h100:2"}, "openmpi", {"SLURM_CPU_BIND": "none", "SLURM_GPUS": "2"}),
    ],
)
def test_slurm(more: dict[str, str], kind: str, expected: dict[str, str | None]) -> None:
    assert changes(SLURM | more, "slurm", kind) == expected | SIGNAL


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        ("hydra", {}, {"HYDRA_BOOTSTRAP": "ssh"}),
        ("hydra", {"HYDRA_BOOTSTRAP": "fork"}, {}),  # the user's
        ("intel", {}, {"I_MPI_HYDRA_BOOTSTRAP": "ssh"}),
        ("openmpi", {}, {}),
    ],
)
def test_hydra_in_a_shell_with_the_variables_of_slurm_and_no_srun(
    kind: str, own: dict[str, str], expected: dict[str, str]
) -> None:
    """By the variables it would start srun, and wait forever."""
    found = changes(SLURM | own, "slurm", kind, srun="")
    assert {name: value for name, value in found.items() if name.endswith("_BOOTSTRAP")} == expected


@pytest.mark.parametrize(
    ("ends", "seconds"),
    [
        ("1970-01-01T00:01:00+00:00\n1970-01-01T00:02:00+00:00\n", "60"),
        ("1970-01-01T00:01:00+00:00\n1970-01-01T00:02:00\n", None),  # with a zone, and without
        ("NONE\n", None),
    ],
)
def test_first_end_that_squeue_prints(ends: str, seconds: str | None) -> None:
    assert changes({}, "slurm", "srun", env=ends).get("SLURM_JOB_END_TIME") == seconds
    assert "SLURM_JOB_END_TIME" not in changes({"SLURM_JOB_END_TIME": "7"}, "slurm", "srun", env=ends)


def test_open_mpi_forwards_what_is_not_of_one_node() -> None:
    of_a_node = ["TMPDIR", "HOSTNAME", "SLURM_JOB_ID", "PMIX_RANK", "OMPI_MCA_btl", "SSH_CLIENT"]
    of_a_node += ["CUDA_VISIBLE_DEVICES", "BASH_FUNC_module%%"]
    of_the_job = ["DASK_GPU_MPI__INTERFACE", "MINE", "PATH", "PBS_JOBID", "VIRTUAL_ENV"]
    assert forwarded(dict.fromkeys([*of_a_node, *of_the_job], "a\nb")) == of_the_job
    assert forwarded({"CUDA_VISIBLE_DEVICES": ""}) == ["CUDA_VISIBLE_DEVICES"]
