"""Who gets in, what a neighbour on the host can read, and where a job listens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.check.kernel import run_kernels
from dask_gpu_mpi.check.ucx import UcxOrder, UcxTrial
from support.jobs.clusters import TELL, facts, foreign_lines, listening, scratch_of, until, without_mpi
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

STRANGERS = script("mpi/scripts/strangers.py")

KEYS = (b"PRIVATE KEY", b"BEGIN CERTIFICATE")


def secrets_in(path: Path) -> bool:
    """Whether a file that can be read has a key or a certificate in it."""
    try:
        return any(key in path.read_bytes() for key in KEYS)
    except OSError:
        return False


@pytest.mark.quick("mpich")
def test_tls_secrets_and_sockets(mpirun: Mpi) -> None:
    job = mpirun.start(STRANGERS, 2)
    job.wait_for("strangers")
    told = facts(job)
    # in: nobody who has not been let in
    assert len(told["strangers"]) == 4, told
    assert all(answer.startswith("refused: ") for answer in told["strangers"]), told
    # while it runs, with its workers up: command lines, environments, files
    processes = job.processes()
    assert len(processes) > 6
    for pid in processes:
        assert not secrets_in(Path(f"/proc/{pid}/cmdline")), processes[pid]
        assert not secrets_in(Path(f"/proc/{pid}/environ")), processes[pid]
    own = {"script.py"}  # the only one that may say so
    files = [path for path in job.directory.rglob("*") if path.is_file() and path.name not in own]
    assert not [path for path in files if secrets_in(path)]
    assert scratch_of(job)
    assert all(path.stat().st_mode & 0o077 == 0 for path in job.directory.glob("dgm-*"))
    # one host: agents, scheduler and workers listen on the loopback interface alone, dashboards included
    pids = without_mpi(job)
    assert {row["pid"] for row in told["workers"]} <= set(pids)
    sockets = {pid: sorted(listening(pid)) for pid in pids}
    assert sum(map(len, sockets.values())) >= 3
    elsewhere = {
        pid: found for pid, found in sockets.items() if any(a not in ("127.0.0.1", "::1") for a, _ in found)
    }
    assert not elsewhere, [processes.get(pid) for pid in elsewhere]
    (job.directory / "go-on").touch()
    assert "Traceback" not in job.wait(30).check(0).stderr
    until(lambda: not scratch_of(job), 5)


#: Modules that a process of ours imports early, or at all.
PLANTED = (
    *(
        "asyncio",
        "click",
        "cloudpickle",
        "contextlib",
        "dask",
        "dask_cuda",
        "dask_gpu_mpi",
        "distributed",
        "json",
        "msgspec",
    ),
    *(
        "mpi4py",
        "multiprocessing",
        "numba",
        "numpy",
        "psutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "ucxx",
    ),
)
#: Tells how Python has set its own process, those of its children, and those of tasks and of their children.
HOW = (
    TELL
    + """
import subprocess
CODE = "import json, os, sys; print(json.dumps([sys.flags.safe_path, sys.path[0], 'PYTHONSAFEPATH' in os.environ]))"

def how():
    import json, os, subprocess, sys
    child = json.loads(subprocess.check_output([sys.executable, "-c", CODE], cwd="/"))
    return [sys.flags.safe_path, *child]
"""
)


def plant(folder: Path) -> Path:
    """A working directory in which another user has put modules; returns the file that they write to."""
    folder.mkdir(parents=True, exist_ok=True)
    ran = folder.parent / f"{folder.name}-ran"
    # which UCX, in MPI's library, would read: it would say so in its output, and load code if told so
    (folder / "ucx.conf").write_text("UCX_LOG_LEVEL=info\n")
    for name in PLANTED:
        (folder / f"{name}.py").write_text(
            f"with open({str(ran)!r}, 'a') as file:\n    print(__name__, file=file)\n"
        )
    return ran


def neighbours(folder: Path, script: str) -> str:
    folder.mkdir()
    (folder / "neighbour.py").write_text("VALUE = 5\n")
    (folder / "script.py").write_text(script)
    return str(folder / "script.py")


CLIENT = """
import neighbour
from distributed import Client
with Client() as client:
    def value():
        import neighbour
        return neighbour.VALUE
    tell(task=client.submit(value).result(), hows=[how(), client.submit(how).result()], first=sys.path[0])
"""


def test_modules_of_the_working_directory_are_not_run_for_a_script_elsewhere(
    mpirun: Mpi, tmp_path: Path
) -> None:
    ran = plant(tmp_path / "shared")
    script = neighbours(tmp_path / "own", f"{HOW}from dask_gpu_mpi import initialize\ninitialize()\n{CLIENT}")
    done = mpirun.run(["python", script], 2, cwd=tmp_path / "shared").check()
    assert facts(done) == {"task": 5, "hows": [[False, False, "", False]] * 2, "first": str(tmp_path / "own")}
    assert foreign_lines(done.stderr) == []
    assert not ran.exists(), ran.read_text()


def test_modules_of_the_working_directory_are_not_run_by_launch(mpirun: Mpi, tmp_path: Path) -> None:
    ran = plant(tmp_path / "shared")
    script = neighbours(tmp_path / "own", f"{HOW}{CLIENT}")
    command = [
        os.path.join(sys.prefix, "bin", "dask-gpu-mpi"),
        "launch",
        "-n",
        "2",
        "--check",
        "--interface",
        "lo",
        script,
    ]
    done = mpirun.run(command, None, cwd=tmp_path / "shared", timeout=110).check()
    assert facts(done) == {"task": 5, "hows": [[False, False, "", False]] * 2, "first": str(tmp_path / "own")}
    assert not ran.exists(), ran.read_text()
    # -m searches the working directory first, as Python itself does
    prints = "import neighbour, sys; print(neighbour.VALUE, [sys.path[0]])"
    (tmp_path / "own" / "module.py").write_text(prints)
    line = [*command[:2], "-n", "1", "--interface", "lo", "-m", "module"]
    done = mpirun.run(line, None, cwd=tmp_path / "own").check()
    assert done.stdout == f"5 {[str(tmp_path / 'own')]}\n"


def test_modules_of_the_working_directory_are_not_run_by_the_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by the processes that try GPUs and UCX, also where those are not installed."""
    ran = plant(tmp_path / "shared")
    monkeypatch.chdir(tmp_path / "shared")
    run_kernels(["GPU-a"], os.environ, 60.0)
    UcxTrial(UcxOrder(""), os.environ, 60.0).result()
    assert not ran.exists(), ran.read_text()
