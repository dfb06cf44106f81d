"""The fork server made of the process itself; what ends with it: tests/faults/test_kills.py."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import psutil
import pytest

from dask_gpu_mpi.agent import main
from dask_gpu_mpi.base.signals import RANK_PID
from support.jobs.clusters import alive, until
from support.jobs.processes import run_python

HEAD = """
    import os, sys, tempfile
    import decimal as heavy  # stands for what the agent imports
    heavy.MARK = "imported once"
    from dask_gpu_mpi.base.signals import ignore_signals
    from dask_gpu_mpi.agent.forkserver import become_fork_server, become_resource_tracker
    import gc
    gc.disable()  # as the agent has it while it imports
    ignore_signals()
    tracker = become_resource_tracker([], sys.argv[1] + "/scratch")
    become_fork_server(sys.argv[1], [])
    from multiprocessing import get_context
    context = get_context("forkserver")
"""


def run(tmp_path: Path, text: str, before: str = "") -> subprocess.CompletedProcess[str]:
    # `-c`, as the agent has it: nothing that children would import again as their main module
    code = textwrap.dedent(before) + textwrap.dedent(HEAD) + textwrap.dedent(text)
    return run_python(code, str(tmp_path), cwd=tmp_path)


def test_children_have_what_was_imported_and_leave_it_alone(tmp_path: Path) -> None:
    """In a directory whose name is too long for a socket; and nowhere else: it goes with the directory."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    done = run(
        deep,
        """
        receiver, sender = context.Pipe()
        code = (
            "import decimal, gc, os; sender.send((getattr(decimal, 'MARK', None), os.getppid() != parent, "
            "gc.isenabled(), gc.get_freeze_count() > 1000))"
        )
        process = context.Process(target=exec, args=(code, {"sender": sender, "parent": os.getpid()}))
        process.start()
        print(receiver.recv())
        process.join(10)
        print(process.exitcode, os.listdir(sys.argv[1]))
        """,
    )
    assert done.stdout == "('imported once', True, True, True)\n0 ['fork-server']\n", done.stderr


def test_children_inherit_what_multiprocessing_passes_on_and_nobody_starts_another_server(
    tmp_path: Path,
) -> None:
    """A semaphore and a pipe; and a child whose server is dead fails at once."""
    done = run(
        tmp_path,
        """
        import multiprocessing.forkserver as stdlib, signal, time
        fds = len(os.listdir("/proc/self/fd"))
        lock, (receiver, sender) = context.Lock(), context.Pipe()
        names = {"lock": lock, "sender": sender}
        processes = [
            context.Process(target=exec, args=("import os\\nwith lock: sender.send(os.getppid())", names))
            for _ in range(3)
        ]
        for process in processes:
            process.start()
        servers = {receiver.recv() for _ in processes}
        for process in processes:
            process.join(10)
        print([process.exitcode for process in processes], len(servers))
        server, = servers
        for process in processes:
            process.close()
        del processes, process, lock, names
        sender.close(), receiver.close()
        print(len(os.listdir("/proc/self/fd")) - fds)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        for _ in range(2):
            try:
                context.Process(target=print).start()
            except ConnectionRefusedError:
                print("refused", len(os.listdir("/proc/self/fd")) - fds)
        """,
    )
    assert done.stdout == "[0, 0, 0] 1\n0\nrefused 0\nrefused 0\n", done.stdout + done.stderr


def test_what_a_child_forks_lives_on_without_the_thread_that_forked_it(tmp_path: Path) -> None:
    """Only the children of the server die with the thread that forked them; a task, in a thread of a worker, may fork as well."""
    done = run(
        tmp_path,
        """
        import time
        receiver, sender = context.Pipe()
        code = (
            "import os, threading, time\\n"
            "def fork():\\n"
            "    if os.fork() == 0:\\n"
            "        time.sleep(0.1)\\n"
            "        sender.send('alive')\\n"
            "        os._exit(0)\\n"
            "thread = threading.Thread(target=fork)\\n"
            "thread.start(); thread.join(); time.sleep(0.3)"
        )
        process = context.Process(target=exec, args=(code, {"sender": sender}))
        process.start()
        print(receiver.recv() if receiver.poll(10) else "dead")
        process.join(10)
        """,
    )
    assert done.stdout == "alive\n", done.stderr


def test_the_tracker_tidies_up_after_all(tmp_path: Path) -> None:
    """It outlives the signals that all processes of a job may get, says nothing, and leaves neither semaphore nor scratch."""
    done = run(
        tmp_path,
        """
        import signal, time
        from multiprocessing import resource_tracker
        from dask_gpu_mpi.machine.scratch import make_scratch
        make_scratch(sys.argv[1] + "/scratch")
        lock = context.Lock()
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(tracker, number)
        time.sleep(0.2)
        resource_tracker.ensure_running()  # starts another one with a warning if it has ended
        print(tracker, lock._semlock.name, os.listdir(sys.argv[1]).count("scratch"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert done.stderr == ""
    pid, name, made = done.stdout.split()
    assert made == "1"
    until(lambda: not alive(int(pid)), 10)
    assert not (tmp_path / "scratch").exists()
    assert not Path(f"/dev/shm/sem.{name.lstrip('/')}").exists()


def test_the_tracker_is_a_fork_that_holds_nothing_of_the_rank(tmp_path: Path) -> None:
    code = """
        import os, sys, time
        from dask_gpu_mpi.agent.forkserver import become_resource_tracker

        lifeline = os.pipe()
        def name(owner, fd):
            try:
                return os.readlink(f"/proc/{owner}/fd/{fd}")
            except FileNotFoundError:  # closed a moment ago
                return ""
        not_its = {name("self", fd) for fd in (1, 2, *lifeline)}
        pid = become_resource_tracker(lifeline)
        limit = time.monotonic() + 10
        while held := not_its & {name(pid, fd) for fd in os.listdir(f"/proc/{pid}/fd")}:
            assert time.monotonic() < limit, held
            time.sleep(0.01)
        command = lambda owner: open(f"/proc/{owner}/cmdline").read()
        print(command(pid) == command("self"))
    """
    done = run_python(textwrap.dedent(code), str(tmp_path))
    assert done.stdout == "True\n", done.stderr


def test_without_a_fork_server_nothing_is_ended() -> None:
    """Least of all the process's own resource tracker."""
    done = run_python(
        "import os, multiprocessing.resource_tracker as tracker\n"
        "from dask_gpu_mpi.agent.forkserver import end_left_behind\n"
        "tracker.ensure_running()\nend_left_behind()\nprint(tracker._resource_tracker._check_alive())"
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("own", "of_program", "is_left"),
    [
        ({}, {}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, True),
        ({"SLURM_JOB_ID": "7"}, {}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, False),
        ({}, {"SLURM_JOB_ID": "8"}, False),
    ],
)
def test_a_job_that_the_script_has_submitted_is_none_of_its_programs(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], of_program: dict[str, str], is_left: bool
) -> None:
    """It has the script's environment, and a number of its own."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    rank = subprocess.Popen(["sleep", "300"])
    environ = {RANK_PID: str(rank.pid), "PATH": os.environ["PATH"], **of_program}
    # no child of the rank, as a program whose parent has ended, or that a daemon of the batch system has started
    other = subprocess.Popen(["sh", "-c", "echo; exec sleep 300"], env=environ, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        monkeypatch.setattr(psutil.Process, "children", lambda *args, **more: [])
        assert [
            each.pid for each in main._programs_of_script(psutil.Process(rank.pid), 0, by_environment=True)
        ] == [other.pid] * is_left
    finally:
        for each in (rank, other):
            each.kill()
            each.wait()
        other.stdout.close()
