"""Errors that travel between ranks: they arrive as what they were."""

from __future__ import annotations

import doctest
import pickle

import pytest

from dask_gpu_mpi import errors
from dask_gpu_mpi.base import failures
from dask_gpu_mpi.base.failures import Failure, one_report, report_error
from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    InputError,
    LauncherError,
    MpiMissingError,
    OptionError,
    PlacementError,
    Problem,
    StartupError,
    WorldTooSmallException,
    world_too_small,
)

KINDS = (
    InputError,
    OptionError,
    PlacementError,
    LauncherError,
    MpiMissingError,
    StartupError,
    WorldTooSmallException,
)


def travelled(error: DaskGpuMpiError) -> DaskGpuMpiError:
    return pickle.loads(pickle.dumps(Failure.of(error))).error(reported=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_arrives(kind: type[DaskGpuMpiError]) -> None:
    arrived = travelled(kind("text"))
    assert isinstance(arrived, kind)
    assert type(arrived).__name__ == kind.__name__
    assert (str(arrived), arrived.exit_code, arrived.reported) == ("text", kind.exit_code, True)


def test_no_class_is_left_out() -> None:
    found = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    of_scripts = {
        "ClusterLostError",
        "SpmdError",
        "SpmdTimeoutError",
        "GangCancelledError",
    }  # no rank sends them
    assert found == {kind.__name__ for kind in KINDS} | of_scripts | {"DaskGpuMpiError", "Problem"}


def test_dask_mpis_exception_arrives() -> None:
    import dask_mpi

    assert isinstance(travelled(world_too_small("too small")), dask_mpi.WorldTooSmallException)


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (1, StartupError), (143, StartupError)])
@pytest.mark.parametrize("name", ["", "NobodyKnows", "world_too_small", "__doc__"])
def test_without_a_class_the_exit_code_decides(code: int, kind: type[DaskGpuMpiError], name: str) -> None:
    arrived = Failure(Problem("text"), code, name).error(reported=False)
    assert type(arrived) is kind
    assert arrived.exit_code == code
    assert not arrived.reported


def test_the_exit_code_of_a_signal_arrives() -> None:
    arrived = travelled(Failure(Problem("SIGTERM"), 143).error(reported=False))
    assert (type(arrived), arrived.exit_code) == (StartupError, 143)
    assert StartupError.exit_code == 1


@pytest.mark.parametrize(
    ("kinds", "of_all"),
    [
        (("OptionError", "OptionError"), OptionError),
        (("OptionError", "PlacementError"), InputError),
        (("OptionError", ""), InputError),
        (("OptionError", "WorldTooSmallException"), WorldTooSmallException),
    ],
)
def test_the_class_of_a_report(kinds: tuple[str, ...], of_all: type[DaskGpuMpiError]) -> None:
    failures = {rank: Failure(Problem(f"text {rank}"), 2, kind) for rank, kind in enumerate(kinds)}
    error = one_report(failures, {}, 2).error(reported=False)
    assert isinstance(error, of_all)
    assert type(error).__name__ == of_all.__name__
    assert error.exit_code == 2


def test_input_and_start_up_together_are_a_start_up_error() -> None:
    failures = {
        0: Failure(Problem("no disk"), 2, "InputError"),
        1: Failure(Problem("no agent"), 1, "StartupError"),
    }
    error = one_report(failures, {}, 3).error(reported=False)
    assert (type(error), error.exit_code) == (StartupError, 1)


def test_ranks_that_say_the_same_share_a_part_whatever_the_class() -> None:
    failures = {0: Failure(Problem("no disk"), 2, "OptionError"), 1: Failure(Problem("no disk"), 2)}
    assert str(one_report(failures, {}, 2).problem) == "no disk"


def test_an_error_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("text")
    for _ in range(2):
        report_error(error)
        assert error.reported
    assert capsys.readouterr().err == "dask_gpu_mpi: error: text\n"
    report_error(InputError("told", reported=True))
    assert capsys.readouterr().err == ""


def test_the_examples() -> None:
    assert doctest.testmod(failures).failed == 0


def test_a_report_spells_out_six_failures_and_counts_the_others() -> None:
    def report(count: int) -> str:
        return str(
            one_report({rank: Failure(Problem(f"text {rank}"), 1) for rank in range(count)}, {}, 100).problem
        )

    assert report(6).endswith("; rank 5 of 100: text 5")
    assert report(7).endswith("; rank 5 of 100: text 5; and 1 more failures of this kind")


def test_a_report_names_four_hosts() -> None:
    def report(count: int) -> str:
        failures = dict.fromkeys(range(count), Failure(Problem("full"), 1))
        return str(one_report(failures, {rank: f"h{rank}" for rank in failures}, 100).problem)

    assert report(4) == "ranks 0-3 of 100 on h0, h1, h2, h3: full"
    assert report(5) == "ranks 0-4 of 100 on h0, h1, h2, h3 and others: full"


def test_what_all_ranks_have_in_common_needs_no_rank() -> None:
    same = dict.fromkeys(range(2), Failure(Problem("full"), 1))
    assert str(one_report(same, {}, 2).problem) == "full"
    assert str(one_report(same, {}, 3).problem) == "ranks 0-1 of 3: full"
    of_ranks = dict.fromkeys(range(2), Failure(Problem("no response", ranks=(0,)), 1))
    assert str(one_report(of_ranks, {0: "a"}, 2).problem) == "ranks 0-1 of 2 on a: no response"
    assert (
        str(one_report({1: Failure(Problem("is lost", where="rank 1"), 1)}, {}, 2).problem)
        == "rank 1: is lost"
    )
