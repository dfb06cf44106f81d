"""What is loaded before MPI, and what is said when that can't be."""

from __future__ import annotations

import sys
import types

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.rendezvous import load_ucx_first


def test_ucx_after_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    monkeypatch.delitem(sys.modules, "ucxx", raising=False)
    with pytest.raises(InputError, match=r"has imported mpi4py\.MPI before initialize\(\)"):
        load_ucx_first()


def test_ucx_that_the_script_has_loaded_first_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    monkeypatch.setitem(sys.modules, "ucxx", types.ModuleType("ucxx"))
    load_ucx_first()


def test_ucx_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    loaded = []
    monkeypatch.setattr("importlib.import_module", loaded.append)
    load_ucx_first()
    assert loaded == ["ucxx"]
