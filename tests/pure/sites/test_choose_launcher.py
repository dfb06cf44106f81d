"""Which launcher starts the ranks: over batch systems, MPI libraries, and what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import LauncherError, MpiMissingError
from dask_gpu_mpi.sites.batch import Allocation
from dask_gpu_mpi.sites.choice import ask_library, choose_launcher, parse_answer
from dask_gpu_mpi.sites.launchers import family_of

OPEN_MPI, MPICH = "Open MPI v5.0.11, package: ...", "MPICH Version:      5.0.2"
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15"
#: What each kind of mpirun prints as its version.
KINDS = {
    "openmpi": "mpirun (Open MPI) 5.0.11",
    "hydra": "HYDRA build details:\n    Version: 5.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18",
    "pals": "mpiexec version 1.2.12 revision 1",
    "broken": "Segmentation fault",
    "site": "no mpirun",
    "orterun": "mpirun (OpenRTE) 4.1.4",
}
#: Files on a node, each below a folder with the name of its kind.
BOTH = ("openmpi/mpirun", "hydra/mpirun", "hydra/mpiexec")
ALL = (*BOTH, "site/srun", "site/flux")
PLUGINS = (
    "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
)

LOCAL = Allocation("local", 1, 1)

Choose = Callable[..., tuple[str, str]]


@pytest.fixture
def choose(tmp_path: Path) -> Choose:
    """The file of the launcher on a node with these files, whose folders are in PATH in this order, and how it meets MPI."""

    def chosen(
        system: str, library: str, here: Sequence[str] = ALL, *, plugins: str = PLUGINS, **given: str
    ) -> tuple[str, str]:
        for file in here:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch(0o755)

        def ask(command: Sequence[str]) -> str:
            return plugins if command[1] == "--mpi=list" else KINDS[Path(command[0]).parent.name]

        path = ":".join(dict.fromkeys(str((tmp_path / file).parent) for file in here))
        starter = choose_launcher(
            Allocation(system, 2, 2),
            library,
            {"PATH": path},
            "/gone/python",
            ask=ask,
            **{name: text.replace("HERE", str(tmp_path)) for name, text in given.items()},
        )
        return os.path.relpath(starter.path, tmp_path), starter.mpi

    return chosen


def of(*names: str) -> str:
    """The list of srun's plugins."""
    return "\n\t".join(["MPI plugin types are...", *names])


PALS = ("hydra/mpirun", "pals/mpiexec")


@pytest.mark.parametrize(
    ("system", "library", "here", "given", "expected"),
    [
        # of the batch system, or of the library
        ("local", OPEN_MPI, ALL, {}, ("openmpi/mpirun", "")),
        ("local", MPICH, ALL, {}, ("hydra/mpirun", "")),
        ("local", INTEL, ALL, {}, ("hydra/mpirun", "")),
        ("hosts", OPEN_MPI, ALL, {}, ("openmpi/mpirun", "")),
        ("pbs", MPICH, ALL, {}, ("hydra/mpirun", "")),
        ("slurm", OPEN_MPI, ALL, {}, ("site/srun", "pmix")),
        ("slurm", MPICH, ALL, {}, ("site/srun", "pmi2")),
        ("slurm", INTEL, ALL, {}, ("site/srun", "pmi2")),
        ("slurm", CRAY, ALL, {}, ("site/srun", "")),
        ("slurm", "", ALL, {}, ("site/srun", "")),
        ("lsf", OPEN_MPI, ALL, {}, ("openmpi/mpirun", "")),
        ("flux", OPEN_MPI, ALL, {}, ("site/flux", "pmix")),
        ("flux", MPICH, ALL, {}, ("site/flux", "")),
        # plugins of srun; no answer
        ("slurm", OPEN_MPI, ALL, {"plugins": of("none", "pmi2")}, ("openmpi/mpirun", "")),
        ("slurm", MPICH, ALL, {"plugins": of("none", "pmi2")}, ("site/srun", "pmi2")),
        ("slurm", OPEN_MPI, ALL, {"plugins": of("pspmi", "pspmix"), "launcher": "srun"}, ("site/srun", "pspmix")),
        ("slurm", MPICH, ALL, {"plugins": of("pspmi", "pspmix")}, ("site/srun", "pspmi")),
        ("slurm", OPEN_MPI, ALL, {"plugins": ""}, ("site/srun", "pmix")),
        # of the user, by its name or its path
        ("slurm", OPEN_MPI, ALL, {"launcher": "mpirun"}, ("openmpi/mpirun", "")),
        ("slurm", MPICH, ALL, {"launcher": "mpiexec"}, ("hydra/mpiexec", "")),
        ("slurm", OPEN_MPI, ALL, {"mpi": "pmix_v4"}, ("site/srun", "pmix_v4")),
        ("slurm", OPEN_MPI, (*ALL, "orterun/orterun"), {"launcher": "orterun"}, ("orterun/orterun", "")),
        ("slurm", OPEN_MPI, (*ALL, "orterun/orterun"), {"launcher": "HERE/orterun/orterun"}, ("orterun/orterun", "")),
        # the best of several; Intel's mpirun is a script that forwards no signal
        ("pbs", MPICH, PALS, {}, ("pals/mpiexec", "")),
        ("pbs", CRAY, PALS, {}, ("pals/mpiexec", "")),
        ("pbs", MPICH, ("hydra/mpiexec", "pals/mpiexec"), {"launcher": "pals"}, ("pals/mpiexec", "")),
        ("pbs", INTEL, ("hydra/mpiexec.hydra", "intel/mpirun", "intel/mpiexec.hydra"), {}, ("intel/mpiexec.hydra", "")),
        ("pbs", INTEL, ("intel/mpirun", "intel/mpiexec"), {}, ("intel/mpirun", "")),
        ("pbs", INTEL, ("intel/mpirun", "intel/mpiexec.hydra"), {"launcher": "mpirun"}, ("intel/mpirun", "")),
        ("pbs", OPEN_MPI, ("broken/mpirun", "openmpi/mpirun"), {}, ("openmpi/mpirun", "")),
    ],
)  # fmt: skip
def test_choice(
    choose: Choose,
    system: str,
    library: str,
    here: Sequence[str],
    given: dict[str, str],
    expected: tuple[str, str],
) -> None:
    assert choose(system, library, here, **given) == expected


@pytest.mark.parametrize(
    ("library", "here", "given", "message"),
    [
        (OPEN_MPI, ("hydra/mpirun", "site/srun"), {"plugins": of("none", "pmi2")},
         r"srun has no plugin pmix or pspmix \(it has none, pmi2\), and no mpirun of Open MPI"),
        # the user's choice is not replaced by another launcher, and would not work
        (OPEN_MPI, ALL, {"plugins": of("none", "pmi2"), "launcher": "srun"},
         r"needs the plugin pmix or pspmix, and there is none, pmi2. Fix: one of them by --mpi"),
        (OPEN_MPI, BOTH, {"launcher": "srun"}, "--launcher srun: command srun not found .* or the path of"),
        (MPICH, (*ALL, "orterun/orterun"), {"launcher": "HERE/orterun/orterun"},
         r"no .*/orterun of MPICH.* was found \(found: .*/orterun \(openmpi"),
        (MPICH, ALL, {"launcher": "HERE/site/flux"}, "site/flux is not an mpirun of a known MPI library"),
        # the mpiexec of a wheel, which would start its ranks by ssh
        (OPEN_MPI, ("openmpi/mpiexec", "pals/mpiexec"), {"launcher": "pals"},
         r"no pals of Open MPI.* was found \(found: .*/openmpi/mpiexec \(openmpi\)"),
    ],
)  # fmt: skip
def test_no_launcher(
    choose: Choose, library: str, here: Sequence[str], given: dict[str, str], message: str
) -> None:
    with pytest.raises(LauncherError, match=message):
        choose("slurm", library, here, **given)


def test_mpirun_of_a_wheel_comes_before_the_librarys_own_and_those_in_path(tmp_path: Path) -> None:
    """Each is really run for its version."""
    files = [tmp_path / folder / "bin" / "mpirun" for folder in ("site", "library", "wheel")]
    found = []
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
        file.chmod(0o755)
        library = str(tmp_path / "library" / "lib" / "libmpi.so.40")
        python = str(tmp_path / "wheel" / "bin" / "python")
        environ = {"PATH": f"{tmp_path}/site/bin"}
        found.append(choose_launcher(LOCAL, OPEN_MPI, environ, python, file=library).path)
    assert found == [str(file) for file in files]
    files[2].chmod(0o644)  # not executable
    assert choose_launcher(LOCAL, OPEN_MPI, environ, python, file=library).path == str(files[1])
    # one that can't run is none, whatever its path says
    other = tmp_path / "MVAPICH2" / "mpirun"
    other.parent.mkdir()
    other.write_text("no program at all")
    other.chmod(0o755)
    with pytest.raises(LauncherError, match=r"no mpirun of MPICH.* was found \(found: none\)"):
        choose_launcher(LOCAL, MPICH, {"PATH": str(other.parent)}, python)


def test_ask_library() -> None:
    """Below a launcher as well: the child is no rank."""
    before = "mpi4py.MPI" in sys.modules
    version, file = ask_library(
        [sys.executable], {**os.environ, "PMI_FD": "77", "PMI_RANK": "0", "PMI_SIZE": "2"}
    )
    assert family_of(version) in ("openmpi", "mpich")
    assert Path(file).is_file()
    assert ("mpi4py.MPI" in sys.modules) is before


def test_no_library(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for text, why in (
        ("echo noise; echo 'RuntimeError: cannot load MPI library' >&2; exit 1", "cannot load MPI library"),
        ("exit 3", "exit code 3"),
        ("", "No such file.*"),
    ):
        python.write_text(f"#!{'/bin/sh' if text else '/gone'}\n{text}\n")
        python.chmod(0o755)
        with pytest.raises(MpiMissingError, match=rf"finds no MPI library \(.*{why}\)\. Fix: install"):
            ask_library([str(python)], {})
    with pytest.raises(MpiMissingError, match=r"--container: no Python .*\(apptainer: not found in PATH\)"):
        ask_library(["apptainer", "exec", "image", "python"], {"PATH": "/gone"})


@pytest.mark.parametrize("text", ["", "3", '["a"]', '["a", "b", "c"]', "[" * 100_000, "1" * 5000, "{}"])
def test_answer_that_is_none(text: str) -> None:
    assert parse_answer(f"noise\ndask-gpu-mpi:{text}\n") is None
