"""What goes wrong before a rank has an agent; the start itself: tests/mpi, tests/faults/test_starts.py."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from dask_gpu_mpi.cluster import start as module
from dask_gpu_mpi.errors import InputError, StartupError


def test_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(InputError, match=r"sys.executable is '' \(expected the path of a Python program\)"):
        module._start_agent({})


def test_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, "AgentProcess", full)
    with pytest.raises(
        StartupError, match="could not start the agent of this rank .Too many open files.. Fix: "
    ):
        module._start_agent({})
