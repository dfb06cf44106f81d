"""The package's errors: what catches them, and the exit code that each stands for."""

from __future__ import annotations

import inspect

import pytest

from dask_gpu_mpi import errors
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, Problem, WorldTooSmallException, world_too_small

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each is not Problem]


@pytest.mark.parametrize("error", CLASSES)
def test_input_is_2_and_the_rest_is_1(error: type[DaskGpuMpiError]) -> None:
    assert issubclass(error, DaskGpuMpiError)
    assert error.exit_code == (2 if issubclass(error, InputError) else 1)
    assert not error.fatal


def test_all_classes_are_public() -> None:
    assert {each.__name__ for each in CLASSES} | {"Problem", "world_too_small"} == set(errors.__all__)


@pytest.mark.parametrize(("name", "builtin"), [("OptionError", ValueError), ("MpiMissingError", ImportError)])
def test_pythons_own_classes_catch_them(name: str, builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise getattr(errors, name)("no")


def test_a_world_too_small_is_ours_and_dask_mpis() -> None:
    theirs = pytest.importorskip("dask_mpi.exceptions").WorldTooSmallException
    error = world_too_small("needs 3")
    assert isinstance(error, WorldTooSmallException)
    assert isinstance(error, theirs)
    assert (type(error).__name__, str(error), error.exit_code) == ("WorldTooSmallException", "needs 3", 2)
