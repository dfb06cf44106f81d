"""Exit codes: one place for all."""

from __future__ import annotations

import itertools

import pytest

from dask_gpu_mpi.errors import ClusterLostError, InputError, StartupError
from dask_gpu_mpi.job import outcome


def test_those_of_errors_and_of_the_walltime() -> None:
    assert outcome.WALLTIME == 75
    assert ClusterLostError.exit_code == StartupError.exit_code == outcome.FAILED == 1
    assert InputError.exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError(), 1), (MemoryError(), 1), (KeyboardInterrupt(), 130), (GeneratorExit(), 1)],
)
def test_of_a_script_that_raises(error: BaseException, code: int) -> None:
    assert outcome.code_of_exception(error) == code


@pytest.mark.parametrize(("code", "aborted"), [(0, 1), (1, 1), (143, 143)])
def test_an_abort_is_never_a_success(code: int, aborted: int) -> None:
    assert outcome.code_of_abort(code) == aborted


@pytest.mark.parametrize(
    ("ended", "ended_by", "received"), list(itertools.product([False, True], [None, 2], [None, 15]))
)
def test_of_a_rank(ended: bool, ended_by: int | None, received: int | None) -> None:
    """A lost cluster comes before all; then what ended the job; a signal of its own where it knows of no end."""
    assert outcome.code_of_rank(lost=True, ended=ended, ended_by=ended_by, received=received) == 1
    code = outcome.code_of_rank(lost=False, ended=ended, ended_by=ended_by, received=received)
    if ended:
        assert code == (0 if ended_by is None else 130)
    else:
        assert code == (1 if received is None else 143)
