"""The first pages that a newcomer reads, run as they stand."""

from __future__ import annotations

import re

from support import ROOT
from support.jobs.mpi import Mpi


def first_script(page: str) -> str:
    """The first block of Python on the page."""
    block = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return block.group(1)


def test_start_here(mpirun: Mpi) -> None:
    """The same script is on the three pages; what is printed has the lines that the page shows."""
    script = first_script("docs/start.md")
    bare = script.split("\n", 1)[1]
    assert bare == first_script("docs/index.md") == first_script("README.md").split("\n", 1)[1]
    done = mpirun.run(script, None, command=["launch", "-n", "2"], timeout=90).check()
    assert re.search(r"^mean with numpy: 0\.\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^dask_gpu_mpi: 2 workers on 1 host, 0 GPUs, ready after [\d.]+ s$", done.stderr, re.M)
    assert re.search(
        r"^dask_gpu_mpi: dashboard at http://localhost:\d+/status\?token=\S+$", done.stderr, re.M
    )
    assert re.search(r"^dask_gpu_mpi: ended after [\d.]+ s$", done.stderr, re.M)
