"""MPI's world against the launcher's, and the messages where they do not match."""

from __future__ import annotations

import re

import pytest

from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.mpi import library as module
from dask_gpu_mpi.mpi.library import check_library, cross_check
from dask_gpu_mpi.sites.launchers import LAUNCHERS, Launcher
from support.mocks.launchers import SAMPLES

SRUN = SAMPLES["srun"]
OPEN_MPI = SAMPLES["Open MPI's mpirun"]
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
HYDRA = SAMPLES["the mpiexec of MPICH or Intel MPI (Hydra)"]


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_shell_of_a_slurm_job_is_refused_where_the_job_has_tasks(step: str | None) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    cross_check(environ, 4, 0, "h")
    words = r"rank 0 on h: .*none of the 4 tasks .*SLURM_NTASKS=4.*Fix: start it with srun"
    with pytest.raises(LauncherError, match=words):
        cross_check(environ, 1, 0, "h")
    cross_check({**environ, "SLURM_NTASKS": "1"}, 1, 0, "h")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_the_wrong_mpi_is_named_with_both_sizes_and_the_remedy(launcher: Launcher) -> None:
    cross_check(SAMPLES[launcher.name], 4, 1, "node7")
    with pytest.raises(LauncherError) as caught:
        cross_check(SAMPLES[launcher.name], 1, 0, "node7", library=f"{MPICH}\0")
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "rank 1 of 4 on node7",
        "MPI (MPICH Version: 5.0.2) started as a singleton (a world of 1 rank)",
        f"although {launcher.name} launched 4 ranks (",
        "=4): launcher and MPI library do not match. Fix: use ",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("environ", "size", "library", "message"),
    [
        (SRUN, 1, "Open MPI v5.0.11, package: x", ". Fix: use srun --mpi=pmix,"),
        (SRUN, 1, MPICH, ". Fix: use srun --mpi=pmi2,"),
        (SRUN, 1, "Intel(R) MPI Library 2021.18", ". Fix: use srun --mpi=pmi2,"),
        (SRUN, 1, "", ". Fix: use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"),
        # these variables are surely ours
        (OPEN_MPI, 2, "", "world of 2 ranks although Open MPI's mpirun launched 4 ranks"),
    ],
)
def test_the_remedy_fits_launcher_and_library(
    environ: dict[str, str], size: int, library: str, message: str
) -> None:
    with pytest.raises(LauncherError, match=re.escape(message)):
        cross_check(environ, size, 0, "h", library=library)


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [
        ({"HOME": "/root"}, 1, 0),
        ({"PALS_RANKID": "2"}, 8, 2),  # sets no size
        (SRUN, 8, 5),  # these may be the variables of an unknown mpirun's daemon
        # srun -n 4 below a shell that mpirun -np 1 has started: MPI has found srun's world
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", **SRUN}, 4, 1),
        # mpirun -np 1 below srun -n 4
        ({**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, 1, 0),
    ],
)
def test_worlds_that_may_be_right(environ: dict[str, str], size: int, rank: int) -> None:
    cross_check(environ, size, rank, "h")


SRUN_PMIX = {**SRUN, "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "who", "launcher", "fix"),
    [
        (OPEN_MPI, "rank 1 of 4", "Open MPI's mpirun (OMPI_COMM_WORLD_SIZE=4)", "use the mpirun of"),
        (SRUN_PMIX, "rank 1 of 4", "srun (SLURM_NTASKS=4)", "use srun --mpi=pmi2, or"),
        ({"PMIX_NAMESPACE": "x"}, "this process", "its launcher", "use srun --mpi=pmi2, or"),
    ],
)
def test_a_library_that_would_abort_is_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], who: str, launcher: str, fix: str
) -> None:
    monkeypatch.setattr(module, "_inspect_library", lambda path: (MPICH, False))
    with pytest.raises(LauncherError) as caught:
        check_library(environ, "libmpi.so", "h")
    assert str(caught.value).startswith(
        f"{who} on h: the MPI library (MPICH Version: 5.0.2) does not support PMIx, and {launcher} offers nothing else: "
        f"launcher and MPI library do not match. Fix: {fix}"
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "pmix", "environ"),
    [
        (MPICH, True, OPEN_MPI),  # MPICH can be built with PMIx
        (MPICH, False, HYDRA),
        (MPICH, False, {**OPEN_MPI, "MPIR_CVAR_PMI_VERSION": "2"}),  # the user knows better
        ("MPICH Version:      4.0.2", False, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}),
        ("Open MPI v5.0.11, package: x", True, OPEN_MPI),
        ("Open MPI v5.0.11, package: x", False, OPEN_MPI),
        ("Intel(R) MPI Library 2021.18", False, OPEN_MPI),
        ("MPI VERSION    : CRAY MPICH version 8.1.28", False, SRUN_PMIX),
        ("", False, OPEN_MPI),
    ],
)
def test_libraries_that_may_work_are_let_through(
    monkeypatch: pytest.MonkeyPatch, version: str, pmix: bool, environ: dict[str, str]
) -> None:
    monkeypatch.setattr(module, "_inspect_library", lambda path: (version, pmix))
    check_library(environ, "libmpi.so", "h")


def test_what_is_no_library_is_left_to_mpi4py() -> None:
    check_library(OPEN_MPI, "/nonexistent/libmpi.so", "h")
    check_library(OPEN_MPI, "libc.so.6", "h")


@pytest.mark.parametrize(
    ("environ", "waits", "silent"),
    [
        ({}, False, False),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, False, False),
        (OPEN_MPI, True, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True, False),  # the first one of another host
        ({"PALS_RANKID": "2"}, True, False),
    ],
)
def test_who_speaks_for_ranks_that_cannot_talk(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], waits: bool, silent: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    assert module.wait_for_rank_0_to_report(environ) is silent
    assert slept == [module.RANK_0_GRACE] * waits
