"""What `launch` changes in the environment, and what Open MPI forwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

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
    ends: str = "",
    has_srun: bool = True,
) -> dict[str, str | None]:
    where = Allocation(system, nodes, nodes, {f"h{i}": 1 for i in range(nodes)})

    def ask(command: Sequence[str]) -> str:
        return ("slurm 24.05" if has_srun else "") if command[0] == "srun" else ends

    return launch_environment(environ, where, library, KINDS[kind], ask, root=root)


def test_nothing_on_a_laptop_but_leave_for_root() -> None:
    assert changes({"PATH": "/bin", "OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": "1"}) == {}
    assert changes({}, root=True) == {}
    assert changes({"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}, kind="local", root=True) == {}
    leave = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert changes({}, kind="openmpi", root=True) == leave
    assert changes(leave, kind="openmpi", root=True) == {}  # what is so already is not said again


def test_shell_that_is_a_rank_starts_none_below_itself() -> None:
    """``srun --pty bash``."""
    environ = {
        "SLURM_JOB_ID": "42",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "PMI_FD": "9",
    }
    for kind in ("srun", "local"):
        gone = {name for name, value in changes(environ, "slurm", kind).items() if value is None}
        assert gone == {"SLURM_STEP_ID", "SLURM_PROCID", "PMI_FD"}


@pytest.mark.parametrize(
    ("environ", "nodes", "expected"),
    [
        ({"OMP_NUM_THREADS": "8", "NCPUS": "8"}, 2, {"OMP_NUM_THREADS": None}),
        ({"OMP_NUM_THREADS": "1", "NCPUS": "8"}, 2, {}),  # the user's
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 2, {"CUDA_VISIBLE_DEVICES": None}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 1, {}),  # true on the only node
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, {}),  # the job has no GPU
    ],
)
def test_pbs(environ: dict[str, str], nodes: int, expected: dict[str, str | None]) -> None:
    assert changes(environ, "pbs", nodes=nodes) == expected


def test_cray_leaves_gpus_to_dask() -> None:
    assert changes({}, "pbs", "pals") == {}
    assert changes({}, "slurm", "srun", library="MPI VERSION    : CRAY MPICH version 8.1") == {
        "MPICH_GPU_SUPPORT_ENABLED": "0",
        **SIGNAL,
    }


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
    found = changes(SLURM | own, "slurm", kind, has_srun=False)
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
    assert changes({}, "slurm", "srun", ends=ends).get("SLURM_JOB_END_TIME") == seconds
    assert "SLURM_JOB_END_TIME" not in changes({"SLURM_JOB_END_TIME": "7"}, "slurm", "srun", ends=ends)


def test_open_mpi_forwards_what_is_not_of_one_node() -> None:
    of_a_node = ["TMPDIR", "HOSTNAME", "SLURM_JOB_ID", "PMIX_RANK", "OMPI_MCA_btl", "SSH_CLIENT"]
    of_a_node += ["CUDA_VISIBLE_DEVICES", "BASH_FUNC_module%%"]
    of_the_job = ["DASK_GPU_MPI__INTERFACE", "MINE", "PATH", "PBS_JOBID", "VIRTUAL_ENV"]
    assert forwarded(dict.fromkeys([*of_a_node, *of_the_job], "a\nb")) == of_the_job
    assert forwarded({"CUDA_VISIBLE_DEVICES": ""}) == ["CUDA_VISIBLE_DEVICES"]
