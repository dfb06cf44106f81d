"""A script that replaces itself by another program: the rank stays, and the program is its child."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from dask_gpu_mpi.job.child_processes import ExecAsChild
from support import ROOT

HEAD = """
import atexit, os, signal, sys, threading
from dask_gpu_mpi.job.child_processes import ExecAsChild
replaced = ExecAsChild()
atexit.register(print, "the end")
PYTHON = sys.executable
"""


def run(body: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A script; `before`: what happens before the cluster is there."""
    return subprocess.run(
        [sys.executable, "-c", "import os\n" + before + HEAD + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "call",
    [
        "os.execv(PYTHON, ['name', '-c', CODE, str(os.getpid())])",
        "os.execl(PYTHON, 'name', '-c', CODE, str(os.getpid()))",
        "os.execvp('python3', ['name', '-c', CODE, str(os.getpid())])",
        "os.execve(PYTHON, ['name', '-c', CODE, str(os.getpid())], {**os.environ, 'MINE': '1'})",
        "os.execle(PYTHON, 'name', '-c', CODE, str(os.getpid()), {**os.environ, 'MINE': '1'})",
    ],
)
def test_the_program_runs_as_a_child_and_the_script_ends_with_its_code(call: str) -> None:
    code = "import os, sys; print(os.getppid() == int(sys.argv[1]), os.environ.get('MINE')); sys.exit(7)"
    done = run(f"CODE = {code!r}\nprint('begin')\n{call}\nprint('never')")
    has_environ = "1" if "MINE" in call else "None"
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == ["begin", f"True {has_environ}", "the end"]


INHERITS = """
read, write = os.pipe()
os.set_inheritable(write, True)
again = os.dup2(write, OF_LAUNCHER)  # another file by a number that was there before
private = os.dup(write)
code = "import os, sys; print(*(os.path.exists('/dev/fd/' + fd) for fd in sys.argv[1:]))"
os.execv(PYTHON, ["x", "-c", code, *map(str, (write, again, private, STAYS))])
"""


def test_descriptors_that_the_script_made_inheritable_are_the_programs() -> None:
    before = "OF_LAUNCHER, STAYS = os.pipe()\n" + "".join(
        f"os.set_inheritable({name}, True)\n" for name in ("OF_LAUNCHER", "STAYS")
    )
    done = run(INHERITS, before)
    assert done.stdout.splitlines() == ["True True False False", "the end"], done.stderr


def test_a_program_that_is_killed() -> None:
    done = run("os.execv(PYTHON, ['x', '-c', 'import os; os.kill(os.getpid(), 9)'])")
    assert (done.returncode, done.stdout) == (137, "the end\n")


def test_no_such_program() -> None:
    done = run(
        """
        for call in (lambda: os.execv("/nowhere/x", ["x"]), lambda: os.execvp("dgm-nowhere", ["x"])):
            try:
                call()
            except FileNotFoundError:
                print("not found")
        """
    )
    assert (done.returncode, done.stdout) == (0, "not found\nnot found\nthe end\n")


def test_forked_children_replace_themselves() -> None:
    done = run(
        """
        pid = os.fork()
        if pid == 0:
            code = "import os, sys; sys.exit(11 if os.getppid() == int(sys.argv[1]) else 12)"
            os.execv(PYTHON, ["x", "-c", code, str(os.getppid())])
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert (done.returncode, done.stdout) == (0, "11\nthe end\n"), done.stderr


def test_what_ends_the_script_ends_the_program() -> None:
    done = run(
        """
        def end(*_):
            raise SystemExit(143)

        signal.signal(signal.SIGTERM, end)
        code = "import os, signal, sys, time; print('up', flush=True); os.kill(int(sys.argv[1]), signal.SIGTERM); time.sleep(60)"
        os.execv(PYTHON, ["x", "-c", code, str(os.getpid())])
        """
    )
    assert (done.returncode, done.stdout) == (143, "up\nthe end\n"), done.stderr


def test_exit_code_0() -> None:
    done = run("os.execv('/bin/true', ['true'])")
    assert done.returncode == 0, done.stderr


def test_the_program_ends_with_a_script_that_is_killed() -> None:
    read, write = os.pipe()
    code = "import os, time; os.kill(os.getppid(), 9); time.sleep(60)"
    # close_fds is for what is opened: standard output stays, and has its end of file when both have ended
    done = subprocess.run(
        [sys.executable, "-c", HEAD + f"os.execv(PYTHON, ['x', '-c', {code!r}])"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=write,
        timeout=60,
    )
    os.close(write)
    assert done.returncode == -9
    assert os.read(read, 1) == b""  # waits for the end of the child
    os.close(read)


def test_taken_back() -> None:
    before = os.execv, os.execve
    replaced = ExecAsChild()
    assert os.execv is not before[0]
    replaced.take_back()
    replaced.take_back()
    assert (os.execv, os.execve) == before
