"""The MPI library is asked for in a child."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import LauncherError, MpiMissingError
from dask_gpu_mpi.sites.starter import MpiLibrary, ask_library, parse_answer


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
