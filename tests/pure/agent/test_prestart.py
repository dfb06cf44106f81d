"""Spare processes as `multiprocessing` sees them: below the standard fork server, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info >= (3, 14),
    reason="spares are for fork servers of our own, which Python 3.14 and systems without GPUs do without",
)

#: Starts spares for two devices, then a process as distributed's nannies start theirs: its environment is in a partial.
PROGRAM = """
import functools, os, signal, sys, time
from multiprocessing import get_context
from dask_gpu_mpi.agent.prestart import Spares

def outcome(answers, code, **more):
    answers.put(os.getpid())
    answers.close()
    answers.join_thread()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)

def call(target, *rest):
    target()

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

if __name__ == "__main__":
    code, killed, more = int(sys.argv[1]), sys.argv[2] == "killed", dict(word.split("=") for word in sys.argv[3:])
    context = get_context("forkserver")
    spares = Spares(os.environ)
    spares.start(["GPU-a", "GPU-b"])
    pids = {device: spare.popen.pid for device, spare in spares._waiting.items()}
    if killed:
        os.kill(pids["GPU-a"], signal.SIGKILL)
        while alive(pids["GPU-a"]):
            time.sleep(0.01)
    answers = context.Queue()
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-a", "PATH": os.environ["PATH"], **more}
    target = functools.partial(outcome, answers, code, env=environ)
    process = context.Process(target=call, args=(target,))
    process.start()
    pid = answers.get(timeout=20)
    process.join(20)
    print("same" if pid == pids["GPU-a"] else "other", pid == process.pid, process.exitcode)
    spares.keep(())
    limit = time.monotonic() + 10
    while any(map(alive, pids.values())) and time.monotonic() < limit:
        time.sleep(0.01)
    print([device for device, each in pids.items() if alive(each)])
"""


def ran(folder: Path, *words: str) -> list[str]:
    """What the program said; it leaves nothing behind."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, left = done.stdout.splitlines()
    assert left == "[]"
    return first.split()


@pytest.mark.parametrize("code", [0, 7, -9])
def test_the_process_is_the_spare(tmp_path: Path, code: int) -> None:
    assert ran(tmp_path, str(code), "") == ["same", "True", str(code)]


def test_a_spare_that_has_died(tmp_path: Path) -> None:
    assert ran(tmp_path, "7", "killed") == ["other", "True", "7"]


def test_an_environment_that_differs(tmp_path: Path) -> None:
    # CUDA has read its variables by then
    assert ran(tmp_path, "7", "", "CUDA_LAUNCH_BLOCKING=1") == ["other", "True", "7"]
