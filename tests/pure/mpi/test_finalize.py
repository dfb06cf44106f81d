"""Who finalizes MPI, and with which library nobody does; real ends: tests/mpi, tests/faults, tests/slurm/test_system_mpis.py."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest

from dask_gpu_mpi.mpi import finalize as module

HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "3", "PMI_FD": "9", "MPI_LOCALRANKID": "0"}
NEWER = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
OLDER = "MPICH Version:\t4.0.2\nMPICH Device:\tch4:ucx\n"
OTHERS = (
    "MPICH Version:\t4.0.2\nMPICH Device:\tch4:ofi\n",
    "Open MPI v4.1.4, package: Debian",
    "Intel(R) MPI Library 2021.18",
)


def fake_mpi(
    version: str, *, size: int = 2, alone: bool = True, state: tuple[bool, bool] = (True, False)
) -> Any:
    """What is asked of MPI. `state`: whether it is initialized, and finalized."""
    calls: list[object] = []

    def all_reduce(where: str, what: list[Any], op: str) -> None:
        assert (where, what[1], op) == ("in place", "bool", "and")
        calls.append("all")
        what[0][0] &= alone

    return types.SimpleNamespace(
        calls=calls,
        LAND="and",
        IN_PLACE="in place",
        C_BOOL="bool",
        COMM_WORLD=types.SimpleNamespace(size=size, Allreduce=all_reduce),
        Is_initialized=lambda: state[0],
        Is_finalized=lambda: state[1],
        Get_library_version=lambda: version,
        Finalize=lambda: calls.append("finalize"),
    )


def calls(monkeypatch: pytest.MonkeyPatch, mpi: Any) -> list[object]:
    package = types.ModuleType("mpi4py")
    package.MPI = mpi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: mpi.calls.append(0 < seconds < 1))
    module.finalize()
    found: list[object] = mpi.calls
    return found


@pytest.mark.parametrize(
    ("version", "ranks_here", "others_alone", "size", "expected"),
    [
        *((version, "1", True, 2, ["finalize"]) for version in (NEWER, *OTHERS)),
        (OLDER, "1", True, 2, ["all", True]),
        (
            OLDER,
            "1",
            False,
            3,
            ["all", "finalize"],
        ),  # some node has several, whose exit code Hydra would lose
        (OLDER, "2", True, 3, ["all", "finalize"]),
        (OLDER, "x", True, 3, ["all", "finalize"]),
        (OLDER, "1", True, 1, ["finalize"]),
    ],
)
def test_a_library_whose_finalize_may_hang_is_only_waited_with(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    ranks_here: str,
    others_alone: bool,
    size: int,
    expected: list[object],
) -> None:
    monkeypatch.setattr(module, "_owner", 0)
    module.finalize_at_exit()
    for name, value in {**HYDRA, "MPI_LOCALNRANKS": ranks_here}.items():
        monkeypatch.setenv(name, value)
    if ranks_here == "x":
        monkeypatch.setenv("PMI_RANK", "x")
    assert calls(monkeypatch, fake_mpi(version, size=size, alone=others_alone)) == expected


@pytest.mark.parametrize(
    ("ours", "state"), [(True, (False, False)), (True, (True, True)), (False, (True, False))]
)
def test_nothing_to_finalize(monkeypatch: pytest.MonkeyPatch, ours: bool, state: tuple[bool, bool]) -> None:
    monkeypatch.setattr(module, "_owner", os.getpid() if ours else 1)
    for version in (NEWER, OLDER):
        assert calls(monkeypatch, fake_mpi(version, state=state)) == []
