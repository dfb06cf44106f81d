"""How MPI is loaded, what comes before that, who finalizes it, and the message if there is none."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import MpiMissingError
from dask_gpu_mpi.mpi import library
from dask_gpu_mpi.mpi.library import load_mpi
from support.mocks.launchers import SAMPLES

#: An mpi4py that finds its settings as the real one does: while it is imported.
FAKE_MPI = """
import mpi4py
calls = ["import", mpi4py.rc.initialize, mpi4py.rc.finalize]
initialized = mpi4py.rc.initialize
def Is_initialized():
    return initialized
def Init_thread():
    calls.append("init")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package mpi4py."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    saved = dict(sys.modules)
    folder = tmp_path / "mpi4py"
    folder.mkdir()
    (folder / "MPI.py").write_text(FAKE_MPI)
    (folder / "__init__.py").write_text(
        "import types\nrc = types.SimpleNamespace(initialize=True, finalize=None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name not in saved]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("by_mpi4py", "calls"),
    [(False, ["import", False, False, "init"]), (True, ["import", True, None])],
)
def test_who_initializes_and_finalizes(fake: Path, by_mpi4py: bool, calls: list[object]) -> None:
    """MPI of the script is as if it had imported it."""
    assert load_mpi({}, "h", by_mpi4py=by_mpi4py).calls == calls


@pytest.mark.parametrize(
    ("error", "host", "text"),
    [
        ("RuntimeError('cannot load libmpi\\nx')", "n3", "on n3 (cannot load libmpi). Fix: "),
        ("ImportError", "", "(ImportError)"),
    ],
)
def test_no_library(fake: Path, error: str, host: str, text: str) -> None:
    (fake / "MPI.py").write_text(f"raise {error}")
    with pytest.raises(MpiMissingError, match=re.escape(text)):
        load_mpi({}, host)


def test_settings_and_the_check_of_the_library_come_before_it_is_loaded(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def settings(environ: object, *given: object, **options: object) -> Iterator[None]:
        assert "mpi4py.MPI" not in sys.modules
        seen.append(options)
        yield

    monkeypatch.setattr(library, "fewer_components", settings)
    monkeypatch.setattr(library, "closed_to_others", settings)
    monkeypatch.setattr(library, "check_library", lambda *given: seen.append(given))
    load_mpi({"A": "1"}, "n3")
    assert seen == [{"one_host": True}, ({"A": "1"}, str(fake / "MPI.py"), "n3"), {"one_host": True}]


NEWER = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
OLDER = "MPICH Version:\t4.0.2\nMPICH Device:\tch4:ucx\n"
OTHERS = (
    "MPICH Version:\t4.0.2\nMPICH Device:\tch4:ofi\n",
    "Open MPI v4.1.4, package: Debian",
    "Intel(R) MPI Library 2021.18",
)


@pytest.mark.parametrize(
    ("version", "hydra", "others_alone", "size", "expected"),
    [
        *((version, {"MPI_LOCALNRANKS": "1"}, True, 2, ["finalize"]) for version in (NEWER, *OTHERS)),
        (OLDER, {"MPI_LOCALNRANKS": "1"}, True, 2, ["all", "settle"]),
        # some node has several, whose exit code Hydra would lose
        (OLDER, {"MPI_LOCALNRANKS": "1"}, False, 3, ["all", "finalize"]),
        (OLDER, {"MPI_LOCALNRANKS": "2"}, True, 3, ["all", "finalize"]),
        (OLDER, {"PMI_RANK": "x"}, True, 3, ["all", "finalize"]),
        (OLDER, {"MPI_LOCALNRANKS": "1"}, True, 1, ["finalize"]),
    ],
)
def test_a_library_whose_finalize_may_hang_is_only_waited_with(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    hydra: dict[str, str],
    others_alone: bool,
    size: int,
    expected: list[str],
) -> None:
    """Real ends: tests/mpi, tests/faults, tests/slurm/test_system_mpis.py."""
    calls: list[str] = []

    def all_reduce(where: str, what: list[Any], op: str) -> None:
        assert (where, what[1], op) == ("in place", "bool", "and")
        calls.append("all")
        what[0][0] &= others_alone

    mpi = types.SimpleNamespace(
        LAND="and",
        IN_PLACE="in place",
        C_BOOL="bool",
        COMM_WORLD=types.SimpleNamespace(size=size, Allreduce=all_reduce),
        Get_library_version=lambda: version,
        Finalize=lambda: calls.append("finalize"),
    )
    for name, value in (SAMPLES["the mpiexec of MPICH or Intel MPI (Hydra)"] | hydra).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))  # type: ignore[arg-type]
    monkeypatch.setattr(library.time, "sleep", lambda seconds: calls.append("settle"))
    library.finalize()
    assert calls == expected
