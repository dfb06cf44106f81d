"""The fork server made of the process itself: imports are shared, children die with it, the hash seed is theirs too."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

HEAD = """
    import os, sys, tempfile
    import decimal as heavy  # stands for what the agent imports
    heavy.MARK = "imported once"
    from dask_gpu_mpi.forkserver import become_fork_server
    import gc
    gc.disable()  # as the agent has it while it imports
    become_fork_server(sys.argv[1], [], [])
    from multiprocessing import get_context
    context = get_context("forkserver")
"""


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    # `-c`, as the agent has it: nothing that children would import again as their main module
    code = textwrap.dedent(HEAD) + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )


def test_children_have_what_was_imported(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        receiver, sender = context.Pipe()
        code = "import decimal, os; sender.send((getattr(decimal, 'MARK', None), os.getppid() != parent))"
        process = context.Process(target=exec, args=(code, {"sender": sender, "parent": os.getpid()}))
        process.start()
        print(receiver.recv())
        process.join(10)
        print(process.exitcode)
        """,
    )
    assert done.stdout.split("\n")[:2] == ["('imported once', True)", "0"], done.stderr


def test_children_die_with_the_process(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import time
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        print(process.pid, flush=True)
        os._exit(0)
        """,
    )
    pid = int(done.stdout)
    # The kernel kills the server when its parent ends, and the child when the server does: before a second has passed.
    for _ in range(100):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        ).stdout.strip()
        if state == "" or state.startswith("Z"):
            return
        subprocess.run(["sleep", "0.05"], check=True)
    raise AssertionError(f"process {pid} lives on in state {state}")


def test_a_long_directory_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    done = run(
        deep, "process = context.Process(target=print, args=('up',)); process.start(); process.join(10)"
    )
    assert "up" in done.stdout, done.stderr


def test_children_collect_garbage_but_leave_what_was_imported_alone(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        receiver, sender = context.Pipe()
        code = "import gc; sender.send((gc.isenabled(), gc.get_freeze_count() > 1000))"
        process = context.Process(target=exec, args=(code, {"sender": sender}))
        process.start()
        print(receiver.recv())
        process.join(10)
        """,
    )
    assert done.stdout == "(True, True)\n", done.stderr
