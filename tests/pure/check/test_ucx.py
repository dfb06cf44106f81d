"""What comes of trying UCX on a node, with a mock of it; tests/ucx and tests/gpu have UCX itself."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from dask_gpu_mpi.check.ucx import try_ucx


def environ_with(ucxx: str, folder: Path) -> dict[str, str]:
    (folder / "ucxx").mkdir()
    (folder / "ucxx" / "__init__.py").write_text(ucxx)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.parametrize(
    ("ucxx", "says"),
    [
        ("raise ImportError('no libucp.so.0')", "no libucp.so.0"),
        (
            "import os, sys; print('loading\\nBus error', file=sys.stderr, flush=True); os._exit(7)",
            "exit code 7: Bus error",
        ),
        ("import os; os._exit(7)", "exit code 7: no error output"),
    ],
)
def test_what_went_wrong_is_reported(tmp_path: Path, ucxx: str, says: str) -> None:
    assert says in try_ucx("", environ_with(ucxx, tmp_path), 60.0).error


def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    assert (
        try_ucx("", environ_with("import time; time.sleep(600)", tmp_path), 1.0).error
        == "no result within 1 s"
    )


@pytest.mark.skipif(
    find_spec("distributed_ucxx") is None,
    reason="distributed-ucxx is not installed; tests/ucx runs this with it",
)
def test_ucx_itself() -> None:
    assert try_ucx("", os.environ, 60.0).error == ""
