"""A process ends with its parent, and only where it is to."""

from __future__ import annotations

import signal
import subprocess
import sys

HEAD = "import os, subprocess, sys, time\nfrom dask_gpu_mpi.base.signals import die_with_parent\n"
#: A parent that ends at once; its child, which has taken the number that is said, is what this test waits for.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
os._exit(0)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_it_ends_with_its_parent() -> None:
    """Its end of the pipe to this test closes with it."""
    child = "die_with_parent(os.getppid()); print('set', flush=True); os.dup2(2, 1); time.sleep(600)"
    command = [sys.executable, "-c", PARENT, HEAD + child]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        # until all that hold the parent's standard error, the child among them, have ended
        parent.communicate("end\n", timeout=60)


def test_a_parent_that_has_gone_already() -> None:
    assert run("die_with_parent(os.getppid() + 1); print('lives on')").stdout == ""
    assert run("die_with_parent(os.getppid() + 1)").returncode == 1


def test_it_is_taken_back() -> None:
    ask = """
import ctypes
def signal_at_the_end():
    number = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
    return number.value
die_with_parent(os.getppid())
print(signal_at_the_end())
die_with_parent(0)
print(signal_at_the_end())
"""
    assert run(ask).stdout.split() == [str(int(signal.SIGKILL)), "0"]
