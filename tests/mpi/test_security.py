"""Modules in the working directory, where others may have put them, are not run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.jobs.clusters import COMMAND, facts, packed_environment
from support.jobs.mpi import Mpi, foreign_lines
from support.jobs.scripts import expanded

#: Modules that a process of ours imports early, or at all.
PLANTED = (
    "asyncio", "click", "cloudpickle", "contextlib", "dask", "dask_cuda", "dask_gpu_mpi", "distributed", "json", "msgspec",
    "mpi4py", "multiprocessing", "numba", "numpy", "psutil", "signal", "sitecustomize", "socket", "ssl", "subprocess", "tempfile",
    "ucxx", "usercustomize",
)  # fmt: skip
#: Tells how Python has set its own process, those of its children, and those of tasks and of their children.
HOW = """
from support.jobs.scripts.tell import tell
import subprocess
CODE = "import json, os, sys; print(json.dumps([sys.flags.safe_path, sys.path[0], 'PYTHONSAFEPATH' in os.environ]))"

def how():
    import json, os, subprocess, sys
    child = json.loads(subprocess.check_output([sys.executable, "-c", CODE], cwd="/"))
    return [sys.flags.safe_path, *child]
"""


def plant(folder: Path) -> Path:
    """A working directory in which another user has put modules; returns the file that they write to."""
    folder.mkdir(parents=True, exist_ok=True)
    ran = folder.parent / f"{folder.name}-ran"
    # which UCX, in MPI's library, would read: it would say so in this file, and load code if told so
    (folder / "ucx.conf").write_text(f"UCX_LOG_LEVEL=info\nUCX_LOG_FILE={ran}\n")
    for name in PLANTED:
        (folder / f"{name}.py").write_text(
            f"with open({str(ran)!r}, 'a') as file:\n    print(__name__, file=file)\n"
        )
    return ran


def neighbours(folder: Path, script: str) -> str:
    folder.mkdir()
    (folder / "neighbour.py").write_text("VALUE = 5\n")
    (folder / "script.py").write_text(expanded(script))
    return str(folder / "script.py")


CLIENT = """
import neighbour
from distributed import Client
with Client() as client:
    def value():
        import neighbour
        return neighbour.VALUE
    tell(task=client.submit(value).result(), hows=[how(), client.submit(how).result()], first=sys.path[0])
tell(prefix=sys.prefix)
"""


LAUNCH = (os.path.join(sys.prefix, "bin", "dask-gpu-mpi"), "launch", "--interface", "lo")


@pytest.mark.parametrize("how", ["initialize", "launch", "staged"])
def test_modules_of_the_working_directory_are_not_run_for_a_script_elsewhere(
    mpirun: Mpi, tmp_path: Path, how: str
) -> None:
    """Nor by `launch`, and by the processes that make copies of an environment, and start a launcher."""
    ran, local = plant(tmp_path / "shared"), tmp_path / "local"
    begin = "from dask_gpu_mpi import initialize\ninitialize()\n" if how == "initialize" else ""
    script = neighbours(tmp_path / "own", HOW + begin + CLIENT)
    ranks, command = 2, ["python", script]
    if how != "initialize":
        stage = ["--stage", str(packed_environment(tmp_path))] if how == "staged" else ["--check"]
        ranks, command = None, [*LAUNCH, "-n", "2", *stage, "--local-directory", str(local), script]
    done = mpirun.run(command, ranks, cwd=tmp_path / "shared").check()
    told = facts(done)
    assert told.pop("prefix").startswith(f"{local}/dgm-stage-") is (how == "staged")
    assert told == {"task": 5, "hows": [[False, False, "", False]] * 2, "first": str(tmp_path / "own")}
    assert how != "initialize" or foreign_lines(done.stderr) == []
    assert not ran.exists(), ran.read_text()
    assert how == "initialize" or list(local.iterdir()) == []


def test_a_module_of_the_working_directory_that_is_asked_for(mpirun: Mpi, tmp_path: Path) -> None:
    neighbours(tmp_path / "own", "")
    # -m searches the working directory first, as Python itself does
    prints = "import neighbour, sys; print(neighbour.VALUE, [sys.path[0]])"
    (tmp_path / "own" / "module.py").write_text(prints)
    done = mpirun.run([*LAUNCH, "-n", "1", "-m", "module"], None, cwd=tmp_path / "own").check()
    assert done.stdout == f"5 {[str(tmp_path / 'own')]}\n"


@pytest.mark.both_mpis
def test_a_launcher_whose_ports_stay_open(mpirun: Mpi) -> None:
    """A rank that may not change other processes warns, once, of what the launcher exposes."""
    if os.geteuid():
        pytest.skip("needs root, which gives up a capability")
    code = "from distributed import Client; print(Client().submit(sum, [1, 2]).result())"
    command = ["setpriv", "--bounding-set=-sys_ptrace", *COMMAND, "-c", code]
    job = mpirun.run(command, 2)
    assert job.check().stdout == "3\n"
    (said,) = [line for line in job.stderr.splitlines() if "stay open" in line]
    assert {"openmpi": "run commands as you", "mpich": "end the job"}[mpirun.name] in said
