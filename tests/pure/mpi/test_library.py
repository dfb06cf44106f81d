"""What is loaded before MPI, and what is said when that can't be."""

from __future__ import annotations

import sys
import types

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.mpi import library
from dask_gpu_mpi.mpi.library import load_ucx_first


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ucx_is_first", False)
    monkeypatch.setenv("UCX_WARN_UNUSED_ENV_VARS", "n")


def test_ucx_after_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    monkeypatch.delitem(sys.modules, "ucxx", raising=False)
    with pytest.raises(InputError, match=r"has imported mpi4py\.MPI before initialize\(\)"):
        load_ucx_first()


def test_ucx_that_the_script_has_loaded_first_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    monkeypatch.setitem(sys.modules, "ucxx", types.ModuleType("ucxx"))
    load_ucx_first()


def test_library_of_ucx_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mpi4py.MPI", "ucxx"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loaded = []
    package = types.ModuleType("libucxx")
    package.load_library = lambda: loaded.append("library")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "libucxx", package)
    load_ucx_first()
    assert loaded == ["library"]
    assert "ucxx" not in sys.modules
    # and so a second cluster of this process is fine
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    load_ucx_first()


def test_ucx_is_loaded_where_its_library_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "libucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx", None)
    load_ucx_first()  # neither is here: the agent tells
    imported = types.ModuleType("ucxx")
    monkeypatch.setitem(sys.modules, "ucxx", imported)
    load_ucx_first()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    monkeypatch.delitem(sys.modules, "ucxx")
    load_ucx_first()
