"""Which launcher starts the ranks: over batch systems, MPI libraries, and what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import LauncherError, MpiMissingError
from dask_gpu_mpi.sites.batch import Allocation
from dask_gpu_mpi.sites.starter import (
    Found,
    MpiLibrary,
    Starter,
    ask_library,
    choose_launcher,
    find_launchers,
    parse_answer,
)

OPEN_MPI, MPICH = MpiLibrary("Open MPI v5.0.11, package: ..."), MpiLibrary("MPICH Version:      5.0.2")
INTEL = MpiLibrary("Intel(R) MPI Library 2021.18 for Linux* OS")
CRAY = MpiLibrary("MPI VERSION    : CRAY MPICH version 8.1.28.15")
BOTH = (Starter("openmpi", "/o/mpirun"), Starter("hydra", "/m/mpirun"), Starter("hydra", "/m/mpiexec"))
COMMANDS = {name: f"/usr/bin/{name}" for name in ("srun", "flux", "jsrun")}
ALL = Found(COMMANDS, BOTH, frozenset({"none", "pmi2", "pmix", "pmix_v4"}))


def choose(system: str, library: MpiLibrary, found: Found = ALL, **given: str) -> tuple[str, str]:
    starter, mpi = choose_launcher(Allocation(system, 2, 2), library, found, **given)
    return starter.path, mpi


@pytest.mark.parametrize(
    ("system", "library", "expected"),
    [
        ("local", OPEN_MPI, ("/o/mpirun", "")),
        ("local", MPICH, ("/m/mpirun", "")),
        ("local", INTEL, ("/m/mpirun", "")),
        ("hosts", OPEN_MPI, ("/o/mpirun", "")),
        ("pbs", MPICH, ("/m/mpirun", "")),
        ("slurm", OPEN_MPI, ("/usr/bin/srun", "pmix")),
        ("slurm", MPICH, ("/usr/bin/srun", "pmi2")),
        ("slurm", INTEL, ("/usr/bin/srun", "pmi2")),
        ("slurm", CRAY, ("/usr/bin/srun", "")),
        ("slurm", MpiLibrary(""), ("/usr/bin/srun", "")),
        ("lsf", OPEN_MPI, ("/usr/bin/jsrun", "")),
        ("flux", OPEN_MPI, ("/usr/bin/flux", "pmix")),
        ("flux", MPICH, ("/usr/bin/flux", "")),
    ],
)
def test_launcher_of_the_batch_system_or_of_the_library(
    system: str, library: MpiLibrary, expected: tuple[str, str]
) -> None:
    assert choose(system, library) == expected


def test_mpirun_where_srun_has_no_plugin_for_the_library() -> None:
    found = Found(COMMANDS, BOTH, frozenset({"none", "pmi2"}))
    assert choose("slurm", OPEN_MPI, found) == ("/o/mpirun", "")
    assert choose("slurm", MPICH, found) == ("/usr/bin/srun", "pmi2")
    with pytest.raises(
        LauncherError, match=r"srun has no plugin pmix \(it has none, pmi2\), and no mpirun of Open MPI"
    ):
        choose("slurm", OPEN_MPI, Found(COMMANDS, BOTH[1:], frozenset({"none", "pmi2"})))
    # not asked, or no answer
    assert choose("slurm", OPEN_MPI, Found(COMMANDS, BOTH)) == ("/usr/bin/srun", "pmix")


def test_the_user_chooses() -> None:
    assert choose("slurm", OPEN_MPI, launcher="mpirun") == ("/o/mpirun", "")
    assert choose("slurm", MPICH, launcher="mpiexec") == ("/m/mpiexec", "")
    assert choose("slurm", OPEN_MPI, mpi="pmix_v4") == ("/usr/bin/srun", "pmix_v4")
    assert choose("lsf", OPEN_MPI, launcher="mpirun") == ("/o/mpirun", "")
    with pytest.raises(LauncherError, match="--launcher srun: command srun not found"):
        choose("slurm", OPEN_MPI, Found({}, BOTH), launcher="srun")
    # by its path
    named = Found({"/o/orterun": "/o/orterun"}, (*BOTH, Starter("openmpi", "/o/orterun")))
    assert choose("slurm", OPEN_MPI, named, launcher="/o/orterun") == ("/o/orterun", "")
    with pytest.raises(
        LauncherError, match=r"no /o/orterun of MPICH.* was found \(found: /o/orterun \(openmpi"
    ):
        choose("slurm", MPICH, named, launcher="/o/orterun")
    with pytest.raises(
        LauncherError, match="--launcher orterum: command orterum not found .* or the path of"
    ):
        choose("slurm", OPEN_MPI, ALL, launcher="orterum")


def test_pals_before_another_mpiexec() -> None:
    found = Found({}, (Starter("hydra", "/m/mpirun"), Starter("pals", "/opt/cray/pals/mpiexec")))
    for library in (MPICH, CRAY):
        assert choose("pbs", library, found) == ("/opt/cray/pals/mpiexec", "")


def test_intels_program_that_hears_signals_comes_first() -> None:
    mpiruns = tuple(Starter("intel", f"/i/{name}") for name in ("mpirun", "mpiexec", "mpiexec.hydra"))
    found = Found({}, (Starter("hydra", "/m/mpiexec.hydra"), *mpiruns))
    assert choose("local", INTEL, found) == ("/i/mpiexec.hydra", "")
    assert choose("local", INTEL, Found({}, mpiruns[:2])) == ("/i/mpirun", "")
    assert choose("local", INTEL, found, launcher="mpirun") == ("/i/mpirun", "")


def test_mpirun_of_another_library_is_refused() -> None:
    expected = r"no mpirun of Open MPI v5.0.11 was found \(found: /m/mpirun \(hydra\).*Fix: load the module"
    with pytest.raises(LauncherError, match=expected):
        choose("local", OPEN_MPI, Found({}, BOTH[1:]))


VERSIONS = {
    "wheel": "HYDRA build details:\n    Version: 5.0.2",
    "site": "mpirun (Open MPI) 4.1.4",
    "library": "mpirun (Open MPI) 5.0.11",
    "broken": "Segmentation fault",
}


def test_find_launchers(tmp_path: Path) -> None:
    """First those of Python's environment (wheels), then the library's own, then the others."""
    for folder in VERSIONS:
        file = tmp_path / folder / "bin" / "mpirun"
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    (tmp_path / "site" / "bin" / "srun").touch(0o755)
    (tmp_path / "site" / "bin" / "mpiexec").touch(0o644)  # not executable

    def ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
        if command[1] == "--mpi=list":
            return "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
        return VERSIONS[Path(command[0]).parent.parent.name]

    environ = {"PATH": f"{tmp_path}/site/bin:{tmp_path}/broken/bin:{tmp_path}/wheel/bin"}
    library = MpiLibrary("", str(tmp_path / "library" / "lib" / "libmpi.so.40"))
    python = str(tmp_path / "wheel" / "bin" / "python")
    found = find_launchers(environ, library, python, own="srun", ask=ask)
    assert found.commands == {"srun": str(tmp_path / "site" / "bin" / "srun")}
    assert [(one.kind, Path(one.path).parent.parent.name) for one in found.mpiruns] == [
        ("hydra", "wheel"),
        ("openmpi", "library"),
        ("openmpi", "site"),
    ]
    assert found.plugins is not None
    assert {"none", "pmi2", "pmix", "pmix_v4"} <= found.plugins
    assert find_launchers(environ, library, python, ask=ask).plugins is None


@pytest.mark.parametrize("named", ["path", "name"])
def test_launcher_that_the_user_has_named_is_found(tmp_path: Path, named: str) -> None:
    (tmp_path / "orterun").touch(0o755)
    name = {"path": str(tmp_path / "orterun"), "name": "orterun"}[named]
    environ = {"PATH": "/gone" if named == "path" else str(tmp_path)}
    found = find_launchers(environ, MpiLibrary(""), "/gone/python", named=name, ask=lambda *_: "OpenRTE")
    assert found.commands == {name: str(tmp_path / "orterun")}
    assert found.mpiruns == (Starter("openmpi", str(tmp_path / "orterun")),)
    assert choose("pbs", OPEN_MPI, found, launcher=name) == (str(tmp_path / "orterun"), "")


def test_launchers_are_really_asked(tmp_path: Path) -> None:
    for name, text in (("mpirun", "echo 'mpirun (Open MPI) 5.0.11'"), ("mpiexec", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = find_launchers({"PATH": str(tmp_path)}, MpiLibrary(""), "/gone/python")
    assert found.mpiruns == (Starter("openmpi", str(tmp_path / "mpirun")),)


# -- the MPI library is asked for in a child


def test_ask_library() -> None:
    """Below a launcher as well: the child is no rank."""
    library = ask_library([sys.executable], {**os.environ, "PMI_FD": "77", "PMI_RANK": "0", "PMI_SIZE": "2"})
    assert library.family in ("openmpi", "mpich")
    assert Path(library.file).is_file()
    assert "mpi4py.MPI" not in sys.modules


def test_name() -> None:
    assert MpiLibrary("Open MPI v5.0.11, package: x\0").name == "Open MPI v5.0.11"
    assert MpiLibrary("").name == "an unknown MPI library"


def test_no_library(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for text, why in (
        ("echo noise; echo 'RuntimeError: cannot load MPI library' >&2; exit 1", "cannot load MPI library"),
        ("exit 3", "exit code 3"),
    ):
        python.write_text(f"#!/bin/sh\n{text}\n")
        python.chmod(0o755)
        with pytest.raises(MpiMissingError, match=rf"finds no MPI library \(.*{why}\). Fix: "):
            ask_library([str(python)], {})
    with pytest.raises(
        LauncherError, match=r"could not run /gone/python \(No such file or directory\)\. Fix: install"
    ):
        ask_library(["/gone/python"], {})
    with pytest.raises(LauncherError, match=r"could not run apptainer .*Fix: load its module"):
        ask_library(["apptainer", "exec", "image", "python"], {"PATH": "/gone"})


@pytest.mark.parametrize("text", ["", "3", "[]", '["a"]', '["a", "b", "c"]', "[" * 100_000, "1" * 5000, "{}"])
def test_answer_that_is_none(text: str) -> None:
    assert parse_answer(f"noise\ndask-gpu-mpi:{text}\n") is None
