"""The package's errors: their exit codes, what catches them, and that they arrive at other ranks as what they were."""

from __future__ import annotations

import inspect
import pickle

import pytest

import dask_gpu_mpi
from dask_gpu_mpi import errors
from dask_gpu_mpi.base.failures import Failure, one_report, report_error
from dask_gpu_mpi.errors import (
    DaskGpuMpiError,
    InputError,
    OptionError,
    Problem,
    StartupError,
    WorldTooSmallException,
    world_too_small,
)

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each is not Problem]
#: Those that ranks send.
KINDS = [
    each
    for each in CLASSES
    if each not in (DaskGpuMpiError, errors.ClusterLostError, errors.GangCancelledError)
    and not issubclass(each, errors.SpmdError)
]


@pytest.mark.parametrize("error", CLASSES)
def test_input_is_2_and_the_rest_is_1(error: type[DaskGpuMpiError]) -> None:
    assert issubclass(error, DaskGpuMpiError)
    assert error.exit_code == (2 if issubclass(error, InputError) else 1)
    assert not error("no").fatal


def test_all_classes_are_public() -> None:
    assert {each.__name__ for each in CLASSES} <= set(dask_gpu_mpi.__all__)


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


def test_an_error_of_another_class_is_a_failure_as_well() -> None:
    assert Failure.of(KeyError("x")) == Failure(Problem("KeyError: 'x'"))


def travelled(error: DaskGpuMpiError) -> DaskGpuMpiError:
    return pickle.loads(pickle.dumps(Failure.of(error))).error(reported=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_arrives(kind: type[DaskGpuMpiError]) -> None:
    arrived = travelled(kind("text"))
    assert isinstance(arrived, kind)
    assert type(arrived).__name__ == kind.__name__
    assert (str(arrived), arrived.exit_code, arrived.reported) == ("text", kind.exit_code, True)


def test_the_parts_of_a_report_arrive() -> None:
    error = StartupError("a; b")
    error.problems = (Problem("a"), Problem("b"))
    assert travelled(error).problems == error.problems


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (1, StartupError), (143, StartupError)])
@pytest.mark.parametrize("name", ["", "NobodyKnows", "world_too_small", "__doc__"])
def test_without_a_class_the_exit_code_decides(code: int, kind: type[DaskGpuMpiError], name: str) -> None:
    arrived = Failure(Problem("text"), code, name).error(reported=False)
    assert (type(arrived), arrived.exit_code, arrived.reported) == (kind, code, False)
    assert travelled(arrived).exit_code == code


@pytest.mark.parametrize(
    ("kinds", "codes", "of_all"),
    [
        ("OptionError OptionError", (2, 2), OptionError),
        ("OptionError PlacementError", (2, 2), InputError),
        ("OptionError Unknown", (2, 2), InputError),
        ("OptionError WorldTooSmallException", (2, 2), WorldTooSmallException),
        ("InputError StartupError", (2, 1), StartupError),
    ],
)
def test_the_class_of_a_report(kinds: str, codes: tuple[int, ...], of_all: type[DaskGpuMpiError]) -> None:
    for text in ("text {}", "same"):  # ranks that say the same share a part, whatever the class
        failures = {
            rank: Failure(Problem(text.format(rank)), code, kind)
            for rank, (kind, code) in enumerate(zip(kinds.split(), codes, strict=True))
        }
        error = one_report(failures, {}, 2).error(reported=False)
        assert isinstance(error, of_all)
        assert (type(error).__name__, error.exit_code) == (of_all.__name__, min(codes))
        assert str(error) == "same" or text != "same" or codes == (2, 1)


def test_an_error_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("text")
    for _ in range(2):
        report_error(error)
        assert error.reported
    assert capsys.readouterr().err == "dask_gpu_mpi: error: text\n"
    report_error(InputError("told", reported=True))
    assert capsys.readouterr().err == ""


def report(failures: dict[int, Problem], ranks: int, *, hosts: bool = False) -> str:
    names = {rank: f"h{rank}" for rank in failures} if hosts else {}
    return str(one_report({rank: Failure(each, 1) for rank, each in failures.items()}, names, ranks).problem)


def test_a_report_spells_out_six_failures_and_eight_hosts_and_counts_the_others() -> None:
    texts = {rank: Problem(f"text {rank}") for rank in range(7)}
    assert report(texts, 100).endswith("; rank 5 of 100: text 5; and 1 more failures of this kind")
    del texts[6]
    assert report(texts, 100).endswith("; rank 5 of 100: text 5")
    full = dict.fromkeys(range(9), Problem("full"))
    eight = "h0, h1, h2, h3, h4, h5, h6, h7"
    assert report(full, 100, hosts=True) == f"ranks 0-8 of 100 on {eight} and 1 more: full"
    del full[8]
    assert report(full, 100, hosts=True) == f"ranks 0-7 of 100 on {eight}: full"


def test_what_all_ranks_have_in_common_needs_no_rank() -> None:
    same = dict.fromkeys(range(2), Problem("full"))
    assert (report(same, 2), report(same, 3)) == ("full", "ranks 0-1 of 3: full")
    of_ranks = dict.fromkeys(range(2), Problem("no response", ranks=(0,)))
    assert report(of_ranks, 2) == "ranks 0-1 of 2: no response"
    assert report({1: Problem("is lost", where="rank 1")}, 2) == "rank 1: is lost"
